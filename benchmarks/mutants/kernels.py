"""Which compiled functions a mistake gets into, so that numba's cache does not serve them as they were."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from places import is_compiled, names_given


@dataclass(frozen=True)
class Definition:
    """A compiled function or a value of a module: the names it has, and those of other definitions in its code.

    `cached` is how the names of its files in numba's cache begin, empty for a value.
    """

    names: frozenset[str]
    mentions: frozenset[str]
    cached: str


def definitions(package: Path) -> list[Definition]:
    """All compiled functions and values of the modules under `package`."""
    return [one for path in sorted(package.rglob("*.py")) for one in definitions_in(path)]


def definitions_in(path: Path) -> Iterator[Definition]:
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.FunctionDef) and is_compiled(statement):
            yield Definition(names_given(statement), names_read(statement), f"{path.stem}.{statement.name}-")
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            yield Definition(names_given(statement), names_read(statement), "")


def names_read(statement: ast.stmt) -> frozenset[str]:
    """The names in `statement` that it does not give itself, annotations aside."""
    arguments = {node.arg for node in ast.walk(statement) if isinstance(node, ast.arg)}
    names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return frozenset({node.id for node in names} - stored - arguments)


def outdated(known: list[Definition], changed: frozenset[str]) -> set[str]:
    """How the names of the cache files begin that no longer hold when the code of the names `changed` is another.

    A name stands for everything of that name in the package, which is a little more than there is to do.
    """
    while True:
        grown = changed.union(*(one.names for one in known if one.mentions & changed))
        if grown == changed:
            return {one.cached for one in known if one.cached and one.names & changed}
        changed = grown
