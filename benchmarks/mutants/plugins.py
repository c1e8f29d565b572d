"""Plugins of pytest: one records which statements each test runs, the other runs chosen tests in an order."""

from __future__ import annotations

import functools
import gc
import multiprocessing.process
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from watching import WATCHED, WRITES, Line, Watch, counted_starts, written


@dataclass(frozen=True)
class Recorded:
    """One test: how long it takes, which statements it runs, and whether a process that it starts ran unwatched."""

    name: str
    seconds: float
    lines: frozenset[Line]
    is_unsure: bool


class Recorder:
    """Records every test in `tests`.

    What runs while tests are collected, or for a fixture of several tests, may matter to all of them: `shared` holds
    the statements, and how the names of these tests begin. Caches of functions that lie in `cached_in` are emptied
    before each test, so that a test that reads an entry is seen making it. Processes of Python that a test starts
    write what they run to a folder of the test in `folder`.
    """

    def __init__(self, watched: Path, cached_in: tuple[Path, ...], folder: Path) -> None:
        self.watch = Watch(watched)
        self.cached_in = tuple(map(str, cached_in))
        self.folder = folder
        self.tests: list[Recorded] = []
        self.shared: list[tuple[str, frozenset[Line]]] = []
        os.environ[WATCHED] = str(watched)
        start = multiprocessing.process.BaseProcess.start
        multiprocessing.process.BaseProcess.start = lambda process: (sys.audit("os.fork"), start(process))[1]  # type: ignore
        self.started = counted_starts()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self) -> None:
        """Finds the caches before conftest.py freezes all objects, for frozen ones are no longer listed."""
        self.shared.append(("", self.watch.seen()))
        self.caches = [
            one for one in gc.get_objects() if isinstance(one, functools._lru_cache_wrapper) and self.is_ours(one)
        ]

    def is_ours(self, function: Any) -> bool:
        module = sys.modules.get(getattr(function, "__module__", ""))
        return str(getattr(module, "__file__", "")).startswith(self.cached_in)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        for one in self.caches:
            one.cache_clear()
        self.watch.ran.clear()
        place = self.folder / str(len(self.tests))
        place.mkdir(parents=True)
        os.environ[WRITES] = str(place)
        begin, started = time.perf_counter(), self.started()
        yield
        seconds = time.perf_counter() - begin
        of_processes = written(place)
        is_unsure = self.started() - started > len(of_processes) or any(each is None for each in of_processes)
        lines = self.watch.seen().union(*(each for each in of_processes if each is not None))
        self.tests.append(Recorded(item.nodeid, seconds, lines, is_unsure))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        yield
        if fixturedef.scope != "function":
            begins = "" if fixturedef.scope == "session" else fixturedef.baseid
            self.shared.append((begins, self.watch.seen()))


class Chosen:
    """Runs the tests of `names` in that order and no others, and keeps the name of the first that fails."""

    def __init__(self, names: list[str]) -> None:
        self.rank = {name: rank for rank, name in enumerate(names)}
        self.failed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((one for one in items if one.nodeid in self.rank), key=lambda one: self.rank[one.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid
