"""Rules that say which plans cannot run, and why.

A rule covers one concern, for a single Plan and for a table of plans: `broken` is arithmetic and comparisons that work
on numbers and on columns; `reason` explains the refusal with the plan's own numbers. Plans that run slowly (tensor
parallelism across nodes, fewer micro batches than stages) are possible: a rule refuses only what the software or the
shapes do not allow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Generic, Protocol, TypeVar

from forerun.common.errors import ForerunError, ImpossiblePlan
from forerun.describe.cluster.types import Cluster
from forerun.describe.kernels.attention import AttentionKernel, attention_choices, attention_kernel
from forerun.describe.model.layer_types import SelfAttention
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.columns import Column, Plans, having, no
from forerun.describe.plan.compressed_rules import (
    unsplit_entries,
    unsplit_entries_why,
    unsplit_pairs,
    unsplit_pairs_why,
)
from forerun.describe.plan.encoder_rules import unfit_encoder, unfit_encoder_why
from forerun.describe.plan.expert_rules import (
    parted_attention_experts,
    parted_attention_experts_why,
    uneven_experts,
    uneven_experts_why,
    unlisted_loads,
    unlisted_loads_why,
    unpaired_overlap,
    unpaired_overlap_why,
    unpaired_shared_experts,
    unpaired_shared_experts_why,
)
from forerun.describe.plan.fields import FIELD_TYPES, choices
from forerun.describe.plan.fitting_degrees import fitting_degrees, fitting_words
from forerun.describe.plan.plan import FP8_PRECISIONS, V_SCHEDULES, Plan
from forerun.describe.plan.recurrence import parted_block, parted_block_why, unsplit_scan, unsplit_scan_why
from forerun.describe.plan.training_rules import (
    of_matrices,
    unfit_adapters,
    unfit_adapters_why,
    unfit_loss_chunks,
    unfit_loss_chunks_why,
    unfit_modules,
    unfit_modules_why,
    unfit_optimizer,
    unfit_optimizer_why,
    unfit_reference,
    unfit_reference_why,
)
from forerun.describe.plan.work_rules import too_much_work, too_much_work_why
from forerun.describe.stacks.catalog import load_stack

AnyModel = ModelSpec | LayeredModel
Model = TypeVar("Model", ModelSpec, LayeredModel, contravariant=True)


class Broken(Protocol[Model]):
    """Says whether a plan breaks a rule, or which plans of a table do."""

    def __call__(self, model: Model, plan: Plans, cluster: Cluster, /) -> Column:
        """Returns True where `plan` can't run: a truth value, or one for each plan of a table, (n,)."""


@dataclass(frozen=True, slots=True)
class Rule(Generic[Model]):
    """One reason why plans can't run."""

    name: str
    """the refusal in general words"""
    broken: Broken[Model]
    reason: Callable[[Model, Plan, Cluster], str]
    """explains the refusal with the numbers of a plan that breaks the rule"""
    degrees: tuple[str, ...] = ()
    """the parallel degrees of which another value may keep the rule"""


_CHOICES = {name: choices(name) for name in FIELD_TYPES if choices(name)}
_MICROSCALING = ("mxfp8", "nvfp4")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Says why a plan cannot run: the rule in general words, and the reason with the plan's own numbers."""

    rule: str
    reason: str
    degrees: tuple[str, ...] = ()
    """the parallel degrees of which another value may keep the rule"""


def check_plan(model: ModelSpec | LayeredModel, plan: Plan, cluster: Cluster) -> None:
    """Raises ImpossiblePlan with the reason if `model` can't be trained on `cluster` as `plan` says.

    Raises UnknownName for a stack that does not exist, ForerunError for a field with a value out of its choices.
    """
    for name, options in _CHOICES.items():
        if getattr(plan, name) not in options:
            known = ", ".join(map(str, options))
            raise ForerunError(f"plan: {name} must be one of {known}, got {getattr(plan, name)!r}")
    if plan.attention not in attention_choices():
        raise ForerunError(f"plan: attention must be one of {', '.join(attention_choices())}, got {plan.attention!r}")
    load_stack(plan.stack)
    refusal = refuse(model, plan, cluster)
    if refusal:
        raise ImpossiblePlan(f"impossible plan: {refusal.reason}{_what_fits(model, plan, cluster, refusal)}")


