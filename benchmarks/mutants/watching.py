"""Notes which statements of the package run, in the process of the tests and in processes of Python that they start."""

from __future__ import annotations

import ast
import atexit
import builtins
import os
import pickle
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from places import is_compiled, is_docstring

Line = tuple[str, int]
"""a statement: name of its file, number of its first line"""
WATCHED, WRITES = "FORERUN_MUTANTS_WATCHED", "FORERUN_MUTANTS_WRITES"
"""environment variables: the folder of the package, and the one to which a started process writes what it ran"""


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


def counted_starts() -> Callable[[], int]:
    """Counts from now on the processes that this one starts; returns what tells their number."""
    started = 0

    def hear(event: str, _arguments: object) -> None:
        nonlocal started
        started += event in ("subprocess.Popen", "os.fork", "os.posix_spawn")

    sys.addaudithook(hear)
    return lambda: started


def watch_this_process() -> None:
    """Has this process, which a test has started, write at its end what it ran.

    It writes None where it starts processes itself, which are not watched. One that is killed writes nothing.
    """
    watched, folder = os.environ.pop(WATCHED, ""), os.environ.pop(WRITES, "")
    if not watched or not folder:
        return
    watch, started, own = Watch(Path(watched)), counted_starts(), os.getpid()

    def write() -> None:
        if os.getpid() == own:
            whole = Path(folder, f"{own}.part")
            whole.write_bytes(pickle.dumps(None if started() else watch.seen()))
            whole.rename(whole.with_suffix(".ran"))

    atexit.register(write)


def written(folder: Path) -> list[frozenset[Line] | None]:
    """What each process that a test started has written to `folder`."""
    return [pickle.loads(path.read_bytes()) for path in folder.glob("*.ran")]
