"""No bound exceeds what a simulation of the same plan gives, and what a bound calls too large does not fit."""

import random
from dataclasses import fields, replace

import numpy as np
import pytest

from forerun.answers.analysis.predict import predict
from forerun.answers.search.orders import all_orders
from forerun.answers.search.screening import Screening
from forerun.answers.search.space import Tally, make_space
from forerun.answers.search.space_table import SpaceTable
from forerun.answers.search.time_bound import TimeBound
from forerun.answers.search.unit_runs import UnitRuns
from forerun.common.errors import ForerunError
from forerun.common.units import GIB
from forerun.core.cost.clock import slows_long_kernels
from forerun.core.network.on_topology import load_network
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.types import KernelRates
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.constraints import refuse
from forerun.describe.plan.fields import choices
from forerun.describe.plan.plan import Plan

CLUSTER = load_cluster("h100-sxm")
FEW_LAYERS = 6
ROUND = 1 + 1e-9
ROOMY = replace(CLUSTER.device, memory_bytes=2**50)


def held_to_simulations(model, table, stack, rows, network=None, cluster=CLUSTER):
    """Check the bounds of some rows; the shares of their times that the bounds are: of all plans at once, of each."""
    screening = Screening(UnitRuns(model, cluster, network), stack)
    screened, close = screening.run(table), TimeBound(screening)
    coarse, shares = screening.coarse(table), []
    assert (coarse.need_bytes <= screened.need_bytes * ROUND).all()
    assert (coarse.time_s <= screened.time_s * ROUND)[~screened.too_large].all()
    for row in rows:
        plan, groups = table.plan(row), table.groups[int(table.mesh[row])]
        prediction = predict(model, plan, cluster, network)
        needs = (screened.held_bytes if prediction.fits else screened.need_bytes)[row] / GIB
        assert needs <= prediction.peak_reserved_gib * ROUND, plan
        if screened.too_large[row]:
            assert not prediction.fits, plan
            continue
        bounds = screened.time_s[row], close.least_step_s(plan, groups)
        shares.append([bound / prediction.step_time_s for bound in bounds])
        assert max(shares[-1]) <= ROUND, plan
    return np.array(shares)


@pytest.mark.parametrize(
    ("name", "n_gpus", "seq_len", "batch", "stack", "extent"),
    [
        ("llama-3.1-8b", 32, 8192, 128, "torchtitan", "default"),
        pytest.param("llama-3.1-8b", 64, 8192, 96, "torchtitan", "whole", marks=pytest.mark.long),
        ("llama-3.1-8b", 48, 4096, 96, "megatron-core", "whole"),
        pytest.param("mixtral-8x7b", 32, 4096, 64, "megatron-core", "whole", marks=pytest.mark.long),
        ("deepseek-v2-lite", 16, 4096, 64, "torchtitan", "whole"),
        ("gpt2-xl", 16, 1024, 64, "deepspeed", "whole"),
        ("llama-3.1-8b", 16, 4096, 64, "composer", "default"),
        ("llama-3.1-8b", 16, 4096, 64, "nanotron", "whole"),
        ("llama-3.1-8b", 16, 4096, 64, "internevo", "whole"),
        ("llama-3.2-1b", 16, 4096, 64, "simple-fsdp", "default"),
        ("gpt2-small", 8, 1024, 64, "nvidia-bert", "default"),
        ("nemotron-h-8b", 16, 4096, 64, "torchtitan", "whole"),
        pytest.param("gpt-oss-20b", 32, 4096, 64, "megatron-core", "whole", marks=pytest.mark.long),
    ],
)
def test_bounds_of_a_space_never_exceed_what_is_predicted(name, n_gpus, seq_len, batch, stack, extent):
    model = load_model(name)
    table = make_space(model, CLUSTER, n_gpus, seq_len, batch, {"stack": stack}, None, extent).table(Tally())
    some = random.Random(n_gpus).sample(range(len(table)), min(40, len(table)))
    shares = held_to_simulations(model, table.take(np.array(some)), stack, range(len(some)))
    assert len(shares) > 5
    assert np.median(shares, axis=0).tolist() > [0.8, 0.9]


