"""Maps a measured row to the model, plan and cluster of a prediction, and notes every assumption."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from forerun.answers.analysis.memory_need import memory_need
from forerun.answers.analysis.predict import predict
from forerun.common.errors import ForerunError, ImpossiblePlan, UnknownName
from forerun.common.units import GIB, GIGA
from forerun.describe.cluster.catalog import cluster_from_parts, load_device
from forerun.describe.cluster.types import Cluster, Device, LinkKind
from forerun.describe.model.architecture_table import sized_for, spec_from_architecture
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.constraints import check_plan
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.evidence.validation import wording
from forerun.evidence.validation.hardware import Hardware, HostFacts
from forerun.evidence.validation.plan_mapping import NOT_STATED, Inexpressible, plan_of
from forerun.evidence.validation.rows import Measurement
from forerun.evidence.validation.wording import says
from forerun.sources.symbolic.build import build

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
    if says(row.notes, wording.ATTENTION_DROPOUT):
        model = replace(model, attention_dropout=True)
    if says(row.notes, wording.HIDDEN_DROPOUT):
        model = replace(model, hidden_dropout=True)
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


def with_assumed_checkpointing(
    row: Measurement, model: ModelSpec, plan: Plan, cluster: Cluster, notes: list[str]
) -> Plan:
    """Adds an assumed recomputation to `plan` if the row states none.

    A plan of a framework whose own configurations recompute does so if it fits. Otherwise a plan that fits without
    recomputation stays as it is. A plan that does not fit recomputes as little as it can. It keeps activations in host
    memory instead if recipes of its stack do so and that takes less time. Appends the assumption to `notes`.
    """
    if row.activation_checkpointing or row.ac_detail:
        return plan
    usual = load_stack(plan.stack).usual_checkpointing
    if usual != "none":
        as_usual = replace(plan, activation_checkpointing=usual)
        if _fits(model, as_usual, cluster):
            _note(notes, f"{usual}, as in the framework's own configurations")
            return as_usual
    if _fits(model, plan, cluster):
        return plan
    selective = replace(plan, activation_checkpointing="selective")
    offered = [replace(selective, selective_policy=policy) for policy in load_stack(plan.stack).recomputes]
    offered.append(replace(plan, activation_checkpointing="full"))
    choices = [_first_that_fits(model, offered, cluster), _offloading(model, plan, cluster)]
    found = [choice for choice in choices if choice is not None]
    if not found:
        return plan
    chosen = min(found, key=lambda choice: predict(model, choice, cluster).step_time_s) if len(found) > 1 else found[0]
    _note(notes, _in_words(chosen))
    return chosen


def _note(notes: list[str], words: str) -> None:
    if NOT_STATED in notes:
        notes.remove(NOT_STATED)
    notes.append(f"activation_checkpointing not stated: taken as {words}")


def _in_words(plan: Plan) -> str:
    """Describes in words how a plan saves memory for activations."""
    kind = plan.activation_checkpointing
    if kind == "none":
        return f"none, with {plan.activation_offload:.0%} of activations in host memory, the least that fits"
    return (
        f"{kind} ({plan.selective_policy}), the least that fits"
        if kind == "selective"
        else f"{kind}, the least that fits"
    )


def _first_that_fits(model: ModelSpec, plans: Iterable[Plan], cluster: Cluster) -> Plan | None:
    return next((plan for plan in plans if _fits(model, plan, cluster)), None)


def _offloading(model: ModelSpec, plan: Plan, cluster: Cluster) -> Plan | None:
    """Returns `plan` with as few activations in host memory as fit, in eighths; None if recipes keep none there.

    Megatron-Core refuses to offload under a pipeline.
    """
    least_gb_s = load_stack(plan.stack).offloads_from_gb_s
    if plan.pp > 1 or least_gb_s is None or cluster.host_bytes_per_s < least_gb_s * GIGA:
        return None
    shares = (eighths / 8 for eighths in range(1, 9))
    more = (replace(plan, activation_offload=share) for share in shares if share > plan.activation_offload)
    return _first_that_fits(model, more, cluster)


def _fits(model: ModelSpec, plan: Plan, cluster: Cluster) -> bool:
    try:
        check_plan(model, plan, cluster)
    except ImpossiblePlan:
        return True  # The prediction then says why the plan can't run.
    return memory_need(build(model, plan, cluster), cluster, load_stack(plan.stack)).held.fits


FABRICS: tuple[tuple[str, LinkKind], ...] = (
    (r"infiniband|\b(HDR|NDR|EDR|XDR)\b", "infiniband"),
    (r"omni-?path", "omnipath"),
    (r"\bEFA\b", "efa"),
    (r"roce|rdma", "roce"),
    (r"ethernet", "ethernet"),
)
"""pattern of a fabric's words -> kind of link; the first match wins"""
MEMORY_TOLERANCE = 0.1
"""largest relative difference between a device's stated and catalogued memory; beyond it is another device"""


