"""The content of a traced Program, in a few lines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.common.units import GIB
from forerun.core.memory.profile import profile
from forerun.core.program.types import Collective, Program

_NOTES = 8


def print_trace(out: Console, program: Program, path: Path, seconds: float) -> None:
    """Print the file of the Program, its contents for each role, and what the tracer had to guess."""
    out.print(Text(f"{path}: {program.meta.get('name')} on {program.meta.get('world_size')} ranks", style="bold"))
    out.print(f"traced in {seconds:.1f} s; forerun predict --program {path} --cluster NAME", soft_wrap=True)
    out.print()
    table = Table(box=None, pad_edge=False)
    for heading in ("role", "ranks", "kernels", "collectives", "sends", "TFLOP", "peak GiB"):
        table.add_column(heading, justify="left" if heading == "role" else "right")
    for number, (cls, memory) in enumerate(zip(program.rank_classes, profile(program), strict=True)):
        count = _counts(program, number)
        ops = program.ops
        kernels = int(count[ops.is_compute].sum())
        flops = float((count * program.ops.flops).sum())
        table.add_row(
            cls.name,
            f"{cls.n_ranks:,}",
            f"{kernels:,}",
            f"{int(count[ops.is_collective].sum()):,}",
            f"{int(count[ops.sends].sum()):,}",
            f"{flops / 1e12:,.3g}" if flops < 1e15 else f"{flops / 1e12:,.0f}",
            f"{memory.peak_bytes / GIB:.3g}",
        )
    out.print(table)
    _print_collectives(out, program)
    notes = [str(note) for note in program.meta.get("notes", ())]  # type: ignore[attr-defined]
    for note in notes[:_NOTES]:
        out.print(f"note: {note}", soft_wrap=True)
    if len(notes) > _NOTES:
        out.print(f"note: and {len(notes) - _NOTES} more, in the Program's meta")


def _counts(program: Program, number: int) -> np.ndarray:
    """Returns how often each op runs on rank class `number`."""
    steps = np.bincount(program.rank_classes[number].block, minlength=len(program.blocks))
    count = np.zeros(len(program.ops), np.int64)
    for block, times in zip(program.blocks, steps.tolist(), strict=True):
        if times:
            count += times * np.bincount(block.op, minlength=len(count))
    return count


def _print_collectives(out: Console, program: Program) -> None:
    """Collectives of the first role by group and kind."""
    ops, count = program.ops, _counts(program, 0)
    rows: dict[tuple[int, int], list[float]] = {}
    for row in np.flatnonzero(ops.is_collective & (count > 0)).tolist():
        entry = rows.setdefault((int(ops.group[row]), int(ops.collective[row])), [0.0, 0.0])
        entry[0] += int(count[row])
        entry[1] += int(count[row]) * float(ops.bytes_comm[row])
    if not rows:
        return
    out.print()
    table = Table(box=None, pad_edge=False)
    for heading in ("group", "ranks", "collective", "times", "GiB in all"):
        table.add_column(heading, justify="left" if heading in ("group", "collective") else "right")
    for (group, kind), (times, size) in sorted(rows.items()):
        where = program.groups[group]
        name = Collective(kind).name.lower().replace("_", "-")
        table.add_row(where.axis, f"{where.size:,}", name, f"{int(times):,}", f"{size / GIB:.3g}")
    out.print(table)
