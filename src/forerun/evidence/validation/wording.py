"""What the words of a measurement table mean in a plan: ordered tables of text pattern -> value, first match wins.

Sources describe software, kernels and checkpointing in prose. The tables name kinds of software and mechanisms,
never a source, a row or a model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from forerun.evidence.validation.rows import Measurement


@dataclass(frozen=True, slots=True)
class StackWords:
    """A software stack and the patterns (regular expressions, case ignored) of the columns that name it."""

    stack: str
    framework: str
    software: str = ""
    notes: str = ""

    def matches(self, row: Measurement) -> bool:
        return says(row.framework, self.framework) and says(row.software, self.software) and says(row.notes, self.notes)


def says(text: str, pattern: str) -> bool:
    """Whether `pattern` occurs in `text`, case ignored; the empty pattern occurs everywhere."""
    return re.search(pattern, text, re.IGNORECASE) is not None


STACKS = (
    StackWords("torchtitan-simple-fsdp", r"torchtitan.*simple_?\s*fsdp"),
    StackWords("simple-fsdp", r"simple_?\s*fsdp"),
    StackWords("composer-torch2.0", r"composer|llm-foundry", software=r"torch (1\.|2\.0\b)"),
    StackWords("composer", r"composer|llm-foundry"),
    StackWords("torchtitan-2024", r"torchtitan|fsdp2", software=r"\b20(23|24)\b"),
    StackWords("torchtitan-0.1", r"torchtitan|fsdp2", software=r"torch 2\.[0-8]\b|\b2025-0[4-7]\b"),
    StackWords("torchtitan-0.2", r"torchtitan|fsdp2", software=r"torch 2\.9\b|\b2025-(08|09|10|11)\b"),
    StackWords("torchtitan", r"torchtitan|fsdp2"),
    StackWords("nanotron", r"nanotron"),
    StackWords("internevo", r"internevo"),
    StackWords("fms-fsdp", r"fsdp1|fms-fsdp|pytorch fsdp|lit-gpt|lightning fsdp|fairscale|metaseq"),
    StackWords("lightning-ddp", r"lightning ddp"),
    StackWords("megatron-kwai", r"megatron.*kwai"),
    StackWords("megatron-deepspeed", r"megatron-deepspeed", software=r"bigscience"),
    StackWords("megatron-lm", r"megatron-deepspeed"),
    StackWords("deepspeed", r"deepspeed"),
    StackWords("nemo", r"nemo|megatron-bridge"),
    StackWords("nemo", r"megatron", notes=r"tp-comm-overlap"),
    StackWords("megatron-core", r"megatron-core|transformer ?engine"),
    StackWords("megatron-core", r"megatron", software=r"transformer ?engine|megatron-core"),
    StackWords("megatron-lm", r"megatron"),
)
NEAREST_STACK = "torchtitan"
"""stands in for software that no table entry names"""

MEGATRON_FAMILY = frozenset({"megatron-lm", "megatron-deepspeed", "megatron-core", "megatron-kwai", "nemo"})
TORCHTITAN = frozenset({"torchtitan", "torchtitan-0.2", "torchtitan-0.1", "torchtitan-2024"})
FSDP_FAMILY = TORCHTITAN | {"composer", "composer-torch2.0", "simple-fsdp", "torchtitan-simple-fsdp", "fms-fsdp"}
"""parameters are sharded between steps even when they stay gathered from forward to backward"""
GATHER_CP_FAMILY = TORCHTITAN
"""context parallelism gathers keys and values at once (`context_parallel_rotate_method = allgather`)"""
HALF_GRADIENT_STACKS = frozenset({"internevo", "deepspeed", "megatron-lm", "megatron-deepspeed"})
"""gradients are reduced in the dtype of the parameters unless a source says otherwise"""

NO_ATTENTION = r"^none"
"""of the attention kernel of a model that has none"""

FP8_RECIPES = (
    (r"tensorwise|fp8-cs|current", "tensorwise"),
    (r"rowwise", "rowwise"),
    (r"delayed|amp_fp8", "delayed"),
    (r"mx|nvfp4", "mx"),
)
FP8_ALL_GATHER = r"\b(fp8|f8|float8) all-?gather"

PRECISIONS = {
    "amp_bf16": "bf16",
    "bf16": "bf16",
    "amp_fp16": "fp16",
    "fp16": "fp16",
    "tf32": "tf32",
    "fp32": "fp32",
    "amp_fp8": "fp8",
    "fp8": "fp8",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}

CHECKPOINTING = (
    (r"separate checkpoint", ("selective", "attention+mlp")),
    (r"checkpoint\(mlp\)", ("selective", "mlp")),
    (r"activation function and norm", ("selective", "mlp-act-norm")),
    (r"attention core|as megatron", ("selective", "attention")),
    (r"selective op|op_list", ("selective", "op")),
    (r"parameter all-gather", ("selective", "params")),
)
"""what is recomputed, as (activation_checkpointing, selective_policy)"""
EVERY_NTH_LAYER = r"every (\d+)\w* (layer|block)"
UNSTATED_FRACTION = r"fraction of (blocks|layers) not stated"

OPTIMIZERS = ((r"sgd", "sgd"), (r"adamw", "adamw"), (r"adam", "adam"))
OPTIMIZER_KERNELS = ((r"foreach", "foreach"), (r"decoupled", "loop"), (r"fused|distributed|apex", "fused"))
"""Composer's DecoupledAdamW updates one tensor after the other; `distributed` is Megatron's, built on apex"""

AUTOCAST = r"^amp_"
"""of a precision whose parameters are fp32: torch.autocast"""
GRAPH_BREAKS = r"checkpoint\("
"""sub-blocks call checkpoint() themselves inside of what is compiled: its hooks end graphs at their borders"""
KEEPS_GATHERED = r"\bac_mode\b"
"""checkpointing is left to the model (simple_fsdp.py: regional_ac is ac_mode == "none"), and this one has none: what is
gathered stays for the backward pass"""
COMPILED_STEP = r"fwd\+bwd"
"""the compiled function goes on to the end of the step"""
BALANCED_ENDS = r"type:transformer\|embedding"
SHORT_LAST_STAGE = r"last stage short"
NO_GRADIENT_OVERLAP = r"\bno\b[^.;]*\bDP\b[^.;]*overlap"
RESHARD = r"reshard_after_forward\s*=\s*(always|never)"
ALL_TO_ALL_CP = r"ulysses|\ba2a\b"
RING_CP = r"ring attention|p2p"
FP32_ACCUMULATION = r"fp32 gradient accumulation"
FP16_GRADIENTS = r"fp16 gradients"


def first_match(table: tuple[tuple[str, str], ...], text: str) -> str | None:
    """The value of the first pattern of `table` that occurs in `text`."""
    return next((value for pattern, value in table if says(text, pattern)), None)


def stack_name(row: Measurement) -> str:
    """The software stack (`forerun stacks`) that a user would pick for the row's framework and software."""
    return next((words.stack for words in STACKS if words.matches(row)), NEAREST_STACK)


def names_a_stack(row: Measurement) -> bool:
    """Whether the row's software is in the table, so that `stack_name` is more than a stand-in."""
    return any(words.matches(row) for words in STACKS)
