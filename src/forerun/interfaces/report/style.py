"""The colours and hatches of every plot, readable for colour-blind people and in greyscale print.

The colours are those of Okabe and Ito, "Color Universal Design" (2008), https://jfly.uni-koeln.de/color/.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """The look of one thing in a drawing; a hatch is one of '' / \\ | - x + ."""

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
    "matmul": Look("matrix products", BLUE),
    "attention": Look("attention", SKY, "/"),
    "memory_bound": Look("memory-bound kernels", GREEN, "\\"),
    "recompute": Look("recomputation", YELLOW, "-"),
    "optimizer": Look("optimizer", "#666666", "."),
    "exposed_data_parallel": Look("data-parallel communication", VERMILLION, "/"),
    "exposed_tensor_parallel": Look("tensor-parallel communication", ORANGE, "\\"),
    "exposed_context_parallel": Look("context-parallel communication", PURPLE, "|"),
    "exposed_expert_parallel": Look("expert-parallel communication", PURPLE, "x"),
    "exposed_pipeline_transfer": Look("pipeline transfers", ORANGE, "-"),
    "exposed_host_copy": Look("copies to and from the host", VERMILLION, "+"),
    "bubble": Look("pipeline bubble", LIGHT, "x"),
    "host": Look("host", GREY, "|"),
    "forward": Look("forward pass", BLUE, "x"),
    "backward": Look("backward pass", GREEN, "."),
    "waiting": Look("waiting for slower GPUs", LIGHT, "."),
}
"""work of a stream (WORK of analysis/timeline_lanes.py), and parts of a step"""

MEMORY_LOOKS = {
    "parameter": Look("parameters", BLUE),
    "optimizer": Look("optimizer state", GREY, "\\"),
    "gradient": Look("gradients", VERMILLION, "/"),
    "unsharded": Look("unsharded parameters and gradients", SKY, "|"),
    "activation": Look("activations", GREEN, "."),
    "logits": Look("logits", PURPLE, "x"),
    "temporary": Look("temporary", YELLOW, "-"),
    "communication": Look("communication buffers", ORANGE, "+"),
    "graph_pool": Look("pools of CUDA graphs", LIGHT, "."),
}
"""categories of memory, from the bottom of a stack: memory that stays through the step comes first"""
