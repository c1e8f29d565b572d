"""What grows with the depth of a model, pairs of allocations and frees, and what readers of a Program are told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_recordings import Recorder

from forerun.core.program.kinds import OpKind
from forerun.core.program.origin import Origin
from forerun.core.program.types import Category, Collective, OpRow, Phase, Stream
from forerun.sources.trace import extrapolate_layers as layers
from forerun.sources.trace.described import Node
from forerun.sources.trace.roles import Roles
from forerun.sources.trace.to_program import to_program
from forerun.sources.trace.tracks import collective_stream, tracks_of


def test_figures_that_grow_evenly_go_on() -> None:
    at = layers._linear([[1.0, 10.0, 7.0], [3.0, 10.0, 4.0], [5.0, 10.0, 1.0]], "x")
    assert [at(n) for n in (0, 1, 2, 5)] == [[1, 10, 7], [3, 10, 4], [5, 10, 1], [11, 10, -8]]
    assert layers._linear([[1e9], [2e9 + 1], [3e9 + 3]], "x")(2) == [3e9 + 2]  # one part in 10**9 is rounding
    for wrong in ([[1.0], [2.0], [4.0]], [[1e9], [2e9], [3e9 + 4]], [[0.0], [0.0], [1.0]]):
        with pytest.raises(layers._NotLinear) as found:
            layers._linear(wrong, "the size")
        assert found.value.what == "the size"


def _row(scale: int, **changes: Any) -> OpRow:
    values = {"details": (2 * scale, 5), "flops": 10.0 * scale, "bytes_read": 4.0, "bytes_written": 1.0 * scale}
    return OpRow("fused", OpKind.MEMORY, "bf16", **{**values, "bytes_comm": 0.0, "launches": scale, **changes})


def test_an_operation_grows_in_every_figure() -> None:
    at = layers._linear_row([_row(1), _row(2), _row(3)])
    assert [at(n) for n in range(3)] == [_row(1), _row(2), _row(3)]
    assert at(9) == _row(10)
    assert at(40_000).launches == 32767
    for wrong, what in ((_row(3)._replace(dtype="fp32"), "the operation"), (_row(3, flops=31.0), "the size of fused")):
        with pytest.raises(layers._NotLinear) as found:
            layers._linear_row([_row(1), _row(2), wrong])
        assert found.value.what == what


def test_tensors_grow_in_number_or_in_size() -> None:
    more = layers._linear_tensors([((8, 1),), ((8, 1), (8, 1)), ((8, 1), (8, 1), (8, 1))])
    assert more(5) == ((8, 1),) * 6
    larger = layers._linear_tensors([((8, 1), (50, 2)), ((8, 1), (70, 2)), ((8, 1), (90, 2))])
    assert [larger(n) for n in (0, 2, 4)] == [((8, 1), (50, 2)), ((8, 1), (90, 2)), ((8, 1), (130, 2))]
    assert layers._linear_tensors([(), (), ()])(7) == ()
    for wrong in (
        [((50, 2),), ((70, 2),), ((95, 2),)],
        [((50, 2),), ((70, 2),), ()],
        [((50, 2),), ((70, 1),), ((90, 2),)],
    ):
        with pytest.raises(layers._NotLinear) as found:
            layers._linear_tensors(wrong)
        assert found.value.what == "the memory"


def _node(scale: int = 1, place: str = "here", waits: Any = ((7, 1),), tensors: Any = ()) -> Node:
    return Node(_row(scale), (place,), waits, tensors, ())


def test_a_node_outside_of_layers_grows_in_its_row_its_waits_and_its_memory() -> None:
    three = [_node(n + 1, waits=((7, 2 * n),), tensors=((100 * n, 3),)) for n in range(3)]
    at = layers._linear_node(three)
    found = at(6)
    assert (found.row, found.place, found.waits, found.allocates) == (_row(7), ("here",), ((7, 12),), ((600, 3),))
    for last, what in (
        (_node(3, place="there"), "the operation"),
        (_node(1, place="there"), "the stream, phase or peer"),
        (_node(1, waits=((8, 1),)), "what is waited for"),
        (_node(1, waits=((7, 5),)), "what is waited for"),
        (_node(1, tensors=((5, 1),)), "the memory"),
    ):
        with pytest.raises(layers._NotLinear) as caught:
            layers._linear_node([_node(), _node(), last])
        assert caught.value.what == what
    assert layers._difference([_node(), _node(tensors=((1, 1),))]) == "the memory"


rows = st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=15)


@given(rows)
def test_equal_rows_have_one_number(found: list[tuple[int, int, int]]) -> None:
    numbers = layers._row_numbers(np.array(found, np.int64)).tolist()
    assert len(set(numbers)) == len(set(found))
    assert len(set(zip(found, numbers, strict=True))) == len(set(found))


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3), min_size=1, max_size=5), st.data()
)
def test_pairs_follow_their_nodes(values: Any, data: st.DataObject) -> None:
    nodes = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=8))
    pairs, entry, owner = layers._pairs_of_nodes(values, np.array(nodes, np.int64))
    found = [(who, tuple(pair)) for who, pair in zip(owner.tolist(), pairs[entry].tolist(), strict=True)]
    assert found == [(who, pair) for who, node in enumerate(nodes) for pair in values[node]]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 1), st.booleans()), max_size=16))
def test_of_equal_tensors_the_last_one_made_is_freed_first(events: list[tuple[int, int, bool]]) -> None:
    """One allocation or free at each node, against a stack for each kind of tensor."""
    stacks: dict[tuple[int, int], list[int]] = {}
    expected = []
    for node, (size, category, makes) in enumerate(events):
        mine = stacks.setdefault((size, category), [])
        if makes:
            mine.append(node)
        else:
            expected.append((size, category, mine.pop() if mine else -1, node))
    expected += [(*kind, node, -1) for kind, left in stacks.items() for node in left]
    pairs = np.array([event[:2] for event in events], np.int64).reshape(-1, 2)
    time = np.array([2 * node + (not makes) for node, (_, _, makes) in enumerate(events)], np.int64)
    found = layers._allocations_with_frees(pairs, time)
    assert sorted(map(tuple, found.T.tolist())) == sorted(expected)


# -- what readers are told ---------------------------------------------------------------------------------------------


def _recorder(rank: int = 0, **meta: Any) -> Recorder:
    one = Recorder(rank, [("dp", (0, 4)), ("tp", (0, 1))], **meta)
    one.kernel("k", 10)
    return one


def _origin(*recorders: Recorder) -> Origin:
    return Origin.of(to_program([one.recording() for one in recorders]))


@pytest.mark.parametrize(
    ("meta", "tokens", "samples"),
    [
        ({}, None, None),
        ({"tokens": 5}, None, None),
        ({"tokens": 5, "samples": 2, "data_parallel_size": 4}, 20, 8),
        ({"tokens": 5, "data_parallel_size": 4, "tokens_per_step": 7}, 7, None),
        ({"tokens": 5, "world_size": 1}, 5, None),
        ({"tokens": 0, "data_parallel_size": 4}, None, None),
    ],
)
def test_tokens_are_those_of_all_ranks_with_data_of_their_own(
    meta: dict[str, Any], tokens: int | None, samples: int | None
) -> None:
    found = _origin(_recorder(**meta))
    assert (found.tokens_per_step, found.samples_per_step) == (tokens, samples)


def test_a_program_says_what_its_recordings_say() -> None:
    first = _recorder(notes=["one", "two"], fallbacks=["f"], torch="2.13", stages=[["made", 1, 2]], world_size=2)
    second = _recorder(1, notes=["two", "three"], world_size=2)
    for size, category, alloc in ((1, Category.PARAMETER, -1), (1, Category.OPTIMIZER, -1), (1, Category.PARAMETER, 0)):
        second.tensor(size, category, alloc, -1)
    second.tensor(1, Category.ACTIVATION, -1, -1)
    found = _origin(first, second)
    assert (found.source, found.name, found.torch, found.world_size) == ("trace", "made", "2.13", 2)
    assert (found.notes, found.fallbacks, found.roles) == (("one", "two", "three"), ("f",), (0, 1))
    assert (found.state_tensors, [stage.name for stage in found.stages]) == (2, ["made"])
    assert found.data_parallel is None


def test_data_parallel_groups_are_entries_of_the_program() -> None:
    one = _recorder(data_parallel=["dp"], sharded=[])
    one.collective(Collective.ALL_REDUCE, 1, 8, 1)
    one.collective(Collective.ALL_REDUCE, 0, 8, 1)
    program = to_program([one.recording()])
    found = Origin.of(program)
    assert [program.groups[number].axis for number in found.data_parallel or ()] == ["dp"]
    assert found.sharded == ()
    assert found.group_ranks is not None
    assert [found.group_ranks[number] for number in found.data_parallel or ()] == [(0, 4)]


def test_without_a_word_a_node_has_eight_gpus() -> None:
    assert to_program([_recorder().recording()]).meta["gpus_per_node"] == 4
    assert to_program([_recorder(gpus_per_node=None).recording()]).meta["gpus_per_node"] == 8


@pytest.mark.parametrize(
    ("name", "kind", "phase", "parallel", "stream"),
    [
        ("mesh_tp", Collective.ALL_REDUCE, Phase.FORWARD, False, Stream.TP),
        ("dp_cp", Collective.ALL_REDUCE, Phase.BACKWARD, False, Stream.REDUCE),
        ("cp_dp", Collective.ALL_REDUCE, Phase.BACKWARD, False, Stream.CP),
        ("fsdp", Collective.ALL_GATHER, Phase.FORWARD, False, Stream.GATHER),
        ("fsdp", Collective.BROADCAST, Phase.FORWARD, False, Stream.GATHER),
        ("fsdp", Collective.REDUCE_SCATTER, Phase.FORWARD, False, Stream.REDUCE),
        ("tp", Collective.ALL_GATHER, Phase.FORWARD, False, Stream.TP),
        ("7", Collective.ALL_GATHER, Phase.FORWARD, True, Stream.GATHER),
        ("7", Collective.ALL_TO_ALL, Phase.FORWARD, True, Stream.REDUCE),
        ("7", Collective.ALL_TO_ALL, Phase.OPTIMIZER, False, Stream.EP),
        ("7", Collective.ALL_REDUCE, Phase.OPTIMIZER, False, Stream.REDUCE),
        ("7", Collective.ALL_REDUCE, Phase.BACKWARD, False, Stream.TP),
        ("pp", Collective.ALL_REDUCE, Phase.OPTIMIZER, False, Stream.PP_SEND),
    ],
)
def test_a_collective_runs_where_its_axis_or_its_use_says(
    name: str, kind: Collective, phase: Phase, parallel: bool, stream: Stream
) -> None:
    assert collective_stream(name, int(kind), int(phase), parallel) == stream


@pytest.mark.parametrize(
    ("name", "stream"), [("ep", Stream.EP), ("cp", Stream.CP), ("tp", Stream.TP), ("7", Stream.CP), (None, Stream.CP)]
)
def test_a_message_among_ranks_that_do_the_same_runs_where_its_group_says(name: str | None, stream: Stream) -> None:
    one = Recorder(0, [(name or "unused", (0, 1))])
    one.kernel("k", 10)
    for sends in (True, False):
        one.message(sends, 1, -1 if name is None else 0, 64, 5, 3)
    roles = Roles.of([one.recording()])
    tracks = tracks_of(roles, 0)
    found = [tracks.tracks[number] for number in tracks.of_node.tolist()]
    assert [track.wanted for track in found] == [Stream.COMPUTE, stream, stream]
    assert [track.message for track in found] == [False, True, True]
    assert len(set(tracks.of_node.tolist())) == 3  # one track for each direction


@pytest.mark.parametrize(
    ("rank", "sends", "stream"),
    [
        (0, True, Stream.PP_SEND),
        (0, False, Stream.PP_RECV_GRAD),
        (1, True, Stream.PP_SEND_GRAD),
        (1, False, Stream.PP_RECV),
    ],
)
def test_a_message_between_stages_runs_by_its_direction(rank: int, sends: bool, stream: Stream) -> None:
    recordings = []
    for number in (0, 1):
        one = Recorder(number, [("pp", (0, 1))], world_size=2)
        one.kernel("k", 10)
        if number == rank:
            one.message(sends, 1 - rank, 0, 64, 5, 3)
        recordings.append(one.recording())
    tracks = tracks_of(Roles.of(recordings), rank)
    assert tracks.tracks[tracks.of_node[1]].wanted == stream
