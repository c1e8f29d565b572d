"""Which plans cannot run, and why.

A rule looks at one concern and answers the reason in words. Plans that run badly (tensor parallelism across nodes,
fewer micro batches than stages) are possible; only what the software or the shapes refuse is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from forerun.cluster.types import Cluster
from forerun.errors import ForerunError, ImpossiblePlan
from forerun.model.layer_types import SelfAttention
from forerun.model.layered import LayeredModel
from forerun.model.spec import ModelSpec
from forerun.plan.fields import FIELD_TYPES, choices
from forerun.plan.plan import Plan
from forerun.plan.stack import load_stack

AnyModel = ModelSpec | LayeredModel
Model = TypeVar("Model")
Rule = Callable[[Model, Plan, Cluster], str | None]

_CHOICES = {name: choices(name) for name in FIELD_TYPES if choices(name)}
_ATTENTION = ("auto", "naive", "flash1", "flash2", "flash3", "triton", "flex", "cudnn", "sdpa")
_FP8 = ("fp8", "mxfp8", "nvfp4")
_MICROSCALING = ("mxfp8", "nvfp4")
_V_SCHEDULES = ("ZBV", "DualPipeV")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a plan cannot run: the rule in general words, and the reason with the plan's own numbers."""

    rule: str
    reason: str


def check_plan(model: ModelSpec | LayeredModel, plan: Plan, cluster: Cluster) -> None:
    """Raise ImpossiblePlan with the reason in words if `model` cannot be trained as `plan` says on `cluster`.

    Raises UnknownName for a stack that does not exist, ForerunError for a field with a value that it can't take.
    """
    for name, options in _CHOICES.items():
        if getattr(plan, name) not in options:
            known = ", ".join(map(str, options))
            raise ForerunError(f"plan: {name} must be one of {known}, got {getattr(plan, name)!r}")
    if plan.attention not in _ATTENTION:
        raise ForerunError(f"plan: attention must be one of {', '.join(_ATTENTION)}, got {plan.attention!r}")
    load_stack(plan.stack)
    refusal = refuse(model, plan, cluster)
    if refusal:
        raise ImpossiblePlan(f"impossible plan: {refusal.reason}")


def refuse(model: ModelSpec | LayeredModel, plan: Plan, cluster: Cluster) -> Refusal | None:
    """The first rule that `plan` breaks; None for a plan that can run."""
    if isinstance(model, LayeredModel):
        return _first(LAYERED_RULES, model, plan, cluster)
    return _first(RULES, model, plan, cluster)


def _first(rules: Sequence[tuple[str, Rule[Model]]], model: Model, plan: Plan, cluster: Cluster) -> Refusal | None:
    for rule, reason_of in rules:
        reason = reason_of(model, plan, cluster)
        if reason:
            return Refusal(rule, reason)
    return None


def _world(model: AnyModel, plan: Plan, cluster: Cluster) -> str | None:
    most = cluster.max_gpus
    if most is not None and plan.world_size > most:
        return f"the plan takes {plan.world_size} GPUs, cluster {cluster.name} joins at most {most}"
    return None


def _precision(model: AnyModel, plan: Plan, cluster: Cluster) -> str | None:
    device = cluster.device
    needed = "fp8" if plan.precision == "mxfp8" else plan.precision
    if needed not in device.peak_flops:
        return f"device {device.name} has no {plan.precision} matrix unit; it has: {', '.join(device.peak_flops)}"
    if plan.precision in _MICROSCALING and device.architecture != "blackwell":
        return f"precision {plan.precision} needs the block scaling of Blackwell, device {device.name} has none"
    if plan.precision not in _FP8 and plan.fp8_recipe != "none":
        return f"fp8_recipe {plan.fp8_recipe} needs precision fp8 or mxfp8, not {plan.precision}"
    if plan.precision not in _FP8 and plan.fp8_all_gather:
        return f"fp8_all_gather needs precision fp8 or mxfp8, not {plan.precision}"
    return None