def _what_fits(model: AnyModel, plan: Plan, cluster: Cluster, refusal: Refusal) -> str:
    """Returns the words about degrees that keep the rule of `refusal`, and all rules about the same degree."""
    degree = next((name for name in refusal.degrees if getattr(plan, name) > 1), None)
    if degree is None or isinstance(model, LayeredModel):
        return ""
    about = [rule for rule in RULES if degree in rule.degrees]
    fits = fitting_degrees(plan, degree, lambda other: not any(rule.broken(model, other, cluster) for rule in about))
    return fitting_words(degree, fits)


def refuse(model: ModelSpec | LayeredModel, plan: Plan, cluster: Cluster) -> Refusal | None:
    """Returns the first rule that `plan` breaks; None for a plan that can run."""
    if isinstance(model, LayeredModel):
        return _first(LAYERED_RULES, model, plan, cluster)
    return _first(RULES, model, plan, cluster)


def _first(rules: Sequence[Rule[Model]], model: Model, plan: Plan, cluster: Cluster) -> Refusal | None:
    for rule in rules:
        if rule.broken(model, plan, cluster):
            return Refusal(rule.name, rule.reason(model, plan, cluster), rule.degrees)
    return None


# -- GPUs and devices ----------------------------------------------------------------------------------------


def _too_many(model: AnyModel, plan: Plans, cluster: Cluster) -> Column:
    return cluster.max_gpus is not None and plan.world_size > cluster.max_gpus


def _too_many_why(model: AnyModel, plan: Plan, cluster: Cluster) -> str:
    return f"the plan takes {plan.world_size} GPUs, cluster {cluster.name} has at most {cluster.max_gpus}"


def _precision(model: AnyModel, plan: Plans, cluster: Cluster) -> Column:
    scaled = plan.fp8_all_gather | (plan.fp8_recipe != "none")
    unscaled = having(plan.precision, lambda precision: precision not in FP8_PRECISIONS)
    return having(plan.precision, lambda precision: _lacks(precision, cluster) is not None) | (scaled & unscaled)


def _precision_why(model: AnyModel, plan: Plan, cluster: Cluster) -> str:
    lacks = _lacks(plan.precision, cluster)
    what = "fp8_all_gather" if plan.fp8_recipe == "none" else f"fp8_recipe {plan.fp8_recipe}"
    return lacks or f"{what} needs precision fp8 or mxfp8, not {plan.precision}"


def _autocast(model: AnyModel, plan: Plans, cluster: Cluster) -> Column:
    cast_to_other = having(plan.precision, lambda precision: precision not in ("bf16", "fp16"))
    return plan.autocast & ((plan.master_dtype != "fp32") | cast_to_other)


def _autocast_why(model: AnyModel, plan: Plan, cluster: Cluster) -> str:
    return (
        "autocast casts weights of master_dtype fp32 to precision bf16 or fp16,"
        f" not {plan.master_dtype} to {plan.precision}"
    )


def _lacks(precision: str, cluster: Cluster) -> str | None:
    """Returns why the device can't compute in `precision`; None if it can."""
    device = cluster.device
    needed = "fp8" if precision == "mxfp8" else precision
    if needed not in device.peak_flops:
        return f"device {device.name} has no {precision} matrix unit; it has: {', '.join(device.peak_flops)}"
    if precision in _MICROSCALING and device.architecture != "blackwell":
        return f"precision {precision} needs the block scaling of Blackwell, device {device.name} has none"
    return None


