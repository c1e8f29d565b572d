"""Reads and checks the fields of a Plan from text and from files; reports each mistake in one line."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import fields as dataclass_fields
from functools import cache
from itertools import chain
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pydantic

from forerun.common.errors import ForerunError
from forerun.describe.kernels.attention import attention_kernels
from forerun.describe.kernels.dispatchers import dispatchers
from forerun.describe.kernels.optimizers import optimizers
from forerun.describe.plan.plan import Plan

FIELD_TYPES: dict[str, Any] = {name: hint for name, hint in get_type_hints(Plan).items() if name != "return"}
FIELD_TYPES = {field.name: FIELD_TYPES[field.name] for field in dataclass_fields(Plan)}
"""type of each field of Plan, in order"""

MEANINGS = {
    "micro_batch": "number of sequences in a micro batch",
    "n_microbatches": "number of micro batches that each data-parallel rank runs in a step",
    "document_lengths": (
        "tokens of each document in a packed sequence, such as 512,1536; the list repeats until it is full"
    ),
    "dp_replicate": "number of data-parallel replicas; -1 uses all remaining GPUs",
    "dp_shard": "number of ranks that shard one copy of the model state; -1 uses all remaining GPUs",
    "cp": "context-parallel degree",
    "tp": "tensor-parallel degree",
    "pp": "pipeline-parallel degree",
    "ep": "expert-parallel degree; its ranks are part of tp x cp x dp_shard",
    "etp": "number of ranks that split each expert (expert tensor parallelism); 1 keeps experts whole",
    "mesh_order": "order of the mesh axes, from neighbouring ranks outwards, joined by -",
    "zero_stage": (
        "what dp_shard shards: 0 nothing (DDP), 1 optimizer state, 2 also gradients, 3 also parameters (FSDP)"
    ),
    "reshard_after_forward": "free unsharded parameters after the forward pass (FSDP); default does so unless pp > 1",
    "shard_min_mib": "size in MiB below which a parameter is not sharded",
    "prefetch": "number of units that FSDP gathers ahead of compute; 0 turns prefetching off",
    "ddp_bucket_mib": "size in MiB of the buckets in which replicated gradients are reduced; 0 uses the stack's size",
    "reduce_dtype": "dtype in which gradients are reduced over ranks; auto uses the stack's dtype",
    "accumulate_dtype": "dtype of the buffer that accumulates gradients of micro batches; auto uses the stack's dtype",
    "overlap_grad_reduce": "reduce gradients while the backward pass still runs",
    "sequence_parallel": "split the sequence over tp outside of tensor-parallel regions",
    "loss_parallel": "compute the loss on logits that stay split over tp",
    "loss_chunks": (
        "number of chunks in which head and loss run; only one chunk's logits are in memory (fused linear"
        " cross entropy)"
    ),
    "async_tp": "overlap tensor-parallel collectives with their matrix products",
    "pp_schedule": "pipeline schedule",
    "virtual_stages": "number of pipeline stages on each rank",
    "layers_per_stage": "number of layers in each stage, in model order, such as 8,8,8,6",
    "balance_ends": "count the embedding and the head as one layer each when layers are assigned to stages",
    "cp_method": "how context-parallel ranks exchange keys and values",
    "cp_load_balance": (
        "tokens of a context-parallel rank: a chunk from each end (head_tail), every cp-th (striped),"
        " consecutive (none)"
    ),
    "expert_imbalance": "tokens of the busiest expert-parallel rank divided by the mean of all ranks",
    "expert_routing": (
        "distribution of tokens over experts: balanced, uniform (random), zipf:S (exponent S), or"
        " loads:A:B:... (measured)"
    ),
    "dispatcher": f"implementation that sends tokens to experts and back: {', '.join(dispatchers())}",
    "expert_overlap": "run a micro batch's forward pass beside another's backward pass to hide the exchange of tokens",
    "shared_expert_overlap": "run the shared experts while tokens travel to the routed ones",
    "precision": "dtype of the matrix products",
    "autocast": (
        "use torch.autocast: weights, norms and residual stream stay in fp32; matrix products cast their operands"
    ),
    "master_dtype": "dtype of the weights that the optimizer updates",
    "fp8_recipe": "how the operands of fp8 matrix products are scaled",
    "fp8_all_gather": "gather parameters in fp8 (FSDP)",
    "activation_checkpointing": "how much of each layer is recomputed in the backward pass",
    "selective_policy": "which operations selective checkpointing keeps or recomputes",
    "recompute_modules": "modules that selective checkpointing recomputes, such as layernorm,moe_act",
    "checkpoint_every": "apply activation checkpointing to every n-th layer",
    "compile": "use torch.compile, which fuses memory-bound kernels",
    "compile_model": "apply torch.compile to the layers; off compiles the loss alone",
    "compile_loss": "apply torch.compile to the loss too, if the stack supports it",
    "graph_breaks": "end compiled graphs at module borders; matrix products and collectives then run eagerly",
    "cuda_graphs": "launch kernels through CUDA graphs",
    "attention": f"attention kernel: {', '.join(attention_kernels())}",
    "lora_rank": "rank of the low-rank adapters (LoRA) that are trained instead of the weights; 0 trains the weights",
    "lora_targets": "linear layers that get adapters, such as q_proj,v_proj",
    "frozen_dtype": "format of frozen weight matrices: wide (dtype of the activations) or nf4 (4 bits, as in QLoRA)",
    "reference": "run a frozen reference model on each micro batch first (DPO, GRPO)",
    "optimizer": "optimizer that updates the weights",
    "moment_dtype": "dtype of the optimizer's moments",
    "optimizer_impl": "implementation of the optimizer step",
    "offload": "which state is kept in host memory between uses",
    "activation_offload": "fraction of the saved activations that waits in host memory for the backward pass",
    "stack": "training framework: a name that forerun stacks lists, or the path of your own stack file",
}
"""one line for each field but seq_len, which commands have as an option of their own"""

_ENTRIES: dict[str, Callable[[], Mapping[str, object]]] = {"optimizer": optimizers}
"""fields whose values are the entries of a data file"""
_KINDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
FOLLOWING = ("seq_len", "n_microbatches")
"""plan fields that follow from the question of a search and the other fields, and can't be fixed"""


