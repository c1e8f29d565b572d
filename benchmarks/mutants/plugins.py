"""Plugins of pytest: one records which statements each test runs, the other runs chosen tests in an order."""

from __future__ import annotations

import ast
import builtins
import functools
import gc
import multiprocessing.process
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from places import is_compiled, is_docstring

Line = tuple[str, int]
"""a statement: name of its file, number of its first line"""


@dataclass(frozen=True)
class Recorded:
    """One test: how long it takes, which statements it runs in this process, and whether it starts another process."""

    name: str
    seconds: float
    lines: frozenset[Line]
    starts_process: bool


class Watch:
    """Has the functions of the modules under `folder` note in `ran` which of their statements run.

    A call that adds to `ran` is put before each statement when a module is imported, which costs a tenth of what
    tracing costs. Compiled functions stay as they are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.lines: list[Line] = []
        self.ran: set[int] = set()
        builtins.__ran__ = self.ran  # type: ignore[attr-defined]
        self.load = SourceFileLoader.get_code
        SourceFileLoader.get_code = lambda loader, name: self.code(loader, name)  # type: ignore

    def code(self, loader: SourceFileLoader, module: str) -> CodeType | None:
        if not loader.path.startswith(self.folder):
            return self.load(loader, module)
        tree = ast.parse(loader.get_data(loader.path))
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not is_compiled(node):
                self.note_body(node, loader.path)
        return compile(ast.fix_missing_locations(tree), loader.path, "exec", dont_inherit=True)

    def note_body(self, node: ast.AST, path: str) -> None:
        """Puts a note before each statement under `node`, functions within it aside."""
        for name, field in ast.iter_fields(node):
            if not isinstance(field, list):
                continue
            inner = [one for one in field if isinstance(one, (ast.stmt, ast.ExceptHandler, ast.match_case))]
            for one in inner:
                if not isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    self.note_body(one, path)
            if inner and isinstance(inner[0], ast.stmt):
                noted = [part for one in inner for part in self.noted(one, path)]
                setattr(node, name, noted)

    def noted(self, statement: Any, path: str) -> list[ast.stmt]:
        if is_docstring(statement):
            return [statement]
        self.lines.append((path, statement.lineno))
        note = ast.parse(f"__ran__.add({len(self.lines) - 1})").body[0]
        for part in ast.walk(note):
            ast.copy_location(part, statement)
        return [note, statement]

    def seen(self) -> frozenset[Line]:
        return frozenset(self.lines[number] for number in self.ran)


class Recorder:
    """Records every test in `tests`.

    What runs while tests are collected, or for a fixture of several tests, may matter to all of them: `shared` holds
    the statements, and how the names of these tests begin. Caches of functions that lie in `cached_in` are emptied
    before each test, so that a test that reads an entry is seen making it.
    """

    def __init__(self, watched: Path, cached_in: tuple[Path, ...]) -> None:
        self.watch = Watch(watched)
        self.cached_in = tuple(map(str, cached_in))
        self.tests: list[Recorded] = []
        self.shared: list[tuple[str, frozenset[Line]]] = []
        self.started = 0
        start = multiprocessing.process.BaseProcess.start
        multiprocessing.process.BaseProcess.start = lambda process: (self.hear("os.fork", ()), start(process))[1]  # type: ignore
        sys.addaudithook(self.hear)

    def hear(self, event: str, _arguments: object) -> None:
        """Counts the processes that start."""
        self.started += event in ("subprocess.Popen", "os.fork", "os.posix_spawn")

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
        begin, started = time.perf_counter(), self.started
        yield
        seconds = time.perf_counter() - begin
        self.tests.append(Recorded(item.nodeid, seconds, self.watch.seen(), self.started > started))

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
