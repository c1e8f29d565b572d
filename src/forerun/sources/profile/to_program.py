"""Makes a Program from one profiled step of each rank, with the measured times, the order and the waits of its work.

A node runs for as long as its kernel did. The host's own time, and the delay between the end of a kernel's dependency
and its start, are nodes of fixed time. So the Program, run unchanged, starts and ends every kernel when the profile
does.

Its time begins when the previous step has ended. Work of the device for this step before that moment runs beside the
rest, and nothing waits for it. Work of the host before that moment is placed at the end. So neither takes less time
than it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from forerun.common.errors import ForerunError
from forerun.common.units import PS_PER_NS
from forerun.core.program.builder import BlockBuilder, OpTableBuilder
from forerun.core.program.groups import CommGroup
from forerun.core.program.origin import PROFILE
from forerun.core.program.types import (
    I64,
    N_CATEGORIES,
    Block,
    Category,
    Collective,
    OpTable,
    Program,
    RankClass,
    Stream,
)
from forerun.describe.cluster.types import Device
from forerun.sources.profile.collectives import Call, calls_of, is_collective
from forerun.sources.profile.communication import communicates
from forerun.sources.profile.event_keys import Key
from forerun.sources.profile.kernel_ops import add_collective, add_kernel, guesses_mask
from forerun.sources.profile.labels import Label, labels_of, operators_of
from forerun.sources.profile.meetings import Meetings, meetings_of
from forerun.sources.profile.profile import Profile
from forerun.sources.profile.schedule import HostWait, Schedule
from forerun.sources.profile.step import NONE, Step

_NODE_SIZE = 8
"""ranks of a node where no file says"""
_HOST = Stream.PP_RECV_GRAD_BACK
"""the stream on which the host's own time stands; the host waits for it"""
_COLLECTIVE_STREAMS = (Stream.REDUCE, Stream.GATHER, Stream.TP, Stream.CP, Stream.EP)
_SPARE_STREAMS = (
    *(Stream.PP_SEND, Stream.PP_RECV, Stream.PP_SEND_GRAD, Stream.PP_RECV_GRAD),
    *(Stream.PP_SEND_BACK, Stream.PP_RECV_BACK, Stream.PP_SEND_GRAD_BACK),
)
_DELAY = "delay before a kernel"
_HOST_TIME = "host"
_HOST_WAIT = "host, after it waited"


def to_program(schedules: Sequence[Schedule], device: Device | None) -> Program:
    """Returns the Program of one step of each rank, recorded on `device`. Ranks that lack do as those that are there.

    Raises ForerunError if the files are of runs of different size.
    """
    steps = [one.step for one in schedules]
    sizes = {one.profile.world_size or len(steps) for one in steps}
    if len(sizes) > 1:
        raise ForerunError(f"{steps[0].profile.path}: the files are of runs of {sorted(sizes)} ranks; import one run")
    world = max(sizes.pop(), len(steps))
    table = _Table(world)
    labels = [labels_of(one) for one in steps]
    calls = [_collectives(one, of_step) for one, of_step in zip(steps, labels, strict=True)]
    meetings = meetings_of(steps, calls)
    modules: dict[str, int] = {"": 0}
    ranks = [
        _Rank(schedule, labels[number], calls[number], meetings, number, table, device, modules)
        for number, schedule in enumerate(schedules)
    ]
    blocks = tuple(one.block() for one in ranks)
    one_step = (np.zeros(1, np.int32), np.zeros(1, np.int32))
    classes = tuple(
        RankClass(f"rank {step.profile.rank}", count, np.array([number], np.int32), *one_step, _memory(step.profile))
        for number, (step, count) in enumerate(zip(steps, _counts(world, len(steps)), strict=True))
    )
    ops, recorded_ps = table.build()
    notes = [note for one in ranks for note in one.notes]
    return Program(
        ops=ops,
        blocks=blocks,
        rank_classes=classes,
        groups=tuple(table.groups),
        channels=meetings.channels,
        modules=tuple(modules),
        meta=_meta(schedules, table, device, recorded_ps, [*notes, *meetings.notes]),
    )