ODD = [
    # copies from the host run beside gathers where FSDP prefetches several units
    ("mixtral-8x7b", {"stack": "torchtitan-0.1", "micro_batch": 3, "n_microbatches": 2, "cp": 4, "prefetch": 2,
     "offload": "params", "precision": "fp32", "master_dtype": "bf16", "reduce_dtype": "bf16"}),
    # a layer keeps less of a single sample
    ("llama-3.2-1b", {"stack": "nanotron", "micro_batch": 5, "activation_checkpointing": "full",
     "checkpoint_every": 2}),
    # what the head adds falls with the samples at first
    ("mixtral-8x7b", {"stack": "nanotron", "micro_batch": 5, "dp_replicate": 4, "cp": 4, "tp": 4,
     "activation_checkpointing": "full", "reshard_after_forward": "never"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "values"), ODD, ids=str)
def test_bounds_of_odd_plans_never_exceed_what_is_predicted(name, values):
    model = replace(load_model(name), n_layers=FEW_LAYERS)
    table = SpaceTable.of_plans([Plan(seq_len=512, **values)], CLUSTER.node_size)
    assert len(held_to_simulations(model, table, values["stack"], [0])) == 1


@pytest.mark.parametrize("stack", ["torchtitan-0.1", "simple-fsdp"])
def test_bounds_hold_with_a_large_vocabulary(stack):
    """Embedding and head are one unit of FSDP under torchtitan-0.1, and a parametrisation gathers them at each use."""
    model = load_model("gemma3-1b")
    table = make_space(model, CLUSTER, 16, 512, 64, {"stack": stack}, None, "whole").table(Tally())
    some = random.Random(1).sample(range(len(table)), min(60, len(table)))
    assert len(held_to_simulations(model, table.take(np.array(some)), stack, range(len(some)))) > 5


@pytest.mark.parametrize(
    ("name", "stack", "extent", "modules"),
    [
        ("llama-3.2-1b", "megatron-core", "whole", 2),
        ("deepseek-v2-lite", "torchtitan", "whole", 1),
        ("deepseek-v2-lite", "megatron-core", "default", 1),
    ],
)
def test_bounds_hold_with_modules_that_predict_further_tokens(name, stack, extent, modules):
    model = replace(load_model(name), mtp_modules=modules)
    table = make_space(model, CLUSTER, 16, 4096, 64, {"stack": stack}, None, extent).table(Tally())
    some = random.Random(modules).sample(range(len(table)), min(24, len(table)))
    shares = held_to_simulations(model, table.take(np.array(some)), stack, range(len(some)))
    assert len(shares) > 3


def test_the_bounds_of_a_plan_do_not_depend_on_its_row():
    """Those of memory are equal. Plans that are alike share a bound of time, which may be that of another of them."""
    model = load_model("llama-3.1-8b")
    table = make_space(model, CLUSTER, 16, 8192, 64, {}, None, "default").table(Tally())
    order = np.array(random.Random(4).sample(range(len(table)), len(table)))
    screening = Screening(UnitRuns(model, CLUSTER), "torchtitan")
    whole = screening.run(table)
    shuffled = screening.run(table.take(order))
    for column in fields(whole):
        one, other = getattr(whole, column.name)[order], getattr(shuffled, column.name)
        np.testing.assert_allclose(one, other, rtol=0.1 if column.name == "time_s" else 1e-12, err_msg=column.name)


VALUES = {
    "micro_batch": (1, 2, 3),
    "n_microbatches": (1, 2, 4, 8),
    **dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp"), (1, 1, 2, 4)),
    "ep": (1, 1, 2, 4),
    "zero_stage": (0, 1, 2, 3),
    "mesh_order": all_orders(),
    "reshard_after_forward": ("default", "always", "never"),
    "prefetch": (1, 1, 0, 2),
    "sequence_parallel": (True, False),
    "pp_schedule": ("1F1B", "GPipe", "Interleaved1F1B", "ZB1P", "ZBV", "DualPipeV"),
    "virtual_stages": (1, 2),
    "layers_per_stage": (None, None, (4, 2), (1, 5), (2, 2, 1, 1)),
    "balance_ends": (False, True),
    "activation_checkpointing": ("none", "selective", "full"),
    "checkpoint_every": (1, 2),
    "compile": (False, True),
    "async_tp": (False, False, True),
    "optimizer": ("adamw", "sgd"),
    "optimizer_impl": ("fused", "foreach"),
    "offload": ("none", "none", "optimizer", "params"),
    "activation_offload": (0.0, 0.0, 0.5),
    "precision": ("bf16", "bf16", "fp8", "fp32"),
    "master_dtype": ("fp32", "bf16"),
    "reduce_dtype": ("auto", "bf16"),
    "accumulate_dtype": ("auto", "bf16"),
    "overlap_grad_reduce": (True, False),
    "ddp_bucket_mib": (0.0, 1.0),
    "shard_min_mib": (0.0, 0.0, 1.0, 100.0),
    "graph_breaks": (False, True),
    "autocast": (False, False, True),
    "selective_policy": ("op", "attention-block", "mlp", "params"),
}


def random_plan(draw: random.Random, model, stack: str) -> Plan:
    """A possible plan with values that spaces don't try."""
    while True:
        fields = {name: draw.choice(values) for name, values in VALUES.items() if draw.random() < 0.6}
        try:
            plan = Plan(seq_len=512, stack=stack, **fields)
        except ForerunError:
            continue
        if refuse(model, plan, CLUSTER) is None:
            return plan


@pytest.mark.parametrize("stack", ["torchtitan", "megatron-core", "deepspeed", "pytorch", "simple-fsdp", "nanotron"])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "mixtral-8x7b", "lfm2-1.2b"])
def test_bounds_of_any_plan_never_exceed_what_is_predicted(name, stack):
    model = replace(load_model(name), n_layers=FEW_LAYERS)
    draw = random.Random(len(stack))
    plans = [random_plan(draw, model, stack) for _ in range(25)]
    table = SpaceTable.of_plans(plans, CLUSTER.node_size)
    assert len(held_to_simulations(model, table, stack, range(len(plans)))) > 8


