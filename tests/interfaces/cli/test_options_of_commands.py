"""Names, kinds, bounds and defaults of the options of every command are what `options.txt` holds, and which default the
help says where the command finds it.

Scripts of users rely on them. Where one changes on purpose, `python tests/interfaces/cli/test_options_of_commands.py`
writes the file anew: read the difference before you commit it, and say it in CHANGELOG.md.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.models import ArgumentInfo, OptionInfo

from forerun.describe.plan.fields import MEANINGS
from forerun.interfaces.cli.main import COMMANDS, _load

FILE = Path(__file__).with_name("options.txt")
OF_PLANS = {name.replace("_", "-") for name in MEANINGS}


def lines(name: str) -> Iterator[str]:
    """A line for each option and argument; fields of a plan are left out, which are options by their own rule."""
    command = _load(name)
    if not isinstance(command, typer.Typer):
        yield from lines_of(name, command)
        return
    for part in command.registered_commands:
        assert part.callback is not None
        yield from lines_of(f"{name} {part.name or part.callback.__name__}", part.callback)


def lines_of(name: str, command: Callable[..., Any]) -> Iterator[str]:
    for one in inspect.signature(command, eval_str=True).parameters.values():
        kind, *info = typing.get_args(one.annotation) if hasattr(one.annotation, "__metadata__") else (one.annotation,)
        about: Any = next((each for each in info if isinstance(each, (OptionInfo, ArgumentInfo))), None)
        if about is None or one.name.replace("_", "-") in OF_PLANS:
            continue
        flags = "/".join(about.param_decls or ()) or f"--{one.name.replace('_', '-')}"
        words = [name, one.name if isinstance(about, ArgumentInfo) else flags, words_of(kind)]
        if about.min is not None or about.max is not None:
            words.append(f"from {about.min} to {about.max}")
        words.append(
            "required" if one.default is one.empty else f"default {getattr(one.default, 'value', one.default)!r}"
        )
        words += re.findall(r"\(default:? .*?\)", about.help or "")
        yield "  ".join(words)


def words_of(kind: Any) -> str:
    """A type in words, the choices of an enumeration among them."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(str(each.value) for each in kind)
    parts = [words_of(part) for part in typing.get_args(kind)]
    return f"{kind.__name__}" if isinstance(kind, type) and not parts else " or ".join(parts) or str(kind)


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_those_that_are_written_down(name: str) -> None:
    written = [line for line in FILE.read_text(encoding="utf-8").splitlines() if line.split()[0] == name]
    assert list(lines(name)) == written


if __name__ == "__main__":
    FILE.write_text("".join(f"{line}\n" for name in COMMANDS for line in lines(name)), encoding="utf-8")
