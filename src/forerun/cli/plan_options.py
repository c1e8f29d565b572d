"""Every field of a Plan as an option of a command; `--plan-file` for those that come from a file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from forerun.cluster.files import read_yaml
from forerun.plan.fields import FIELD_TYPES, choices, from_text, is_flag, is_list, plan_fields
from forerun.plan.plan import Plan

Command = TypeVar("Command", bound=Callable[..., None])

HELP = {
    "micro_batch": "sequences of one micro batch",
    "n_microbatches": "micro batches of a data-parallel rank in a step",
    "dp_replicate": "data-parallel replicas; -1 for the rest",
    "dp_shard": "ranks that share one copy of the state; -1 for the rest",
    "cp": "context-parallel degree",
    "tp": "tensor-parallel degree",
    "pp": "pipeline-parallel degree",
    "ep": "expert-parallel degree, carved out of dp_shard x cp",
    "zero_stage": "what dp_shard shards: 0 nothing (DDP), 1 optimizer state, 2 and gradients, 3 and parameters (FSDP)",
    "reshard_after_forward": "free gathered parameters after the forward pass",
    "prefetch": "FSDP units gathered ahead",
    "ddp_bucket_mib": "size of a bucket of replicated gradients; 0: the stack's own",
    "reduce_dtype": "dtype in which gradients are reduced",
    "accumulate_dtype": "dtype of the gradient buffer",
    "overlap_grad_reduce": "reduce gradients while backward runs",
    "sequence_parallel": "split the sequence outside tensor-parallel regions",
    "loss_parallel": "keep the logits split over tp",
    "async_tp": "overlap tensor-parallel collectives with their products",
    "pp_schedule": "pipeline schedule",
    "virtual_stages": "stages of a pipeline rank",
    "layers_per_stage": "layers of each stage in model order, as 8,8,8,6",
    "balance_ends": "count embedding and head as a layer each",
    "cp_method": "how context parallelism exchanges keys and values",
    "expert_imbalance": "tokens of the busiest expert rank over the mean",
    "precision": "dtype of the matrix products",
    "master_dtype": "dtype of the weights that the optimizer updates",
    "fp8_recipe": "scaling of fp8 operands",
    "fp8_all_gather": "gather parameters in fp8",
    "activation_checkpointing": "recompute activations in backward",
    "selective_policy": "what selective checkpointing keeps or recomputes",
    "checkpoint_every": "checkpoint every n-th layer",
    "compile": "torch.compile: fused memory-bound kernels",
    "cuda_graphs": "launch from CUDA graphs",
    "attention": "attention kernel: naive, flash1, flash2, flash3, triton, flex, cudnn, sdpa",
    "optimizer": "optimizer",
    "optimizer_impl": "kernels of the optimizer step",
    "offload": "what lives in host memory between uses",
    "activation_offload": "fraction of saved activations kept in host memory",
    "stack": "software stack (forerun stacks)",
}
"""one line for each field; seq_len is an option of the commands themselves"""
_SEARCHED = (
    *("micro_batch", "dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "zero_stage", "reshard_after_forward"),
    *("pp_schedule", "virtual_stages", "cp_method", "activation_checkpointing", "selective_policy"),
)
"""fields whose default a search does not use"""


def with_plan_options(several: bool) -> Callable[[Command], Command]:
    """Give a command an option for each field of Plan; it receives those given as `fields`, name -> text or flag.

    With `several`, options take a list of values, as --tp 1,2,4.
    """

    def decorate(command: Command) -> Command:
        names = [name for name in HELP if not (several and name == "n_microbatches")]  # follows from the global batch
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "fields"]

        def wrapped(**values: Any) -> None:
            given = {name: values.pop(name) for name in names}
            command(**values, fields={name: value for name, value in given.items() if value is not None})

        parameters = own + [_option(name, several) for name in names]
        wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
        keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        wrapped.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in keyword}
        return wrapped  # type: ignore[return-value]

    return decorate


def parse(fields: Mapping[str, str | bool], plan_file: Path | None, *, several: bool) -> dict[str, Any]:
    """Plan fields of a file and, over them, of options. With `several`, options with commas become lists.

    Raises ForerunError for a file or value that is wrong.
    """
    values = dict(plan_fields(read_yaml(plan_file), str(plan_file))) if plan_file else {}
    for name, given in fields.items():
        if isinstance(given, bool):
            values[name] = given
        elif several and not is_list(name) and "," in given:
            values[name] = [from_text(name, part.strip()) for part in given.split(",")]
        else:
            values[name] = from_text(name, given)
    return values


def _option(name: str, several: bool) -> inspect.Parameter:
    option = "--" + name.replace("_", "-")
    if is_flag(name):
        kind: Any = bool | None
        declaration = typer.Option(f"{option}/--no-{name.replace('_', '-')}", help=_help(name, several))
    else:
        kind = str | None
        metavar = "|".join(map(str, choices(name))) or _metavar(name)
        metavar += ",..." if several and not is_list(name) else ""
        declaration = typer.Option(option, help=_help(name, several), metavar=metavar)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, declaration]
    )


def _help(name: str, several: bool) -> str:
    default = Plan.__dataclass_fields__[name].default
    quiet = default is None or default is False or (several and name in _SEARCHED)
    shown = "" if quiet else f" (default {_plain(default)})"
    return HELP[name][0].upper() + HELP[name][1:] + shown + "."


def _plain(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _metavar(name: str) -> str:
    return {int: "N", float: "X", str: "NAME"}.get(FIELD_TYPES[name], "N,N,...")
