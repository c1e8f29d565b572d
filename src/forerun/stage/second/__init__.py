"""STAGE's second generation: grouped heads, experts, micro-batches, weights in buckets."""

from forerun.stage.second.args import SecondStageArgs
from forerun.stage.second.generate import SecondStageTraces, generate_second

__all__ = ["SecondStageArgs", "SecondStageTraces", "generate_second"]
