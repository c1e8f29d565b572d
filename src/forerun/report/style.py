"""How things look in every picture and page: colours that colour-blind people tell apart, and hatches for grey print.

The colours are those of Okabe and Ito, "Color Universal Design" (2008), https://jfly.uni-koeln.de/color/.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.analysis.breakdown import Cause

BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#999999"
LIGHT = "#E8E8E8"


@dataclass(frozen=True, slots=True)
class Look:
    """How one thing is drawn; a hatch is one of '' / \\ | - x + ."""

    label: str
    colour: str
    hatch: str = ""


CAUSE_LOOKS = {
    "compute": Look("compute", BLUE),
    "communication": Look("exposed communication", VERMILLION, "/"),
    "bubble": Look("pipeline bubble", YELLOW, "."),
    "host": Look("host", GREY, "\\"),
    "waiting": Look("waiting for slower ranks", PURPLE, "x"),
}
"""parts of an iteration's time: CAUSES of experiment/result.py"""

WORK_LOOKS = {
    Cause.MATMUL: Look("matrix products", BLUE),
    Cause.ATTENTION: Look("attention", SKY, "/"),
    Cause.MEMORY_BOUND: Look("memory-bound kernels", GREEN, "\\"),
    Cause.RECOMPUTE: Look("recomputation", YELLOW, "-"),
    Cause.OPTIMIZER: Look("optimizer", "#666666", "."),
    Cause.EXPOSED_DATA_PARALLEL: Look("data-parallel communication", VERMILLION, "/"),
    Cause.EXPOSED_TENSOR_PARALLEL: Look("tensor-parallel communication", ORANGE, "\\"),
    Cause.EXPOSED_CONTEXT_PARALLEL: Look("context-parallel communication", PURPLE, "|"),
    Cause.EXPOSED_EXPERT_PARALLEL: Look("expert-parallel communication", PURPLE, "x"),
    Cause.EXPOSED_PIPELINE_TRANSFER: Look("pipeline transfers", ORANGE, "-"),
    Cause.EXPOSED_HOST_COPY: Look("copies to and from the host", VERMILLION, "+"),
    Cause.BUBBLE: Look("pipeline bubble", LIGHT, "x"),
    Cause.HOST: Look("host", GREY, "|"),
    Cause.WAITING: Look("waiting for slower ranks", LIGHT, "."),
    Cause.WAITING: Look("waiting for slower GPUs", LIGHT, "."),
}
"""what a stream does, and parts of a step"""

MEMORY_LOOKS = {
    "parameter": Look("parameters", BLUE),
    "optimizer": Look("optimizer state", GREY, "\\"),
    "gradient": Look("gradients", VERMILLION, "/"),
    "unsharded": Look("gathered parameters and gradients", SKY, "|"),
    "activation": Look("activations", GREEN, "."),
    "logits": Look("logits", PURPLE, "x"),
    "temporary": Look("temporary", YELLOW, "-"),
    "communication": Look("communication buffers", ORANGE, "+"),
}
"""categories of memory, from the bottom of a stack: what lives through the step first"""