def cluster_of(row: Measurement, hardware: Hardware, notes: list[str]) -> Cluster:
    """Returns the Cluster of a row. Raises UnknownName for an unknown device; appends each assumption to `notes`."""
    facts = hardware.get(row.hw_key, HostFacts())
    device = _device(row, facts, notes)
    intra = row.intra_node or facts.intra
    gbit = row.inter_node_gbit_s_per_gpu or facts.inter_node_gbit_s_per_gpu
    cluster = cluster_from_parts(
        row.hw_key or device.name,
        device.name,
        _node_size(row, facts, intra),
        intra_kind="nvlink" if says(intra, r"no NVSwitch") else None,
        inter_bytes_per_s=None if gbit is None else gbit * GIGA / 8,
        inter_kind=next((kind for words, kind in FABRICS if says(facts.fabric, words)), None),
    )
    if gbit is None and (row.n_gpus or 1) > cluster.node_size:
        usual = cluster.links[-1].bytes_per_s * 8 / GIGA
        notes.append(f"network between nodes not stated: taken as {usual:g} Gbit/s per GPU, usual for {device.name}")
    return replace(cluster, device=device)


def _device(row: Measurement, facts: HostFacts, notes: list[str]) -> Device:
    gpu = row.gpu or facts.gpu
    memory_gb = row.gpu_mem_gb or facts.hbm_gb
    device = _catalogued(gpu, memory_gb)
    if memory_gb is None:
        notes.append(f"memory of {gpu} not stated: taken as {device.name}")
    elif abs(memory_gb * GIB / device.memory_bytes - 1) > MEMORY_TOLERANCE:
        notes.append(f"{gpu} with {memory_gb:g} GB is not in the catalogue: taken as {device.name} with that memory")
        device = replace(device, memory_bytes=round(memory_gb * GIB))
    if facts.clock != 1.0:
        notes.append(f"clock as benchmarks of {row.hw_key} show it: {facts.clock:g} of other {device.name}s")
    if facts.power_w is not None:
        notes.append(f"power limit of {row.hw_key}: {facts.power_w:g} W")
        device = replace(device, power_w=facts.power_w)
    elif says(f"{row.notes} {facts.stated}", r"power[- ]limited"):
        notes.append(f"{gpu} with an unknown power limit: taken at full power")
    device = replace(device, sustained=device.sustained * facts.clock)
    return device


def _catalogued(gpu: str, memory_gb: float | None) -> Device:
    """Returns the device of that name and memory, or else of that name."""
    if memory_gb is not None:
        try:
            return load_device(f"{gpu}-{memory_gb:g}GB")
        except UnknownName:
            pass
    return load_device(gpu)


def _node_size(row: Measurement, facts: HostFacts, intra: str) -> int | None:
    """Returns the number of GPUs in one NVLink domain: a rack where the links say so, else the server."""
    domain = re.search(r"NVL(\d+)", intra)
    return int(domain[1]) if domain else row.gpus_per_node or facts.gpus_per_node
