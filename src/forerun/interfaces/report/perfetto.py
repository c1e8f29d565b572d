"""write_trace: a step, or a run of several, as Chrome trace JSON for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from forerun.answers.analysis.history import RunIteration
from forerun.common.files import whole_file
from forerun.core.program.kinds import OpKind, columns_of
from forerun.core.program.types import I64, N_STREAMS, Collective, FlatProgram, Phase, Program, Stream

if TYPE_CHECKING:
    from forerun.core.engine.simulate import Timeline

_HOST = N_STREAMS
"""the host's place among the threads of a rank class, after the streams"""
_RUN_PID = 1_000_000
"""a number larger than that of any rank class"""


def write_trace(path: str | Path, program: Program, flat: FlatProgram, timeline: Timeline, issue_ps: I64) -> None:
    """Writes the trace of one step to `path`.

    One process per rank class; one thread per stream that has nodes, and one for the host that launches kernels
    (`issue_ps` is the host's time per op, as given to `engine.simulate`). Slices are in order of their start, and
    never overlap on a thread. Times are microseconds with three digits: Perfetto rounds the start and the duration of a
    slice to whole nanoseconds, each by itself, so that with more digits a slice could end after the next one starts.
    The file appears whole or not at all, compressed where its name ends in .gz.

    Raises ForerunError if the file can't be written.
    """
    iteration = RunIteration(0, program, flat, timeline, issue_ps)
    with _text_file(path) as file:
        _write_events(file, _events([iteration]), program.meta)


def write_run_trace(path: str | Path, iterations: Iterable[RunIteration], meta: dict[str, object]) -> None:
    """Writes the trace of iterations that follow each other to `path`, as `write_trace` does for one.

    Rank class k of every iteration is process k. One more process, `run`, has a slice for each iteration. `iterations`
    are taken one by one and go to the disk slice by slice. `meta` holds the metadata of the trace.

    Raises ForerunError if the file can't be written.
    """
    marks = [
        _metadata(_RUN_PID, _RUN_PID, "process_name", "name", "run"),
        _metadata(_RUN_PID, _RUN_PID, "process_sort_index", "sort_index", -1),
        _metadata(_RUN_PID, _RUN_PID, "thread_name", "name", "iterations"),
    ]
    with _text_file(path) as file:
        _write_events(file, chain(_events(_marked(iterations, marks)), marks), meta)


@contextmanager
def _text_file(path: str | Path) -> Iterator[TextIO]:
    """Opens a file for text, compressed where its name ends in .gz; the same text gives the same bytes."""
    with whole_file(path) as binary:
        if not str(path).endswith(".gz"):
            with io.TextIOWrapper(binary, encoding="utf-8") as file:
                yield file
            return
        with (
            gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=binary, mtime=0) as packed,
            io.TextIOWrapper(packed, encoding="utf-8") as file,
        ):
            yield file


def _write_events(file: TextIO, events: Iterator[str], meta: dict[str, object]) -> None:
    file.write('{"displayTimeUnit": "ms", "otherData": ')
    file.write(json.dumps({key: str(value) for key, value in meta.items()}))
    file.write(', "traceEvents": [\n')
    for number, event in enumerate(events):
        file.write(event if number == 0 else ",\n" + event)
    file.write("\n]}\n")


def _events(iterations: Iterable[RunIteration]) -> Iterator[str]:
    """Returns the slices of one iteration after the other; processes and threads are named before their first slice."""
    told: set[str] = set()
    for iteration in iterations:
        op_texts = _op_texts(iteration.program)
        for number in range(len(iteration.program.rank_classes)):
            for text in _names(iteration, number):
                if text not in told:
                    told.add(text)
                    yield text
            yield from _slices(iteration, number, op_texts)


def _names(iteration: RunIteration, number: int) -> Iterator[str]:
    """Yields the names and the order of the process of a rank class and its threads."""
    rank_class, flat = iteration.program.rank_classes[number], iteration.flat
    name = f"{rank_class.name} ({rank_class.n_ranks} ranks)" if rank_class.n_ranks > 1 else rank_class.name
    pid = number + 1
    yield _metadata(pid, pid, "process_name", "name", name)
    yield _metadata(pid, pid, "process_sort_index", "sort_index", number)
    streams = set(flat.stream[flat.class_ptr[number] : flat.class_ptr[number + 1]].tolist())
    for place, thread in [*((s, Stream(s).name.lower()) for s in sorted(streams)), (_HOST, "host")]:
        yield _metadata(pid, _tid(pid, place), "thread_name", "name", thread)
        yield _metadata(pid, _tid(pid, place), "thread_sort_index", "sort_index", place)


