"""Every field of a Plan as an option of a command; `--plan-file` for those that come from a file."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.common.errors import ForerunError
from forerun.common.yaml_files import read_yaml
from forerun.describe.plan.fields import (
    FIELD_TYPES,
    FOLLOWING,
    MEANINGS,
    choices,
    from_text,
    is_flag,
    is_list,
    plan_fields,
)
from forerun.describe.plan.plan import Plan
from forerun.interfaces.cli import completion
from forerun.interfaces.cli.option_groups import Command, grouped, with_parameters

_SEARCHED = (
    *("micro_batch", "dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "zero_stage", "reshard_after_forward"),
    *("pp_schedule", "virtual_stages", "cp_method", "activation_checkpointing", "selective_policy"),
)
"""fields whose default a search does not use"""
VALUES = "_values"
"""end of the name of an option that takes the values of a flag"""
_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "NAME"}


def with_plan_options(several: bool) -> Callable[[Command], Command]:
    """Adds an option for each field of Plan to a command, and the options of its option groups.

    The command receives the given fields as `fields`: name -> text or flag. With `several`, options take a list of
    values, as --tp 1,2,4.
    """

    def decorate(command: Command) -> Command:
        # With several plans, micro batches follow from the global batch.
        names = [name for name in MEANINGS if not (several and name == "n_microbatches")]
        flags = [name for name in names if is_flag(name)] if several else []
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "fields"]

        def wrapped(**values: Any) -> None:
            given = {name: values.pop(name) for name in names}
            given |= {name: listed for name in flags if (listed := values.pop(name + VALUES)) is not None}
            command(**values, fields={name: value for name, value in given.items() if value is not None})

        options = [_option(name, several) for name in names] + [_values_option(name) for name in flags]
        return grouped(with_parameters(wrapped, own + options, command))

    return decorate


def flags_with_values(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments of a command, with each `--flag true,false` renamed to the hidden option for the flag's
    values."""
    flags = {"--" + name.replace("_", "-") for name in MEANINGS if is_flag(name)}
    out = list(arguments)
    for place, (option, value) in enumerate(pairwise(arguments)):
        if option in flags and set(value.split(",")) <= {"true", "false"}:
            out[place] = option + VALUES.replace("_", "-")
    return out


def parse(fields: Mapping[str, str | bool], plan_file: Path | None, *, several: bool) -> dict[str, Any]:
    """Returns the plan fields of a file, overridden by options. With `several`, options with commas become lists.

    Raises ForerunError for a file or value that is wrong.
    """
    values = dict(plan_fields(read_yaml(plan_file), str(plan_file))) if plan_file else {}
    for name, given in fields.items():
        if isinstance(given, bool):
            values[name] = given
        elif is_flag(name):
            chosen = [part == "true" for part in given.split(",")]
            values[name] = chosen[0] if len(chosen) == 1 else chosen
        elif several and not is_list(name) and "," in given:
            values[name] = [from_text(name, part.strip()) for part in given.split(",")]
        else:
            values[name] = from_text(name, given)
    return values


def plan_asked_about(text: str, seq_len: int) -> dict[str, Any]:
    """Returns the plan fields of --why: `tp=16,pp=3`, or the YAML file of a plan.

    What follows from a search's question is left out. Raises ForerunError for a field or value that is wrong, and for
    sequences of another length than `seq_len`.
    """
    if "=" in text:
        parts = [part.partition("=") for part in re.split(r",(?=\s*[\w-]+\s*=)", text)]
        given = {name.strip().replace("-", "_"): value.strip() for name, _, value in parts}
        unknown = next((name for name in given if name not in FIELD_TYPES), None)
        if unknown is not None:
            raise ForerunError(f"--why {text}: a plan has no field {unknown!r}; it has: {', '.join(FIELD_TYPES)}")
        values = {name: from_text(name, value) for name, value in given.items()}
    else:
        values = dict(plan_fields(read_yaml(Path(text)), text))
    if values.get("seq_len", seq_len) != seq_len:
        raise ForerunError(f"--why {text}: seq_len is {values['seq_len']}, not the search's {seq_len}; leave it out")
    asked = {name: value for name, value in values.items() if name not in FOLLOWING}
    if not asked:
        raise ForerunError(f"--why {text}: expected fields of a plan, such as tp=16,pp=3")
    return asked


def _option(name: str, several: bool) -> inspect.Parameter:
    option = "--" + name.replace("_", "-")
    if is_flag(name):
        kind: Any = bool | None
        declaration = typer.Option(f"{option}/--no-{name.replace('_', '-')}", help=_help(name, several))
    else:
        kind = str | None
        metavar = "|".join(map(str, choices(name))) or _METAVARS.get(FIELD_TYPES[name], "N,N,...")
        metavar += ",..." if several and not is_list(name) else ""
        declaration = typer.Option(
            option, help=_help(name, several), metavar=metavar, autocompletion=completion.of_field(name)
        )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, declaration]
    )


def _values_option(name: str) -> inspect.Parameter:
    """Returns the hidden option that `flags_with_values` names."""
    option = typer.Option("--" + (name + VALUES).replace("_", "-"), hidden=True)
    return inspect.Parameter(
        name + VALUES, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
    )


def _help(name: str, several: bool) -> str:
    default = Plan.__dataclass_fields__[name].default
    quiet = default is None or default is False or default == () or (several and name in _SEARCHED)
    shown = "" if quiet else f" (default {_plain(default)})"
    return MEANINGS[name][0].upper() + MEANINGS[name][1:] + shown + "."


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
