"""Runs traced processes, one for each recorded rank, within limits, and reads their recordings.

The caller's own torch is never touched: programs run in processes of their own, which may fail, abort, hang or use too
much memory, and each of these ends as one error.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from forerun.common.errors import ForerunError
from forerun.common.units import GIB
from forerun.sources.trace.coordinator import Coordinator
from forerun.sources.trace.guardian import guarded
from forerun.sources.trace.inside.start import run
from forerun.sources.trace.job import Failure, Job
from forerun.sources.trace.recording import Recording, load_recording
from forerun.sources.trace.remains import MARK, ask_place, end_all, last_words, place, resident_bytes

_POLL_S = 0.02
_MOST_PRINTED_BYTES = 1 << 30


@dataclass(frozen=True)
class Limits:
    """The resources that traced processes may use."""

    time_s: float = 900.0
    memory_gib: float = 16.0
    """The resident memory of one process."""


@dataclass
class _Process:
    job: Job
    popen: subprocess.Popen[bytes] | _Forked
    output: Path


def record_script(job: Job, limits: Limits, show_output: bool = False) -> list[Recording]:
    """Returns the recordings of `job` and of every rank that it exchanges messages with, in order of rank.

    `job.folder` is ignored: recordings pass through a temporary folder.

    Raises:
        ForerunError: a process failed; the message names the operation and the source line.
    """
    if not job.is_module and not Path(job.target).is_file():
        raise ForerunError(f"{job.target}: no such script; give its path, or --module with a module's name")
    return _record(job, limits, show_output)


def record_call(job: Job, program: Callable[[Any], None], limits: Limits) -> list[Recording]:
    """Does the same as `record_script` for a function of the caller: `program(world)` runs in forked processes.

    Raises:
        ForerunError: a process failed, or this system can't fork.
    """
    if not hasattr(os, "fork"):
        raise ForerunError(
            "trace: a function can't be traced, as this system can't fork; trace a script (forerun trace)"
        )
    return _record(job, limits, False, program)


def _record(
    job: Job, limits: Limits, show_output: bool, program: Callable[[Any], None] | None = None
) -> list[Recording]:
    with tempfile.TemporaryDirectory(prefix="forerun-trace-") as folder, guarded(folder) as pipe:
        ranks = _TracedRanks(replace(job, folder=folder), limits, show_output, program, pipe)
        try:
            return ranks.run()
        finally:
            ranks.stop()


class _Forked:
    """A forked process with the methods of subprocess.Popen that are used here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(_POLL_S)


class _TracedRanks:
    """The traced processes of one program, one for each rank that is recorded."""

    def __init__(
        self, job: Job, limits: Limits, show_output: bool, program: Callable[[Any], None] | None, pipe: int
    ) -> None:
        self.job, self.limits, self.show_output, self.program = job, limits, show_output, program
        self.pipe = pipe
        """of the guardian, which forked processes close"""
        self.processes: dict[int, _Process] = {}
        self.recordings: dict[int, Recording] = {}
        self.coordinator = Coordinator(self._start)
        self.deadline = time.monotonic() + limits.time_s

    def run(self) -> list[Recording]:
        self._start(self.job.rank)
        while len(self.recordings) < len(self.processes):
            self.coordinator.poll(_POLL_S)
            for rank, process in list(self.processes.items()):
                if rank not in self.recordings:
                    self._look_at(rank, process)
        return [self.recordings[rank] for rank in sorted(self.recordings)]

    def _start(self, rank: int) -> None:
        """Starts the process of `rank`, unless it was started before."""
        if rank in self.processes:
            return
        job = replace(self.job, rank=rank)
        output = Path(job.folder) / f"rank{rank}.output.txt"
        fd = self.coordinator.connect(rank)
        variables = self.coordinator.environment(rank) | {MARK: job.folder}
        with output.open("wb") as sink:
            start = self._spawn if self.program is None else self._fork
            popen = start(job, fd, variables, sink)
        os.close(fd)
        self.processes[rank] = _Process(job, popen, output)

    def _spawn(self, job: Job, fd: int, variables: dict[str, str], sink: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "forerun.sources.trace.inside.script", str(job.write())],
            stdin=subprocess.DEVNULL,
            stdout=None if self.show_output else sink,
            stderr=None if self.show_output else subprocess.STDOUT,
            env=os.environ | job.variables | variables | {"PYTHONUNBUFFERED": "1"},
            pass_fds=(fd,),
            start_new_session=True,
            cwd=job.working_folder or None,
        )

    def _fork(self, job: Job, fd: int, variables: dict[str, str], sink: IO[bytes]) -> _Forked:
        pid = os.fork()
        if pid:
            return _Forked(pid)
        try:
            os.close(self.pipe)
            os.setsid()
            os.environ.update(variables)
            os.dup2(sink.fileno(), 1)
            os.dup2(sink.fileno(), 2)
            assert self.program is not None
            run(job, self.program)
        except BaseException as error:
            Failure(f"{type(error).__name__}: {error}").write(job.failure)
        finally:
            os._exit(1)

    def _look_at(self, rank: int, process: _Process) -> None:
        code = process.popen.poll()
        if code is None:
            self._check_limits(process)
            return
        self.coordinator.ended(rank)
        if not process.job.recording.is_file():
            raise self._error(process, code)
        try:
            recording = load_recording(process.job.recording)
        except ForerunError:
            raise ForerunError(
                f"{self._name(process)}: the traced process left a damaged recording; is the temporary folder full?"
            ) from None
        self.recordings[rank] = recording
        if self.job.alone:
            return
        for peer in sorted({int(p) for p in recording.peer.tolist() if p >= 0}):
            self._start(peer)

    def _check_limits(self, process: _Process) -> None:
        where, pid = self._name(process), process.popen.pid
        used, printed = resident_bytes(pid), process.output.stat().st_size
        if time.monotonic() > self.deadline:
            problem = f"the step was not recorded within {self.limits.time_s:g} s; raise --time-limit or trace less"
        elif used > self.limits.memory_gib * GIB:
            problem = (
                f"the traced process uses {used / GIB:.1f} GiB of host memory; the limit is"
                f" {self.limits.memory_gib:g} GiB (--host-memory-limit)"
            )
        elif printed > _MOST_PRINTED_BYTES:
            problem = f"the traced process printed more than {_MOST_PRINTED_BYTES / GIB:g} GiB; let it print less"
        else:
            return
        line = ask_place(pid, process.job.last_place)
        raise ForerunError(f"{where}: {problem}" + (f" (at {line})" if line else ""))

    def _name(self, process: _Process) -> str:
        rank = f" (rank {process.job.rank})" if process.job.rank != self.job.rank or len(self.processes) > 1 else ""
        return f"{process.job.name}{rank}"

    def _error(self, process: _Process, code: int) -> ForerunError:
        failure = Failure.read(process.job.failure)
        if failure is not None:
            return failure.error(self._name(process))
        line = place(process.job.last_place)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        at = f" at {line}" if line else ""
        words = last_words(process.output)
        return ForerunError(
            f"{self._name(process)}: the traced process {how}{at} before its step was recorded; last line of its"
            f" output: {words}"
        )

    def stop(self) -> None:
        """Ends every process and all processes that it started."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.popen.pid, signal.SIGKILL)
            process.popen.wait()
        end_all(self.job.folder)
        self.coordinator.close()
