"""STAGE's first generation: dense transformers, the whole batch at once, layers dealt to stages in turn."""

from forerun.astrasim.stage.first_generation.args import StageArgs, load_stage_args
from forerun.astrasim.stage.first_generation.generate import StageTraces, generate

__all__ = ["StageArgs", "StageTraces", "generate", "load_stage_args"]
