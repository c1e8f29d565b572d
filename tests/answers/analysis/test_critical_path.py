"""The critical path: hand-made programs with known paths, and what holds on random ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_programs import N_OPS, program, random_programs

from forerun.answers.analysis.critical_path import CriticalPath, critical_path, path_of
from forerun.answers.analysis.predict import simulate
from forerun.common.errors import ForerunError
from forerun.core.engine.simulate import simulate as run_engine
from forerun.core.program.builder import BlockBuilder
from forerun.core.program.types import Block, Channel, FlatProgram, Phase, Program, Stream
from forerun.core.program.unfold import unfold
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan

COSTS = st.lists(st.integers(0, 50), min_size=N_OPS, max_size=N_OPS)
NETWORK = st.lists(st.booleans(), min_size=N_OPS, max_size=N_OPS)
SLOW = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=N_OPS, max_size=N_OPS)


def path(
    what: Program | Block,
    durations: Sequence[int],
    issues: Sequence[int] = (0,) * N_OPS,
    slow: Sequence[float] = (0,) * N_OPS,
    network: Sequence[bool] = (False,) * N_OPS,
) -> tuple[CriticalPath, FlatProgram]:
    what = what if isinstance(what, Program) else program([what], [[0]])
    flat = unfold(what)
    padded = np.array([*durations, *[0] * (N_OPS - len(durations))], np.int64)
    issue = np.array(issues, np.int64)
    timeline = run_engine(flat, padded, issue, np.array(slow, float), np.array(slow, float), np.array(network))
    return path_of(what, flat, timeline, issue), flat


def test_the_path_goes_through_what_the_last_kernel_waited_for() -> None:
    block = BlockBuilder()
    gather = block.node(0, Stream.GATHER)
    block.node(1)
    block.node(1, after=[gather])
    block.node(2, Stream.REDUCE)
    found, _ = path(block.build("b"), [100, 30, 7])
    assert found.node.tolist() == [0, 2]
    assert found.by_cause_ps == {"exposed_data_parallel": 100, "memory_bound": 30}
    assert [(c.name, c.count, c.time_ps) for c in found.contributors] == [("op0", 1, 100), ("op1", 1, 30)]
    assert found.contributors[0].share == 100 / 130


def test_a_host_that_falls_behind_is_on_the_path() -> None:
    block = BlockBuilder()
    for _ in range(3):
        block.node(0)
    found, _ = path(block.build("launch bound"), [3], issues=[10] * N_OPS)
    assert found.by_cause_ps == {"host": 30, "memory_bound": 3}
    assert found.on_host.tolist() == [True, True, True, False]


def test_a_sync_leads_back_to_the_node_that_the_host_waited_for() -> None:
    block = BlockBuilder()
    block.node(0, sync=True)
    block.node(1)
    found, _ = path(block.build("b"), [100, 20], issues=[10] * N_OPS)
    assert found.node.tolist() == [0, 0, 1, 1]
    assert found.on_host.tolist() == [True, False, True, False]
    assert found.by_cause_ps == {"memory_bound": 120, "host": 20}


def test_a_host_that_ends_last_ends_the_path() -> None:
    block = BlockBuilder()
    block.node(0)
    block.node(1, Stream.COPY)
    found, _ = path(block.build("b"), [5, 0], issues=[10, 10, 0, 0, 0, 0])
    assert found.step_ps == 20
    assert found.by_cause_ps == {"host": 20}


def test_the_path_crosses_to_the_class_that_comes_last_to_a_meeting() -> None:
    early, late = BlockBuilder(), BlockBuilder()
    early.node(0)
    early.node(1, Stream.PP_RECV, channel=0)
    early.node(2, after=[1], phase=Phase.OPTIMIZER)
    late.node(3)
    late.node(1, Stream.PP_SEND, after=[0], channel=0)
    two = program([early.build("e"), late.build("l")], [[0], [1]], [Channel("c", (0, 1))])
    found, _ = path(two, [10, 5, 40, 80])
    assert found.node.tolist() == [3, 1, 2]
    assert found.by_cause_ps == {"memory_bound": 80, "optimizer": 40, "exposed_pipeline_transfer": 5}
    assert found.by_class_ps == {"class 1": 80, "class 0": 45}


def test_classes_of_one_name_are_counted_together() -> None:
    first, second = BlockBuilder(), BlockBuilder()
    first.node(0)
    first.node(1, Stream.PP_SEND, after=[0], channel=0)
    second.node(1, Stream.PP_RECV, channel=0)
    second.node(2, after=[0])
    two = program([first.build("f"), second.build("s")], [[0], [1]], [Channel("c", (0, 1))])
    alike = dataclasses.replace(
        two, rank_classes=tuple(dataclasses.replace(one, name="rank") for one in two.rank_classes)
    )
    found, _ = path(alike, [10, 5, 40])
    assert found.by_class_ps == {"rank": 55}


def test_ties_go_to_the_own_stream_then_to_the_first_predecessor_then_to_the_host() -> None:
    block = BlockBuilder()
    block.node(0, Stream.REDUCE)
    block.node(0, Stream.GATHER)
    block.node(0)
    block.node(1, after=[1, 0])
    found, _ = path(block.build("b"), [10, 1])
    assert found.node.tolist() == [2, 3]
    first_of_all = BlockBuilder()
    first_of_all.node(0)
    first_of_all.node(0, Stream.REDUCE)
    first_of_all.node(1, after=[1])
    found, _ = path(first_of_all.build("b"), [10, 1])
    assert found.node.tolist() == [0, 2]
    apart = BlockBuilder()
    apart.node(0, Stream.REDUCE)
    apart.node(0, Stream.GATHER)
    apart.node(1, after=[1, 0])
    found, _ = path(apart.build("b"), [10, 1], issues=[0, 10, 0, 0, 0, 0])
    assert found.node.tolist() == [0, 2]
    assert found.by_cause_ps["exposed_data_parallel"] == 10


@given(random_programs(), COSTS, COSTS, SLOW, NETWORK)
def test_every_picosecond_has_a_cause_and_every_piece_begins_with_what_it_waited_for(
    what: Program, durations: list[int], issues: list[int], slow: list[float], network: list[bool]
) -> None:
    found, flat = path(what, durations, issues, slow, network)
    assert sum(found.by_cause_ps.values()) == found.step_ps
    assert sum(found.by_class_ps.values()) == found.step_ps
    assert sum(row.time_ps for row in found.contributors) == found.step_ps
    assert found.start_ps[:1].tolist() in ([0], [])
    assert found.end_ps[-1:].tolist() in ([found.step_ps], [])
    np.testing.assert_array_equal(found.start_ps[1:], found.end_ps[:-1])
    pieces = list(zip(found.node.tolist(), found.on_host.tolist(), strict=True))
    for (earlier, by_host), (later, launch) in pairwise(pieces):
        if launch:
            assert earlier == later - 1
            assert by_host or flat.sync[earlier]
        elif by_host:
            assert earlier in together(flat, later)
        else:
            assert any(earlier in waits(flat, member) for member in together(flat, later))


def together(flat: FlatProgram, node: int) -> list[int]:
    meeting = flat.meeting[node]
    return [node] if meeting < 0 else np.flatnonzero(flat.meeting == meeting).tolist()


def waits(flat: FlatProgram, node: int) -> list[int]:
    owner = np.searchsorted(flat.class_ptr, node, side="right") - 1
    mine = np.arange(flat.class_ptr[owner], node)
    before = mine[flat.stream[mine] == flat.stream[node]][-1:].tolist()
    return before + flat.pred[flat.pred_ptr[node] : flat.pred_ptr[node + 1]].tolist()


def test_a_plan_has_a_path_as_long_as_its_step() -> None:
    plan = Plan(dp_shard=2, pp=2, tp=2, n_microbatches=4, zero_stage=1, seq_len=4096)
    model, cluster = load_model("llama-3.1-8b"), load_cluster("h100-sxm")
    found = critical_path(simulate(model, plan, cluster))
    assert sum(found.by_cause_ps.values()) == found.step_ps
    assert max(found.by_cause_ps, key=lambda name: found.by_cause_ps[name]) == "matmul"
    assert len(found.by_class_ps) == 2


def test_a_folded_run_is_refused() -> None:
    plan = Plan(pp=2, n_microbatches=8, zero_stage=0, seq_len=4096)
    model, cluster = load_model("llama-3.1-8b"), load_cluster("h100-sxm")
    with pytest.raises(ForerunError, match="critical path: the run is folded"):
        critical_path(simulate(model, plan, cluster, folded=True))
