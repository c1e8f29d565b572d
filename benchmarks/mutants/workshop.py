"""A copy of the package in which mutants stand one at a time, and processes that run tests on it."""

from __future__ import annotations

import compileall
import contextlib
import fcntl
import filecmp
import importlib
import importlib.util
import os
import pickle
import py_compile
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kernels import definitions, outdated
from places import Mutant
from plugins import Chosen, Recorded, Recorder
from watching import MARKS, WATCHED, Watch

OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--hypothesis-profile=first-failure"]
SETTINGS = {"NUMBA_OPT": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
LEAST_LIMIT_S = 60.0
LIMIT_FACTOR = 5.0
"""time limit of a run of tests over the time that they take on the original"""
STARTED = Path(__file__).parent / "started"
"""folder of the module that Python imports at the start of each process"""
MOST_BYTES = 6 << 30
"""memory that a process of tests may hold, for a mutant can make a loop endless"""


class Workshop:
    """A copy of `src`, with numba's cache beside it.

    This process never imports the copy. It imports what the tests need besides, and forks a process for each mutant.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder, self.source = root, folder, folder / "src"
        copy_changed(root / "src", self.source)
        compileall.compile_dir(self.source, quiet=1)
        self.kernels = definitions(self.source)
        self.cache = folder / "numba"
        self.cache.mkdir(exist_ok=True)
        os.environ.update(SETTINGS, PYTHONPATH=str(self.source), NUMBA_CACHE_DIR=str(self.cache))
        sys.path.insert(0, str(self.source))
        sys.dont_write_bytecode = True

    def record(self, tests: list[Path], package: Path) -> list[Recorded]:
        """What each of `tests` runs in `package`, a folder or file under `root`."""
        answer = self.answer(lambda: self.recorded(tests, self.folder / package), None)
        if not isinstance(answer, tuple) or answer[0]:
            raise SystemExit(f"the tests fail without any mutant:\n{(self.folder / 'log').read_text()[-3000:]}")
        _, found, modules = answer
        for name in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        return [one for one in found if isinstance(one, Recorded)]

    def recorded(self, tests: list[Path], package: Path) -> tuple[int, list[Recorded], list[str]]:
        """The exit status of `tests`, what each runs, and the modules of other packages that they import."""
        marks = self.folder / "marks"
        watch = Watch(package, marks)
        watch.clear()
        os.environ.update({WATCHED: str(package), MARKS: str(marks)})
        os.environ["PYTHONPATH"] = f"{self.source}{os.pathsep}{STARTED}"
        recorder = Recorder(watch, (package, self.root / "tests"))
        status = run_tests(tests, recorder)
        modules = [name for name, one in sys.modules.items() if "site-packages" in str(getattr(one, "__file__", ""))]
        return status, recorder.recorded(), modules

    def killer(self, mutant: Mutant, tests: list[Recorded]) -> str:
        """What kills `mutant`: the first of `tests` that fails, the time limit or an exit; empty where it survives."""
        copy = self.folder / mutant.path
        code, stamp = copy.read_bytes(), copy.stat()
        begins = tuple(outdated(self.kernels, mutant.place.defined))
        limit_s = LEAST_LIMIT_S + LIMIT_FACTOR * sum(test.seconds for test in tests)
        copy.write_bytes(mutant.within(code))
        os.utime(copy, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # so that numba keeps what the mistake is not in
        Path(importlib.util.cache_from_source(str(copy))).unlink()
        try:
            with self.cache_without(begins) as cache:
                found = self.answer(lambda: failed_test([test.name for test in tests], cache), limit_s)
        finally:
            copy.write_bytes(code)
            os.utime(copy, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
            py_compile.compile(str(copy))
        return str(found)

    @contextlib.contextmanager
    def cache_without(self, begins: tuple[str, ...]) -> Iterator[Path]:
        """Numba's cache; where some functions are outdated, a copy without them."""
        if not begins:
            yield self.cache
            return
        copy = self.folder / "numba-of-mutant"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.cache, copy)
        for path in copy.rglob("*.nb[ic]"):
            if path.name.startswith(begins):
                path.unlink()
        yield copy

    def answer(self, work: Callable[[], Any], limit_s: float | None) -> Any:
        """What `work` returns in a process of its own, or a text that says how the process ended."""
        reply = self.folder / "reply"
        reply.unlink(missing_ok=True)
        process = os.fork()
        if process == 0:
            self.work_and_leave(work, reply)
        status = waited(process, limit_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        if status is None:
            return "time limit"
        return pickle.loads(reply.read_bytes()) if reply.exists() else f"exit {os.waitstatus_to_exitcode(status)}"

    def work_and_leave(self, work: Callable[[], Any], reply: Path) -> None:
        os.setsid()
        os.chdir(self.root)
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            reply.write_bytes(pickle.dumps(work()))
        finally:
            sys.stdout.flush()
            os._exit(0)


def copy_changed(source: Path, copy: Path) -> None:
    """Makes `copy` a copy of `source`; files that are alike stay, and with them what is compiled of them."""
    for old in copy.rglob("*"):
        if old.is_file() and old.suffix != ".pyc" and not (source / old.relative_to(copy)).exists():
            old.unlink()
    for path in source.rglob("*"):
        there = copy / path.relative_to(source)
        if not path.is_file() or "__pycache__" in path.parts:
            continue
        if (
            not there.exists()
            or not filecmp.cmp(path, there, shallow=False)
            or path.stat().st_mtime != there.stat().st_mtime
        ):
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, there)


def waited(process: int, limit_s: float | None) -> int | None:
    """The status with which `process` ends, or None where it takes longer than `limit_s` and is killed."""
    begin = time.monotonic()
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return status
        if limit_s is not None and time.monotonic() - begin > limit_s:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return None
        time.sleep(0.02)


def run_tests(tests: list[Path], *plugins: object) -> int:
    return int(pytest.main([*OPTIONS, *map(str, tests)], plugins=list(plugins)))


def failed_test(names: list[str], cache: Path) -> str:
    """The first of the tests `names` that fails, empty where all pass."""
    import numba

    os.environ["NUMBA_CACHE_DIR"] = str(cache)
    vars(numba.config)["CACHE_DIR"] = str(cache)
    chosen = Chosen(names)
    status = run_tests(sorted({Path(name.split("::")[0]) for name in names}), chosen)
    return chosen.failed or (f"exit {status}" if status else "")


@contextlib.contextmanager
def free_folder(parent: Path) -> Iterator[Path]:
    """The first numbered folder in `parent` that no other run uses. What numba compiled there stays for later runs."""
    for number in range(100):
        folder = parent / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
            return
    raise SystemExit(f"all folders in {parent} are in use")
