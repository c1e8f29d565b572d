"""Rules about an encoder in front of a model: which plans can't run it, and why."""

from __future__ import annotations

from forerun.describe.cluster.types import Cluster
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.columns import Column, Plans, having
from forerun.describe.plan.plan import Plan
from forerun.describe.plan.work_rules import MOST_TOKENS


def unfit_encoder(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    """Says in which plans the encoder of `model` does not run."""
    encoder = model.runs
    if encoder is None:
        return False
    attends = encoder.joins == "attention"
    packed = having(plan.document_lengths, lambda lengths: bool(lengths)) & attends
    short = (plan.seq_len < encoder.out_tokens) & (not attends)
    large = plan.micro_batch * encoder.inputs * encoder.tokens > MOST_TOKENS
    return (plan.cp > 1) | ((plan.pp > 1) & attends) | packed | plan.reference | short | large


def unfit_encoder_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    """Explains the refusal of one plan."""
    encoder = model.runs
    assert encoder is not None
    attends = encoder.joins == "attention"
    what = "an encoder with a decoder" if attends else "a tower"
    if plan.cp > 1:
        return f"cp {plan.cp}: {what} runs without context parallelism"
    if plan.pp > 1 and attends:
        return f"pp {plan.pp}: {what} runs without pipeline stages, as all of its layers read the encoder's output"
    if plan.document_lengths and attends:
        return f"document_lengths: {what} runs without packed documents"
    if plan.reference:
        return f"reference: {what} runs without a reference model"
    if plan.seq_len < encoder.out_tokens and not attends:
        return (
            f"seq_len {plan.seq_len}: {encoder.inputs} {encoder.reads} take {encoder.out_tokens:,} tokens of each"
            " sequence; take a longer one, or fewer"
        )
    tokens = plan.micro_batch * encoder.inputs * encoder.tokens
    return f"{tokens:,} tokens in the encoder for a micro batch; at most {MOST_TOKENS:,} are simulated"
