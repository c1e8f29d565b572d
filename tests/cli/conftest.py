"""The console command, run as a user runs it."""

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).with_name("forerun")


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
