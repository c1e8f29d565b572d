"""`--no-code`: refuses experiment files that name Python code."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated

import typer

from forerun.common.errors import ForerunError
from forerun.common.own_code import before_own_code
from forerun.interfaces.cli.option_groups import Command, around


@dataclass(frozen=True)
class CodeOptions:
    """Says whether the command executes Python files that an experiment file names."""

    no_code: Annotated[
        bool,
        typer.Option(
            "--no-code", help="Refuse a file that names Python code; without this option Forerun executes the code."
        ),
    ] = False


def executes_code(command: Command) -> Command:
    """Gives a command the option `--no-code`; without it, the command says on stderr which code it executes."""
    return around(command, CodeOptions, _watched)


def _watched(options: CodeOptions) -> AbstractContextManager[None]:
    said: set[str] = set()

    def ask(what: str) -> None:
        if options.no_code:
            raise ForerunError(f"{what}, and --no-code refuses it; read the code, then leave --no-code out")
        if what not in said:
            said.add(what)
            print(f"warning: {what}, which Forerun executes with your rights; --no-code refuses it", file=sys.stderr)

    return before_own_code(ask)
