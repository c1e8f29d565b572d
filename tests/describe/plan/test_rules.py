"""What follows from a plan is said once, and a table of plans answers as each of its plans does."""

import ast
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.answers.search.table import PlanTable
from forerun.describe.plan import rules
from forerun.describe.plan.fields import choices
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack, stack_names
from forerun.sources.symbolic.states import least_moment_bytes, resident_states, update_gradient_bytes, update_of

SOURCE = Path(__file__).parents[3] / "src" / "forerun"
DEGREE = st.sampled_from((1, 1, 2, 4))
LISTED = ("zero_stage", "reshard_after_forward", "pp_schedule", "precision", "master_dtype", "reduce_dtype")
PLANS = st.builds(
    Plan,
    seq_len=st.just(512),
    n_microbatches=st.sampled_from((1, 4)),
    **dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp"), DEGREE),
    **{name: st.sampled_from(choices(name)) for name in (*LISTED, "accumulate_dtype", "optimizer", "optimizer_impl")},
    offload=st.sampled_from(choices("offload")),
    autocast=st.booleans(),
)
OF_ONE_PLAN = ("mesh_axes", "sharding")
"""properties that are text, which no table is asked for"""
PROPERTIES = sorted(
    name for name, value in vars(Plan).items() if isinstance(value, property) and name not in OF_ONE_PLAN
)
RULES = ("reduce_dtype", "accumulate_dtype", "gathers_parameters", "has_working_copy", "scatters_gradients")
RULES = (*RULES, "reduces_every_microbatch", "accumulates", "keeps_bucket_copies")
OF_PLAN = ("wide_dtype", "weight_bytes", "gradient_bytes")


def row(column: object, number: int) -> object:
    """What a column of a table says of one plan."""
    if hasattr(column, "codes"):
        return column.values[column.codes[number]]
    return column[number] if isinstance(column, np.ndarray) else column


@given(plans=st.lists(PLANS, min_size=1, max_size=6), stack=st.sampled_from(stack_names()))
@settings(max_examples=100, deadline=None)
def test_a_table_answers_as_its_plans_do(plans, stack):
    table, stack = PlanTable.of(plans), load_stack(stack)
    asked = {name: lambda plan, name=name: getattr(plan, name) for name in PROPERTIES}
    asked |= {name: getattr(rules, name) for name in OF_PLAN}
    asked |= {name: lambda plan, name=name: getattr(rules, name)(plan, stack) for name in RULES}
    asked["parameter"] = lambda plan: resident_states(plan, stack, 100, 30, 7, 60).parameter
    asked["gradient"] = lambda plan: resident_states(plan, stack, 100, 30, 7, 60).gradient
    asked["optimizer"] = lambda plan: resident_states(plan, stack, 100, 30, 7, 60).optimizer
    asked["read"] = lambda plan: update_of(plan, stack, update_gradient_bytes(plan, 2)).read
    asked["written"] = lambda plan: update_of(plan, stack, update_gradient_bytes(plan, 2)).written
    asked["moments"] = least_moment_bytes
    for name, rule in asked.items():
        column = rule(table)
        for number, plan in enumerate(plans):
            assert row(column, number) == rule(plan), (name, plan)
            assert not isinstance(rule(plan), np.ndarray | np.generic), name


@pytest.mark.parametrize(
    ("fields", "holds"),
    [
        ({"dp_shard": 8}, {"uses_fsdp", "shards_parameters", "shards_gradients", "shards_optimizer", "reshards"}),
        ({"dp_shard": 1, "dp_replicate": 8}, {"uses_fsdp", "reshards"}),
        (
            {"cp": 2, "zero_stage": 2, "stack": "deepspeed"},
            {"shards_gradients", "shards_optimizer", "gathers_updates", "reshards"},
        ),
        ({"dp_shard": 8, "zero_stage": 1}, {"shards_optimizer", "gathers_updates", "reshards"}),
        ({"dp_shard": 8, "zero_stage": 0}, {"reshards"}),
        ({"zero_stage": 0, "pp": 2, "pp_schedule": "ZB1P"}, {"splits_backward", "gathers_once"}),
        ({"zero_stage": 0, "pp_schedule": "ZB1P", "reshard_after_forward": "never"}, set()),
        ({"zero_stage": 0, "pp": 2, "reshard_after_forward": "always"}, {"reshards"}),
    ],
)
def test_what_a_plan_does(fields, holds):
    plan = Plan(seq_len=512, **fields)
    flags = {name for name in PROPERTIES if isinstance(getattr(plan, name), bool)}
    assert {name for name in flags if getattr(plan, name)} == holds


def sharding_comparisons(tree: ast.AST) -> list[int]:
    """Lines that compare the zero_stage of a plan with 3, which is what the properties of Plan are for."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            # a measured row is no plan
            asks = any(
                isinstance(side, ast.Attribute)
                and side.attr == "zero_stage"
                and not (isinstance(side.value, ast.Name) and side.value.id == "row")
                for side in sides
            )
            if asks and any(isinstance(side, ast.Constant) and side.value == 3 for side in sides):
                found.append(node.lineno)
    return found


def test_only_the_plan_says_what_a_zero_stage_shards():
    elsewhere = {
        str(path.relative_to(SOURCE)): lines
        for path in SOURCE.rglob("*.py")
        if path.parent != SOURCE / "describe" / "plan"
        and (lines := sharding_comparisons(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert elsewhere == {}
    assert sharding_comparisons(ast.parse("if setup.plan.zero_stage < 3 and plan.fsdp > 1:\n    pass")) == [1]
