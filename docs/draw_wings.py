"""Draws the wings of the package, the packages inside them, and who imports whom: python docs/draw_wings.py [FILE].

Boxes and arrows come from the imports in src/forerun. An arrow that follows from others is left out: where A imports B
and B imports C, no arrow from A to C is drawn.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "forerun"
PICTURE = ROOT / "docs" / "pictures" / "wings.svg"
INK = "#34495e"
Arrow = tuple[str, str]


class Box(NamedTuple):
    """A box of the drawing, in hundredths of its width."""

    x: float
    y: float
    width: float
    height: float

    @property
    def top(self) -> float:
        return self.y + self.height


def imported(path: Path) -> Iterator[tuple[str, ...]]:
    """Yields the names of `forerun` that a module imports, split at the dots."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("forerun."):
            yield tuple(node.module.split("."))
        elif isinstance(node, ast.Import):
            yield from (tuple(each.name.split(".")) for each in node.names if each.name.startswith("forerun."))


def wings() -> dict[str, list[str]]:
    """Returns the packages and modules of each wing, sorted."""
    folders = sorted(path.parent for path in SOURCE.glob("*/__init__.py"))
    return {
        wing.name: sorted(
            path.stem
            for path in wing.iterdir()
            if (path.suffix == ".py" or path.is_dir()) and not path.name.startswith("_")
        )
        for wing in folders
    }


def sentence(wing: str) -> str:
    """Returns what a wing says of itself."""
    return ast.get_docstring(ast.parse((SOURCE / wing / "__init__.py").read_text(encoding="utf-8"))) or ""


def arrows() -> set[Arrow]:
    """Returns (importer, imported) for all pairs of different wings."""
    return {
        (wing, name[1])
        for wing in wings()
        for path in (SOURCE / wing).rglob("*.py")
        for name in imported(path)
        if len(name) > 1 and name[1] != wing
    }


def floors(known: set[Arrow]) -> dict[str, int]:
    """Returns the floor of each wing, 0 for the ground: one above the highest wing that it imports."""
    floor: dict[str, int] = {}
    while len(floor) < len(wings()):
        below = {wing: {other for one, other in known if one == wing} for wing in wings() if wing not in floor}
        ready = {
            wing: 1 + max((floor[each] for each in others), default=-1)
            for wing, others in below.items()
            if others <= set(floor)
        }
        if not ready:
            raise SystemExit(f"the imports of {', '.join(sorted(below))} go in a circle")
        floor |= ready
    return floor


def told_by_others(arrow: Arrow, known: set[Arrow]) -> bool:
    """Whether a longer way over other wings leads from the arrow's start to its end."""
    return any((arrow[0], between) in known and (between, arrow[1]) in known for between in wings())


def boxes(known: set[Arrow]) -> dict[str, Box]:
    """Returns the box of each wing, which reaches up to the lowest wing that imports it. The tallest stand left."""
    floor = floors(known)
    top = {wing: min((floor[one] for one, other in known if other == wing), default=floor[wing] + 1) for wing in floor}
    placed: dict[str, Box] = {}
    for wing in sorted(floor, key=lambda wing: (floor[wing] - top[wing], wing)):
        beside = [each for each in floor if floor[each] < top[wing] and floor[wing] < top[each]]
        on_floor = [sum(floor[each] <= level < top[each] for each in beside) for level in range(floor[wing], top[wing])]
        width = 100 / max(on_floor)
        column = sum(each in placed for each in beside)
        placed[wing] = Box(column * width + 1, 10 * floor[wing] + 1, width - 2, 10 * (top[wing] - floor[wing]) - 3)
    return placed


def picture() -> Figure:
    """Returns the drawing; the id of each arrow in it is "importer imports imported"."""
    known = arrows()
    placed = boxes(known)
    height = max(box.top for box in placed.values()) + 2
    figure = Figure(figsize=(9.6, 0.105 * height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 100), ylim=(0, height))
    axes.axis("off")
    for wing, at in placed.items():
        box = FancyBboxPatch((at.x, at.y), at.width, at.height, boxstyle="round,pad=0,rounding_size=0.8")
        box.set(facecolor="#eef3f8", edgecolor=INK)
        axes.add_patch(box)
        about = wrap(sentence(wing), int(1.25 * at.width))
        axes.text(at.x + 1.2, at.top - 1.2, wing, weight="bold", size=10.5, va="top")
        axes.text(at.x + 14, at.top - 1.2, ", ".join(wings()[wing]), size=8.5, va="top", color=INK)
        axes.text(at.x + 1.2, at.top - 3.6, "\n".join(about), size=8, va="top", linespacing=1.25)
    for start, end in sorted(known):
        if told_by_others((start, end), known):
            continue
        narrow = min(placed[start], placed[end], key=lambda box: box.width)
        x = narrow.x + narrow.width / 2
        line = axes.annotate(
            "", (x, placed[end].top), (x, placed[start].y), arrowprops={"arrowstyle": "-|>", "color": INK}
        )
        line.arrow_patch.set_gid(f"{start} imports {end}")
    return figure


def draw(path: Path) -> None:
    """Writes the drawing; the same imports give the same SVG, whose text stays text."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "wings"}):
        picture().savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