def _counts(world: int, n_files: int) -> list[int]:
    """Returns how many ranks each file stands for."""
    each, rest = divmod(world, n_files)
    return [each + (number < rest) for number in range(n_files)]


def _collectives(step: Step, labels: Sequence[Label]) -> dict[int, Call]:
    """Returns the call of each collective of a step, by its place."""
    profile = step.profile
    names = profile.rows.name[step.row].tolist()
    places = [place for place, number in enumerate(names) if is_collective(profile.texts[number])]
    announced = operators_of(profile, (labels[place].announcement for place in places))
    around = [announced.get(labels[place].announcement) for place in places]
    return dict(zip(places, calls_of(profile, step.row[np.array(places, np.int64)], around), strict=True))


def _memory(profile: Profile) -> I64:
    """Returns the peak of the recorded memory as bytes that stay: a profile does not state the purpose of a tensor."""
    out = np.zeros(N_CATEGORIES, np.int64)
    out[Category.ACTIVATION] = profile.device_peak_bytes(Key.TOTAL_ALLOCATED) or 0
    return out


def _meta(
    schedules: Sequence[Schedule], table: _Table, device: Device | None, recorded_ps: list[int], notes: list[str]
) -> dict[str, object]:
    steps = [one.step for one in schedules]
    first = steps[0].profile
    whole = [number for number, members in enumerate(table.members) if len(members) == table.world > 1]
    return {
        "source": PROFILE,
        "world_size": table.world,
        "gpus_per_node": min(_NODE_SIZE, table.world),
        "group_ranks": [list(members) for members in table.members],
        "roles": {"ranks": [one.profile.rank for one in steps], "world_size": table.world},
        "data_parallel": whole if whole and len(table.members) == 1 else None,
        "sharded": whole if whole and len(table.members) == 1 and table.gathers else None,
        "measured_step_s": [one.measured_ns / 1e9 for one in schedules],
        "recorded": {
            "device": device.name if device else "",
            "gpu": first.device_names[0] if first.device_names else "",
            "time_ps": recorded_ps,
            "group_ranks": [list(members) for members in table.members],
            "host_ops": table.host_ops,
        },
        "notes": list(dict.fromkeys(notes)),
    }


@dataclass
class _Table:
    """The ops of all ranks. Work of one signature that took different times is different ops."""

    world: int
    builder: OpTableBuilder = field(default_factory=OpTableBuilder)
    number: dict[tuple[int, int], int] = field(default_factory=dict)
    groups: list[CommGroup] = field(default_factory=list)
    members: list[tuple[int, ...]] = field(default_factory=list)
    of_host: set[int] = field(default_factory=set)
    """ops of the builder that are the host's own time"""
    gathers: bool = False
    """whether a collective gathers or scatters, as sharded data parallelism does"""

    def add(self, op: int, time_ns: int) -> int:
        """Returns the number of the op `op` of the builder where it took this time."""
        return self.number.setdefault((op, time_ns * PS_PER_NS), len(self.number))

    def delay(self, name: str, time_ns: int) -> int:
        """Returns the number of a fixed time."""
        op = self.builder.delay(name, time_ns * PS_PER_NS)
        if name == _HOST_TIME:
            self.of_host.add(op)
        return self.number.setdefault((op, NONE), len(self.number))

    @property
    def host_ops(self) -> list[int]:
        """Numbers of the ops that are the host's own time."""
        return [number for number, (op, _) in enumerate(self.number) if op in self.of_host]

    def group(self, call: Call, rank: int) -> int:
        """Returns the group of a collective: neighbours, or the whole world, where the file does not say which."""
        size = min(call.group_size or self.world, self.world)
        first = max(0, min(rank, self.world - size)) if rank >= size else 0
        members = call.ranks or tuple(range(first, first + size))
        self.gathers |= call.kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
        if members not in self.members:
            self.members.append(members)
            self.groups.append(CommGroup.of_ranks(call.group_name or "world", members, _NODE_SIZE))
        return self.members.index(members)

    def build(self) -> tuple[OpTable, list[int]]:
        """Returns all ops, and the picoseconds that each took, NONE for fixed times.

        The host's time to launch them is among the nodes, so no op has any.
        """
        ops = self.builder.build().take([base for base, _ in self.number])
        return replace(ops, launches=np.zeros_like(ops.launches)), [time for _, time in self.number]


