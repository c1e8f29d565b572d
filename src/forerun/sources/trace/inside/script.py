"""Runs a training script, unmodified, in a traced process: `python -m forerun.sources.trace.inside.script JOB`."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forerun.sources.trace.inside.start import run
from forerun.sources.trace.job import Job


def main(path: str) -> None:
    """Runs the job in the file at `path` and ends the process."""
    job = Job.read(path)

    def program(_: Any) -> None:
        run_main(job.target, job.arguments, job.is_module)

    run(job, program)


def run_main(target: str, arguments: Sequence[str], is_module: bool) -> None:
    """Runs a script or a module as `python target arguments` would."""
    sys.argv = [target, *arguments]
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(target).resolve().parent)
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
