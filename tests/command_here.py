"""The command `forerun` in this process: what it prints is what a process of its own prints, seconds sooner."""

from __future__ import annotations

import io
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from forerun.interfaces.cli.main import run


def run_here(folder: Path | None, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`forerun ARGUMENTS` in `folder`, or where the tests run."""
    words, stdout, stderr = [str(argument) for argument in arguments], io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        if folder is not None:
            patch.chdir(folder)
        code = run(words)
    return subprocess.CompletedProcess(words, code, stdout.getvalue(), stderr.getvalue())
