"""Jobs and how they end, files of configurations, marks, paths of modules and event slots: known answers."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from saved_programs import plan_of, program_of

from forerun.common.errors import ForerunError
from forerun.core.program.storage import load
from forerun.core.program.types import Collective, Phase
from forerun.describe.plan.training_loop import TrainingLoop
from forerun.sources.trace import blocks, launch, many, marks, record
from forerun.sources.trace.blocks import Module
from forerun.sources.trace.described import Path as ModulePath
from forerun.sources.trace.described import absolute_waits, relative_waits
from forerun.sources.trace.job import Failure, Job, release
from forerun.sources.trace.launch import Limits
from forerun.sources.trace.many import read_configurations, trace_all
from forerun.sources.trace.module_request import ModuleRequest
from forerun.sources.trace.purpose import data_parallel
from forerun.sources.trace.titan import trainer_job


@pytest.mark.parametrize(
    ("rank", "world", "per_node", "expected"),
    [(0, 1, 8, "0 0 1 1 0 1"), (5, 6, 8, "5 5 6 6 0 1"), (13, 16, 8, "13 5 16 8 1 2"), (16, 17, 8, "16 0 17 8 2 3")],
)
def test_a_program_has_the_environment_of_torchrun(rank: int, world: int, per_node: int, expected: str) -> None:
    job = Job("", rank=rank, world_size=world, gpus_per_node=per_node, variables={"A": "b", "MASTER_PORT": "1"})
    found = job.environment()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert " ".join(found[name] for name in names) == expected
    assert (found["ROLE_RANK"], found["ROLE_WORLD_SIZE"]) == (str(rank), str(world))
    assert (found["A"], found["MASTER_PORT"], found["MASTER_ADDR"]) == ("b", "1", "localhost")


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    job = Job(str(tmp_path), "a.py", ("--x", "1"), rank=3, kernels=("k.py",), variables={"A": "b"}, title="mine")
    assert Job.read(job.write()) == job
    assert (job.name, replace(job, title="").name) == ("mine", "a.py")
    names = [path.name for path in (job.recording, job.failure, job.last_place)]
    assert names == ["rank3.npz", "rank3.failure.json", "rank3.fault.txt"]


@pytest.mark.parametrize(
    ("version", "found"), [("2.9", (2, 9)), ("2.13.0+cpu", (2, 13)), ("10.0.1", (10, 0)), ("2", None), ("2.9a", None)]
)
def test_a_release_is_two_numbers(version: str, found: tuple[int, int] | None) -> None:
    if found is not None:
        assert release(version) == found
        return
    with pytest.raises(ForerunError, match="is not a release of torch"):
        release(version)


def test_a_failure_is_one_line_of_at_most_six_hundred_letters(tmp_path: Path) -> None:
    failure = Failure("it\n broke", "aten::mm", "train.py:3")
    failure.write(tmp_path / "f")
    assert Failure.read(tmp_path / "f") == failure
    assert str(failure.error("a.py")) == "a.py: it broke (in aten::mm) at train.py:3"
    assert str(Failure("it broke").error("a.py")) == "a.py: it broke"
    assert str(Failure("x" * 600).error("a")) == "a: " + "x" * 600
    assert str(Failure("x" * 601).error("a")) == "a: " + "x" * 600 + " [...]"
    assert Failure.read(tmp_path / "none") is None
    (tmp_path / "f").write_text('{"unknown": 1}')
    assert Failure.read(tmp_path / "f") is None
    (tmp_path / "f").write_text("[")
    assert Failure.read(tmp_path / "f") is None


# -- processes ---------------------------------------------------------------------------------------------------------


def _ranks(**job: Any) -> Any:
    return launch._TracedRanks(Job("/none", "train.py", **job), Limits(), False, None, -1)


def _process(folder: Path, printed: int = 0, rank: int = 0) -> Any:
    with (folder / "out").open("wb") as file:
        file.truncate(printed)
    return launch._Process(Job(str(folder), "train.py", rank=rank), SimpleNamespace(pid=1), folder / "out")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("late_s", "used_gib", "printed", "problem"),
    [
        (-60.0, 16.0, 1 << 30, None),
        (1.0, 0.0, 0, r"^train\.py: the step was not recorded within 900 s; raise --time-limit or trace less \(at a:1"),
        (-60.0, 16.1, 0, r"uses 16\.1 GiB of host memory; the limit is 16 GiB \(--host-memory-limit\)"),
        (-60.0, 0.0, (1 << 30) + 1, "printed more than 1 GiB; let it print less"),
    ],
)
def test_a_process_has_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late_s: float, used_gib: float, printed: int, problem: str | None
) -> None:
    monkeypatch.setattr(launch, "resident_bytes", lambda pid: used_gib * 2**30)
    monkeypatch.setattr(launch, "ask_place", lambda pid, path: "a:1")
    ranks = _ranks()
    ranks.deadline = launch.time.monotonic() - late_s
    process = _process(tmp_path, printed)
    if problem is None:
        ranks._check_limits(process)
        return
    with pytest.raises(ForerunError, match=problem):
        ranks._check_limits(process)


def test_a_process_that_runs_is_held_to_its_limits_and_one_that_ended_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "ask_place", lambda pid, path: "")
    ranks = _ranks()
    ranks.deadline = launch.time.monotonic() - 1.0
    ended: list[int] = []
    monkeypatch.setattr(ranks.coordinator, "ended", ended.append)
    process = _process(tmp_path)
    process.popen.poll = lambda: None
    with pytest.raises(ForerunError, match=r"was not recorded within 900 s; raise --time-limit or trace less$"):
        ranks._look_at(0, process)
    assert ended == []
    process.popen.poll = lambda: 3
    with pytest.raises(ForerunError, match="ended with exit code 3"):
        ranks._look_at(0, process)
    process.job.recording.write_bytes(b"damaged")
    with pytest.raises(ForerunError, match="left a damaged recording; is the temporary folder full"):
        ranks._look_at(0, process)
    assert ended == [0, 0]


def test_ranks_that_a_recording_talks_to_are_started_unless_it_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = SimpleNamespace(peer=np.array([-1, 3, 0, 3, -1]))
    monkeypatch.setattr(launch, "load_recording", lambda path: recording)
    for alone, expected in ((False, [0, 3]), (True, [])):
        ranks, process, started = _ranks(alone=alone), _process(tmp_path), []
        monkeypatch.setattr(ranks, "_start", started.append)
        process.popen.poll = lambda: 0
        process.job.recording.write_bytes(b"")
        ranks._look_at(0, process)
        assert (started, list(ranks.recordings)) == (expected, [0])


def test_how_a_process_ended_is_told(tmp_path: Path) -> None:
    ranks, process = _ranks(), _process(tmp_path)
    (tmp_path / "out").write_text("first\nlast words\n")
    expected = "before its step was recorded; last line of its output: last words"
    assert str(ranks._error(process, 3)) == f"train.py: the traced process ended with exit code 3 {expected}"
    killed = str(ranks._error(process, -signal.SIGKILL))
    assert killed == f"train.py: the traced process was ended by SIGKILL {expected}"
    process.job.last_place.write_text('  File "/home/a/train.py", line 30 in f\n')
    assert "SIGKILL at /home/a/train.py:30 before" in str(ranks._error(process, -signal.SIGKILL))
    Failure("it broke").write(process.job.failure)
    assert str(ranks._error(process, 3)) == "train.py: it broke"


def test_other_ranks_are_named_by_number(tmp_path: Path) -> None:
    ranks = _ranks(rank=2)
    assert ranks._name(_process(tmp_path, rank=2)) == "train.py"
    assert ranks._name(_process(tmp_path, rank=3)) == "train.py (rank 3)"
    ranks.processes = {2: None, 3: None}
    assert ranks._name(_process(tmp_path, rank=2)) == "train.py (rank 2)"


def test_a_script_that_is_not_there_is_not_started() -> None:
    with pytest.raises(ForerunError, match=r"nowhere\.py: no such script; give its path, or --module"):
        launch.record_script(Job("", "nowhere.py"), Limits())


def test_a_mesh_multiplies_to_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Job] = []
    monkeypatch.setattr(record, "record_call", lambda job, program, limits: seen.append(job) or [])
    monkeypatch.setattr(record, "to_program", lambda recordings: "a program")
    with pytest.raises(ForerunError, match=r"mesh \{'dp': 4, 'tp': 2\} has 8 ranks, world_size is 6"):
        record.trace_call(dict, len, world_size=6, mesh={"dp": 4, "tp": 2})
    assert record.trace_call(dict, len, world_size=8, mesh={"dp": 4, "tp": 2}) == "a program"
    assert record.trace_call(dict, len, world_size=8, rank=0, steps=3) == "a program"
    assert [(job.rank, job.alone, job.steps) for job in seen] == [(0, False, 2), (0, True, 3)]


# -- files of configurations -------------------------------------------------------------------------------------------

JOB = Job("", "train.py", ("--a", "1"), world_size=8, variables={"A": "1", "B": "2"})


def _configurations(folder: Path, text: str) -> list[many.Configuration]:
    (folder / "c.yaml").write_text(text)
    return read_configurations(folder / "c.yaml", JOB)


def test_configurations_add_to_the_job(tmp_path: Path) -> None:
    plain, other = _configurations(
        tmp_path, "plain: {}\nother-1.5: {world_size: 16, gpus_per_node: 4, args: [--b, 2, 0.5], env: {B: 3, C: x}}\n"
    )
    assert (plain.name, plain.job) == ("plain", JOB)
    assert (other.name, other.job.world_size, other.job.gpus_per_node) == ("other-1.5", 16, 4)
    assert other.job.arguments == ("--a", "1", "--b", "2", "0.5")
    assert other.job.variables == {"A": "1", "B": "3", "C": "x"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}\n", "names no configuration"),
        ("a: {world_size: 0}\n", "a.world_size: Input should be greater than or equal to 1"),
        ("a: {gpus_per_node: 0}\n", "a.gpus_per_node"),
        ("a: {speed: 1}\n", "a.speed: Extra inputs are not permitted"),
        ("a/b: {}\n", "a/b"),
    ],
)
def test_wrong_configurations_are_one_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ForerunError, match=says) as caught:
        _configurations(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_a_key_tells_jobs_apart_and_not_where_they_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("a")
    job = replace(JOB, target=str(script))

    def key(**changes: Any) -> str:
        return many.Configuration("x", replace(job, **changes)).key

    first = key()
    assert key(folder="elsewhere") == first
    assert many.Configuration("y", job).key == first
    others = [key(world_size=9), key(arguments=()), key(is_module=True), key(target="nowhere.py")]
    script.write_text("b")
    assert len({first, *others, key()}) == 6


def test_programs_that_are_there_are_not_traced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Job] = []

    def trace_job(job: Job, limits: Limits) -> Any:
        traced.append(job)
        if job.world_size == 3:
            raise ForerunError("three is too few")
        return program_of(plan_of(dp_shard=8)), 1.0

    monkeypatch.setattr(many, "trace_job", trace_job)
    heard: list[tuple[int, int]] = []
    wanted = [many.Configuration(f"w{n}", replace(JOB, world_size=n)) for n in (4, 3, 2)]

    def run() -> list[tuple[str, str]]:
        return trace_all(wanted, tmp_path / "new" / "folder", Limits(), 1, lambda *done: heard.append(done))

    assert run() == [("w3", "three is too few")]
    assert [job.world_size for job in traced] == [4, 3, 2]
    assert heard == [(1, 3), (2, 3), (3, 3)]
    kept = load(tmp_path / "new" / "folder" / "w2.program").meta
    assert (kept["name"], kept["key"]) == ("w2", wanted[2].key)
    assert run() == [("w3", "three is too few")]
    assert [job.world_size for job in traced] == [4, 3, 2, 3]
    (tmp_path / "new" / "folder" / "w2.program").write_bytes(b"damaged")
    wanted[0] = many.Configuration("w4", replace(JOB, world_size=4, steps=5))
    run()
    assert [job.world_size for job in traced[4:]] == [4, 3, 2]
    monkeypatch.setattr(many, "trace_job", lambda job, limits: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run()


# -- marks, requests, torchtitan ---------------------------------------------------------------------------------------


def test_marks_reach_whoever_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    marks.mark_step()  # nobody listens
    heard: list[object] = []
    monkeypatch.setattr(marks, "listeners", [lambda: heard.append("step"), lambda: heard.append("again")])
    monkeypatch.setattr(marks, "stage_listeners", [heard.append])
    monkeypatch.setattr(marks, "loop", TrainingLoop())
    marks.mark_step()
    marks.mark_stage("model made")
    work = TrainingLoop()
    marks.mark_loop(work)
    assert (heard, marks.loop is work) == (["step", "again", "model made"], True)


def test_a_module_is_traced_at_three_depths(tmp_path: Path) -> None:
    def request(prefetch: int) -> ModuleRequest:
        return ModuleRequest(len, lambda: "made", replace(plan_of(dp_shard=8), prefetch=prefetch), tmp_path)

    assert [request(prefetch).depths for prefetch in (0, 1, 2)] == [(2, 3, 4), (2, 3, 4), (4, 5, 6)]
    one = request(1)
    assert (one.inputs(), replace(one, example_inputs=(5,)).inputs()) == ("made", (5,))
    assert (one.recording(3, 1).name, one.anything_described()) == ("depth3-rank1.npz", False)
    for rank, repeats in ((0, 7), (1, 7)):
        one.described(rank).write_text(json.dumps({"repeats": repeats}))
    assert (one.anything_described(), one.repeats()) == (True, 7)
    one.described(1).write_text(json.dumps({"repeats": 8}))
    with pytest.raises(ForerunError, match=r"ranks repeat different numbers of layers: \[7, 8\]"):
        one.repeats()


def test_a_checkouts_trainer_goes_before_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    job = Job("", "llama3", variables={"X": "1"})
    assert trainer_job(job, ("llama3_8b",)).variables == {"X": "1"}
    assert trainer_job(job, ("llama3_8b",), "/there").variables == {"X": "1", "PYTHONPATH": "/there:/mine"}
    own = replace(job, variables={"PYTHONPATH": "/own"})
    assert trainer_job(own, ("llama3_8b",), "/there").variables == {"PYTHONPATH": "/there:/own"}
    monkeypatch.delenv("PYTHONPATH")
    found = trainer_job(job, ("llama3_8b", "--x"), "/there")
    assert found.variables["PYTHONPATH"] == "/there"
    assert (found.title, found.arguments) == ("torchtitan llama3_8b", ("llama3", "llama3_8b", "--x"))


# -- modules, waits and slots ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "module", "seen"),
    [
        ("", ("", -1, ""), ("", "")),
        ("norm", ("norm", -1, ""), ("norm", "norm")),
        ("layers.3.mlp.up", ("layers", 3, "mlp.up"), ("layers.*+1.mlp.up", "layers.3.mlp.up")),
        ("layers.2", ("layers", 2, ""), ("layers.*", "layers.2")),
        ("layers.0.experts.5", ("layers", 0, "experts.5"), ("layers.*-2.experts.5", "layers.0.experts.5")),
        ("layer10.x", ("layer10.x", -1, ""), ("layer10.x", "layer10.x")),
    ],
)
def test_a_module_seen_from_a_block_of_layer_two_or_of_none(path: str, module: Any, seen: tuple[str, str]) -> None:
    found = Module.of(path)
    assert (found.unit, found.number, found.rest) == module
    assert (found.relative(2), found.relative(-1)) == seen


def test_numbers_of_a_path_are_words_of_their_own() -> None:
    found = ModulePath.of("layers.3.mlp2.0")
    assert (found.text, found.numbers) == ("layers.*.mlp2.*", (3, 0))
    assert found.with_numbers((7, 1)) == "layers.7.mlp2.1"
    assert ModulePath.of("12").text == "*"


def test_a_slot_is_free_again_once_its_event_was_waited_for() -> None:
    assert blocks._slots([0, 1, 2, 5], [3, 2, 4, 6], [0, 0, 0, 0]) == [0, 1, 1, 0]
    assert blocks._slots([0, 5], [5, 9], [0, 0]) == [0, 0]
    assert blocks._slots([0, 5], [6, 9], [0, 0]) == [0, 1]
    assert blocks._slots([0, 5, 9], [1, 6, 10], [0, 1, 0]) == [0, 1, 0]  # kinds have slots of their own


@st.composite
def waiting(draw: st.DrawFn) -> Any:
    """Streams of nodes, and for each node some earlier nodes that it waits for."""
    stream = draw(st.lists(st.integers(0, 3), min_size=1, max_size=20))
    waits = [sorted(draw(st.sets(st.integers(0, node - 1), max_size=3))) if node else [] for node in range(len(stream))]
    return stream, waits


@given(waiting())
def test_waits_by_distance_are_the_same_waits(case: Any) -> None:
    stream, waits = case
    ptr = np.cumsum([0, *map(len, waits)])
    flat = np.array([one for each in waits for one in each], np.int32)

    class One(SimpleNamespace):
        def __len__(self) -> int:
            return len(stream)

    one: Any = One(stream=np.array(stream, np.int32), wait_ptr=ptr, wait=flat)
    relative = relative_waits(one)
    for node, (told, wanted) in enumerate(zip(relative, waits, strict=True)):
        between = [(stream[w], sum(stream[k] == stream[w] for k in range(w + 1, node))) for w in wanted]
        assert told == tuple(sorted(between))
    waiter = np.array([node for node, told in enumerate(relative) for _ in told], np.int64)
    columns = np.array([pair for told in relative for pair in told], np.int64).reshape(-1, 2)
    back = absolute_waits(np.array(stream, np.int64), waiter, columns[:, 0], columns[:, 1])
    assert sorted(zip(waiter.tolist(), back.tolist(), strict=True)) == sorted(
        (node, wait) for node, each in enumerate(waits) for wait in each
    )
    gone = absolute_waits(np.array(stream, np.int64), waiter, columns[:, 0], columns[:, 1] + len(stream))
    assert (gone == -1).all()


# -- what groups are for -----------------------------------------------------------------------------------------------

REDUCE, GATHER, SCATTER = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER
FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD


@pytest.mark.parametrize(
    ("name", "nodes", "found"),
    [
        ("dp", [(BACKWARD, REDUCE, 900)], (["dp"], [])),
        ("7", [(Phase.OPTIMIZER, REDUCE, 900)], (["7"], [])),
        ("7", [(BACKWARD, REDUCE, 10)], (["7"], [])),  # a hundredth of the parameters
        ("7", [(BACKWARD, REDUCE, 9)], ([], [])),
        ("7", [(BACKWARD, REDUCE, 5), (BACKWARD, REDUCE, 5)], (["7"], [])),
        ("7", [(FORWARD, GATHER, 900), (BACKWARD, SCATTER, 900)], (["7"], ["7"])),
        ("7", [(BACKWARD, SCATTER, 900)], (["7"], ["7"])),
        ("7", [(FORWARD, GATHER, 5), (BACKWARD, REDUCE, 900)], (["7"], [])),
        ("7", [(FORWARD, GATHER, 10), (BACKWARD, REDUCE, 900)], (["7"], ["7"])),
        ("7", [(FORWARD, Collective.BROADCAST, 900), (BACKWARD, REDUCE, 900)], (["7"], [])),
        ("7", [(FORWARD, GATHER, 900)], ([], [])),
        ("7", [(FORWARD, REDUCE, 900), (BACKWARD, REDUCE, 900)], ([], [])),
        ("7", [(FORWARD, REDUCE, 10), (BACKWARD, REDUCE, 900)], (["7"], [])),
        ("7", [(BACKWARD, Collective.ALL_TO_ALL, 900)], ([], [])),
        ("7", [(FORWARD, Collective.ALL_TO_ALL, 900), (BACKWARD, SCATTER, 900)], (["7"], ["7"])),
        ("7", [(FORWARD, Collective.SEND_RECV, 900), (BACKWARD, SCATTER, 900)], ([], [])),
        ("tp", [(BACKWARD, REDUCE, 900)], ([], [])),
        ("dp_cp", [(BACKWARD, REDUCE, 900)], (["dp_cp"], [])),
        ("7", [], ([], [])),
        # of DistributedDataParallel
        ("ddp", [(FORWARD, REDUCE, 900), (FORWARD, GATHER, 900), (BACKWARD, REDUCE, 5)], (["ddp"], [])),
        ("ddp", [(FORWARD, REDUCE, 900)], ([], [])),
    ],
)
def test_groups_that_reduce_gradients_are_data_parallel(name: str, nodes: list[Any], found: Any) -> None:
    kinds = [kind for _, kind, _ in nodes] + [REDUCE]
    ops = SimpleNamespace(
        is_communication=np.ones(len(kinds), np.bool_),
        group=np.array([1] * len(nodes) + [0]),
        collective=np.array(kinds),
        bytes_comm=np.array([float(size) for *_, size in nodes] + [5000.0]),
    )
    one: Any = SimpleNamespace(
        ops=ops,
        op=np.arange(len(kinds)),
        phase=np.array([phase for phase, *_ in nodes] + [FORWARD]),
        groups=[("other", (0,)), (name, (0, 1))],
        tensor_category=np.array([0, 0, 1]),
        tensor_alloc=np.array([-1, 3, -1]),
        tensor_bytes=np.array([1000, 5000, 5000]),
        meta={"averages": ["ddp"]},
    )
    assert data_parallel(one) == found