@dataclass
class _Rank:
    """The block of one rank."""

    schedule: Schedule
    labels: list[Label]
    calls: dict[int, Call]
    meetings: Meetings
    number: int
    table: _Table
    device: Device | None
    modules: dict[str, int]
    notes: list[str] = field(default_factory=list)

    def block(self) -> Block:
        """Returns the step's nodes in the order in which the host issues them."""
        step, schedule = self.schedule.step, self.schedule
        labels = self.labels
        ops = self._ops(labels)
        streams = self._streams()
        builder = BlockBuilder()
        node = np.full(len(step), NONE, np.int64)
        start, finish = step.start_ns.tolist(), step.finish_ns.tolist()
        waits = [wait for wait in schedule.host_waits if wait.end_ns > step.before_ns]
        host_ns = step.before_ns
        for place, issue_ns in enumerate(step.issue_ns.tolist()):
            while waits and waits[0].end_ns <= issue_ns and max(waits[0].until, default=NONE) < place:
                host_ns = self._wait(builder, waits.pop(0), host_ns, node, finish)
            host_ns = self._host_time(builder, issue_ns, host_ns)
            ready_ns = int(schedule.ready_ns[place])
            stream, label = int(streams[place]), labels[place]
            module = self._module(label.module)
            after = [int(node[other]) for other in schedule.after[place]]
            if start[place] > ready_ns:
                delay = self.table.delay(_DELAY, start[place] - ready_ns)
                builder.node(delay, stream, label.phase, module, after)
                after = []
            channel = self.meetings.channel[self.number].get(place, NONE)
            node[place] = builder.node(ops[place], stream, label.phase, module, after, channel=channel)
        for wait in waits:
            host_ns = self._wait(builder, wait, host_ns, node, finish)
        host_ns = self._host_time(builder, step.end_ns, host_ns)
        self._host_time(builder, host_ns + schedule.lead_ns, host_ns)
        self._say()
        return builder.build(f"step of rank {step.profile.rank}")

    def _host_time(self, builder: BlockBuilder, until_ns: int, host_ns: int) -> int:
        """Lets the host work until a time, and returns the time that it has then."""
        if until_ns > host_ns:
            builder.node(self.table.delay(_HOST_TIME, until_ns - host_ns), stream=_HOST, sync=True)
        return max(until_ns, host_ns)

    def _wait(self, builder: BlockBuilder, wait: HostWait, host_ns: int, node: I64, finish: list[int]) -> int:
        host_ns = self._host_time(builder, wait.begin_ns, host_ns)
        rest_ns = wait.end_ns - max([host_ns, *(finish[place] for place in wait.until)])
        if not wait.until:
            rest_ns = wait.own_ns
        after = [int(node[place]) for place in wait.until]
        builder.node(self.table.delay(_HOST_WAIT, max(0, rest_ns)), stream=_HOST, after=after, sync=True)
        return wait.end_ns

    def _module(self, path: str) -> int:
        return self.modules.setdefault(path, len(self.modules))

    def _ops(self, labels: list[Label]) -> list[int]:
        """Returns the op of every work of the step."""
        step, profile = self.schedule.step, self.schedule.step.profile
        operators = operators_of(profile, (label.operator for label in labels))
        times = (step.finish_ns - step.start_ns).tolist()
        copied = profile.values(Key.BYTES, 0)[step.row].tolist()
        speed = self.device.memory_bytes_per_s if self.device else 0.0
        builder = self.table.builder
        longest: dict[int, int] = {}
        for place, label in enumerate(labels):
            best = longest.get(label.operator)
            if label.operator != NONE and place not in self.calls and (best is None or times[place] > times[best]):
                longest[label.operator] = place
        found = []
        for place, number in enumerate(profile.rows.name[step.row].tolist()):
            name, time_ns = profile.texts[number], times[place]
            if place in self.calls:
                call = self.calls[place]
                op = add_collective(builder, name, call, self.table.group(call, profile.rank))
                time_ns = self.meetings.transfer_ns[self.number].get(place, time_ns)
            else:
                operator = labels[place].operator
                main = operators.get(operator) if longest.get(operator) == place else None
                op = add_kernel(builder, name, time_ns / 1e9, speed, max(0.0, copied[place]), main)
            found.append(self.table.add(op, time_ns))
        if any(guesses_mask(one) for one in operators.values()):
            self.notes.append(
                "attention counts as causal where queries and keys are equally many, as files name no mask"
            )
        return found

    def _streams(self) -> I64:
        """Returns the engine's stream of every work: the one that computes most is the compute stream.

        Dispatchers of experts have their own kernels, so communication without NCCL is on the dispatchers' streams.
        """
        step = self.schedule.step
        numbers, stream = np.unique(2 * step.stream + step.leads, return_inverse=True)
        time = (step.finish_ns - step.start_ns).astype(np.float64)
        talks = step.profile.text_mask(communicates)[step.profile.rows.name[step.row]]
        by_nccl = np.isin(np.arange(len(step)), list(self.calls))
        computing, talking, exchanging = (
            np.bincount(stream, np.where(chosen, time, 0.0), len(numbers))
            for chosen in (~talks, talks, talks & ~by_nccl)
        )
        free = {True: list(_COLLECTIVE_STREAMS), False: list(_SPARE_STREAMS)}
        placed = np.zeros(len(numbers), np.int64)
        main = int(np.argmax(computing))
        for one in np.argsort(-(computing + talking), kind="stable").tolist():
            rest = free[bool(talking[one] > computing[one])] or free[True] or free[False]
            if one == main:
                placed[one] = Stream.COMPUTE
            elif 2 * exchanging[one] > computing[one] + talking[one] and Stream.EP in free[True]:
                free[True].remove(Stream.EP)
                placed[one] = Stream.EP
            elif rest:
                placed[one] = rest.pop(0)
            else:
                placed[one] = _SPARE_STREAMS[-1]
                self.notes.append(f"{len(numbers)} streams are more than the engine has, so some share one")
        return placed[stream]

    def _say(self) -> None:
        schedule, step = self.schedule, self.schedule.step
        rank = step.profile.rank
        missing = int((step.call == NONE).sum())
        if missing:
            self.notes.append(f"rank {rank}: {missing} of {len(step)} kernels have no launch and start when they did")
        if schedule.n_inferred:
            self.notes.append(
                f"rank {rank}: {schedule.n_inferred} waits between streams follow from the order of calls; the file"
                f" states {schedule.n_stated}"
            )
        if step.profile.device_peak_bytes(Key.TOTAL_ALLOCATED) is None:
            self.notes.append(f"rank {rank}: no memory events, so its tensors count as nothing")
        undescribed = sum(call.bytes_comm == 0 for call in self.calls.values())
        if undescribed:
            self.notes.append(
                f"rank {rank}: {undescribed} of {len(self.calls)} collectives say no size, so they keep their times on"
                " any network"
            )
        ungrouped = sum(call.bytes_comm > 0 and not call.group_size for call in self.calls.values())
        if ungrouped:
            self.notes.append(
                f"rank {rank}: {ungrouped} of {len(self.calls)} collectives say no group, so they count as over all"
                f" {self.table.world} ranks"
            )
