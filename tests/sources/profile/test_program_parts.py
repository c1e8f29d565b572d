"""Streams, groups, meetings and notes of a Program that a profile becomes, each by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from profile_files import Event, host, kernel, launch, write_profile

from forerun.answers.profile.imported import Imported, import_step
from forerun.answers.profile.kernel_types import short_name
from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.origin import Origin
from forerun.core.program.types import Category, Collective, Program, Stream
from forerun.sources.profile.collectives import Call, calls_of, is_collective, kind_of
from forerun.sources.profile.kernel_ops import add_collective, add_kernel, cut, product_shape
from forerun.sources.profile.labels import Operator
from forerun.sources.profile.read import read_profile, read_profiles
from forerun.sources.profile.schedule import HostWait, schedule_of
from forerun.sources.profile.step import steps_of

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*)"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevComm*)"
DISPATCH = "void deep_ep::intranode::dispatch<4>(int4*)"


def _work(*kernels: tuple[str, float, int], **said: Any) -> list[Event]:
    """A step of kernels (name, duration, stream), each launched 1 us after the one before, one after the other."""
    events, at = [host("ProfilerStep#0", 0, 500, "user_annotation")], 1000.0
    for number, (name, dur, stream) in enumerate(kernels, 1):
        more = said if is_collective(name) else {}
        events += [launch(number, 0.5, number), kernel(name, at, dur, number, stream, **more)]
        at += dur
    return events


def _import(folder: Path, *ranks: list[Event], world: int | None = None, **beside: Any) -> Imported:
    paths = []
    for rank, events in enumerate(ranks):
        about = {} if world is None else {"world_size": world}
        told = {"distributedInfo": {"rank": rank, **about}, **beside}
        paths.append(write_profile(folder / f"{rank}.json", events, **told))
    return import_step(read_profiles(paths))


def _streams(program: Program, rank: int = 0) -> dict[str, Stream]:
    """The stream of each kernel that is named apart from others."""
    block = program.blocks[rank]
    fixed = program.ops.is_delay[block.op]
    named = zip(block.op[~fixed].tolist(), block.stream[~fixed].tolist(), strict=True)
    return {program.ops.name[op]: Stream(stream) for op, stream in named}


def test_each_stream_has_its_place_by_what_it_does_and_for_how_long(tmp_path: Path) -> None:
    kernels = [("gemm", 90, 7), ("copy", 30, 8), ("small", 20, 9), ("deepest", 10, 10)]
    kernels += [(f"{NCCL} {stream}", 300 - stream, stream) for stream in (20, 21, 22, 23)]
    found = _streams(_import(tmp_path, _work(*kernels, (DISPATCH, 500, 30))).program)
    assert found == {
        "gemm": Stream.COMPUTE,
        "copy": Stream.PP_SEND,
        "small": Stream.PP_RECV,
        "deepest": Stream.PP_SEND_GRAD,
        f"{NCCL} 20": Stream.REDUCE,
        f"{NCCL} 21": Stream.GATHER,
        f"{NCCL} 22": Stream.TP,
        f"{NCCL} 23": Stream.CP,
        DISPATCH: Stream.EP,
    }


def test_where_streams_do_both_the_larger_part_decides(tmp_path: Path) -> None:
    kernels = [("gemm", 90, 7), (f"{NCCL} a", 31, 8), ("with a", 30, 8), (f"{NCCL} b", 20, 9), ("with b", 20, 9)]
    kernels += [(DISPATCH, 12, 10), ("with dispatch", 12, 10)]
    found = _streams(_import(tmp_path, _work(*kernels)).program)
    assert found["with a"] == found[f"{NCCL} a"] == Stream.REDUCE
    assert found["with b"] == found[f"{NCCL} b"] == Stream.PP_SEND
    assert found["with dispatch"] == found[DISPATCH] == Stream.PP_RECV  # half of its time is no more than half


def test_more_streams_than_the_engine_has_share_the_last(tmp_path: Path) -> None:
    many = [("gemm", 90, 1), *((f"k{stream}", 50 - stream, stream) for stream in range(2, 16))]
    imported = _import(tmp_path, _work(*many))
    found = list(_streams(imported.program).values())
    assert len(set(found)) == 13  # compute, seven spare ones, five of collectives
    assert [stream for stream in found if found.count(stream) > 1] == [Stream.PP_SEND_GRAD_BACK] * 3
    assert sum("15 streams are more than the engine has" in note for note in imported.notes) == 1
    assert not any("more than the engine" in note for note in _import(tmp_path, _work(*many[:13])).notes)


SAID = {"Collective name": "_allgather_base", "dtype": "BFloat16", "In msg nelems": 100, "Out msg nelems": 800}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (SAID, (Collective.ALL_GATHER, 1600, "bf16")),
        (SAID | {"Collective name": "_reduce_scatter_base"}, (Collective.REDUCE_SCATTER, 200, "bf16")),
        (SAID | {"Collective name": "allreduce", "dtype": "Float"}, (Collective.ALL_REDUCE, 3200, "fp32")),
        (SAID | {"Collective name": "allreduce", "In msg nelems": 900}, (Collective.ALL_REDUCE, 1800, "bf16")),
        (SAID | {"Collective name": "all_to_allv", "dtype": "Long"}, (Collective.ALL_TO_ALL, 800, "long")),
        (SAID | {"Collective name": "broadcast", "dtype": "Half"}, (Collective.BROADCAST, 200, "fp16")),
        (SAID | {"Collective name": "barrier", "dtype": "Byte"}, (Collective.ALL_REDUCE, 800, "byte")),
        (SAID | {"Collective name": "send", "dtype": "Double"}, (Collective.SEND_RECV, 800, "fp64")),
        (SAID | {"dtype": "unheard"}, (Collective.ALL_GATHER, 800, "unheard")),
        ({}, (Collective.ALL_REDUCE, 0, "")),
    ],
)
def test_a_collective_moves_its_whole_buffer(tmp_path: Path, said: dict[str, Any], expected: tuple[Any, ...]) -> None:
    profile = read_profile(write_profile(tmp_path / "a.json", _work((NCCL, 5, 7), **said)))
    (call,) = calls_of(profile, np.flatnonzero(profile.is_gpu_work))
    assert (call.kind, call.bytes_comm, call.dtype) == expected


@pytest.mark.parametrize(
    ("said", "dims", "dtype", "expected"),
    [
        ("nccl:all_reduce", [[3, 100], [50]], "float", (Collective.ALL_REDUCE, 1400, "fp32")),
        ("nccl:_all_gather_base", [[10]], "c10::BFloat16", (Collective.ALL_GATHER, 40, "bf16")),  # of two ranks
        ("nccl:_reduce_scatter_base", [[8192, 384]], "c10::Half", (Collective.REDUCE_SCATTER, 6291456, "fp16")),
        ("nccl:all_to_all", [[5, 2]], "long int", (Collective.ALL_TO_ALL, 80, "long")),
        ("nccl:broadcast", [[]], "unsigned char", (Collective.BROADCAST, 1, "unsigned")),
        ("nccl:send 0->1", [[7]], "float", (Collective.SEND_RECV, 28, "fp32")),
        ("nccl:all_reduce", [[7]], "of_another_package", (Collective.ALL_REDUCE, 0, "of_another_package")),
        ("nccl:coalesced", [[7]], "float", (Collective.ALL_REDUCE, 28, "fp32")),  # the kernel's own kind
    ],
)
def test_an_annotation_around_its_launch_describes_a_collective_that_says_nothing(
    tmp_path: Path, said: str, dims: list[list[int]], dtype: str, expected: tuple[Any, ...]
) -> None:
    """As in files before 2024, which name no size and no group at the kernel."""
    argument = {"Input Dims": dims, "Input type": [dtype] * len(dims)}
    events = [
        host("ProfilerStep#0", 0, 500, "user_annotation"),
        host(said, 9, 20, "user_annotation", **argument),
        host("record_param_comms", 9, 15),
        launch(10, 1, 1),
        kernel(NCCL, 20, 50, 1),
        launch(40, 1, 2),
        kernel(NCCL, 80, 50, 2),  # nothing around it
    ]
    imported = _import(tmp_path, events, world=2)
    ops = imported.program.ops
    talks = np.flatnonzero(ops.is_communication)
    assert (ops.collective[talks[0]], ops.bytes_comm[talks[0]], ops.dtype[talks[0]]) == expected
    assert (ops.collective[talks[1]], ops.bytes_comm[talks[1]]) == (Collective.ALL_REDUCE, 0)
    assert imported.replayed_s == pytest.approx(imported.measured_s)
    known = expected[1] > 0
    assert any("1 of 2 collectives say no group" in note for note in imported.notes) == known
    assert any(f"{2 - known} of 2 collectives say no size" in note for note in imported.notes)


def test_a_kernel_that_says_its_sizes_is_right_about_them(tmp_path: Path) -> None:
    around = host("nccl:all_reduce", 0, 400, "user_annotation", **{"Input Dims": [[7]], "Input type": ["float"]})
    ops = _import(tmp_path, [around, *_work((NCCL, 5, 7), **SAID)]).program.ops
    (row,) = np.flatnonzero(ops.is_communication)
    assert (ops.collective[row], ops.bytes_comm[row]) == (Collective.ALL_GATHER, 1600)


@pytest.mark.parametrize(
    ("name", "cut_to", "short"),
    [
        ("gemm", "gemm", "gemm"),
        (f"void add<4, {'float, ' * 40}>(int)", f"void add<4, {'float, ' * 15}flo>", "add"),
        (f"void at::{'x' * 90}::f<g<h<{'i' * 30}", f"void at::{'x' * 90}::f<g<h<{'i' * 13}>>>", f"at::{'x' * 90}::f"),
        (f"f(void (*)(int{', int' * 40}))", f"f(void (*)(int{', int' * 21},))", "f"),
    ],
)
def test_a_long_name_of_a_kernel_is_cut_where_its_brackets_still_match(name: str, cut_to: str, short: str) -> None:
    assert cut(name) == cut_to
    assert short_name(cut(name)) == short


@pytest.mark.parametrize(
    ("size", "listed", "ranks"),
    [
        (3, "[4, 0, 2]", (0, 2, 4)),
        (3, "[0, 1, ...]", ()),
        (3, "[0, 1]", ()),
        (2, "[0, -1]", ()),
        (2, "[0, 0]", ()),
        (2, '{"0": 1}', ()),
        (2, "", ()),
    ],
)
def test_a_group_has_the_ranks_that_its_list_tells(
    tmp_path: Path, size: int, listed: str, ranks: tuple[int, ...]
) -> None:
    said = {"Group size": size, "Process Group Ranks": listed, "Process Group Name": "mesh_tp"}
    profile = read_profile(write_profile(tmp_path / "a.json", _work((NCCL, 5, 7), **said)))
    (call,) = calls_of(profile, np.flatnonzero(profile.is_gpu_work))
    assert (call.ranks, call.group_size, call.group_name) == (ranks, size, "mesh_tp")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("AllReduce", Collective.ALL_REDUCE),
        ("gather", Collective.BROADCAST),
        ("recv", Collective.SEND_RECV),
        ("receive", Collective.NONE),
    ],
)
def test_names_of_calls_tell_their_kind(name: str, kind: Collective) -> None:
    assert kind_of(name) == kind


def test_the_group_of_a_collective_is_its_neighbours_unless_the_file_lists_it(tmp_path: Path) -> None:
    said = SAID | {"Group size": 2, "Process Group Name": "pairs"}
    ranks = [_work(("gemm", 9, 7), (GATHER, 5, 8), **said) for _ in range(5)]
    program = _import(tmp_path, *ranks, world=6).program
    origin = Origin.of(program)
    assert origin.group_ranks == ((0, 1), (2, 3), (3, 4), (4, 5))
    assert [(one.axis, one.size) for one in program.groups] == [("pairs", 2)] * 4
    assert (origin.data_parallel, origin.sharded) == (None, ())
    assert [one.n_ranks for one in program.rank_classes] == [2, 1, 1, 1, 1]
    assert [one.name for one in program.rank_classes] == [f"rank {number}" for number in range(5)]


@pytest.mark.parametrize(
    ("name", "sharded"), [("_allgather_base", (0,)), ("_reduce_scatter_base", (0,)), ("allreduce", ())]
)
@pytest.mark.parametrize("world", [2, 16])
def test_one_group_of_the_whole_world_is_data_parallel(
    tmp_path: Path, world: int, name: str, sharded: tuple[int, ...]
) -> None:
    said = SAID | {"Collective name": name, "Group size": 0}
    origin = Origin.of(_import(tmp_path, _work(("gemm", 9, 7), (NCCL, 5, 8), **said), world=world).program)
    assert origin.group_ranks == (tuple(range(world)),)
    assert (origin.data_parallel, origin.sharded, origin.world_size) == ((0,), sharded, world)
    alone = Origin.of(_import(tmp_path, _work(("gemm", 9, 7), (NCCL, 5, 8), **said), world=1).program)
    assert alone.data_parallel is None


def test_ranks_meet_where_they_do_the_same_collectives(tmp_path: Path) -> None:
    tp = SAID | {"Group size": 2, "Process Group Ranks": "[0, 1]"}
    both = [(NCCL, 30, 8), (NCCL, 20, 8)]
    first, second = _work(*both, **tp), _work(("gemm", 9, 7), (NCCL, 12, 8), (NCCL, 40, 8), **tp)
    other = _work(*both, **tp | {"Process Group Ranks": "[2, 3]"})
    program = _import(tmp_path, first, second, other, world=4).program
    assert [(one.name, one.members) for one in program.channels] == [("group (0, 1)", (0, 1))]
    times = [np.array(Origin.of(program).recorded.time_ps)[block.op].tolist() for block in program.blocks]  # type: ignore[union-attr]
    talks = [[time // 10**6 for time in rank if time > 0] for rank in times]
    assert talks == [[12, 20], [9, 12, 20], [30, 20]]  # the shorter of both where they meet
    fewer = _import(tmp_path, first, _work((NCCL, 12, 8), **tp), world=4)
    assert fewer.program.channels == ()
    note = "collectives of group (0, 1) differ between ranks (rank 0: 2, rank 1: 1), so they don't wait there"
    assert note in fewer.notes


def test_sends_meet_apart_from_the_collectives_of_their_group(tmp_path: Path) -> None:
    said = {"Group size": 2, "Process Group Ranks": "[0, 1]", "dtype": "Byte", "In msg nelems": 64}
    send = "ncclDevKernel_SendRecv(ncclDevComm*)"
    first = _work((NCCL, 30, 8), (send, 4, 9), (send, 4, 9), **said)
    found = _import(tmp_path, first, _work((NCCL, 20, 8), (send, 4, 9), **said), world=2)
    assert len(found.program.channels) == 1
    assert any(note.startswith("transfers of group (0, 1) differ") for note in found.notes)


def test_the_notes_count_what_is_missing(tmp_path: Path) -> None:
    events = _work(("gemm", 9, 7), (NCCL, 5, 8), (NCCL, 5, 8), **{"Group size": 2})
    events += [kernel("no launch", 400, 5, 99), kernel("no launch", 410, 5, 98)]
    notes = _import(tmp_path, events, world=2).notes
    assert notes == (
        "rank 0: 2 of 5 kernels have no launch and start when they did",
        "rank 0: no memory events, so its tensors count as nothing",
        "rank 0: 2 of 2 collectives say no size, so they keep their times on any network",
    )


def test_memory_events_of_the_device_tell_the_peak(tmp_path: Path) -> None:
    def event(at: float, total: int, device: int) -> Event:
        args = {"Bytes": 1, "Total Allocated": total, "Total Reserved": 2 * total, "Device Type": device}
        return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": at, "args": args}

    events = [*_work(("gemm", 9, 7)), event(5, 700, 1), event(6, 900, 1), event(7, 9000, 0), event(8, 100, 1)]
    imported = _import(tmp_path, events, world=1)
    resident = imported.program.rank_classes[0].resident_bytes
    assert resident[Category.ACTIVATION] == resident.sum() == 900
    assert imported.notes == ()


def test_a_launch_into_a_full_queue_takes_what_the_others_take(tmp_path: Path) -> None:
    """1,000 kernels are queued when the last three are launched: one at once, two after the device has done some."""
    count = 1003
    events = [host("ProfilerStep#0", 0, 9000, "user_annotation")]
    calls = [(number, 0.5) for number in range(1, 1001)] + [(1001, 1.0), (1002, 3000), (5000, 1.2)]
    for number, (at, dur) in enumerate(calls, 1):
        events += [launch(at, dur, number), kernel("k", 2000 + 10 * number, 10, number)]
    (step,) = steps_of(read_profile(write_profile(tmp_path / "a.json", events)))
    assert step.queued.tolist()[-3:] == [1000, 1001, 702]
    found = schedule_of(step).host_waits
    assert len(step) == count
    assert found == (HostWait(1_002_000, 4_002_000, (198,), 500),)
    full = steps_of(read_profile(write_profile(tmp_path / "a.json", events)))[0]
    full.queued[:] = 1000
    waits = {wait.begin_ns: wait for wait in schedule_of(full).host_waits}
    assert waits[5_000_000] == HostWait(5_000_000, 5_001_200, (298,), 500)  # the shortest launch is the usual one
    assert 1_001_000 not in waits  # no more than twice the usual time


@pytest.mark.parametrize(
    ("operator", "shape"),
    [
        (Operator("aten::mm", ((8, 4), (4, 6)), "bf16"), (1, 8, 6, 4)),
        (Operator("aten::addmm", ((6,), (8, 4), (4, 6)), "fp32"), (1, 8, 6, 4)),
        (Operator("aten::bmm", ((3, 8, 4), (3, 4, 6)), "fp16"), (3, 8, 6, 4)),
        (Operator("aten::baddbmm", ((3, 8, 6), (3, 8, 4), (3, 4, 6)), "bf16"), (3, 8, 6, 4)),
        (Operator("aten::mm", ((1, 1), (1, 1)), "bf16"), (1, 1, 1, 1)),
        (Operator("aten::mm", ((8, 4), (5, 6)), "bf16"), None),
        (Operator("aten::mm", ((8, 0), (0, 6)), "bf16"), None),
        (Operator("aten::mm", ((1 << 31, 4), (4, 6)), "bf16"), None),
        (Operator("aten::mm", (((1 << 31) - 1, 4), (4, 6)), "bf16"), (1, (1 << 31) - 1, 6, 4)),
        (Operator("aten::mm", ((8, 4),), "bf16"), None),
        (Operator("aten::mm", ((4,), (4, 6)), "bf16"), None),
        (Operator("aten::bmm", ((3, 8, 4), (4, 6)), "bf16"), None),
        (Operator("aten::bmm", ((1, 3, 8, 4), (1, 3, 4, 6)), "bf16"), None),
        (Operator("aten::mm", ((8, 4), (4, 6)), "fp64"), None),
        (Operator("aten::mm", None, "bf16"), None),
        (Operator("aten::add", ((8, 4), (4, 6)), "bf16"), None),
    ],
)
def test_an_operator_that_is_one_product_tells_its_shape(
    operator: Operator, shape: tuple[int, int, int, int] | None
) -> None:
    assert product_shape(operator) == shape


def test_each_kernel_moves_what_the_file_or_its_time_tells() -> None:
    mm = Operator("aten::mm", ((8, 4), (4, 6)), "fp32")
    q = (2, 3, 16, 8)
    attention = Operator("aten::_scaled_dot_product_flash_attention", (q, q, q), "bf16")
    ops = OpTableBuilder()
    added = [
        add_kernel(ops, "Memcpy DtoH (Device -> Pinned)", 1.0, 1e9, 64, None),
        add_kernel(ops, "Memcpy HtoD (Pinned -> Device)", 1.0, 1e9, 32, None),
        add_kernel(ops, "Memcpy DtoD (Device -> Device)", 1.0, 1e9, 16, None),
        add_kernel(ops, "Memset (Device)", 1.0, 1e9, 8, None),
        add_kernel(ops, "gemm", 1.0, 1e9, 0, mm),
        add_kernel(ops, "flash_fwd_kernel", 1.0, 1e9, 0, attention),
        add_kernel(ops, "elementwise", 2e-6, 1e9, 0, attention),
        add_kernel(ops, "x" * 500, 2e-6, 1e9, 0, None),
        add_collective(ops, "y" * 500, Call(Collective.NONE, 7.0, (), 2, "", "bf16"), 0),
        add_collective(ops, "z" * 500, Call(Collective.SEND_RECV, 7.0, (), 2, "", "bf16"), 0),
        add_collective(ops, "w", Call(Collective.ALL_TO_ALL, 9.0, (), 2, "", "bf16"), 0),
    ]
    table = ops.build()
    assert added == list(range(11))
    assert table.name[7:10] == ("x" * 120, "y" * 120, "z" * 120)
    assert table.bytes_read[[2, 3, 6, 7]].tolist() == [16, 0, 2000, 2000]
    assert table.bytes_written[[2, 3, 6, 7]].tolist() == [16, 8, 0, 0]
    assert table.bytes_read[4] == 4 * (8 + 6) * 4
    assert table.bytes_written[4] == 4 * 8 * 6
    assert table.flops[4] == 2 * 8 * 6 * 4
    assert table.flops[5] == 2 * 2 * 2 * 3 * 16 * 16 * 8 / 2  # two products, half of each under the causal mask
    assert table.bytes_comm[8:].tolist() == [7, 7, 9]
    assert table.collective[[8, 10]].tolist() == [Collective.ALL_REDUCE, Collective.ALL_TO_ALL]
