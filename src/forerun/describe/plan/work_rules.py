"""Refuses plans that would take too long to simulate, or whose numbers exceed 64 bits, before work begins.

The limits are far above any real training run. A plan beyond them would run for minutes, or use all memory, without a
result.
"""

from __future__ import annotations

from math import inf

from forerun.common.units import MIB
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.parameters import compute_parameter_count, encoder_parameter_count
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.columns import Column, Plans, numbers, where
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack

MOST_GPUS = 1 << 24
"""as many devices as a topology has at most"""
MOST_PARAMETERS = 10**15
"""a thousand times the largest published model"""
MOST_LENGTH = 1 << 28
MOST_TOKENS = 1 << 32
"""tokens, or samples of a model given layer by layer, of one micro batch"""
MOST_MICRO_BATCHES = 20_000
MOST_PASSES = 300_000
"""micro batches times layers; the simulation of so many takes 10 s or so"""
MOST_BUCKETS = 20_000
"""of a size that the plan gives"""
MOST_STACK_BUCKETS = 500_000
"""of the stack's size; so many that a model whose gradients no GPU could hold still runs out of memory"""
AnyModel = ModelSpec | LayeredModel


def _n_layers(model: AnyModel) -> int:
    return len(model.layers) if isinstance(model, LayeredModel) else model.n_layers


def too_much_work(model: AnyModel, plan: Plans, cluster: Cluster) -> Column:
    """Returns a mask of the plans that are too large to simulate."""
    if _too_large(model):
        return True
    sizes = (
        (plan.world_size, MOST_GPUS),
        (plan.seq_len, MOST_LENGTH),
        (plan.micro_batch * plan.seq_len, MOST_TOKENS),
        (plan.n_microbatches, MOST_MICRO_BATCHES),
        (plan.n_microbatches * (_n_layers(model) + 2), MOST_PASSES),
        (_buckets(model, plan), MOST_BUCKETS),
        (_stack_buckets(model, plan), MOST_STACK_BUCKETS),
    )
    broken: Column = False
    for size, most in sizes:
        broken = broken | (size > most)
    return broken


def too_much_work_why(model: AnyModel, plan: Plan, cluster: Cluster) -> str:
    """Explains the refusal of one plan."""
    large = _too_large(model)
    if large:
        return large
    passes = plan.n_microbatches * (_n_layers(model) + 2)
    of = f"passes of layers ({_n_layers(model)} and two ends, {plan.n_microbatches:,} micro batches)"
    reasons = (
        (plan.world_size, MOST_GPUS, "GPUs"),
        (plan.seq_len, MOST_LENGTH, "tokens in a sequence"),
        (plan.micro_batch * plan.seq_len, MOST_TOKENS, "tokens in a micro batch"),
        (plan.n_microbatches, MOST_MICRO_BATCHES, "micro batches"),
        (passes, MOST_PASSES, of),
        (_buckets(model, plan), MOST_BUCKETS, f"buckets of gradients (ddp_bucket_mib {plan.ddp_bucket_mib:g})"),
        (_stack_buckets(model, plan), MOST_STACK_BUCKETS, "buckets of gradients of the stack's size"),
    )
    size, most, what = next(reason for reason in reasons if reason[0] > reason[1])
    return f"{size:,.0f} {what}; at most {most:,} are simulated"


def _too_large(model: AnyModel) -> str:
    """Returns the reason for which a model is too large for any plan. The text is empty if it is not."""
    parameters = _parameters(model)
    if parameters > MOST_PARAMETERS:
        return f"{model.name} has {parameters:.4g} parameters; at most {MOST_PARAMETERS:.0e} are simulated"
    return ""


def _parameters(model: AnyModel) -> float:
    if isinstance(model, LayeredModel):
        return float(sum(layer.num_parameters for layer in model.layers))
    encoder = 0 if model.runs is None else encoder_parameter_count(model.runs)
    return float(compute_parameter_count(model) + encoder)


def _buckets(model: AnyModel, plan: Plans) -> Column:
    """Returns how many buckets of the plan's size hold the gradients of a rank; 0 if the stack gives it."""
    return _pieces(model, plan, numbers(lambda mib: mib or inf, plan.ddp_bucket_mib))


def _stack_buckets(model: AnyModel, plan: Plans) -> Column:
    """Returns how many buckets of the stack's size hold the gradients of a rank; 0 if the plan gives it."""
    size = numbers(lambda mib, stack: inf if mib else load_stack(stack).bucket_mib, plan.ddp_bucket_mib, plan.stack)
    return _pieces(model, plan, size)


def _pieces(model: AnyModel, plan: Plans, mib: Column) -> Column:
    """Returns how many pieces of `mib` MiB make up the gradients of a rank that replicas reduce."""
    share = _parameters(model) * 4 / (plan.tp * plan.pp * plan.ep)
    return where(plan.dp_replicate > 1, share / MIB / mib, 0)