# -- tensor parallelism --------------------------------------------------------------------------------------


def _heads(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    if not model.n_heads:
        return False
    broken = model.n_heads % plan.tp != 0
    if model.mla:
        return broken
    return broken | ((model.n_kv_heads % plan.tp != 0) & (plan.tp % model.n_kv_heads != 0))


def _heads_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    if model.n_heads % plan.tp:
        return f"{model.n_heads} attention heads are not divisible by tp {plan.tp}"
    return f"of {model.n_kv_heads} key-value heads and tp {plan.tp}, neither is a multiple of the other"


def _widths(model: ModelSpec) -> list[tuple[str, int]]:
    widths = [
        ("ffn_hidden", kind.ffn_hidden)
        if kind.moe is None or kind.shortcut
        else ("the shared experts' width", kind.moe.shared_ffn)
        for kind in model.kinds
    ]
    return list(dict.fromkeys(widths))


def _feed_forward(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    broken: Column = False
    for _, width in _widths(model):
        broken |= width % plan.tp != 0
    return broken


def _feed_forward_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    name, width = next((name, width) for name, width in _widths(model) if width % plan.tp)
    return f"{name} {width} is not divisible by tp {plan.tp}"


def _async_tp(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    return plan.async_tp & ((plan.tp == 1) | no(plan.sequence_parallel))


def _async_tp_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    return f"async_tp needs sequence_parallel and tp above 1, got {plan.sequence_parallel} and {plan.tp}"


# -- sequences and experts -----------------------------------------------------------------------------------


def _parts_of_sequence(model: ModelSpec, plan: Plans) -> list[tuple[Column, Column]]:
    """Returns (in which plans, into how many parts) the sequence is cut."""
    parts = [(plan.cp > 1, plan.cp)]
    if model.causal:
        chunks = (plan.cp > 1) & (plan.cp_method != "ulysses") & (plan.cp_load_balance == "head_tail")
        parts.append((chunks, 2 * plan.cp))
    return [*parts, (plan.sequence_parallel & (plan.tp > 1), plan.cp * plan.tp)]


def _sequence(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    broken: Column = False
    if model.position == "learned":
        broken = plan.seq_len > model.max_positions
    for here, parts in _parts_of_sequence(model, plan):
        broken |= here & (plan.seq_len % parts != 0)
    return broken


def _sequence_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    if model.position == "learned" and plan.seq_len > model.max_positions:
        return f"seq_len {plan.seq_len} is longer than the {model.max_positions} learned positions of {model.name}"
    parts = next(parts for here, parts in _parts_of_sequence(model, plan) if here and plan.seq_len % parts)
    if parts == plan.cp:
        name = f"cp {plan.cp}"
    elif plan.cp > 1 and parts == 2 * plan.cp and plan.cp_method != "ulysses" and plan.cp_load_balance == "head_tail":
        name = f"2 x cp {plan.cp} (cp_load_balance head_tail gives a rank two chunks; striped and none give it one)"
    else:
        name = f"cp {plan.cp} x tp {plan.tp} (sequence_parallel)"
    return f"seq_len {plan.seq_len} is not divisible by {name}"


@cache
def _kernel(stack: str, attention: str) -> str:
    """Returns the name of a plan's attention kernel, before the device chooses among its variants."""
    return load_stack(stack).attention if attention == "auto" else attention


def _unfused(plan: Plans) -> Column:
    """Says in which plans the kernel materialises all scores, so that context parallelism can't cut the sequence."""
    return _kernels_that(plan, lambda kernel: kernel.form != "fused")


def _kernels_that(plan: Plans, trait: Callable[[AttentionKernel], bool]) -> Column:
    """Says in which plans the attention kernel has a trait."""

    def of_stack(stack: str) -> Column:
        return having(plan.attention, lambda attention: trait(attention_kernel(_kernel(stack, attention))))

    return having(plan.stack, of_stack)


def _foreign_kernel(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    return _kernels_that(plan, lambda kernel: not kernel.runs(cluster.device.architecture))


def _foreign_kernel_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    kernel, device = attention_kernel(_kernel(plan.stack, plan.attention)), cluster.device
    return f"attention {kernel.name} needs {' or '.join(kernel.runs_on)}; {device.name} is {device.architecture}"


def _context(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    ulysses = (plan.cp_method == "ulysses") & (model.n_heads % (plan.cp * plan.tp) != 0)
    return (plan.cp > 1) & (ulysses | _unfused(plan))


def _context_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    if plan.cp_method == "ulysses" and model.n_heads % (plan.cp * plan.tp):
        return f"ulysses: {model.n_heads} attention heads are not divisible by cp {plan.cp} x tp {plan.tp}"
    return f"cp {plan.cp} needs a flash attention kernel, not {_kernel(plan.stack, plan.attention)}"


# -- pipelines -----------------------------------------------------------------------------------------------


def _stages(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    def broken(layers: tuple[int, ...] | None) -> Column:
        if layers is None:
            return model.n_layers + 2 * (plan.balance_ends & (plan.n_stages > 1)) < plan.distinct_stages
        return (plan.distinct_stages != len(layers)) | (_uneven(model, layers) is not None)

    return having(plan.layers_per_stage, broken)


def _uneven(model: ModelSpec, layers: tuple[int, ...]) -> str | None:
    """Returns the error in the layers of stages that holds for any number of stages. Returns None if there is none."""
    if min(layers, default=0) < 0 or 0 in layers[1:-1]:
        return f"layers_per_stage {layers}: only the first and the last stage may be without layers"
    if sum(layers) != model.n_layers:
        return f"layers_per_stage sums to {sum(layers)}, {model.name} has {model.n_layers} layers"
    return None


def _stages_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    stages, layers = plan.distinct_stages, plan.layers_per_stage
    shape = f"pp {plan.pp}" + (f" x virtual_stages {plan.virtual_stages}" if plan.virtual_stages > 1 else "")
    if layers is None:
        return f"{model.n_layers} layers are fewer than the {stages} stages of {shape}"
    if len(layers) != stages:
        return f"layers_per_stage lists {len(layers)} stages, {shape} has {stages}"
    return str(_uneven(model, layers))


def _schedule(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    def wrong(schedule: str) -> Column:
        if schedule in V_SCHEDULES:
            few = (schedule in ("DualPipeV", "DualPipe")) & (plan.n_microbatches < 2 * plan.pp)
            odd = (schedule == "DualPipe") & ((plan.pp % 2 != 0) | (plan.n_microbatches % 2 != 0))
            return (plan.virtual_stages != 2) | few | odd
        if schedule == "Interleaved1F1B":
            return (plan.virtual_stages < 2) | (plan.n_microbatches % plan.pp != 0)
        return plan.virtual_stages > 1

    return ((plan.pp == 1) & (plan.virtual_stages > 1)) | ((plan.pp > 1) & having(plan.pp_schedule, wrong))


def _schedule_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    schedule, virtual = plan.pp_schedule, plan.virtual_stages
    if plan.pp == 1:
        return f"virtual_stages {virtual} needs pp above 1"
    if schedule in V_SCHEDULES and virtual != 2:
        return f"schedule {schedule} has 2 virtual_stages a rank, got {virtual}"
    if schedule == "DualPipe" and (plan.pp % 2 or plan.n_microbatches % 2):
        return f"schedule DualPipe needs an even pp and even micro batches, got {plan.pp} and {plan.n_microbatches}"
    if schedule in ("DualPipeV", "DualPipe"):
        return f"schedule {schedule} needs at least 2 x pp {plan.pp} micro batches, got {plan.n_microbatches}"
    if schedule != "Interleaved1F1B":
        return f"schedule {schedule} has one stage a rank, got virtual_stages {virtual}"
    if virtual < 2:
        return "schedule Interleaved1F1B needs virtual_stages above 1"
    return f"schedule Interleaved1F1B: {plan.n_microbatches} micro batches are not divisible by pp {plan.pp}"


def _offload(model: AnyModel, plan: Plans, cluster: Cluster) -> Column:
    return (plan.offload == "params") & no(plan.uses_fsdp)


def _offload_why(model: AnyModel, plan: Plan, cluster: Cluster) -> str:
    return f"offload params needs zero_stage 3 (parameters gathered when used), got {plan.zero_stage}"


def _documents(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    packed = having(plan.document_lengths, lambda lengths: bool(lengths))
    return packed & ((plan.cp > 1) | _unfused(plan))


def _documents_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    if plan.cp > 1:
        return f"document_lengths: packed documents are not split over cp {plan.cp}"
    return f"document_lengths needs a fused attention kernel, not {_kernel(plan.stack, plan.attention)}"


# -- models given layer by layer -----------------------------------------------------------------------------


def _layers_only(model: LayeredModel, plan: Plans, cluster: Cluster) -> Column:
    staged = (plan.virtual_stages > 1) | (plan.layers_per_stage != None)  # noqa: E711  a column answers for each plan
    split = (plan.tp > 1) | (plan.cp > 1) | (plan.pp > 1) | (plan.ep > 1) | (plan.etp > 1)
    scaled = having(plan.precision, lambda precision: precision in FP8_PRECISIONS)
    return (
        (plan.loss_chunks > 1)
        | split
        | staged
        | (plan.seq_len != 1)
        | scaled
        | (plan.lora_rank > 0)
        | plan.reference
        | (having(plan.document_lengths, lambda lengths: bool(lengths)))
    )


def _layers_only_why(model: LayeredModel, plan: Plan, cluster: Cluster) -> str:
    degrees = [f"{axis} {getattr(plan, axis)}" for axis in ("tp", "cp", "pp", "ep", "etp") if getattr(plan, axis) > 1]
    if degrees:
        return f"{degrees[0]} needs a transformer; {model.name}, given layer by layer, runs on dp_replicate x dp_shard"
    if plan.virtual_stages > 1 or plan.layers_per_stage is not None:
        return f"virtual_stages and layers_per_stage need a transformer; {model.name} is given layer by layer"
    if plan.seq_len != 1:
        return f"seq_len {plan.seq_len}: {model.name} takes whole samples; leave seq_len at 1"
    if plan.loss_chunks > 1:
        return f"loss_chunks {plan.loss_chunks} needs a transformer; {model.name} is given layer by layer"
    if plan.document_lengths:
        return f"document_lengths needs a transformer; {model.name} is given layer by layer"
    if plan.lora_rank or plan.reference:
        field = f"lora_rank {plan.lora_rank}" if plan.lora_rank else "reference"
        return f"{field} needs a transformer; {model.name} is given layer by layer"
    return f"precision {plan.precision} needs a transformer; {model.name} is given layer by layer"


def _layers_checkpointing(model: LayeredModel, plan: Plans, cluster: Cluster) -> Column:
    known = (plan.selective_policy == "op") | (plan.selective_policy == "params")
    return (plan.activation_checkpointing == "selective") & no(known)


def _layers_checkpointing_why(model: LayeredModel, plan: Plan, cluster: Cluster) -> str:
    return f"selective_policy {plan.selective_policy} needs a transformer; {model.name} takes op, or full"


def _layers_attention(model: LayeredModel, plan: Plans, cluster: Cluster) -> Column:
    return any(isinstance(layer, SelfAttention) for layer in model.layers) & _unfused(plan)


def _layers_attention_why(model: LayeredModel, plan: Plan, cluster: Cluster) -> str:
    kernel = _kernel(plan.stack, plan.attention)
    return f"attention {kernel} needs a transformer; {model.name}, given layer by layer, runs a fused kernel"


def _layers_optimizer(model: LayeredModel, plan: Plans, cluster: Cluster) -> Column:
    return of_matrices(plan, lambda own: True)


def _layers_optimizer_why(model: LayeredModel, plan: Plan, cluster: Cluster) -> str:
    return f"optimizer {plan.optimizer} needs a transformer, whose matrices are known; not {model.name}"


LAYERED_RULES: tuple[Rule[LayeredModel], ...] = (
    Rule("too large to simulate", too_much_work, too_much_work_why),
    Rule("more GPUs than the cluster joins", _too_many, _too_many_why),
    Rule("precision that the device lacks", _precision, _precision_why),
    Rule("needs a transformer", _layers_only, _layers_only_why),
    Rule("checkpointing that needs a transformer", _layers_checkpointing, _layers_checkpointing_why),
    Rule("attention that needs a transformer", _layers_attention, _layers_attention_why),
    Rule("optimizer that needs a transformer", _layers_optimizer, _layers_optimizer_why),
    Rule("offload does not fit the sharding", _offload, _offload_why),
)
"""rules of models given layer by layer"""

RULES: tuple[Rule[ModelSpec], ...] = (
    Rule("too large to simulate", too_much_work, too_much_work_why),
    Rule("more GPUs than the cluster joins", _too_many, _too_many_why),
    Rule("precision that the device lacks", _precision, _precision_why),
    Rule("autocast of other weights than fp32", _autocast, _autocast_why),
    Rule("attention kernel that the device does not run", _foreign_kernel, _foreign_kernel_why),
    Rule("attention heads do not split over tp", _heads, _heads_why, ("tp",)),
    Rule("recurrence does not split over tp or cp", unsplit_scan, unsplit_scan_why),
    Rule("compressed keys do not fit the parallelism", unsplit_entries, unsplit_entries_why),
    Rule("pairs of heads do not fit the parallelism", unsplit_pairs, unsplit_pairs_why),
    Rule("a shared block does not fit the parallelism", parted_block, parted_block_why),
    Rule("feed-forward width does not split over tp", _feed_forward, _feed_forward_why, ("tp",)),
    Rule("async_tp without sequence parallelism", _async_tp, _async_tp_why),
    Rule("sequence does not split over cp and tp", _sequence, _sequence_why, ("cp", "tp")),
    Rule("context parallelism does not fit attention", _context, _context_why, ("cp",)),
    Rule("experts do not split over ep", uneven_experts, uneven_experts_why, ("ep", "etp")),
    Rule("experts of the attention do not split", parted_attention_experts, parted_attention_experts_why),
    Rule("loads of other experts than the model's", unlisted_loads, unlisted_loads_why),
    Rule("shared experts without an exchange beside them", unpaired_shared_experts, unpaired_shared_experts_why),
    Rule("expert_overlap without passes to pair", unpaired_overlap, unpaired_overlap_why),
    Rule("layers do not spread over the stages", _stages, _stages_why, ("pp",)),
    Rule("schedule does not fit stages or micro batches", _schedule, _schedule_why, ("pp",)),
    Rule("offload does not fit the sharding", _offload, _offload_why),
    Rule("adapters do not fit the parallelism", unfit_adapters, unfit_adapters_why),
    Rule("a loss in chunks does not fit", unfit_loss_chunks, unfit_loss_chunks_why),
    Rule("modules that predict further tokens do not fit", unfit_modules, unfit_modules_why),
    Rule("an encoder does not fit", unfit_encoder, unfit_encoder_why),
    Rule("packed documents do not fit attention", _documents, _documents_why),
    Rule("a reference model does not fit the parallelism", unfit_reference, unfit_reference_why),
    Rule("optimizer of matrices does not fit the sharding", unfit_optimizer, unfit_optimizer_why),
)
"""rules of transformers; the first one that a plan breaks is the reason that it reports"""
