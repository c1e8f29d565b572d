"""Runs a training script, unmodified, in a traced process: `python -m forerun.sources.trace.inside.script JOB`."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from forerun.sources.trace.inside.start import run
from forerun.sources.trace.job import Job


def main(path: str) -> None:
    """Runs the job in the file at `path` and ends the process."""
    job = Job.read(path)

    def program(_: Any) -> None:
        sys.argv = [job.target, *job.arguments]
        if job.is_module:
            sys.path[0] = os.getcwd()
            runpy.run_module(job.target, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(job.target).resolve().parent)
            runpy.run_path(job.target, run_name="__main__")

    run(job, program)


if __name__ == "__main__":
    main(sys.argv[1])
