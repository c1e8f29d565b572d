"""The command line as a user runs it, in this process; in one of its own where the environment is a test's own."""

import io
import subprocess
from contextlib import redirect_stderr, redirect_stdout

import pytest
from console_command import COMMAND

from forerun.interfaces.cli.main import run


@pytest.fixture
def forerun(tmp_path, monkeypatch):
    """Run `forerun ARGUMENTS` in an empty folder."""

    def command(*arguments, env=None):
        words = [str(argument) for argument in arguments]
        if env is not None:
            whole = [str(COMMAND), *words]
            options = {"cwd": tmp_path, "env": env, "timeout": 600, "capture_output": True, "text": True}
            return subprocess.run(whole, check=False, **options)
        monkeypatch.chdir(tmp_path)
        stdout, stderr = io.StringIO(), io.StringIO()
        with redirect_stdout(stdout), redirect_stderr(stderr):
            code = run(words)
        return subprocess.CompletedProcess(words, code, stdout.getvalue(), stderr.getvalue())

    return command
