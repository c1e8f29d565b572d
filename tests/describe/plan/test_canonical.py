"""Plans with equal canonical forms execute the same step, and those that do have equal forms."""

from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.program.types import Program
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.canonical import NAMINGS, canonical
from forerun.describe.plan.constraints import refuse
from forerun.describe.plan.plan import DEFAULT_ORDER, Plan
from forerun.sources.symbolic.build import build

H100 = load_cluster("h100-sxm")
SMALL = {"n_layers": 4, "hidden": 256, "ffn_hidden": 512, "n_heads": 4, "n_kv_heads": 2, "vocab": 512}
DENSE = replace(load_model("llama-3.2-1b"), **SMALL, head_dim=64)
MIXTRAL = load_model("mixtral-8x7b")
EXPERTS = replace(MIXTRAL, **SMALL, head_dim=64, moe=replace(MIXTRAL.moe, n_experts=4, top_k=2, expert_ffn=128))
ORDERS = (DEFAULT_ORDER, "dp_replicate-dp_shard-tp-cp-pp", "cp-tp-pp-dp_shard-dp_replicate")
CHOICES = {
    "micro_batch": (1, 2),
    "n_microbatches": (1, 2, 4),
    "dp_replicate": (1, 2, 4),
    "dp_shard": (1, 2, 4),
    "cp": (1, 2),
    "tp": (1, 2),
    "pp": (1, 2),
    "ep": (1, 2),
    "mesh_order": ORDERS,
    "zero_stage": (0, 1, 2, 3),
    "reshard_after_forward": ("default", "always", "never"),
    "prefetch": (0, 1, 2),
    "shard_min_mib": (0.0, 0.25),
    "document_lengths": ((), (64, 192)),
    "loss_chunks": (1, 1, 4),
    "lora_rank": (0, 0, 8),
    "lora_targets": (("q_proj", "v_proj"), ("down_proj",)),
    "ddp_bucket_mib": (0.0, 0.25, 25.0),
    "autocast": (False, True),
    "reduce_dtype": ("auto", "fp32", "bf16"),
    "overlap_grad_reduce": (True, False),
    "sequence_parallel": (True, False),
    "loss_parallel": (True, False),
    "pp_schedule": ("1F1B", "GPipe", "ZB1P"),
    "layers_per_stage": (None, (4,)),
    "balance_ends": (True, False),
    "cp_method": ("ring", "allgather", "ulysses"),
    "cp_load_balance": ("head_tail", "striped", "none"),
    "expert_imbalance": (1.0, 1.5),
    "expert_routing": ("balanced", "zipf:1"),
    "shared_expert_overlap": (False, True),
    "activation_checkpointing": ("none", "selective", "full"),
    "selective_policy": ("op", "mlp", "params"),
    "checkpoint_every": (1, 2),
    "recompute_modules": ((), ("mlp",)),
    "dispatcher": ("auto", "alltoall", "allgather"),
    "compile": (True, False),
    "compile_model": (True, False),
    "compile_loss": (True, False),
    "graph_breaks": (False, True),
    "attention": ("auto", "flash2", "flash3"),
    "offload": ("none", "optimizer", "params"),
    "stack": ("torchtitan", "pytorch", "megatron-core", "deepspeed", "simple-fsdp"),
}
PLANS = st.builds(Plan, seq_len=st.just(512), **{name: st.sampled_from(values) for name, values in CHOICES.items()})


def content(program: Program) -> object:
    """All that a Program executes: ops by what they are and where they communicate, and the blocks of each class.

    Groups count by how they lie on the nodes, and neither they nor blocks by their names.
    """
    ops = program.ops
    groups = [() if g < 0 else (program.groups[g].nodes, program.groups[g].ranks_per_node) for g in ops.group.tolist()]
    columns = [_plain(getattr(ops, each.name)) for each in fields(ops) if each.name != "group"]
    row = list(map(repr, zip(groups, *columns, strict=True)))
    blocks = [repr((_columns(block, "name", "op"), [row[op] for op in block.op])) for block in program.blocks]
    number: dict[str, int] = {}
    classes = [
        (_columns(one, "block"), [number.setdefault(blocks[block], len(number)) for block in one.block])
        for one in program.rank_classes
    ]
    return hash((*number, repr(classes), program.channels))


