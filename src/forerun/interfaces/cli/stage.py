"""`forerun stage`: execution traces of a transformer from STAGE's flags."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.astrasim.stage.first_generation import StageArgs, generate
from forerun.astrasim.stage.first_generation.args import truth
from forerun.astrasim.stage.generated import GeneratedTraces, trace_name, write_traces
from forerun.astrasim.stage.second_generation import SecondStageArgs, generate_second
from forerun.astrasim.stage.second_generation.args import MODEL_TYPES
from forerun.common.errors import ForerunError

SCHEMA = "v0.0.4"
HELP = {
    "output_dir": "folder for the traces; made if it is not there",
    "output_name": "name of the traces: NAME.<rank>.et, or a file name with %d for the rank",
    "comm_group_file": "file for the communicator groups, in the folder; needed by the first generation",
    "dp": "data-parallel degree",
    "tp": "tensor-parallel degree",
    "sp": "sequence-parallel degree",
    "pp": "pipeline-parallel degree",
    "ep": "expert-parallel degree",
    "weight_sharded": "split weights over data-parallel ranks",
    "activation_recompute": "recompute activations in the backward pass",
    "tpsp": "split tokens over tensor-parallel ranks between blocks",
    "din": "width of the model's input",
    "dout": "width of the model's output",
    "dvocal": "size of the vocabulary",
    "dmodel": "width of the model",
    "dff": "width of the feed-forward network",
    "batch": "number of sequences in a step",
    "micro_batch": "number of sequences in a micro batch; -1 for the whole batch",
    "seq": "number of tokens in a sequence",
    "head": "number of attention heads",
    "kvhead": "number of key-value heads",
    "num_stacks": "number of layers",
    "experts": "number of experts in a layer",
    "kexperts": "number of experts for each token",
    "model_type": "kind of model",
    "mixed_precision": "use the tensor sizes of mixed precision; dense models are then Llama-like",
    "print_gpu_vram": "print the memory of each rank",
    "chakra_schema_version": f"version of the trace format: {SCHEMA}",
}
"""one line for each flag"""
_FIRST = {field.name: field for field in fields(StageArgs)}
_SECOND = {field.name: field for field in fields(SecondStageArgs)}
_OF_FIRST = {"comm_group_file", *_FIRST} - set(_SECOND)
_OF_SECOND = {"print_gpu_vram", *_SECOND} - set(_FIRST)
"""flags that only one generation has"""


def stage(**flags: Any) -> None:
    """Generate the Chakra execution traces of a transformer from the flags of STAGE, one file for each rank.

    STAGE has two generations. The flags --comm_group_file, --din and --dout select the first one. The flags --dvocal,
    --kvhead, --experts, --kexperts, --ep, --micro_batch, --tpsp, --model_type, --mixed_precision and
    --print_gpu_vram select the second one, which is also the default.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    version = given.get("chakra_schema_version", SCHEMA)
    if version != SCHEMA:
        raise ForerunError(f"--chakra_schema_version {version}: Forerun writes only {SCHEMA}; leave it out")
    folder, name = Path(given["output_dir"]), given["output_name"]
    if _is_first(given):
        traces: GeneratedTraces = generate(StageArgs(**_values(given, _FIRST)))
        groups = given["comm_group_file"]
    else:
        traces = second = generate_second(SecondStageArgs(**_values(given, _SECOND)))
        if truth(given.get("print_gpu_vram", False), "--print_gpu_vram"):
            print(*second.footprint_lines(), sep="\n")
        # The name that STAGE derives.
        groups = trace_name(name).replace(".%d", "").replace(".et", ".json")
    write_traces(traces, folder, name, groups)
    print(f"{folder}: traces of {len(traces):,} ranks, {len(traces.groups):,} communicator groups in {groups}")


def _is_first(given: Mapping[str, Any]) -> bool:
    first, second = ([f"--{name}" for name in given if name in own] for own in (_OF_FIRST, _OF_SECOND))
    if first and second:
        raise ForerunError(
            f"{', '.join(first)} are of STAGE's first generation, {', '.join(second)} of its second; give those of one"
        )
    if first and "comm_group_file" not in given:
        raise ForerunError(f"{', '.join(first)}: give --comm_group_file too, which STAGE's first generation needs")
    return bool(first)


def _values(given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: truth(value, f"--{name}") if known[name].type == "bool" else value
        for name, value in given.items()
        if name in known
    }


def _option(name: str) -> inspect.Parameter:
    kinds = {**_SECOND, **_FIRST}
    kind = kinds[name].type if name in kinds else "bool" if name == "print_gpu_vram" else "str"
    metavar = {"int": "N", "bool": "true|false"}.get(str(kind), "|".join(MODEL_TYPES) if name == "model_type" else "")
    help_line = HELP[name][0].upper() + HELP[name][1:] + _defaults(name) + "."
    is_required = name in ("output_dir", "output_name")
    annotation: Any = int if kind == "int" else str
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if is_required else None,
        annotation=Annotated[
            annotation if is_required else annotation | None,
            typer.Option(f"--{name}", help=help_line, metavar=metavar or name.split("_")[-1].upper()),
        ],
    )


def _defaults(name: str) -> str:
    own = [f"{known[name].default}".lower() for known in (_FIRST, _SECOND) if name in known]
    return f" (default {', in the second generation '.join(dict.fromkeys(own))})" if own else ""


_options = [_option(name) for name in HELP]
stage.__signature__ = inspect.Signature(_options)  # type: ignore[attr-defined]
stage.__annotations__ = {option.name: option.annotation for option in _options}
