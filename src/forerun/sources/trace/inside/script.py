"""Runs a training script, unmodified, in a traced process: `python -m forerun.sources.trace.inside.script JOB`."""

from __future__ import annotations

import faulthandler
import os
import runpy
import sys
from importlib import import_module
from pathlib import Path

from forerun.common.errors import ForerunError
from forerun.sources.trace.job import Failure, Job
from forerun.sources.trace.remains import ASK


def main(path: str) -> None:
    """Runs the job in the file at `path` and ends the process."""
    job = Job.read(path)
    fault = job.last_place.open("w", encoding="utf-8")
    faulthandler.enable(fault)
    faulthandler.register(ASK, fault, all_threads=False)
    try:
        # this imports torch, which may be missing or of another version
        module = import_module("forerun.sources.trace.inside.world")
        world = module.World(job)
    except ForerunError as error:
        Failure(str(error)).write(job.failure)
        raise SystemExit(1) from None
    except ImportError as error:
        Failure(f"{error}; tracing needs torch (pip install 'forerun[trace]')").write(job.failure)
        raise SystemExit(1) from None
    sys.argv = [job.target, *job.arguments]
    sys.path[0] = os.getcwd() if job.is_module else str(Path(job.target).resolve().parent)

    def program() -> None:
        if job.is_module:
            runpy.run_module(job.target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(job.target, run_name="__main__")

    module.leave(world.run(program))


if __name__ == "__main__":
    main(sys.argv[1])
