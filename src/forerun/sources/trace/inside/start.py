"""Starts a traced process: sets up its world, runs the program, and ends the process."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from forerun.common.errors import ForerunError
from forerun.sources.trace.job import Failure, Job
from forerun.sources.trace.remains import ASK


def run(job: Job, program: Callable[[Any], None]) -> None:
    """Runs `program(world)` as rank `job.rank` and ends the process."""
    fault = job.last_place.open("w", encoding="utf-8")
    faulthandler.enable(fault)
    faulthandler.register(ASK, fault, all_threads=False)
    try:
        # These import torch, which may be missing or of a version that lacks what the second one imports.
        import_module("forerun.sources.trace.inside.torch_versions.supported").check_version()
        module = import_module("forerun.sources.trace.inside.world")
        world = module.World(job)
    except ForerunError as error:
        Failure(str(error)).write(job.failure)
    except ImportError as error:
        Failure(f"{error}; tracing needs torch (pip install 'forerun[trace]')").write(job.failure)
    else:
        module.leave(world.run(lambda: program(world)))
    os._exit(1)
