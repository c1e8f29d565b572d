"""Notes which statements of a package run, in this process and in those that it starts."""

from __future__ import annotations

import ast
import builtins
import mmap
import os
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from places import is_compiled, is_docstring

Line = tuple[str, int]
"""a statement: name of its file, number of its first line"""
WATCHED, MARKS = "FORERUN_MUTANTS_WATCHED", "FORERUN_MUTANTS_MARKS"
"""environment variables: the folder of the package, and the file in which processes note what they run"""
IGNORED = (
    "torch._dynamo.config",
    b"ignore_logging_functions: set[Callable[..., Any]] = set()",
    b"ignore_logging_functions = {__mark__}",
)
"""how torch.compile learns that marks are no part of the code that it captures"""


class Watch:
    """Has the functions of the modules in `package` note in the file `marks` which of their statements run.

    When a module is imported, a call of `__mark__` is put before each statement, which costs a tenth of what tracing
    costs. Compiled functions stay as they are. All processes map the file, which has a byte for each line of the
    package: forks and Pythons that start another Watch leave their marks there at once, however they end.
    """

    def __init__(self, package: Path, marks: Path) -> None:
        self.lines: list[Line] = []
        self.before: dict[str, int] = {}
        for path in sorted(package.rglob("*.py")) if package.is_dir() else [package]:
            self.before[str(path)] = len(self.lines)
            self.lines += [(str(path), number) for number in range(len(path.read_bytes().splitlines()) + 2)]
        with marks.open("r+b" if marks.exists() else "w+b") as file:
            file.truncate(len(self.lines))
            ran = self.ran = mmap.mmap(file.fileno(), len(self.lines))
        builtins.__mark__ = lambda number: ran.__setitem__(number, 1)  # type: ignore[attr-defined]
        self.load = SourceFileLoader.get_code
        SourceFileLoader.get_code = lambda loader, name: self.code(loader, name)  # type: ignore

    def code(self, loader: SourceFileLoader, module: str) -> CodeType | None:
        if module == IGNORED[0]:
            return compile(loader.get_data(loader.path).replace(*IGNORED[1:]), loader.path, "exec", dont_inherit=True)
        if loader.path not in self.before:
            return self.load(loader, module)
        tree = ast.parse(loader.get_data(loader.path))
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not is_compiled(node):
                self.mark_body(node, self.before[loader.path])
        return compile(ast.fix_missing_locations(tree), loader.path, "exec", dont_inherit=True)

    def mark_body(self, node: ast.AST, before: int) -> None:
        """Puts a mark before each statement under `node`, functions within it aside."""
        for name, field in ast.iter_fields(node):
            if not isinstance(field, list):
                continue
            inner = [one for one in field if isinstance(one, (ast.stmt, ast.ExceptHandler, ast.match_case))]
            for one in inner:
                if not isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    self.mark_body(one, before)
            if inner and isinstance(inner[0], ast.stmt):
                setattr(node, name, [part for one in inner for part in marked(one, before)])

    def seen(self) -> frozenset[Line]:
        """The statements that ran since the last `clear`."""
        return frozenset(line for line, ran in zip(self.lines, self.ran[:], strict=True) if ran)

    def clear(self) -> None:
        self.ran[:] = bytes(len(self.lines))


def watch_this_process() -> None:
    """Has this process, which a test has started, leave its marks where the process of the tests reads them."""
    package, marks = os.environ.get(WATCHED), os.environ.get(MARKS)
    if package and marks:
        Watch(Path(package), Path(marks))


def marked(statement: Any, before: int) -> list[ast.stmt]:
    if is_docstring(statement):
        return [statement]
    mark = ast.parse(f"__mark__({before + statement.lineno})").body[0]
    for part in ast.walk(mark):
        ast.copy_location(part, statement)
    return [mark, statement]
