"""The content of a traced Program, in a few lines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console

from forerun.common.units import GIB
from forerun.core.memory.profile import profile
from forerun.core.program.types import Collective, Program
from forerun.interfaces.report.console import make_table, print_title

_NOTES = 8


def print_trace(out: Console, program: Program, path: Path, seconds: float) -> None:
    """Prints the file of the Program, its contents for each role, and the guesses of the tracer."""
    print_title(out, f"{path}: {program.meta.get('name')} on {program.meta.get('world_size')} ranks")
    out.print(f"traced in {seconds:.1f} s; forerun predict --program {path} --cluster NAME", soft_wrap=True)
    out.print()
    ops, rows = program.ops, []
    for number, (cls, memory) in enumerate(zip(program.rank_classes, profile(program), strict=True)):
        count = _counts(program, number)
        flops = float((count * ops.flops).sum())
        kinds = (int(count[of_kind].sum()) for of_kind in (ops.is_compute, ops.is_collective, ops.sends))
        work = f"{flops / 1e12:,.3g}" if flops < 1e15 else f"{flops / 1e12:,.0f}"
        counted = (f"{n:,}" for n in (cls.n_ranks, *kinds))
        rows.append((cls.name, *counted, work, f"{memory.peak_bytes / GIB:.3g}"))
    headings = ("role", "ranks", "kernels", "collectives", "sends", "TFLOP", "peak GiB")
    out.print(make_table("lrrrrrr", headings, rows, gap=2))
    _print_collectives(out, program)
    for fallback in program.meta.get("fallbacks") or ():  # type: ignore[attr-defined]
        out.print(f"warning: torch.compile failed: {fallback}", style="bold", soft_wrap=True)
    notes = [str(note) for note in program.meta.get("notes", ())]  # type: ignore[attr-defined]
    for note in notes[:_NOTES]:
        out.print(f"note: {note}", soft_wrap=True)
    if len(notes) > _NOTES:
        out.print(f"note: and {len(notes) - _NOTES} more, in the Program's meta")


def _counts(program: Program, number: int) -> np.ndarray:
    """Returns the number of times that each op runs on rank class `number`."""
    steps = np.bincount(program.rank_classes[number].block, minlength=len(program.blocks))
    count = np.zeros(len(program.ops), np.int64)
    for block, times in zip(program.blocks, steps.tolist(), strict=True):
        if times:
            count += times * np.bincount(block.op, minlength=len(count))
    return count


def _print_collectives(out: Console, program: Program) -> None:
    """Prints the collectives of the first role by group and kind."""
    ops, count = program.ops, _counts(program, 0)
    rows: dict[tuple[int, int], list[float]] = {}
    for row in np.flatnonzero(ops.is_collective & (count > 0)).tolist():
        entry = rows.setdefault((int(ops.group[row]), int(ops.collective[row])), [0.0, 0.0])
        entry[0] += int(count[row])
        entry[1] += int(count[row]) * float(ops.bytes_comm[row])
    if not rows:
        return
    out.print()
    cells = []
    for (group, kind), (times, size) in sorted(rows.items()):
        where, name = program.groups[group], Collective(kind).name.lower().replace("_", "-")
        cells.append((where.axis, f"{where.size:,}", name, f"{int(times):,}", f"{size / GIB:.3g}"))
    out.print(make_table("lrlrr", ("group", "ranks", "collective", "times", "GiB in all"), cells, gap=2))
