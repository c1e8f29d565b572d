"""Rows that leave checkpointing open and would not fit without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from measured_rows import measurement

from forerun.common.units import GIB
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.evidence.validation.mapping import with_assumed_checkpointing
from forerun.evidence.validation.plan_mapping import NOT_STATED

MODEL = replace(load_model("llama-3.1-8b"), n_layers=8)
CLUSTER = load_cluster("h100-sxm")


def room(tmp_path: Path, gib: float, stack: str, stated: str = "") -> tuple[str, str, list[str]]:
    cluster: Cluster = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=int(gib * GIB)))
    plan, notes = Plan(seq_len=8192, micro_batch=2, dp_shard=8, stack=stack), [NOT_STATED]
    row = measurement(tmp_path, activation_checkpointing=stated, ac_detail="")
    found = with_assumed_checkpointing(row, MODEL, plan, cluster, notes)
    return found.activation_checkpointing, found.selective_policy, notes


def test_what_fits_is_left_as_it_is(tmp_path: Path) -> None:
    assert room(tmp_path, 200, "pytorch") == ("none", "op", [NOT_STATED])


def test_torchtitan_recomputes_as_its_own_configurations_do(tmp_path: Path) -> None:
    words = "activation_checkpointing not stated: taken as selective, as in the framework's own configurations"
    assert room(tmp_path, 200, "torchtitan") == ("selective", "op", [words])


@pytest.mark.parametrize(
    ("gib", "stack", "taken"),
    [
        (48, "torchtitan", ("selective", "op")),
        (48, "pytorch", ("selective", "op")),
        (36, "torchtitan", ("full", "op")),
        (35, "megatron-core", ("selective", "mlp-act-norm")),
    ],
)
def test_the_least_that_fits_is_taken_and_said(tmp_path: Path, gib: float, stack: str, taken: tuple[str, str]) -> None:
    mode, policy, notes = room(tmp_path, gib, stack)
    assert (mode, policy) == taken
    assert len(notes) == 1
    assert notes[0].startswith("activation_checkpointing not stated: taken as " + mode)


def test_recipes_on_grace_keep_activations_in_host_memory(tmp_path: Path) -> None:
    gb200 = load_cluster("gb200")
    small = replace(gb200, device=replace(gb200.device, memory_bytes=32 * GIB))
    plan, notes = Plan(seq_len=8192, micro_batch=2, dp_shard=8, stack="nemo"), [NOT_STATED]
    row = measurement(tmp_path, activation_checkpointing="", ac_detail="")
    found = with_assumed_checkpointing(row, MODEL, plan, small, notes)
    assert found.activation_checkpointing == "none"
    assert 0 < found.activation_offload < 1
    assert f"with {found.activation_offload:.0%} of activations in host memory" in notes[0]


def test_what_a_row_states_is_never_changed(tmp_path: Path) -> None:
    assert room(tmp_path, 36, "torchtitan", stated="none")[0] == "none"


def test_what_fits_in_no_way_is_left_as_it_is(tmp_path: Path) -> None:
    assert room(tmp_path, 8, "torchtitan") == ("none", "op", [NOT_STATED])
