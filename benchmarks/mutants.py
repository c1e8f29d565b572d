"""How many small mistakes in a package its own tests find.

Run `python benchmarks/mutants.py core/engine --number 30`. Each mutant is one small mistake in one place of the
package: `*` for `/`, `+` for `-`, a constant that is one too large, `<` for `<=`, `==` for `!=`, `and` for `or`, a lost
`not` or sign, or a statement that does nothing. A mutant is *killed* when a test of the package fails or the tests run
out of time, and *survives* when all pass. Some survivors behave as the original does, so not every one of them shows
that a test is missing.

The mutants stand in a copy of `src`. A number for `--seed` picks other places; the same number picks the same ones.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
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
LEAST_LIMIT_S = 60.0
LIMIT_FACTOR = 4.0
"""time limit of a run of tests over the time that they take on the original"""


@dataclass(frozen=True)
class Mutant:
    """One mistake: `new` in place of the text from `start` to `end`, which are (line, column) in bytes."""

    path: Path
    start: tuple[int, int]
    end: tuple[int, int]
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.start[0]}: {one_line(self.old)} -> {one_line(self.new)}"

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


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of one file, in the order of its text."""
    source = path.read_text(encoding="utf-8")
    for node in code_nodes(ast.parse(source)):
        old = ast.get_source_segment(source, node)
        for new in changes(node):
            if old is not None:
                end = (node.end_lineno or node.lineno, node.end_col_offset or 0)
                yield Mutant(path, (node.lineno, node.col_offset), end, old, new)


def code_nodes(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """The statements and expressions under `node` that say what the program does.

    Annotations, decorators, docstrings, imports, the texts of errors and zip's `strict` are left out, and so is the 1
    of -1, which mostly stands for nothing.
    """
    for name, field in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, (ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr)) or is_docstring(child):
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue
            if isinstance(child, (ast.expr, ast.stmt)) and not (
                isinstance(node, ast.UnaryOp) and isinstance(child, ast.Constant)
            ):
                yield child
            if isinstance(child, ast.AST):
                yield from code_nodes(child)


def is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


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
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
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


def swapped(operator: ast.AST) -> ast.AST:
    return SWAPS[type(operator)]()


class Workshop:
    """A copy of `src`, and the tests of one package."""

    def __init__(self, folder: Path, tests: list[Path]) -> None:
        self.folder, self.tests = folder, tests
        self.warm = folder / "warm"
        self.warm.mkdir()
        shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
        begin = time.monotonic()
        done = self.run(tests, self.warm, None)
        if done is None or done.returncode:
            raise SystemExit(f"the tests fail without any mutant:\n{'' if done is None else done.stdout[-2000:]}")
        self.limit_s = max(LEAST_LIMIT_S, LIMIT_FACTOR * (time.monotonic() - begin))

    def run(self, tests: list[Path], cache: Path, limit_s: float | None) -> subprocess.CompletedProcess[str] | None:
        """Run `tests` on the copy until the first fails; None where they take longer than `limit_s`."""
        environment = os.environ | {
            "PYTHONPATH": str(self.folder / "src"),
            "PYTHONPYCACHEPREFIX": str(self.folder / "bytecode"),
            "NUMBA_CACHE_DIR": str(cache),
            "NUMBA_OPT": "1",
        }
        options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--hypothesis-profile=first-failure"]
        command = [sys.executable, "-m", "pytest", *options, *map(str, tests)]
        try:
            return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None

    def kills(self, mutant: Mutant) -> str:
        """The test that kills `mutant`, empty where it survives."""
        copy = self.folder / mutant.path.relative_to(ROOT)
        before, code = copy.stat(), copy.read_bytes()
        module = ".".join(mutant.path.relative_to(ROOT / "src").with_suffix("").parts)
        nearest = sorted(self.tests, key=lambda test: module not in test.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory(dir=self.folder) as cache:
            shutil.copytree(self.warm, cache, dirs_exist_ok=True)
            copy.write_bytes(mutant.within(code))
            done = self.run(nearest, Path(cache), self.limit_s)
            copy.write_bytes(code)
            os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
        if done is None:
            return "time limit"
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0].split(" - ")[0] if failed else f"exit {done.returncode}" if done.returncode else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", help="folder under src/forerun, or one file of it, as core/engine")
    parser.add_argument("--number", type=int, default=20, help="mutants to try (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (%(default)s)")
    parser.add_argument("--tests", action="append", help="folder or file of tests; that of the package unless given")
    arguments = parser.parse_args()
    package = ROOT / "src/forerun" / arguments.package
    folder = arguments.package if package.is_dir() else Path(arguments.package).parent
    chosen = [Path(name).absolute() for name in arguments.tests or [ROOT / "tests" / folder]]
    tests = [test for one in chosen for test in (sorted(one.rglob("test_*.py")) if one.is_dir() else [one])]
    files = sorted(package.rglob("*.py")) if package.is_dir() else [package]
    mutants = [mutant for path in files for mutant in mutants_of(path)]
    picked = random.Random(arguments.seed).sample(mutants, min(arguments.number, len(mutants)))
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(Path(folder), tests)
        for mutant in sorted(picked, key=lambda one: (one.path, one.start)):
            killer = workshop.kills(mutant)
            survived += not killer
            print(f"{'killed  ' if killer else 'SURVIVED'} {mutant}{f'  ({killer})' if killer else ''}", flush=True)
    killed = len(picked) - survived
    print(f"{killed} of {len(picked)} killed ({killed / max(1, len(picked)):.0%}); {len(mutants)} places in all")


if __name__ == "__main__":
    main()
