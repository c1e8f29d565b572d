"""Plugins of pytest: one records which statements each test runs, the other runs chosen tests in an order."""

from __future__ import annotations

import functools
import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from watching import Line, Watch


@dataclass(frozen=True)
class Recorded:
    """One test, with the statements that it runs, in this process and in those that it starts.

    `fixtures_s` is how long the fixtures take that it shares with others, `seconds` how long it took itself, with those
    that were made for it.
    """

    name: str
    seconds: float
    fixtures_s: float
    lines: frozenset[Line]


class Recorder:
    """Records every test in `tests`.

    What runs while tests are collected, or for a fixture of several tests, may matter to all of them: `shared` holds
    how the names of these tests begin, the statements, and the seconds that they take. Caches of functions that lie in
    `cached_in` are emptied before each test, so that a test that reads an entry is seen making it.
    """

    def __init__(self, watch: Watch, cached_in: tuple[Path, ...]) -> None:
        self.watch = watch
        self.cached_in = tuple(map(str, cached_in))
        self.tests: list[Recorded] = []
        self.shared: list[tuple[str, frozenset[Line], float]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self) -> None:
        """Finds the caches before conftest.py freezes all objects, for frozen ones are no longer listed."""
        self.shared.append(("", self.watch.seen(), 0.0))
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
        self.watch.clear()
        begin = time.perf_counter()
        yield
        self.tests.append(Recorded(item.nodeid, time.perf_counter() - begin, 0.0, self.watch.seen()))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if fixturedef.scope != "function":
            begins = "" if fixturedef.scope == "session" else fixturedef.baseid
            self.shared.append((begins, self.watch.seen(), time.perf_counter() - begin))

    def recorded(self) -> list[Recorded]:
        """The tests, each with what it shares with others."""
        return [self.with_shared(test) for test in self.tests]

    def with_shared(self, test: Recorded) -> Recorded:
        shared = [one for one in self.shared if test.name.startswith(one[0])]
        lines = test.lines.union(*(lines for _, lines, _ in shared))
        return replace(test, lines=lines, fixtures_s=sum(seconds for _, _, seconds in shared))


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