BESIDE = {
    "n_microbatches": (4, 8, 12),
    **dict.fromkeys(("dp_shard", "ep"), (2, 4, 8)),
    "cp": (1, 1, 2),
    "tp": (1, 2, 4, 8),
    "pp": (1, 2, 4),
    "zero_stage": (1, 2, 3),
    "pp_schedule": ("1F1B", "Interleaved1F1B", "DualPipeV", "DualPipe"),
    "virtual_stages": (1, 2),
    "dispatcher": ("auto", "deepep", "hybridep"),
    "activation_checkpointing": ("none", "selective", "full"),
}


@pytest.mark.parametrize("stack", ["megatron-core", "deepspeed"])
@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2-lite"])
def test_bounds_of_passes_side_by_side_never_exceed_what_is_predicted(name, stack):
    model, draw = replace(load_model(name), n_layers=8), random.Random(name)
    plans: list[Plan] = []
    while len(plans) < 8:
        values = {field: draw.choice(some) for field, some in BESIDE.items()}
        try:
            plan = Plan(seq_len=1024, stack=stack, expert_overlap=True, **values)
        except ForerunError:
            continue
        if refuse(model, plan, CLUSTER) is None:
            plans.append(plan)
    table = SpaceTable.of_plans(plans, CLUSTER.node_size)
    assert len(held_to_simulations(model, table, stack, range(len(plans)))) > 3


@pytest.mark.parametrize("dispatcher", ["auto", "deepep"])
def test_the_time_bound_is_close_where_exchanges_are_not_hidden(dispatcher):
    model = replace(load_model("deepseek-v3"), n_layers=16)
    plan = Plan(4096, dp_shard=64, tp=2, pp=2, ep=64, n_microbatches=16, zero_stage=1, dispatcher=dispatcher)
    plan = replace(plan, pp_schedule="Interleaved1F1B", virtual_stages=2, expert_overlap=True, stack="megatron-core")
    table = SpaceTable.of_plans([plan], CLUSTER.node_size)
    screening = Screening(UnitRuns(model, CLUSTER, n_gpus=plan.world_size), plan.stack)
    bound_s = TimeBound(screening).least_step_s(table.plan(0), table.groups[0])
    step_s = predict(model, plan, CLUSTER).step_time_s
    assert 0.93 * step_s < bound_s <= step_s


