"""The console command, run as a user runs it."""

import subprocess

import pytest
from console_command import COMMAND


@pytest.fixture
def forerun(tmp_path):
    """Run `forerun ARGUMENTS` in an empty folder."""

    def run(*arguments, **options):
        return subprocess.run(
            [str(COMMAND), *map(str, arguments)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            **options,
        )

    return run
