"""Maps a measured row to the model, plan and cluster of a prediction, and notes every assumption."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from forerun.common.errors import ForerunError
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.architecture_table import sized_for, spec_from_architecture
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.evidence.validation.assumed_checkpointing import with_assumed_checkpointing
from forerun.evidence.validation.cluster_mapping import cluster_of
from forerun.evidence.validation.hardware import Hardware
from forerun.evidence.validation.plan_mapping import Inexpressible, plan_of
from forerun.evidence.validation.rows import Measurement

DIMENSIONS = ("n_layers", "hidden", "n_heads", "n_kv_heads", "ffn_hidden", "vocab")


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a row's prediction. `notes` are the assumptions where the row states nothing."""

    model: ModelSpec
    plan: Plan
    cluster: Cluster
    notes: tuple[str, ...]


def map_row(row: Measurement, models: Mapping[str, ModelSpec], hardware: Hardware) -> Inputs:
    """Returns model, plan and cluster of `row`. Raises Inexpressible with the reason."""
    notes: list[str] = []
    try:
        model = _model_of(row, models, notes)
        plan = plan_of(row, model, notes)
        cluster = cluster_of(row, hardware, notes)
        plan = with_assumed_checkpointing(row, model, plan, cluster, notes)
    except Inexpressible:
        raise
    except ForerunError as error:
        raise Inexpressible(str(error)) from None
    return Inputs(model, plan, cluster, tuple(notes))


def to_inputs(row: Measurement, models: Mapping[str, ModelSpec], hardware: Hardware) -> tuple[ModelSpec, Plan, Cluster]:
    """Returns the arguments of a predictor: `map_row` without its notes."""
    inputs = map_row(row, models, hardware)
    return inputs.model, inputs.plan, inputs.cluster


def _model_of(row: Measurement, models: Mapping[str, ModelSpec], notes: list[str]) -> ModelSpec:
    """Returns the named architecture with the dimensions of the row, or one made from the row alone."""
    known = models.get(row.model)
    model = _from_row(row, notes) if known is None else _with_row_dimensions(row, known, notes)
    return sized_for(model, row.seq_len) if row.seq_len else model


def _with_row_dimensions(row: Measurement, model: ModelSpec, notes: list[str]) -> ModelSpec:
    """Returns `model` with the row's dimensions, which are those of the measured run."""
    stated = {name: getattr(row, name) for name in DIMENSIONS}
    changed: dict[str, Any] = {
        name: value for name, value in stated.items() if value is not None and value != getattr(model, name)
    }
    if not changed:
        return model
    if row.head_dim and model.mla is None:
        changed["head_dim"] = row.head_dim
    notes.append(f"the row's dimensions differ from the models file: taken {changed}")
    return replace(model, **changed)


def _from_row(row: Measurement, notes: list[str]) -> ModelSpec:
    """Returns a dense decoder; a gated feed-forward implies RMSNorm and rotary positions, any other implies GPT-2."""
    if row.is_moe:
        raise Inexpressible(f"model {row.model!r} has experts, but is not in the models file")
    missing = [name for name in (*DIMENSIONS, "head_dim") if getattr(row, name) is None]
    if missing:
        raise Inexpressible(f"model {row.model!r} is not in the models file and the row lacks {', '.join(missing)}")
    notes.append(f"model {row.model!r} is not in the models file: made from the row's dimensions")
    gated = row.mlp in ("swiglu", "geglu")
    entry: dict[str, Any] = {name: getattr(row, name) for name in (*DIMENSIONS, "mlp")}
    entry |= {"norm": "rmsnorm" if gated else "layernorm", "bias": not gated}
    if row.n_heads == 0:
        return spec_from_architecture(row.model, {**entry, "attention": "none", "pos_emb": "none"})
    positions = "rope" if gated else "learned"
    return spec_from_architecture(
        row.model, {**entry, "head_dim": row.head_dim, "tied_embeddings": not gated, "pos_emb": positions}
    )