@pytest.mark.parametrize("stack", ["torchtitan", "megatron-core"])
def test_bounds_hold_for_every_optimizer(stack):
    model = replace(load_model("mixtral-8x7b"), n_layers=FEW_LAYERS)
    draw, plans = random.Random(7), []
    while len(plans) < 30:
        plan = replace(random_plan(draw, model, stack), optimizer=draw.choice(choices("optimizer")))
        if plan.offload != "params" and refuse(model, plan, CLUSTER) is None:
            plans.append(plan)
    table = SpaceTable.of_plans(plans, CLUSTER.node_size)
    assert len(held_to_simulations(model, table, stack, range(len(plans)))) > 10


@pytest.mark.parametrize("stack", ["torchtitan", "deepspeed"])
def test_bounds_hold_for_adapters(stack):
    model = replace(load_model("llama-3.2-1b"), n_layers=FEW_LAYERS)
    draw, plans = random.Random(3), []
    while len(plans) < 25:
        plan = replace(random_plan(draw, model, stack), lora_rank=16, frozen_dtype=draw.choice(("wide", "nf4")))
        if plan.offload != "params" and refuse(model, plan, CLUSTER) is None:
            plans.append(plan)
    table = SpaceTable.of_plans(plans, CLUSTER.node_size)
    assert len(held_to_simulations(model, table, stack, range(len(plans)))) > 10


def test_bounds_hold_on_a_network():
    model, network = load_model("llama-3.1-8b"), load_network("switch:8@450/300,fat-tree:4@50/700")
    space = make_space(model, CLUSTER, 32, 8192, 64, {"tp": [2, 8], "pp": [1, 4]}, None, "whole", on_network=True)
    table = space.table(Tally())
    some = random.Random(1).sample(range(len(table)), 15)
    shares = held_to_simulations(model, table.take(np.array(some)), "torchtitan", range(len(some)), network)
    assert len(shares)


@pytest.mark.parametrize("faster", [KernelRates(memory=1.5, network=2.0), KernelRates(gemm=2.0, attention=1.5)])
def test_bounds_hold_where_measured_steps_have_shown_other_rates(faster):
    model = load_model("llama-3.1-8b")
    table = make_space(model, CLUSTER, 32, 8192, 64, {"offload": ["none", "optimizer"]}).table(Tally())
    some = random.Random(2).sample(range(len(table)), 25)
    held_to_simulations(
        model, table.take(np.array(some)), "torchtitan", range(25), cluster=replace(CLUSTER, rates=faster)
    )


def test_bounds_know_the_way_through_host_memory():
    model, cluster = load_model("llama-3.2-1b"), load_cluster("rtx4090")
    table = make_space(model, cluster, 8, 2048, 16, {"stack": "simple-fsdp"}).table(Tally())
    some = random.Random(3).sample(range(len(table)), min(15, len(table)))
    held_to_simulations(model, table.take(np.array(some)), "simple-fsdp", range(len(some)), cluster=cluster)
    direct = replace(cluster, links=(replace(cluster.links[0], peer_to_peer=True), *cluster.links[1:]))
    plan = Plan(seq_len=512, dp_shard=8, stack="simple-fsdp")
    groups = SpaceTable.of_plans([plan], cluster.node_size).groups[0]
    staged_s, direct_s = (
        TimeBound(Screening(UnitRuns(model, each), plan.stack)).least_step_s(plan, groups) for each in (cluster, direct)
    )
    assert staged_s > 3 * direct_s


def test_the_time_bound_is_close_without_communication():
    model = load_model("llama-3.1-8b")
    plan = Plan(seq_len=8192, n_microbatches=2, zero_stage=0, stack="torchtitan")
    table = SpaceTable.of_plans([replace(plan, tp=8)], CLUSTER.node_size)
    assert held_to_simulations(model, table, plan.stack, [0]).min() > 0.95


GROWING = [
    {"n_microbatches": 2},
    {"micro_batch": 2},
    {"seq_len": 1024},
    {"activation_checkpointing": "full"},
    {"offload": "params"},
    {"reshard_after_forward": "always", "n_microbatches": 4},
]


