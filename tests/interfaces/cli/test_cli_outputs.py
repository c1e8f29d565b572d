"""What every command does with the files that it is to write, and its exit codes."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as Hand

import pytest
import typer
from command_here import run_here
from typer.models import ArgumentInfo

from forerun.interfaces.cli import exit_codes
from forerun.interfaces.cli.main import COMMANDS, _load

DOCS = Path(__file__).parents[3] / "docs/cli.md"
NAMES_A_FILE = re.compile(r"(Write|Keep) .*|The file to write\.")


def outputs() -> Iterator[tuple[str, ...]]:
    """The words of each command, and the option for a file that it writes; none for an argument."""
    for name in COMMANDS:
        command = _load(name)
        parts = command.registered_commands if isinstance(command, typer.Typer) else [Hand(name=None, callback=command)]
        for part in parts:
            words = (name,) if part.name is None and len(parts) == 1 else (name, part.name or part.callback.__name__)
            for one in inspect.signature(part.callback, eval_str=True).parameters.values():
                kind, *found = typing.get_args(one.annotation) or (None,)
                for about in found if kind in (Path, Path | None) else ():
                    if about.metavar not in ("FOLDER", "DIR") and NAMES_A_FILE.fullmatch(about.help or ""):
                        flag = (about.param_decls or [f"--{one.name.replace('_', '-')}"])[:1]
                        yield (*words, *(() if isinstance(about, ArgumentInfo) else flag))


OUTPUTS = [*outputs(), ("trace", "train.py", "-o")]


@pytest.mark.parametrize("words", OUTPUTS, ids=" ".join)
def test_a_file_that_can_not_be_written_is_told_before_any_work(words, tmp_path):
    for path, why in (("gone/file", "there is no folder gone; make it"), (".", "it is a folder")):
        done = run_here(tmp_path, *words, path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"error: {path}: can't be written: {why}\n"
        assert list(tmp_path.iterdir()) == []


def test_exit_codes_are_those_of_the_documentation():
    """Scripts of users rely on them."""
    codes = {value for name, value in vars(exit_codes).items() if name.isupper()}
    assert codes == {1, 2, 3, 4, 5, 70, 130}
    assert {
        int(code) for code in re.findall(r"^\| (\d+) \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    } == codes | {0}
