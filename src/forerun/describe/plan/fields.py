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
    "micro_batch": "sequences of one micro batch",
    "n_microbatches": "micro batches of a data-parallel rank in a step",
    "document_lengths": "tokens of the documents packed into a sequence, such as 512,1536, repeated until it is full",
    "dp_replicate": "data-parallel replicas; -1 for the rest",
    "dp_shard": "ranks that share one copy of the state; -1 for the rest",
    "cp": "context-parallel degree",
    "tp": "tensor-parallel degree",
    "pp": "pipeline-parallel degree",
    "ep": "expert-parallel degree, carved out of tp x cp x dp_shard",
    "etp": "ranks that split each expert; 1 for whole experts",
    "mesh_order": "axes of the mesh from neighbouring ranks outwards, joined by -",
    "zero_stage": "what dp_shard shards: 0 nothing (DDP), 1 optimizer state, 2 gradients too, 3 parameters too (FSDP)",
    "reshard_after_forward": "free gathered parameters after the forward pass",
    "shard_min_mib": "parameters of fewer MiB stay whole on every rank",
    "prefetch": "FSDP units gathered ahead of compute",
    "ddp_bucket_mib": "size of a bucket of replicated gradients; 0: the stack's own",
    "reduce_dtype": "dtype in which gradients are reduced",
    "accumulate_dtype": "dtype of the buffer that micro batches add their gradients to",
    "overlap_grad_reduce": "reduce gradients while backward runs",
    "sequence_parallel": "split the sequence outside tensor-parallel regions",
    "loss_parallel": "keep the logits split over tp",
    "loss_chunks": "parts of the tokens whose logits are in memory at a time (fused linear cross entropy)",
    "async_tp": "overlap tensor-parallel collectives with their matrix products",
    "pp_schedule": "pipeline schedule",
    "virtual_stages": "pipeline stages of each rank",
    "layers_per_stage": "layers of each stage in model order, such as 8,8,8,6",
    "balance_ends": "count embedding and head as one layer each when spreading layers over stages",
    "cp_method": "how context parallelism exchanges keys and values",
    "cp_load_balance": "a rank's tokens of a causal sequence: head and tail chunks, every cp-th, or consecutive ones",
    "expert_imbalance": "tokens of the busiest expert rank over the mean",
    "expert_routing": "how tokens spread over experts: balanced, uniform, zipf:S, loads:A:B:... of each expert",
    "dispatcher": f"what brings tokens to experts and back: {', '.join(dispatchers())}",
    "expert_overlap": "forward and backward passes side by side, which hide each other's exchanges of tokens",
    "shared_expert_overlap": "shared experts run beside the exchange of tokens",
    "precision": "dtype of the matrix products",
    "autocast": "torch.autocast: weights, norms and residual stream in fp32; matrix products cast their operands",
    "master_dtype": "dtype of the weights that the optimizer updates",
    "fp8_recipe": "scaling of fp8 operands",
    "fp8_all_gather": "gather parameters in fp8",
    "activation_checkpointing": "recompute activations in backward",
    "selective_policy": "what selective checkpointing keeps or recomputes",
    "recompute_modules": "parts of a layer that selective checkpointing recomputes, such as layernorm,moe_act",
    "checkpoint_every": "checkpoint every n-th layer",
    "compile": "torch.compile: fused memory-bound kernels",
    "compile_model": "torch.compile covers the layers, not the loss alone",
    "compile_loss": "torch.compile covers the loss too, where the stack can",
    "graph_breaks": "compiled graphs end at module borders; matrix products and collectives run eagerly",
    "cuda_graphs": "launch from CUDA graphs",
    "attention": f"attention kernel: {', '.join(attention_kernels())}",
    "lora_rank": "rank of low-rank adapters, trained in place of the weights; 0 trains the weights",
    "lora_targets": "linear layers with adapters, such as q_proj,v_proj",
    "frozen_dtype": "how frozen matrices of layers are kept; nf4 is QLoRA's 4 bits",
    "reference": "a frozen reference model scores each micro batch first (DPO, GRPO)",
    "optimizer": "what updates the weights",
    "moment_dtype": "dtype of the optimizer's moments",
    "optimizer_impl": "kernels of the optimizer step",
    "offload": "what is kept in host memory between uses",
    "activation_offload": "fraction of saved activations kept in host memory",
    "stack": "training framework: a name (forerun stacks) or the path of a stack's file",
}
"""one line for each field but seq_len, which commands have as an option of their own"""

_ENTRIES: dict[str, Callable[[], Mapping[str, object]]] = {"optimizer": optimizers}
"""fields whose values are the entries of a data file"""
_KINDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
FOLLOWING = ("seq_len", "n_microbatches")
"""plan fields that follow from the question of a search and the other fields, and can't be fixed"""


def choices(name: str) -> tuple[str | int, ...]:
    """Returns the values that field `name` may take; empty where neither its type nor a data file lists them."""
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
