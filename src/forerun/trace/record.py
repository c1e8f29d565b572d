"""record: a job in, a Program out."""

from __future__ import annotations

import time
from pathlib import Path

from forerun.program.storage import save
from forerun.program.types import Program
from forerun.trace.job import Job
from forerun.trace.launch import Limits, record_script
from forerun.trace.to_program import to_program


def trace_job(job: Job, limits: Limits, show_output: bool = False) -> tuple[Program, float]:
    """The Program of a script's step, and the seconds that it took to make it.

    Raises:
        ForerunError: the script is not there or failed, or its step can't be told.
    """
    start = time.perf_counter()
    program = to_program(record_script(job, limits, show_output))
    return program, time.perf_counter() - start


def write_program(program: Program, path: Path) -> None:
    """Save `program`, in a folder that is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save(program, path)