def choices(name: str) -> tuple[str | int, ...]:
    """Returns the values that field `name` may take. The result is empty if neither its type nor a data file lists
    them.
    """
    if name in _ENTRIES:
        return tuple(_ENTRIES[name]())
    hint = FIELD_TYPES[name]
    parts = _alternatives(hint)
    return tuple(chain(*map(get_args, parts))) if all(get_origin(part) is Literal for part in parts) else ()


def is_flag(name: str) -> bool:
    """Says whether field `name` is true or false."""
    return bool in _alternatives(FIELD_TYPES[name])


def is_list(name: str) -> bool:
    """Says whether field `name` holds several values."""
    return _element(name) is not None


def _element(name: str) -> Any:
    """Returns the type of the values that field `name` holds several of; None for other fields."""
    return next((get_args(part)[0] for part in _alternatives(FIELD_TYPES[name]) if get_origin(part) is tuple), None)


def from_text(name: str, text: str) -> object:
    """Returns the value of field `name` that a person wrote as `text`. Raises ForerunError for text of another type."""
    place, options = f"--{name.replace('_', '-')}", choices(name)
    if options:
        value = next((option for option in options if str(option).lower() == text.lower()), text)
        return checked(name, value, place)
    if is_list(name):
        parts = [part.strip() for part in text.split(",")]
        if _element(name) is int:
            return tuple(_parsed(int, part, place) for part in parts)
        return checked(name, parts, place)
    return _parsed(bool if is_flag(name) else FIELD_TYPES[name], text, place)


def checked(name: str, value: object, place: str) -> object:
    """Returns `value` if field `name` can hold it; a list becomes a tuple, a whole number becomes a float if need be.

    Raises ForerunError, which starts with `place`.
    """
    try:
        if isinstance(value, bool) and not is_flag(name):  # pydantic takes True for the 1 of a Literal
            raise ValueError
        if name in _ENTRIES and value not in list(_ENTRIES[name]()):
            raise ValueError
        return _adapter(FIELD_TYPES[name]).validate_python(tuple(value) if isinstance(value, list) else value)
    except ValueError:
        raise ForerunError(f"{place}: expected {_expected(name)}, got {value!r}") from None


def plan_fields(values: Mapping[str, object], place: str) -> dict[str, object]:
    """Returns the checked Plan fields of a mapping read from `place`. Raises ForerunError for a wrong key or value."""
    for key in values:
        if key not in FIELD_TYPES:
            close = difflib.get_close_matches(str(key), FIELD_TYPES, 1)
            hint = f"; did you mean {close[0]}?" if close else f"; known: {', '.join(FIELD_TYPES)}"
            raise ForerunError(f"{place}: unknown key {key!r}{hint}")
    return {name: checked(name, value, f"{place}: {name}") for name, value in values.items()}


@cache
def _adapter(hint: Any) -> pydantic.TypeAdapter[object]:
    return pydantic.TypeAdapter(hint, config=pydantic.ConfigDict(strict=True))


def _parsed(kind: Any, text: str, place: str) -> object:
    try:
        return _adapter(kind).validate_strings(text)
    except ValueError:
        raise ForerunError(f"{place}: expected {_KINDS[kind]}, got {text!r}") from None


def _expected(name: str) -> str:
    if options := choices(name):
        return f"one of {', '.join(map(str, options))}"
    if is_list(name):
        words = get_args(_element(name))
        return f"a list of {', '.join(words)}" if words else "a list of whole numbers"
    return _KINDS[bool if is_flag(name) else FIELD_TYPES[name]]


def _alternatives(hint: object) -> tuple[object, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
