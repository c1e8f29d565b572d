"""Maps the words of a measurement table to plan values: ordered tables of pattern -> value; the first match wins.

Sources describe software, kernels and checkpointing in prose. The patterns match kinds of software and mechanisms,
never a source, a row or a model.
"""

from __future__ import annotations

import re

from forerun.describe.stacks.catalog import generations, named_by
from forerun.evidence.validation.rows import Measurement


def says(text: str, pattern: str) -> bool:
    """Returns whether `pattern` occurs in `text`, in any case; the empty pattern occurs everywhere."""
    return re.search(pattern, text, re.IGNORECASE) is not None


NO_ATTENTION = r"^none"
"""attention kernel of a model that has no attention"""

FP8_RECIPES = (
    (r"block-?wise|\bblocks?\b|1x128|128x128", "block"),
    (r"tensorwise|fp8-cs|current", "tensorwise"),
    (r"rowwise", "rowwise"),
    (r"delayed|amp_fp8", "delayed"),
    (r"mx|nvfp4", "mx"),
)
FP8_ALL_GATHER = r"\b(fp8|f8|float8) all-?gather"

PRECISIONS = {
    "amp_bf16": "bf16",
    "bf16": "bf16",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
    "bfloat16": "bf16",
    "amp_fp16": "fp16",
    "fp16": "fp16",
    "float16": "fp16",
    "16-mixed": "fp16",
    "tf32": "tf32",
    "fp32": "fp32",
    "float32": "fp32",
    "amp_fp8": "fp8",
    "fp8": "fp8",
    "float8": "fp8",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
"""words of tables and of Lightning (`bf16-mixed`) -> Plan.precision"""

SCHEDULES = (
    (r"gpipe|\bafab\b|all[- ]forward[- ]all[- ]backward", "GPipe"),
    (r"dual-?_? ?pipe-?_? ?v\b", "DualPipeV"),
    (r"dual-?_? ?pipe\b", "DualPipe"),
    (r"\bzb-?v\b|zbv", "ZBV"),
    (r"\bzb-?(h?1|h1p|1p)\b|zero[- ]?bubble", "ZB1P"),
    (r"interleaved", "Interleaved1F1B"),
    (r"1f1b", "1F1B"),
)
"""words -> Plan.pp_schedule"""

CHECKPOINTING = (
    (r"separate checkpoint", ("selective", "attention+mlp")),
    (r"checkpoint\(mlp\)", ("selective", "mlp")),
    (r"activation function and norm", ("selective", "mlp-act-norm")),
    (r"attention core|as megatron", ("selective", "attention")),
    (r"selective op|op_list", ("selective", "op")),
    (r"parameter all-gather", ("selective", "params")),
)
"""words -> (activation_checkpointing, selective_policy)"""
EVERY_NTH_LAYER = r"every (\d+)\w* (layer|block)"
UNSTATED_FRACTION = r"fraction of (blocks|layers) not stated"

OPTIMIZERS = (
    (r"\bmuon", "muon"),
    (r"\bshampoo", "shampoo"),
    (r"\bsoap\b", "soap"),
    (r"adafactor", "adafactor"),
    (r"adam.*\b8[- ]?bit|\b8[- ]?bit.*adam|adamw?8bit", "adamw8bit"),
    (r"sgd", "sgd"),
    (r"adamw", "adamw"),
    (r"adam", "adam"),
)
OPTIMIZER_KERNELS = ((r"foreach", "foreach"), (r"decoupled", "loop"), (r"fused|distributed|apex", "fused"))
"""Composer's DecoupledAdamW updates one tensor after the other; `distributed` is Megatron's, which uses apex"""

LOSS_ALONE = r"\(loss only\)"
"""only the loss is compiled, which is a small part of the gain of a compiler"""
CHUNKED_LOSS = r"chunked cross[- ]entropy"
NARROW_STATE = r"\bno fp32 master|\b(pure|full) bf16\b"
"""the optimizer updates weights of 2 bytes, and its states have their dtype"""
GRAPH_BREAKS = r"checkpoint\("
"""sub-blocks call checkpoint() inside the compiled model; its hooks break the graph at their borders"""
KEEPS_GATHERED = r"\bac_mode\b"
"""the model decides on checkpointing (simple_fsdp.py: regional_ac is ac_mode == "none") and has none, so that gathered
parameters stay for the backward pass"""
COMPILED_STEP = r"fwd\+bwd"
"""the compiled function reaches to the end of the step"""
BALANCED_ENDS = r"type:transformer\|embedding"
SHORT_LAST_STAGE = r"last stage short"
ATTENTION_DROPOUT, HIDDEN_DROPOUT = r"dropout [0-9.]+ on attention\b", r"dropout [0-9.]+ on [^.;]*\bhidden"
NO_GRADIENT_OVERLAP = r"\bno\b[^.;]*\bDP\b[^.;]*overlap"
RESHARD = r"reshard_after_forward\s*=\s*(always|never)"
CP_METHODS = ((r"ulysses|\ba2a\b", "ulysses"), (r"ring attention|p2p", "ring"))
DISPATCHERS = ((r"hybrid-?ep\b", "hybridep"), (r"deep-?ep\b", "deepep"), (r"all-?to-?all dispatcher", "alltoall"))
"""words -> the dispatcher that brings tokens to their experts"""
EXPERT_OVERLAP = r"expert communication overlapped"
RECOMPUTED = r"recompute_modules ((?:core_attn|layernorm|mla_up_proj|moe_act|mlp|moe|shared_experts)\b(?:, ?|))+"
"""modules that Megatron-Core recomputes"""
LORA = r"(?<!\bno )(?<!\bwithout )\bq?lora\b"
QLORA = r"\bqlora\b|\bnf4\b"
LORA_RANK = r"\blora\b[^.;]*?\b(?:rank|r)\s*=?\s*(\d+)|\brank[- ](\d+)[^.;]*\blora\b"
"""the number of the rank near the word LoRA"""
ACCUMULATION = ((r"fp32 gradient accumulation", "fp32"), (r"fp16 gradients", "fp16"))
"""words -> dtype of the buffer that sums the gradients of micro batches"""


def first_match(table: tuple[tuple[str, str], ...], text: str) -> str | None:
    """Returns the value of the first pattern of `table` that occurs in `text`."""
    return next((value for pattern, value in table if says(text, pattern)), None)


DATED = r"\b20\d\d\b|\d+\.\d+"
"""a year or a version in the words for software"""


def named_stack(row: Measurement) -> str | None:
    """Returns the stack that the row's framework, software and notes name; None if they name none.

    Of a framework that changed, a row without a version or a date is taken as the middle one of its generations, which
    is the least wrong on average.
    """
    found = named_by({"framework": row.framework, "software": row.software, "notes": row.notes})
    known = undated(row, found)
    return known[len(known) // 2] if known else found


def undated(row: Measurement, stack: str | None) -> tuple[str, ...]:
    """Returns the generations of `stack` between which the row's words for software do not tell; () where they do."""
    if stack is None or says(row.software, DATED):
        return ()
    known = generations(stack)
    return known if len(known) > 1 else ()
