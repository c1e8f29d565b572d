"""STAGE's second generation: grouped heads, experts, micro-batches, weights in buckets."""

from forerun.astrasim.stage.second_generation.args import MODEL_TYPES, SecondStageArgs
from forerun.astrasim.stage.second_generation.generate import SecondStageTraces, generate_second

__all__ = ["MODEL_TYPES", "SecondStageArgs", "SecondStageTraces", "generate_second"]
