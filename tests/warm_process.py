"""Forks of the tests' process stand for fresh Pythons: torch is imported once, not by every traced process.

A fork leaves out nothing but the start of the interpreter: it has arguments, paths, modules and outputs of its own.
Tests that start the command `forerun` trace in real processes.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from forerun.sources.trace import launch

TESTS = Path(__file__).parent
OF_INSIDE = (
    *("world", "script", "two_functions", "parallelize.module_program", "parallelize.pipeline", "compiled.backend"),
)
OF_TORCH = (
    *("torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.distributed.pipelining"),
    *("torch.distributed.tensor.parallel", "torch.distributed.tensor.experimental._attention"),
)


@cache
def warm() -> None:
    """Imports what traced processes import. Garbage collections of the forks leave that out: to go through it all takes
    a tenth of a second, and the fork then has a copy of every page."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (*(f"forerun.sources.trace.inside.{module}" for module in OF_INSIDE), *OF_TORCH):
            import_module(name)
    gc.collect()
    gc.freeze()


def install(patch: pytest.MonkeyPatch) -> None:
    """Lets scripts run in forks where `launch` starts new Pythons, and warms this process before it forks."""
    own_fork = launch._TracedRanks._fork

    def start_function(self, job, fd, variables, sink):
        warm()
        return own_fork(self, job, fd, variables, sink)

    def start_script(self, job, fd, variables, sink):
        warm()
        path, script = str(job.write()), import_module("forerun.sources.trace.inside.script")
        return launch._Forked(fork(lambda: script.main(path), sink.fileno(), job.variables | variables))

    patch.setattr(launch._TracedRanks, "_fork", start_function)
    patch.setattr(launch._TracedRanks, "_spawn", start_script)


def fork(program: Callable[[], object], output: int, variables: dict[str, str]) -> int:
    """Starts a fork that runs `program()` as the whole of a Python process would, and returns its process id."""
    warm()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        os.environ.update(variables)
        nowhere = os.open(os.devnull, os.O_RDONLY)
        for here, there in ((nowhere, 0), (output, 1), (output, 2)):
            os.dup2(here, there)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(fd, mode, 1) for fd, mode in enumerate(("r", "w", "w")))
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
        _forget_tests()
        multiprocessing.set_start_method(None, force=True)  # a test that started processes has fixed it
        program()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        os._exit(code)


def run_file(program: Path, *arguments: object) -> None:
    """Runs a file as `python program arguments` would, in a fork: its own folder is the first where it imports from."""
    sys.argv = [str(program), *map(str, arguments)]
    sys.path.insert(0, str(program.parent))
    runpy.run_path(str(program), run_name="__main__")


def wait(pid: int, timeout_s: float) -> int:
    """Waits for the fork and returns its exit code; a fork that takes longer than `timeout_s` is ended."""
    process, deadline = launch._Forked(pid), time.monotonic() + timeout_s
    while (code := process.poll()) is None:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return code


def _forget_tests() -> None:
    """Leaves no module of the tests, and none of their folders on the path."""
    sys.path[:] = ["", *[path for path in sys.path if path and not Path(path).is_relative_to(TESTS)]]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).is_relative_to(TESTS) and name != __name__:
            del sys.modules[name]
