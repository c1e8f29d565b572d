"""Shell completion: the words of the line that a shell completes, and the names of presets."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from forerun.describe.cluster.catalog import cluster_names
from forerun.describe.model.catalog import layered_names, model_names
from forerun.describe.plan.fields import choices
from forerun.describe.stacks.catalog import stack_names


def words_to_complete(environment: Mapping[str, str]) -> list[str] | None:
    """Returns the words after `forerun` on the line that a shell completes; None if no shell asks."""
    if "_TYPER_COMPLETE_ARGS" not in environment and "COMP_WORDS" not in environment:
        return None
    line = environment.get("_TYPER_COMPLETE_ARGS") or environment.get("COMP_WORDS", "")
    try:
        return shlex.split(line)[1:]
    except ValueError:  # a quote that is still open
        return line.split()[1:]


def models(incomplete: str) -> list[str]:
    """Returns the model presets that begin with the typed text."""
    return _beginning(incomplete, [*model_names(), *layered_names()])


def clusters(incomplete: str) -> list[str]:
    """Returns the cluster presets that begin with the typed text."""
    return _beginning(incomplete, cluster_names())


def of_field(name: str) -> Callable[[str], list[str]]:
    """Returns the function that completes the option of a plan's field. After a comma it completes the next value."""

    def complete(incomplete: str) -> list[str]:
        known = stack_names() if name == "stack" else [str(each) for each in choices(name)]
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{each}" for each in _beginning(last, known)]

    return complete


def _beginning(incomplete: str, names: list[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))


def asked() -> list[str] | None:
    """Returns `words_to_complete` of this process."""
    return words_to_complete(os.environ)


def names_a_preset(words: list[str], environment: Mapping[str, str]) -> bool:
    """Returns whether the word that is completed is the name of a preset, whatever else the command takes."""
    line = environment.get("_TYPER_COMPLETE_ARGS") or environment.get("COMP_WORDS", "")
    before = words if line.endswith(" ") else words[:-1]
    return before[-1:] in (["--cluster"], ["--stack"]) or (before in (["plan"], ["predict"]) and words[-1][:1] != "-")


def of_presets(
    model: Annotated[str, typer.Argument(autocompletion=models)] = "",
    cluster: Annotated[str, typer.Option(autocompletion=clusters)] = "",
    stack: Annotated[str, typer.Option(autocompletion=of_field("stack"))] = "",
) -> None:
    """Stands for a command where only the name of a preset is completed, so that the command need not be loaded."""


def known_at_once() -> bool:
    """Returns `names_a_preset` of this process."""
    return names_a_preset(asked() or [], os.environ)