def _heads(model: ModelSpec, plan: Plan, cluster: Cluster) -> str | None:
    if not model.n_heads or plan.tp == 1:
        return None
    if model.n_heads % plan.tp:
        return f"{model.n_heads} attention heads are not divisible by tp {plan.tp}"
    if model.mla:
        return None
    kv_heads = model.n_kv_heads
    if kv_heads % plan.tp and plan.tp % kv_heads:
        return f"{kv_heads} key-value heads neither divide by tp {plan.tp} nor can be copied to it evenly"
    return None


def _feed_forward(model: ModelSpec, plan: Plan, cluster: Cluster) -> str | None:
    widths = [("ffn_hidden", model.ffn_hidden if model.moe is None or model.moe.n_dense_layers else 0)]
    if model.moe:
        widths.append(("the shared experts' width", model.moe.shared_ffn))
    for name, width in widths:
        if width % plan.tp:
            return f"{name} {width} is not divisible by tp {plan.tp}"
    return None


def _async_tp(model: ModelSpec, plan: Plan, cluster: Cluster) -> str | None:
    if plan.async_tp and (plan.tp == 1 or not plan.sequence_parallel):
        return f"async_tp needs sequence_parallel and tp above 1, got tp {plan.tp}"
    return None


def _sequence(model: ModelSpec, plan: Plan, cluster: Cluster) -> str | None:
    if model.position == "learned" and plan.seq_len > model.max_positions:
        return f"seq_len {plan.seq_len} is longer than the {model.max_positions} learned positions of {model.name}"
    parts = [(plan.cp, f"cp {plan.cp}")]
    if plan.cp > 1 and plan.cp_method == "ring" and model.causal:
        parts.append((2 * plan.cp, f"2 x cp {plan.cp} (a balanced ring cuts it in two chunks a rank)"))
    if plan.sequence_parallel and plan.tp > 1:
        parts.append((plan.cp * plan.tp, f"cp {plan.cp} x tp {plan.tp} (sequence_parallel)"))
    for parts_of_sequence, name in parts:
        if plan.seq_len % parts_of_sequence:
            return f"seq_len {plan.seq_len} is not divisible by {name}"
    return None


def _context(model: ModelSpec, plan: Plan, cluster: Cluster) -> str | None:
    if plan.cp == 1:
        return None
    if plan.cp_method == "ulysses" and model.n_heads % (plan.cp * plan.tp):
        return f"ulysses: {model.n_heads} attention heads are not divisible by cp {plan.cp} x tp {plan.tp}"
    kernel = load_stack(plan.stack).attention if plan.attention == "auto" else plan.attention
    if kernel == "naive":
        return f"cp {plan.cp} needs a flash attention kernel, not naive"
    return None


def _experts(model: ModelSpec, plan: Plan, cluster: Cluster) -> str | None:
    if plan.ep == 1:
        return None
    if model.moe is None:
        return f"ep {plan.ep} needs a mixture of experts, {model.name} is dense"
    if model.moe.n_experts % plan.ep:
        return f"{model.moe.n_experts} experts are not divisible by ep {plan.ep}"
    if plan.fsdp % plan.ep:
        return f"ep {plan.ep} does not divide dp_shard {plan.dp_shard} x cp {plan.cp}"
    return None


def _stages(model: ModelSpec, plan: Plan, cluster: Cluster) -> str | None:
    stages = plan.n_stages
    shape = f"pp {plan.pp}" + (f" x virtual_stages {plan.virtual_stages}" if plan.virtual_stages > 1 else "")
    layers = plan.layers_per_stage
    if layers is None:
        ends = 2 if plan.balance_ends and stages > 1 else 0
        if model.n_layers + ends < stages:
            return f"{model.n_layers} layers are fewer than the {stages} stages of {shape}"
        return None
    if len(layers) != stages:
        return f"layers_per_stage names {len(layers)} stages, {shape} has {stages}"
    if min(layers) < 0 or 0 in layers[1:-1]:
        return f"layers_per_stage {layers}: only the first and the last stage may be without layers"
    if sum(layers) != model.n_layers:
        return f"layers_per_stage sums to {sum(layers)}, {model.name} has {model.n_layers} layers"
    return None


