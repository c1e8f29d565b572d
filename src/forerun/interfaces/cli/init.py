"""`forerun init`: four questions, and a YAML file to start from."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forerun.common.errors import ForerunError
from forerun.common.files import whole_file
from forerun.interfaces.cli import completion
from forerun.interfaces.cli.option_groups import grouped
from forerun.interfaces.cli.output_option import check_output
from forerun.interfaces.starts import GOALS, Question, start_of

_DEFAULTS = {"model": "llama-3.1-8b", "cluster": "h100-sxm", "gpus": "64", "goal": "plan"}
_GOALS = "; ".join(f"{name}: {words}" for name, words in GOALS.items())


@dataclass(frozen=True)
class Answers:
    """Holds the four answers. The command asks for a missing one, or takes its default if nobody can answer."""

    model: Annotated[
        str | None,
        typer.Option(
            help="Model: a preset (forerun models lists them) or a config.json.", autocompletion=completion.models
        ),
    ] = None
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Cluster: a preset (forerun clusters lists them) or a YAML file.", autocompletion=completion.clusters
        ),
    ] = None
    gpus: Annotated[int | None, typer.Option(min=1, help="Number of GPUs.")] = None
    goal: Annotated[
        str | None, typer.Option(metavar="|".join(GOALS), help=f"Question that the file answers. {_GOALS}.")
    ] = None


@grouped
def init(
    answers: Answers,
    path: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.", callback=check_output)] = Path(
        "forerun.yaml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Ask for a model, a cluster, GPUs and a goal, and write a YAML file that answers the question with one command."""
    if path.exists() and not force:
        raise ForerunError(f"{path}: the file exists already; replace it with --force, or give another name")
    asks = sys.stdin.isatty()
    if asks and answers.goal is None:
        for name, words in GOALS.items():
            print(f"  {name:8} {words}")
    said = {name: _answer(name, getattr(answers, name), asks) for name in _DEFAULTS}
    if not said["gpus"].isdecimal():
        raise ForerunError(f"GPUs: expected a whole number, got {said['gpus']!r}")
    start = start_of(Question(said["model"], said["cluster"], int(said["gpus"]), said["goal"]))
    with whole_file(path) as file:
        file.write(start.text.encode())
    print(f"{path} is written. Next:\n  {start.command.replace('FILE', str(path))}")


def _answer(name: str, given: object, asks: bool) -> str:
    if given is not None:
        return str(given)
    return str(typer.prompt(name, default=_DEFAULTS[name])) if asks else _DEFAULTS[name]