def _slices(iteration: RunIteration, number: int, op_texts: list[tuple[str, str]]) -> Iterator[str]:
    """Yields the slices of a rank class in order of their start."""
    program, flat, timeline, issue_ps = iteration.program, iteration.flat, iteration.timeline, iteration.issue_ps
    nodes = range(int(flat.class_ptr[number]), int(flat.class_ptr[number + 1]))
    slices = [(int(timeline.start_ps[i]), int(timeline.end_ps[i]), int(flat.stream[i]), i) for i in nodes]
    for i in nodes:
        end = int(timeline.issue_end_ps[i])
        slices.append((end - int(issue_ps[flat.op[i]]), end, _HOST, i))
    slices.sort()
    pid = number + 1
    for start, end, place, i in slices:
        if end == start and place == _HOST:
            continue
        when = _when(iteration.start_ps + start, iteration.start_ps + end)
        timing = f'"ph": "X", "pid": {pid}, "tid": {_tid(pid, place)}, {when}'
        op_name, op_args = op_texts[flat.op[i]]
        if place == _HOST:
            yield f'{{"name": {op_name}, "cat": "host", {timing}}}'
        else:
            category = json.dumps(Phase(flat.phase[i]).name.lower())
            args = f"{op_args}, {_node_args(program, flat, number, i)}"
            yield f'{{"name": {op_name}, "cat": {category}, {timing}, "args": {{{args}}}}}'


def _marked(iterations: Iterable[RunIteration], marks: list[str]) -> Iterator[RunIteration]:
    """Yields the same iterations; `marks` gets a slice for each on the run's own thread."""
    for number, iteration in enumerate(iterations):
        when = _when(iteration.start_ps, iteration.start_ps + iteration.timeline.end_of_step_ps)
        timing = f'"ph": "X", "pid": {_RUN_PID}, "tid": {_RUN_PID}, {when}'
        marks.append(f'{{"name": "iteration {number}", "cat": "iteration", {timing}}}')
        yield iteration


def _tid(pid: int, place: int) -> int:
    """Returns the number of a thread. It is neither 0 nor the number of its process, because Perfetto takes both for
    the main thread.
    """
    return 100 * pid + place + 1


def _metadata(pid: int, tid: int, kind: str, key: str, value: str | int) -> str:
    return json.dumps({"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {key: value}})


def _when(start_ps: int, end_ps: int) -> str:
    """Returns start and duration of a slice, which ends in the nanosecond in which the next one may start."""
    start_ns, end_ns = start_ps // 1000, end_ps // 1000
    return f'"ts": {_us(start_ns)}, "dur": {_us(end_ns - start_ns)}'


def _us(time_ns: int) -> str:
    """Returns nanoseconds as a decimal number of microseconds, exactly."""
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"


def _op_texts(program: Program) -> list[tuple[str, str]]:
    """Returns name and arguments of every op as JSON, encoded once because many slices write them."""
    ops = program.ops
    texts = []
    for i, name in enumerate(ops.name):
        args: dict[str, object] = {"kind": OpKind(ops.kind[i]).name.lower(), "dtype": ops.dtype[i]}
        for column in ("flops", "bytes_read", "bytes_written", "bytes_comm"):
            if getattr(ops, column)[i]:
                args[column] = float(getattr(ops, column)[i])
        if ops.collective[i]:
            args["collective"] = Collective(ops.collective[i]).name.lower()
        if ops.group[i] >= 0:
            group = program.groups[ops.group[i]]
            args["group"] = f"{group.axis} of {group.size}: {group.nodes} nodes x {group.ranks_per_node}"
        if ops.kernel[i]:
            args["kernel"] = ops.kernel[i]
        details = ops.details_of(i)
        args |= dict(zip(columns_of(type(details)), details.values(), strict=True))
        texts.append((json.dumps(name), json.dumps(args)[1:-1]))
    return texts


def _node_args(program: Program, flat: FlatProgram, number: int, i: int) -> str:
    rank_class = program.rank_classes[number]
    step = int(flat.step[i])
    args = {
        "phase": Phase(flat.phase[i]).name.lower(),
        "micro_batch": int(rank_class.microbatch[step]),
        "layer": int(rank_class.layer[step]),
        "block": program.blocks[rank_class.block[step]].name,
        "module": program.modules[flat.module[i]] if flat.module[i] < len(program.modules) else "",
    }
    if flat.meeting[i] >= 0:
        args["channel"] = program.channels[flat.meeting_channel[flat.meeting[i]]].name
    return json.dumps(args)[1:-1]