def _schedule(model: ModelSpec, plan: Plan, cluster: Cluster) -> str | None:
    schedule, virtual = plan.pp_schedule, plan.virtual_stages
    if plan.pp == 1:
        return f"virtual_stages {virtual} needs pp above 1" if virtual > 1 else None
    if schedule in _V_SCHEDULES and virtual != 2:
        return f"schedule {schedule} has 2 virtual_stages a rank, got {virtual}"
    if schedule == "Interleaved1F1B":
        if virtual < 2:
            return "schedule Interleaved1F1B needs virtual_stages above 1"
        if plan.n_microbatches % plan.pp:
            return f"schedule Interleaved1F1B: {plan.n_microbatches} micro batches are not divisible by pp {plan.pp}"
    elif schedule not in _V_SCHEDULES and virtual > 1:
        return f"schedule {schedule} has one stage a rank, got virtual_stages {virtual}"
    if schedule == "DualPipeV" and plan.n_microbatches < 2 * plan.pp:
        return f"schedule DualPipeV needs at least 2 x pp {plan.pp} micro batches, got {plan.n_microbatches}"
    return None


def _offload(model: AnyModel, plan: Plan, cluster: Cluster) -> str | None:
    if plan.offload == "params" and plan.zero_stage != 3:
        return f"offload params needs zero_stage 3 (parameters gathered when used), got {plan.zero_stage}"
    return None


def _layers_only(model: LayeredModel, plan: Plan, cluster: Cluster) -> str | None:
    degrees = [f"{axis} {getattr(plan, axis)}" for axis in ("tp", "cp", "pp", "ep") if getattr(plan, axis) > 1]
    if degrees:
        return f"{degrees[0]} needs a transformer; {model.name}, given layer by layer, runs on dp_replicate x dp_shard"
    if plan.virtual_stages > 1 or plan.layers_per_stage is not None:
        return f"virtual_stages and layers_per_stage need pp above 1, which {model.name}, given layer by layer, has not"
    if plan.seq_len != 1:
        return f"seq_len {plan.seq_len}: {model.name} takes whole samples; leave seq_len at 1"
    if plan.precision in _FP8:
        return f"precision {plan.precision} needs a transformer; {model.name} is given layer by layer"
    return None


def _layers_checkpointing(model: LayeredModel, plan: Plan, cluster: Cluster) -> str | None:
    if plan.activation_checkpointing == "selective" and plan.selective_policy not in ("op", "params"):
        return f"selective_policy {plan.selective_policy} needs a transformer; {model.name} takes op, or full"
    return None


def _layers_attention(model: LayeredModel, plan: Plan, cluster: Cluster) -> str | None:
    kernel = load_stack(plan.stack).attention if plan.attention == "auto" else plan.attention
    if kernel == "naive" and any(isinstance(layer, SelfAttention) for layer in model.layers):
        return f"attention naive needs a transformer; {model.name}, given layer by layer, runs a fused kernel"
    return None


LAYERED_RULES: tuple[tuple[str, Rule[LayeredModel]], ...] = (
    ("more GPUs than the cluster joins", _world),
    ("precision that the device lacks", _precision),
    ("needs a transformer", _layers_only),
    ("checkpointing that needs a transformer", _layers_checkpointing),
    ("attention that needs a transformer", _layers_attention),
    ("offload does not fit the sharding", _offload),
)
"""rules of models given layer by layer"""

RULES: tuple[tuple[str, Rule[ModelSpec]], ...] = (
    ("more GPUs than the cluster joins", _world),
    ("precision that the device lacks", _precision),
    ("attention heads do not split over tp", _heads),
    ("feed-forward width does not split over tp", _feed_forward),
    ("async_tp without sequence parallelism", _async_tp),
    ("sequence does not split over cp and tp", _sequence),
    ("context parallelism does not fit attention", _context),
    ("experts do not split over ep", _experts),
    ("layers do not spread over the stages", _stages),
    ("schedule does not fit stages or micro batches", _schedule),
    ("offload does not fit the sharding", _offload),
)
"""(rule in general words, what answers the reason or None)"""
