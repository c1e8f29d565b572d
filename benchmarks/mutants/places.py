"""The places of a file where a small mistake can stand, and what the mistake is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
COMPILERS = {"njit", "kernel", "inlined"}
"""decorators of the functions that numba compiles"""


@dataclass(frozen=True)
class Place:
    """Where a node of the syntax tree runs.

    `line` is where its statement begins. `defined` are the names that the outermost statement gives to the module.
    `watched` is false where the node runs when the module is imported, or within a compiled function, so that no test
    can be seen running it.
    """

    line: int
    defined: frozenset[str] = frozenset()
    watched: bool = False


@dataclass(frozen=True)
class Mutant:
    """One mistake: `new` in place of the text from `start` to `end`, which are (line, column) in bytes."""

    path: Path
    start: tuple[int, int]
    end: tuple[int, int]
    old: str
    new: str
    place: Place

    def __str__(self) -> str:
        return f"{self.path}:{self.start[0]}: {one_line(self.old)} -> {one_line(self.new)}"

    def within(self, code: bytes) -> bytes:
        """The whole file, which is `code` without the mistake."""
        lines = code.splitlines(keepends=True)
        (first, begin), (last, end) = self.start, self.end
        head, tail = b"".join(lines[: first - 1]), b"".join(lines[last:])
        return head + lines[first - 1][:begin] + self.new.encode() + lines[last - 1][end:] + tail


def one_line(code: str) -> str:
    """`code` without line breaks, cut to what fits a line of the report."""
    text = " ".join(code.split())
    return text if len(text) <= 70 else text[:67] + "..."


def mutants_of(root: Path, path: Path) -> Iterator[Mutant]:
    """Every mutant of one file under `root`, in the order of its text."""
    source = (root / path).read_text(encoding="utf-8")
    for node, place in code_nodes(ast.parse(source), Place(0)):
        old = ast.get_source_segment(source, node)
        for new in changes(node):
            if old is not None:
                end = (node.end_lineno or node.lineno, node.end_col_offset or 0)
                yield Mutant(path, (node.lineno, node.col_offset), end, old, new, place)


def code_nodes(node: ast.AST, place: Place) -> Iterator[tuple[ast.expr | ast.stmt, Place]]:
    """The statements and expressions under `node` that say what the program does, and where each runs.

    Annotations, decorators, docstrings, imports, the texts of errors and zip's `strict` are left out, and so is the 1
    of -1, which mostly stands for nothing.
    """
    for name, field in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        inside = entered(node, place) if name == "body" else place
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, (ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr)) or is_docstring(child):
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue
            there = at_statement(child, inside) if isinstance(child, ast.stmt) else inside
            if isinstance(child, (ast.expr, ast.stmt)) and not (
                isinstance(node, ast.UnaryOp) and isinstance(child, ast.Constant)
            ):
                yield child, there
            if isinstance(child, ast.AST):
                yield from code_nodes(child, there)


def is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def entered(node: ast.AST, place: Place) -> Place:
    """The place of what stands in the body of `node`, which is at `place`."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return replace(place, watched=not is_compiled(node))
    return place


def is_compiled(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(one, ast.Name) and one.id in COMPILERS for one in function.decorator_list)


def at_statement(statement: ast.stmt, outside: Place) -> Place:
    return Place(statement.lineno, outside.defined or names_given(statement), outside.watched)


def names_given(statement: ast.stmt) -> frozenset[str]:
    """The names that a statement at the level of the module defines."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return frozenset({statement.name})
    nodes = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return frozenset(node.id for node in nodes if isinstance(node.ctx, ast.Store))


def changes(node: ast.expr | ast.stmt) -> Iterator[str]:
    """What may stand in the place of `node`."""
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield f"({ast.unparse(ast.BinOp(node.left, swapped(node.op), node.right))})"
    elif isinstance(node, ast.BoolOp):
        yield f"({ast.unparse(ast.BoolOp(swapped(node.op), node.values))})"
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        yield f"({ast.unparse(ast.Compare(node.left, [swapped(node.ops[0]), *node.ops[1:]], node.comparators))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        yield repr(node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield repr(not node.value)
    elif isinstance(node, ast.AugAssign):
        yield "pass"
        if type(node.op) in SWAPS:
            yield ast.unparse(ast.AugAssign(node.target, swapped(node.op), node.value))
    elif has_effect(node):
        yield "pass"


def has_effect(node: ast.AST) -> bool:
    """Whether `node` is a call whose answer nobody uses, or writes to a part of an object."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript))


def swapped(operator: ast.AST) -> Any:
    """An operator of the same kind, which does something else."""
    return SWAPS[type(operator)]()
