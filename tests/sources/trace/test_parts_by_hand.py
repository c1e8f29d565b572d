"""Aligned depths, what has ended when a node starts, roles, what is left of a process: known answers."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.common.errors import ForerunError
from forerun.sources.trace import order, purpose, remains
from forerun.sources.trace.align import NotPeriodic, Run, align
from forerun.sources.trace.roles import Groups, Roles, axis_of


def numbers(text: str) -> Any:
    return np.array([ord(letter) for letter in text], np.int64)


@pytest.mark.parametrize(
    ("x", "y", "z", "runs"),
    [
        ("", "", "", []),
        ("abc", "abc", "abc", [((0, 0, 0), 3, 0)]),
        ("", "a", "aa", [((0, 0, 0), 0, 1)]),
        ("ab", "aLb", "aLLb", [((0, 0, 0), 1, 1), ((1, 2, 3), 1, 0)]),
        ("ab", "aLMb", "aLMLMb", [((0, 0, 0), 1, 2), ((1, 3, 5), 1, 0)]),
        ("Lb", "LLb", "LLLb", [((0, 0, 0), 1, 1), ((1, 2, 3), 1, 0)]),
        ("ab", "abL", "abLL", [((0, 0, 0), 2, 1)]),
        ("ab", "Lab", "LLab", [((0, 0, 0), 0, 1), ((0, 1, 2), 2, 0)]),
        ("abc", "aLbMc", "aLLbMMc", [((0, 0, 0), 1, 1), ((1, 2, 3), 1, 1), ((2, 4, 6), 1, 0)]),
        ("ab", "aLbKb", "aLbKLbKb", [((0, 0, 0), 1, 3), ((1, 4, 7), 1, 0)]),
        ("ab", "aLb", "aLb", None),
        ("ab", "aLb", "aLLLb", None),
        ("ab", "aLb", "aLMb", None),
        ("ab", "ab", "abL", None),
        ("ab", "a", "a", None),
        ("", "a", "aaa", None),
    ],
)
def test_layers_are_found_where_they_are_added(x: str, y: str, z: str, runs: list[Any] | None) -> None:
    if runs is None:
        with pytest.raises(NotPeriodic):
            align(numbers(x), numbers(y), numbers(z))
    else:
        assert align(numbers(x), numbers(y), numbers(z)) == [Run(*run) for run in runs]


def test_the_node_that_differs_is_named() -> None:
    with pytest.raises(NotPeriodic) as found:
        align(numbers("abc"), numbers("abLc"), numbers("abLMc"))
    assert found.value.node == 2
    with pytest.raises(NotPeriodic) as found:
        align(numbers("ab"), numbers("a"), numbers("a"))
    assert found.value.node == 0


@given(st.lists(st.tuples(st.text("abc", min_size=1, max_size=300), st.text("xyz", max_size=4)), max_size=5))
def test_what_is_added_can_be_taken_away(parts: list[tuple[str, str]]) -> None:
    depths = [numbers("".join(common + n * added for common, added in parts)) for n in range(3)]
    runs = align(*depths)
    for n, depth in enumerate(depths):
        kept = [depth[run.first[n] : run.first[n] + run.common + n * run.added] for run in runs]
        assert np.array_equal(np.concatenate([*kept, []]), depth)
    assert sum(run.added for run in runs) == sum(len(added) for _, added in parts)
    for run in runs:
        x, y, z = run.first
        assert np.array_equal(depths[0][x : x + run.common], depths[1][y : y + run.common])
        assert np.array_equal(depths[0][x : x + run.common], depths[2][z : z + run.common])
        y, z = y + run.common, z + run.common
        added = depths[1][y : y + run.added]
        assert np.array_equal(np.tile(added, 2), depths[2][z : z + 2 * run.added])


def ended(track: list[int], waits: dict[int, list[int]], sync: tuple[int, ...] = ()) -> tuple[Any, Any]:
    """Returns what has ended before each node, and the waits that are needed, by node."""
    n = len(track)
    pointers = np.cumsum([0, *(len(waits.get(i, ())) for i in range(n))])
    flat = np.array([p for i in range(n) for p in waits.get(i, ())], np.int32)
    function = getattr(order.last_ended, "py_func", order.last_ended)
    stops = np.isin(np.arange(n), sync).astype(np.int8)
    clock, keep = function(np.array(track, np.int32), pointers, flat, stops, max(track) + 1)
    needed = {i: flat[pointers[i] : pointers[i + 1]][keep[pointers[i] : pointers[i + 1]]].tolist() for i in waits}
    return clock.tolist(), needed


@pytest.mark.parametrize(
    ("track", "waits", "sync", "clock", "needed"),
    [
        # two nodes of a track run in order; of another track nothing is known
        ([0, 0, 1], {}, (), [[-1, -1], [0, -1], [-1, -1]], {}),
        # a wait for another track, and what that one had waited for
        ([0, 1, 2], {1: [0], 2: [1]}, (), [[-1, -1, -1], [0, -1, -1], [0, 1, -1]], {1: [0], 2: [1]}),
        # a wait for an earlier node of the own track says nothing new
        ([0, 0, 0], {2: [0, 1]}, (), [[-1], [0], [1]], {2: []}),
        # of two waits for one track the later one counts, of two equal ones one
        ([0, 0, 1], {2: [0, 1]}, (), [[-1, -1], [0, -1], [1, -1]], {2: [1]}),
        ([0, 1], {1: [0, 0]}, (), [[-1, -1], [0, -1]], {1: [0]}),
        # a wait that another wait implies
        ([0, 1, 2], {1: [0], 2: [0, 1]}, (), [[-1, -1, -1], [0, -1, -1], [0, 1, -1]], {1: [0], 2: [1]}),
        # the host waits: everything after it starts later than the node and than what that one had waited for
        ([0, 1, 2, 3], {1: [0], 3: [0, 2]}, (1,), [[-1] * 4, [0, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, -1]],
         {1: [0], 3: [2]}),
        # a node of which nothing waits leaves others as they were
        ([0, 1, 1], {2: [0]}, (0,), [[-1, -1], [0, -1], [0, 1]], {2: []}),
    ],
)  # fmt: skip
def test_what_has_ended_when_a_node_starts(track: Any, waits: Any, sync: Any, clock: Any, needed: Any) -> None:
    assert ended(track, waits, sync) == (clock, needed)


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("mesh_dp_shard", "dp_shard"),
        ("dp_shard#2", "dp_shard"),
        ("tp", "tp"),
        ("t", "t"),
        ("default_pg", "group"),
        ("Default", "group"),
        ("undefined", "group"),
        ("mesh_dim_0", "group"),
        ("dim_x", "group"),
        ("7", "group"),
        ("a1", "group"),
        ("a_", "group"),
        ("", "group"),
    ],
)
def test_axes_of_groups(name: str, axis: str) -> None:
    assert axis_of(name) == axis


def recording(rank: int, world: int = 8, groups: Any = (), peers: Any = (), length: int = 1) -> Any:
    class Recorded(SimpleNamespace):
        def __len__(self) -> int:
            return length

    return Recorded(rank=rank, meta={"world_size": world}, groups=list(groups), peer=np.array(peers, np.int64))


@pytest.mark.parametrize(
    ("recordings", "problem"),
    [
        ([], "there is no recording to make a Program of"),
        ([recording(3, length=0)], "rank 3 ran no kernel in its step"),
        ([recording(1), recording(1)], "rank 1 is recorded twice"),
        ([recording(0, 4), recording(1, 8)], r"runs of different size: world sizes \[4, 8\]"),
    ],
)
def test_what_is_no_run(recordings: list[Any], problem: str) -> None:
    with pytest.raises(ForerunError, match=problem):
        Roles.of(recordings)


def test_roles_of_ranks() -> None:
    roles = Roles.of([recording(0), recording(4)])
    assert (len(roles), roles.world_size, roles.ranks) == (2, 8, ((0, 1, 2, 3), (4, 5, 6, 7)))
    assert (roles.counts(), roles.names()) == ([4, 4], ["ranks like 0", "ranks like 4"])
    assert roles.of_rank == {rank: rank // 4 for rank in range(8)}
    assert (roles.of_peer(0, -1, 6), roles.of_peer(1, -1, 2)) == (1, 0)
    assert (roles.in_group(0, [5, 6, 99]), roles.in_group(1, [7])) == ((0, 1), (1,))
    assert Roles.of([recording(0)]).names() == ["every rank"]
    assert Roles.of([recording(0, peers=[4]), recording(4)]).names() == ["stage 0", "stage 1"]
    unknown = Roles.of([recording(0, 0), recording(2, 0)])
    assert unknown.world_size == 2
    assert sum(unknown.counts()) == 2


def test_a_peer_without_a_role_has_that_of_its_place_in_the_group() -> None:
    first = recording(0, 7, [("pp", (0, 3, 6)), ("other", (0, 1))])
    second = recording(5, 7, [("pp", (2, 5)), ("other", (4, 5))])
    roles = Roles((first, second), 7, ((0,), (5,)), {0: 0, 5: 1})
    assert roles.counts() == [4, 3]
    assert [roles.of_peer(0, 0, peer) for peer in (3, 6, 4)] == [1, 0, 0]
    assert [roles.of_peer(0, 1, 1), roles.of_peer(1, 0, 2), roles.of_peer(1, 1, 4)] == [1, 0, 0]


def test_groups_of_two_recordings_are_one_where_their_part_is_the_same() -> None:
    first = recording(0, 16, [("tp", (1, 0)), ("dp", (0, 8)), ("dp", (0, 8))])
    second = recording(8, 16, [("tp", (8, 9)), ("dp", (0, 8))])
    groups = Groups(Roles.of([first, second]), 8)
    assert groups.numbers == [[0, 1, 2], [0, 1]]
    assert (groups.ranks, groups.names) == ([[0, 1], [0, 8], [0, 8]], ["tp", "dp", "dp"])
    assert [(entry.axis, entry.size) for entry in groups.entries] == [("tp", 2), ("dp", 2), ("dp", 2)]
    assert [groups.border(8, 0, 1), groups.border(0, 8, 1), groups.border(0, 8, 2)] == [3, 3, 4]
    assert groups.ranks[3] == [0, 8]


def test_ranks_that_see_different_samples() -> None:
    one: Any = SimpleNamespace(rank=0, groups=[("dp", (0, 2, 4, 6)), ("in", (0, 2)), ("cp", (0, 1)), ("own", (0,))])
    assert purpose.distinct_ranks(one, []) == 1
    assert purpose.distinct_ranks(one, ["dp"]) == 4
    assert purpose.distinct_ranks(one, ["in", "dp"]) == 4
    assert purpose.distinct_ranks(one, ["in", "cp", "own"]) == 4
    assert purpose.words("Mesh_DP_shard#tp") == {"mesh", "dp", "shard"}


def test_what_a_process_left(tmp_path: Any) -> None:
    text = tmp_path / "out"
    assert (remains.tail(text), remains.last_words(text), remains.place(text)) == ("", "none", "")
    text.write_text("first\n\n last \n \n\n", "utf-8")
    assert remains.last_words(text) == " last "
    text.write_bytes(b"x" * 65536 + b"\xff!")
    assert remains.tail(text) == "x" * 65534 + "\N{REPLACEMENT CHARACTER}!"
    text.write_text(
        f'  File "{json.__file__}", line 1 in loads\n  File "<string>", line 2\n'
        '  File "/home/a/train.py", line 30 in f\n  File "/home/a/main.py", line 4 in g\n',
        "utf-8",
    )
    assert remains.place(text) == "/home/a/train.py:30"
    assert not remains.is_users("/venv/lib/site-packages/a.py")
    assert not remains.is_users(remains.__file__)
    assert remains.resident_bytes(2**30) == 0