def _columns(one: object, *without: str) -> list[object]:
    return [_plain(getattr(one, each.name)) for each in fields(one) if each.name not in without]


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray) else value


def runs(model, plan):
    return refuse(model, plan, H100) is None


@settings(max_examples=100)
@given(PLANS, st.booleans())
def test_equal_forms_are_equal_programs(plan, with_experts):
    model = EXPERTS if with_experts else DENSE
    if not runs(model, plan):
        return
    form = canonical(model, plan)
    assert runs(model, form)
    assert canonical(model, form) == form
    assert (form.world_size, form.global_batch) == (plan.world_size, plan.global_batch)
    if form != plan:
        assert content(build(model, form, H100)) == content(build(model, plan, H100))


@pytest.mark.parametrize("stack", ["torchtitan", "megatron-core", "deepspeed"])
@pytest.mark.parametrize("number", range(len(NAMINGS)))
def test_every_naming_renames_something_that_executes_the_same(number, stack):
    """Where a field makes no difference, all of its values build one Program; elsewhere they build several."""
    naming = NAMINGS[number]
    base = Plan(seq_len=512, stack=stack)
    for mesh in ({}, {"dp_replicate": 2}, {"dp_shard": 2}, {"dp_shard": 2, "pp": 2}, {"tp": 2, "cp": 2}):
        for zero_stage in (0, 1, 3):
            plan = replace(base, **mesh, zero_stage=zero_stage)
            named = {}
            for values in product(*(CHOICES[name] for name in naming.fields)):
                one = replace(plan, **dict(zip(naming.fields, values, strict=True)))
                if runs(DENSE, one) and one.world_size == plan.world_size:
                    named.setdefault(canonical(DENSE, one), set()).add(content(build(DENSE, one, H100)))
            assert all(len(programs) == 1 for programs in named.values())


def test_names_of_one_data_parallel_plan():
    """Four names of DDP on eight GPUs are one; sharded over two and over four ranks are two others."""
    pairs = ((1, 8), (2, 4), (4, 2), (8, 1))
    plans = [Plan(seq_len=512, dp_replicate=r, dp_shard=s, zero_stage=0) for r, s in pairs]
    assert {canonical(DENSE, plan) for plan in plans} == {Plan(seq_len=512, dp_replicate=8, zero_stage=0)}
    sharded = [replace(plan, zero_stage=3) for plan in plans]
    assert len({canonical(DENSE, plan) for plan in sharded}) == 4


SPACE = {
    "zero_stage": (0, 1, 3),
    "reshard_after_forward": ("default", "always", "never"),
    "prefetch": (0, 1),
    "ddp_bucket_mib": (0.0, 100.0, 0.25),
    "overlap_grad_reduce": (True, False),
}
SPLIT = {
    "sequence_parallel": (True, False),
    "loss_parallel": (True, False),
    "pp_schedule": ("1F1B", "GPipe"),
    "balance_ends": (True, False),
    "cp_method": ("ring", "allgather", "ulysses"),
    "cp_load_balance": ("head_tail", "striped", "none"),
    "expert_imbalance": (1.0, 2.0),
}
MEMORY = {
    "activation_checkpointing": ("none", "selective", "full"),
    "selective_policy": ("op", "mlp"),
    "checkpoint_every": (1, 2),
    "compile": (True, False),
    "compile_model": (True, False),
    "compile_loss": (True, False),
}


@pytest.mark.parametrize("space", [SPACE, SPLIT, MEMORY], ids=["sharding", "splitting", "activations"])
@pytest.mark.parametrize("mesh", [(1, 1, 1, 1), (4, 1, 1, 1), (1, 4, 1, 1), (2, 2, 1, 1), (1, 2, 2, 1), (1, 1, 1, 4)])
def test_equal_programs_are_equal_forms(space, mesh):
    """In a small space no two plans that stand for themselves build the same Program."""
    replicate, shard, tp, pp = mesh
    base = Plan(seq_len=512, dp_replicate=replicate, dp_shard=shard, tp=tp, pp=pp, n_microbatches=2)
    plans = (replace(base, **dict(zip(space, values, strict=True))) for values in product(*space.values()))
    found = {}
    for form in {canonical(DENSE, plan) for plan in plans if runs(DENSE, plan)}:
        found.setdefault(content(build(DENSE, form, H100)), set()).add(form)
    assert not [_differences(forms) for forms in found.values() if len(forms) > 1]


