"""The command line as a user runs it, in this process; in one of its own where the environment is a test's own."""

import subprocess

import pytest
from command_here import run_here
from console_command import COMMAND


@pytest.fixture
def forerun(tmp_path):
    """Run `forerun ARGUMENTS` in an empty folder."""

    def command(*arguments, env=None):
        if env is not None:
            whole = [str(COMMAND), *map(str, arguments)]
            options = {"cwd": tmp_path, "env": env, "timeout": 600, "capture_output": True, "text": True}
            return subprocess.run(whole, check=False, **options)
        return run_here(tmp_path, *arguments)

    return command
