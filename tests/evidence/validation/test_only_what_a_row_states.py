"""The mapping of a row sets what the row states and nothing else, so what is validated is what users get."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from measured_rows import measurement

from forerun.describe.model.architecture_table import load_architectures
from forerun.describe.model.spec import ModelSpec
from forerun.describe.stacks.catalog import stack_names
from forerun.evidence import validation
from forerun.evidence.validation.mapping import _model_of
from forerun.evidence.validation.plan_mapping import Inexpressible, stated_fields
from forerun.evidence.validation.rows import Measurement, read_measurements

ROOM = Path(validation.__file__).parent
SHARED = Path(__file__).parents[4] / "shared" / "validation"
TABLES = ("measurements.csv", "measurements-2.csv")
MESH = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")

STATED_BY = {
    "seq_len": ("seq_len",),
    **dict.fromkeys(MESH, ("n_gpus",)),
    "zero_stage": ("zero_stage", "dp_shard", "dp_replicate", "n_gpus"),
    "reshard_after_forward": ("notes", "ac_detail"),
    "overlap_grad_reduce": ("notes",),
    "micro_batch": ("micro_batch", "n_microbatches", "grad_accum", "global_batch_seqs"),
    "n_microbatches": ("micro_batch", "n_microbatches", "grad_accum", "global_batch_seqs"),
    "pp_schedule": ("pp_schedule", "pp_virtual_stages"),
    "virtual_stages": ("pp_schedule", "pp_virtual_stages"),
    "layers_per_stage": ("notes",),
    "balance_ends": ("notes", "pp"),
    "sequence_parallel": ("sp",),
    "async_tp": ("async_tp",),
    "cp_method": ("notes",),
    "precision": ("precision",),
    "autocast": ("param_dtype",),
    "master_dtype": ("notes", "param_dtype"),
    "moment_dtype": ("notes", "param_dtype"),
    "loss_chunks": ("notes",),
    "reduce_dtype": ("grad_reduce_dtype",),
    "accumulate_dtype": ("notes",),
    "fp8_recipe": ("fp8_recipe", "precision"),
    "fp8_all_gather": ("fp8_recipe", "precision"),
    "activation_checkpointing": ("activation_checkpointing", "ac_detail"),
    "selective_policy": ("ac_detail",),
    "recompute_modules": ("ac_detail",),
    "dispatcher": ("notes",),
    "expert_overlap": ("notes",),
    "checkpoint_every": ("activation_checkpointing", "ac_detail"),
    "compile": ("torch_compile",),
    "compile_model": ("torch_compile",),
    "compile_loss": ("torch_compile",),
    "graph_breaks": ("torch_compile",),
    "cuda_graphs": ("torch_compile",),
    "attention": ("attention_kernel",),
    "optimizer": ("optimizer",),
    "optimizer_impl": ("optimizer", "torch_compile"),
    "offload": ("cpu_offload",),
    "activation_offload": ("cpu_offload",),
}
"""field of a plan -> the columns of which one at least says it"""


def texts(path: Path) -> list[str]:
    """Every name and text of a module; docstrings are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    loose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in loose
    ]
    return constants + [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]


@pytest.mark.parametrize("path", sorted(ROOM.glob("*.py")), ids=lambda path: path.name)
def test_no_framework_is_named_in_the_room(path: Path) -> None:
    words = {word.lower() for word in texts(path)}
    assert not {name for name in stack_names() if name in words}
    assert not {name for name in stack_names() for word in words if name.replace("-", "_") == word}


@pytest.mark.parametrize("table", TABLES)
def test_every_field_of_a_plan_is_stated_by_a_column(table: str) -> None:
    models = load_architectures(SHARED / "models.yaml")
    rows = read_measurements(SHARED / table)
    assert len(rows) > 50
    unfounded = {(name, column) for row in rows for name, column in fields_without_a_column(row, models).items()}
    assert not unfounded


def fields_without_a_column(row: Measurement, models: dict[str, ModelSpec]) -> dict[str, tuple[str, ...]]:
    """Fields that the mapping of `row` sets -> the columns that should say so and are all empty."""
    try:
        fields = stated_fields(row, _model_of(row, models, []), [])
    except Inexpressible:
        return {}
    return {
        name: STATED_BY[name]
        for name in fields
        if all(getattr(row, column) in (None, "") for column in STATED_BY[name])
    }


def test_an_almost_empty_row_leaves_the_rest_open(tmp_path: Path) -> None:
    empty = ("sp", "async_tp", "activation_checkpointing", "ac_detail", "torch_compile", "attention_kernel")
    empty += ("optimizer", "cpu_offload", "grad_reduce_dtype", "notes", "fp8_recipe")
    row = measurement(tmp_path, **dict.fromkeys(empty, ""))
    fields = stated_fields(row, _model_of(row, {}, []), [])
    assert not set(fields) & {name for name, columns in STATED_BY.items() if set(columns) <= set(empty)}