def _differences(plans):
    """The fields in which plans differ, with their values."""
    columns = {each.name: [getattr(plan, each.name) for plan in plans] for each in fields(Plan)}
    return {name: values for name, values in columns.items() if len(set(values)) > 1}


MIXED = "cp-tp-pp-dp_shard-dp_replicate"
APART = "dp_shard-tp-cp-dp_replicate-pp"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"dp_shard": 2, "zero_stage": 0}, {"dp_replicate": 2, "zero_stage": 0}),
        ({"dp_shard": 2, "dp_replicate": 2, "zero_stage": 0}, {"dp_replicate": 4, "zero_stage": 0}),
        ({"dp_shard": 2, "zero_stage": 0, "mesh_order": APART}, {"dp_replicate": 2, "zero_stage": 0}),
        ({"dp_shard": 2, "dp_replicate": 2, "zero_stage": 0, "tp": 2, "mesh_order": APART}, None),
        (
            {"dp_shard": 2, "dp_replicate": 2, "zero_stage": 0, "pp": 2, "mesh_order": APART},
            {"dp_replicate": 4, "zero_stage": 0, "pp": 2},
        ),
        ({"zero_stage": 1}, {"zero_stage": 0}),
        ({"zero_stage": 1, "dp_shard": 2}, None),
        ({"zero_stage": 1, "cp": 2}, None),
        ({"zero_stage": 2, "stack": "deepspeed"}, {"zero_stage": 0}),
        ({"zero_stage": 1, "dp_replicate": 2}, {"dp_replicate": 2, "zero_stage": 0}),
        ({"mesh_order": MIXED}, {}),
        ({"mesh_order": MIXED, "cp": 2}, {"cp": 2}),
        ({"mesh_order": MIXED, "cp": 2, "tp": 2}, None),
        ({"mesh_order": MIXED, "pp": 2, "dp_shard": 2}, None),
        ({"mesh_order": MIXED, "dp_shard": 2, "dp_replicate": 2}, {"dp_shard": 2, "dp_replicate": 2}),
        ({"dp_shard": 2, "reshard_after_forward": "always"}, {"dp_shard": 2}),
        ({"dp_shard": 2, "reshard_after_forward": "never"}, None),
        ({"dp_shard": 2, "pp": 2, "reshard_after_forward": "always"}, None),
        ({"dp_shard": 2, "pp": 2, "reshard_after_forward": "never"}, {"dp_shard": 2, "pp": 2}),
        ({"reshard_after_forward": "never"}, {}),
        ({"dp_shard": 2, "prefetch": 2}, None),
        ({"prefetch": 2}, {}),
        ({"dp_shard": 2, "prefetch": 2, "stack": "simple-fsdp"}, {"dp_shard": 2}),
        ({"dp_shard": 2, "shard_min_mib": 0.25}, None),
        ({"shard_min_mib": 0.25}, {}),
        ({"shard_min_mib": 0.25, "dp_shard": 2, "zero_stage": 1}, {"dp_shard": 2, "zero_stage": 1}),
        ({"overlap_grad_reduce": False}, {}),
        ({"overlap_grad_reduce": False, "dp_shard": 2}, {"dp_shard": 2}),
        ({"overlap_grad_reduce": False, "dp_replicate": 2, "zero_stage": 0}, None),
        ({"ddp_bucket_mib": 0.25, "dp_replicate": 2, "zero_stage": 0}, None),
        ({"ddp_bucket_mib": 0.25, "dp_shard": 2}, {"dp_shard": 2}),
        (
            {"ddp_bucket_mib": 0.25, "dp_replicate": 2, "zero_stage": 0, "overlap_grad_reduce": False},
            {"dp_replicate": 2, "zero_stage": 0, "overlap_grad_reduce": False},
        ),
        ({"reduce_dtype": "fp32"}, {}),
        ({"reduce_dtype": "bf16"}, None),
        ({"reduce_dtype": "bf16", "stack": "deepspeed"}, {}),
        ({"sequence_parallel": False}, {}),
        ({"sequence_parallel": False, "tp": 2}, None),
        ({"loss_parallel": False}, {}),
        ({"loss_parallel": False, "tp": 2}, None),
        ({"cp_method": "ulysses"}, {}),
        ({"cp_method": "ulysses", "cp": 2}, None),
        ({"cp_load_balance": "none"}, {}),
        ({"cp_load_balance": "none", "cp": 2}, None),
        ({"cp_load_balance": "none", "cp": 2, "cp_method": "ulysses"}, {"cp": 2, "cp_method": "ulysses"}),
        ({"expert_imbalance": 1.5}, {}),
        ({"expert_routing": "zipf:1"}, {}),
        ({"pp_schedule": "GPipe"}, {}),
        ({"pp_schedule": "GPipe", "pp": 2}, {"pp": 2}),
        ({"pp_schedule": "GPipe", "pp": 2, "n_microbatches": 2}, None),
        ({"pp_schedule": "ZB1P", "pp": 2}, None),
        ({"layers_per_stage": (4,)}, {}),
        ({"layers_per_stage": (2, 2), "pp": 2}, None),
        ({"balance_ends": True}, {}),
        ({"balance_ends": True, "pp": 2}, None),
        ({"balance_ends": True, "pp": 2, "layers_per_stage": (2, 2)}, {"pp": 2, "layers_per_stage": (2, 2)}),
        ({"selective_policy": "mlp", "activation_checkpointing": "full"}, {"activation_checkpointing": "full"}),
        ({"selective_policy": "mlp", "activation_checkpointing": "selective"}, None),
        ({"checkpoint_every": 2}, {}),
        ({"checkpoint_every": 2, "activation_checkpointing": "full"}, None),
        ({"compile_loss": False}, {}),
        ({"compile_loss": False, "compile": True}, None),
        ({"compile_model": False}, {}),
        ({"compile_model": False, "compile": True}, None),
        ({"compile_model": False, "compile_loss": False, "compile": True}, {}),
        ({"compile_model": False, "compile": True, "stack": "torchtitan-2024"}, {}),
        ({"graph_breaks": True}, {}),
        ({"graph_breaks": True, "compile": True}, None),
        ({"attention": "sdpa"}, {}),
        ({"attention": "flash2"}, None),
    ],
)
def test_what_makes_no_difference_is_named_alike_and_the_rest_stays(given, named):
    """`named` are the fields of the canonical form that are not at their default, None where it is the plan."""
    plan = Plan(512, **given)
    expected = plan if named is None else Plan(512, stack=plan.stack, **named)
    assert canonical(DENSE, plan) == expected


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"expert_imbalance": 1.5}, None),
        ({"expert_routing": "uniform"}, {}),
        ({"dp_shard": 2, "ep": 2, "expert_routing": "uniform"}, None),
        ({"dp_shard": 2, "ep": 2, "zero_stage": 0}, None),
        ({"dp_shard": 4, "ep": 2, "zero_stage": 0}, {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "zero_stage": 0}),
        ({"dp_shard": 4, "cp": 2, "ep": 2, "zero_stage": 0}, {"dp_replicate": 4, "cp": 2, "ep": 2, "zero_stage": 0}),
    ],
)
def test_with_experts_what_makes_no_difference_is_named_alike(given, named):
    plan = Plan(512, **given)
    assert canonical(EXPERTS, plan) == (plan if named is None else Plan(512, **named))


def test_experts_that_are_padded_to_a_capacity_compute_the_same_however_the_router_chooses():
    padded = replace(EXPERTS, moe=replace(EXPERTS.moe, capacity_factor=1.5))
    plans = [Plan(512, expert_imbalance=1.6), Plan(512, dp_shard=2, ep=2, expert_routing="uniform")]
    assert [canonical(padded, plan) for plan in plans] == [Plan(512), Plan(512, dp_shard=2, ep=2)]
