"""`--time-limit` and `--memory-limit-process`: the time and the memory that a command may use on its own machine."""

from __future__ import annotations

import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forerun.common.errors import ForerunError
from forerun.common.units import GIB
from forerun.interfaces.cli.numbers import parse_bytes, parse_duration
from forerun.interfaces.cli.option_groups import Command, around
from forerun.interfaces.cli.process import LimitReached
from forerun.interfaces.report.ticking import can_tick, ticking

_LOOK_EVERY_S = 0.2
_AGAIN_AFTER_S = 10.0
"""seconds that a command has for cleaning up before the limit ends it once more"""
_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)
_GOES_ON = {"plan": "--store", "run": "--store", "dse": "--out", "experiment": "--out"}
"""by command, the option with which the same command continues after its finished work"""


@dataclass(frozen=True)
class ProcessLimits:
    """Holds the limits of the time and the memory of this machine that the command may use."""

    time_limit: Annotated[
        str | None, typer.Option(metavar="TIME", help="Stop the command after this time: 90s, 10min, 2h.")
    ] = None
    memory_limit_process: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Stop the command if it uses more memory of this machine than this: 4GiB."),
    ] = None


def limited(command: Command, name: str) -> Command:
    """Gives the command `name` the options of `ProcessLimits`.

    The command raises LimitReached when it passes a limit, and ForerunError for a limit that can't be read or watched.
    """
    return around(command, ProcessLimits, lambda limits: _within(limits, name))


@contextmanager
def _within(limits: ProcessLimits, name: str) -> Iterator[None]:
    checks = list(_checks(limits))
    if not checks:
        yield
        return
    if not can_tick():
        raise ForerunError("--time-limit, --memory-limit-process: this process or system has no free SIGALRM for them")
    more = f"; with {_GOES_ON[name]} the same command goes on from what it had finished" if name in _GOES_ON else ""
    raised_at = -_AGAIN_AFTER_S

    def look() -> None:
        nonlocal raised_at
        reached = next((said for check in checks if (said := check())), None)
        if reached is not None and time.monotonic() >= raised_at + _AGAIN_AFTER_S:
            raised_at = time.monotonic()
            raise LimitReached(reached + more)

    with ticking(look, _LOOK_EVERY_S, _LOOK_EVERY_S):
        yield


def _checks(limits: ProcessLimits) -> Iterator[Callable[[], str | None]]:
    """Yields a function for each limit that says which limit is reached, or None."""
    if limits.time_limit is not None:
        seconds = parse_duration(limits.time_limit, "--time-limit")
        end = time.monotonic() + seconds
        of_time = f"the command took longer than --time-limit {limits.time_limit}"
        yield lambda: of_time if time.monotonic() >= end else None
    if limits.memory_limit_process is not None:
        most = parse_bytes(limits.memory_limit_process)
        of_memory = f"the command used more memory than --memory-limit-process {limits.memory_limit_process}"
        yield lambda: f"{of_memory} ({used / GIB:.2f} GiB)" if (used := used_bytes()) > most else None


def used_bytes() -> int:
    """Returns the memory of this process and of those that it started; pages that several share count once.

    Where the system doesn't tell the memory in use, this is the most that this process used so far.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            return sum(_proportional_bytes(process) for process in _family(os.getpid()))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def _family(process: int) -> Iterator[int]:
    yield process
    for threads in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # a thread or process that has ended
            for child in threads.read_bytes().split():
                yield from _family(int(child))


def _proportional_bytes(process: int) -> int:
    """Returns the resident memory of a process. A page that n processes share counts as 1/n."""
    try:
        found = _PSS.search(Path(f"/proc/{process}/smaps_rollup").read_bytes())
    except OSError:
        if process == os.getpid():
            raise
        return 0  # it has ended
    return int(found.group(1)) << 10 if found else 0
