"""Where a communication pattern prices a step: the gradients' all-reduces, and nothing else."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from forerun.common.errors import ForerunError
from forerun.common.units import PS_PER_S
from forerun.core.cost.gradient_exchange import gradient_rows, wires_of
from forerun.core.cost.measured import Curve, Measured, NetworkProfile
from forerun.core.cost.memory_bound import memory_rates
from forerun.core.cost.step_costs import Launching, step_costs
from forerun.core.network.alpha_beta import AlphaBeta
from forerun.core.network.network_file import parse_topology
from forerun.core.network.patterns import CommunicationPattern, NoNetwork
from forerun.core.network.patterns_catalog import pattern_of
from forerun.core.network.patterns_collectives import Compressed, Nccl, RingAllReduce
from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.groups import CommGroup
from forerun.core.program.kinds import OpKind
from forerun.core.program.types import Collective
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.sources.symbolic.build import build

H100 = load_cluster("h100-sxm")
MODEL = replace(load_model("llama-3.1-8b"), n_layers=2)
MIXTURE = replace(load_model("mixtral-8x7b"), n_layers=2)
EVERY_PLAN = {
    "ddp": (MODEL, Plan(seq_len=512, dp_replicate=16)),
    "hybrid": (MODEL, Plan(seq_len=512, dp_shard=4, dp_replicate=4, zero_stage=3)),
    "zero-1": (MODEL, Plan(seq_len=512, dp_shard=4, zero_stage=1, tp=2, pp=2, n_microbatches=4)),
    "experts": (MIXTURE, Plan(seq_len=512, dp_shard=16, zero_stage=0, ep=4)),
}


@dataclass(frozen=True)
class AMillisecond(CommunicationPattern):
    name: str = "a millisecond"

    def seconds(self, size_bytes, group, wires):
        return np.full_like(size_bytes, 1e-3)


def program(name):
    model, plan = EVERY_PLAN[name]
    return build(model, replace(plan, stack="fms-fsdp"), H100)  # whose norms of gradients are reduced in any plan


def costs(program, n_gpus, pattern, stack="pytorch", **options):
    return step_costs(
        program.ops, program.groups, H100, load_stack(stack), Launching(), n_gpus, pattern=pattern, **options
    )


def names(program, rows):
    return {(program.ops.name[row].rpartition(".")[2], program.groups[program.ops.group[row]].axis) for row in rows}


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("ddp", {("grads", "dp_all")}),
        ("hybrid", {("replicas", "dp_replicate")}),
        ("zero-1", set()),
        ("experts", {("grads", "dp_all"), ("grads", "dp_expert_all")}),
    ],
)
def test_gradients_are_told_from_norms_and_activations(plan, expected):
    one = program(plan)
    rows = gradient_rows(one.ops, one.groups)
    assert names(one, rows) == expected
    others = set(np.flatnonzero(one.ops.collective == Collective.ALL_REDUCE).tolist()) - set(rows.tolist())
    assert {one.ops.name[row] for row in others} <= {"grad_norm.reduce", "loss.reduce"}
    assert others


def test_in_traced_programs_size_and_group_tell():
    """A trace calls every all-reduce the same; groups may have no name."""
    groups = tuple(CommGroup(axis, 8, 1, 8) for axis in ("group", "dp", "fsdp", "tp", "dp_cp", "ep"))
    groups += (CommGroup("dp", 1, 1, 1),)
    ops = OpTableBuilder()
    for number in range(len(groups)):
        for size in (4, 8192, 8193, 1e8):
            ops.collective("all_reduce", Collective.ALL_REDUCE, number, size)
    ops.collective("reduce_scatter", Collective.REDUCE_SCATTER, 0, 1e8)
    table = ops.build()
    found = {(groups[table.group[row]].axis, table.bytes_comm[row]) for row in gradient_rows(table, groups)}
    assert found == {(axis, size) for axis in ("group", "dp", "fsdp", "dp_cp") for size in (8193, 1e8)}


@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_a_pattern_changes_nothing_but_gradients(plan):
    one = program(plan)
    base, priced = (costs(one, 16, pattern) for pattern in (None, AMillisecond()))
    rows = gradient_rows(one.ops, one.groups)
    changed = np.flatnonzero(base.duration_ps != priced.duration_ps)
    assert set(changed.tolist()) == set(rows.tolist())
    assert priced.duration_ps[rows].tolist() == [PS_PER_S // 1000] * len(rows)
    assert (priced.calibrated[rows] == 0).all()
    assert base.issue_ps.tolist() == priced.issue_ps.tolist()


@pytest.mark.parametrize("network", [None, "switch:8@450/300,torus2d:2x1@50/700"])
@pytest.mark.parametrize("plan", EVERY_PLAN)
def test_the_pattern_nccl_is_no_pattern(plan, network):
    one = program(plan)
    network = network and parse_topology(network)
    base, priced = (costs(one, 16, pattern, network=network) for pattern in (None, Nccl()))
    assert base.duration_ps.tolist() == priced.duration_ps.tolist()


def test_a_framework_falls_short_of_nccl_but_not_of_a_textbook():
    one = program("ddp")
    rows = gradient_rows(one.ops, one.groups)
    wires = wires_of(H100, 16)
    stack = load_stack("pytorch")
    assert stack.network_rate < 1
    for pattern, rate in ((RingAllReduce(), stack.network_rate), (RingAllReduce(AlphaBeta()), 1.0)):
        for row in rows:
            alone = pattern.seconds(one.ops.bytes_comm[[row]], one.groups[one.ops.group[row]], wires)[0]
            assert costs(one, 16, pattern).duration_ps[row] == pytest.approx(alone / rate * PS_PER_S, abs=1)


def test_an_ideal_network_frees_all_communication():
    one = program("zero-1")
    free, bound = (costs(one, 16, pattern) for pattern in (NoNetwork(), None))
    talks = (one.ops.kind == OpKind.COLLECTIVE) | (one.ops.kind == OpKind.P2P)
    assert talks.sum() > 5
    for mine, others in ((free.duration_ps, bound.duration_ps), (free.issue_ps, bound.issue_ps)):
        assert (mine[talks] == 0).all()
        assert mine[~talks].tolist() == others[~talks].tolist()


def test_a_pattern_goes_over_what_was_measured_of_another():
    """The user's times are of NCCL's choice."""
    one = program("ddp")
    curve = Curve((1.0, 1e12), (7.0, 7.0))
    measured = Measured(network=NetworkProfile({(Collective.ALL_REDUCE, 16, 1): curve}))
    rows = gradient_rows(one.ops, one.groups)
    known, ring = (costs(one, 16, pattern, measured=measured) for pattern in (None, RingAllReduce()))
    assert (known.duration_ps[rows] == 7 * PS_PER_S).all()
    assert ring.duration_ps[rows].tolist() == costs(one, 16, RingAllReduce()).duration_ps[rows].tolist()
    lacking = costs(one, 16, RingAllReduce(), measured=Measured(network=NetworkProfile({})))
    assert not set(lacking.lacks) & set(rows.tolist())
    assert lacking.lacks


def test_compression_takes_passes_at_the_speed_of_the_device():
    wires = wires_of(H100, 16)
    group = CommGroup.on_mesh("dp", 16, 1, 8)
    size = np.array([1e9])
    packed = Compressed(NoNetwork(), 4.0, passes=2.0).seconds(size, group, wires)
    bandwidth = memory_rates(H100.device).bytes_per_s
    assert packed == pytest.approx(2 * (2.25e9 / bandwidth + wires.launch_s))


def test_slower_patterns_take_longer_in_a_step():
    one = program("ddp")
    rows = gradient_rows(one.ops, one.groups)
    total = [
        int(costs(one, 16, pattern_of(name)).duration_ps[rows].sum())
        for name in ("no_network", "nccl", "ring_allreduce", "all_gather", "parameter_server")
    ]
    assert total == sorted(total)
    assert total[-1] > 10 * total[1]


@pytest.mark.parametrize("answer", [np.array([1.0]), np.array(1.0), np.full(3, -1.0), np.full(3, np.nan)])
def test_a_pattern_has_to_say_a_time_for_each_size(answer):
    class Wrong(AMillisecond):
        def seconds(self, size_bytes, group, wires):
            return answer

    one = program("ddp")
    assert len(gradient_rows(one.ops, one.groups)) == 3
    with pytest.raises(ForerunError, match=r"pattern a millisecond: seconds\(\) gave .* for 3 sizes"):
        costs(one, 16, Wrong())