@pytest.mark.parametrize("stack", ["torchtitan", "megatron-core"])
@pytest.mark.parametrize("pp", [1, 4])
def test_bounds_grow_with_what_there_is_to_do(stack, pp):
    model = replace(load_model("llama-3.1-8b"), n_layers=8)
    reshard = "always" if pp == 1 else "never"
    less = Plan(seq_len=512, dp_shard=8, tp=2, pp=pp, stack=stack, reshard_after_forward=reshard)
    plans = [less, *(replace(less, **more) for more in GROWING)]
    table = SpaceTable.of_plans(plans, CLUSTER.node_size)
    fewer, more = (
        [
            TimeBound(Screening(UnitRuns(each, CLUSTER), stack)).least_step_s(table.plan(row), table.groups[row])
            for row in range(len(plans))
        ]
        for each in (model, replace(model, n_layers=12))
    )
    for times in (fewer, more):
        assert all(time_s >= times[0] for time_s in times), times
    assert all(longer > shorter for longer, shorter in zip(more, fewer, strict=True))


def test_bounds_have_no_steps_between_lengths():
    model = replace(load_model("llama-3.1-8b"), n_layers=8)
    lengths = range(4096, 4352, 16)
    plans = [Plan(seq_len=length, dp_shard=8, tp=2, pp=2, n_microbatches=4) for length in lengths]
    close = TimeBound(Screening(UnitRuns(model, CLUSTER), plans[0].stack))
    groups = SpaceTable.of_plans(plans, CLUSTER.node_size).groups
    times = np.array([close.least_step_s(plan, own) for plan, own in zip(plans, groups, strict=True)])
    assert (np.diff(times) > 0).all()
    assert (np.diff(times) < 0.02 * times[:-1]).all()


@pytest.mark.parametrize(
    ("name", "n_gpus", "seq_len", "stack", "fixed"),
    [
        ("llama-3.2-1b", 32, 512, "torchtitan", {"tp": [1, 4], "cp": [1, 2]}),
        ("deepseek-v2-lite", 32, 1024, "torchtitan", {"tp": [1, 4], "ep": [1, 8], "compile": True, "cp": 1}),
        ("deepseek-v2-lite", 32, 4096, "megatron-core", {"tp": [1, 2], "ep": [8, 16], "pp": 2, "cp": 1}),
        ("nemotron-h-8b", 16, 128, "torchtitan", {"tp": [1, 2], "compile": False, "cp": 1}),
    ],
)
def test_units_of_few_micro_batches_stand_for_all_and_those_of_whole_passes_for_split_ones(
    name, n_gpus, seq_len, stack, fixed
):
    fixed = {"pp": [1, 2], "activation_checkpointing": "none", "stack": stack, **fixed}
    model = load_model(name)
    table = make_space(model, CLUSTER, n_gpus, seq_len, 512, fixed).table(Tally())
    screenings = [Screening(UnitRuns(model, replace(CLUSTER, device=ROOMY)), stack) for _ in range(2)]
    coarse, fine = screenings[0].coarse(table), screenings[1].run(table)
    assert not (coarse.too_large | fine.too_large).any()
    plans = table.rows(slice(None))
    assert len(plans.values["micro_batch"]) > 5
    shares = coarse.time_s / fine.time_s
    assert shares.max() <= ROUND
    assert np.median(shares) > 0.85
    assert len(screenings[0].runs._found) < len(screenings[1].runs._found)
    split = np.broadcast_to(plans.splits_backward, len(table))
    if split.any():
        assert np.median(shares[split]) > 0.85


def test_where_long_kernels_throttle_a_device_each_micro_batch_stands_for_itself():
    throttled = replace(load_cluster("l40s"), device=replace(load_cluster("l40s").device, memory_bytes=2**50))
    assert slows_long_kernels(throttled.device)
    assert not slows_long_kernels(CLUSTER.device)  # its clock is known
    model, fixed = load_model("llama-3.1-8b"), {"pp": 2, "tp": 2, "cp": 1, "activation_checkpointing": "none"}
    table = make_space(model, throttled, 16, 4096, 64, {**fixed, "stack": "torchtitan"}).table(Tally())
    coarse, fine = (
        getattr(Screening(UnitRuns(model, throttled), "torchtitan"), name)(table).time_s for name in ("coarse", "run")
    )
    assert (coarse <= fine * ROUND).all()
    assert np.allclose(coarse, fine, rtol=1e-6)
