"""Shows the effect of a program's change on its step, as console tables and as a record for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from forerun.common.units import GIB, MIB
from forerun.interfaces.report.console import make_table, print_table
from forerun.interfaces.report.figures import percent, seconds

if TYPE_CHECKING:
    from forerun.answers.analysis.prediction import Prediction
    from forerun.answers.diff.changes import StepDiff, TensorChange, WorkChange

_CAUSE_LEAST_S = 1e-6
"""causes that change by less are not shown"""


def diff_record(diff: StepDiff) -> dict[str, Any]:
    """Returns every figure of a diff; work in order of lost time, tensors in order of grown bytes."""
    return {
        "before": _figures(diff.before),
        "after": _figures(diff.after),
        "slowdown": diff.slowdown,
        "memory_growth": diff.growth,
        "causes": [
            {"cause": name, "before_s": before, "after_s": after, "lost_s": after - before}
            for name, (before, after) in diff.causes.items()
        ],
        "work": [asdict(change) | {"how": change.how, "lost_s": change.lost_s} for change in diff.work],
        "tensors": [asdict(change) | {"how": change.how, "grown_bytes": change.grown_bytes} for change in diff.tensors],
    }


def _figures(prediction: Prediction) -> dict[str, Any]:
    names = ("model", "n_gpus", "step_time_s", "mfu", "hfu", "peak_allocated_gib", "peak_reserved_gib", "fits")
    return {name: getattr(prediction, name) for name in names}


def print_diff(out: Console, diff: StepDiff, top: int) -> None:
    """Prints both steps, the causes, and the `top` changes of work and of tensors."""
    _print_steps(out, diff)
    if not diff.work and not diff.tensors:
        out.print()
        out.print("Both programs do the same work and hold the same tensors at their peaks.")
        return
    _print_causes(out, diff)
    _print_work(out, diff.work, top)
    _print_tensors(out, diff.tensors, top)


def _print_steps(out: Console, diff: StepDiff) -> None:
    old, new = diff.before, diff.after
    peaks = (
        ("peak allocated", old.peak_allocated_gib, new.peak_allocated_gib),
        ("peak reserved", old.peak_reserved_gib, new.peak_reserved_gib),
    )
    rows = [
        ("program", old.model, new.model, ""),
        ("step time", seconds(old.step_time_s), seconds(new.step_time_s), f"{diff.slowdown:+.2%}"),
        ("MFU", percent(old.mfu), percent(new.mfu), ""),
        *((name, f"{was:.3g} GiB", f"{now:.3g} GiB", f"{now / was - 1:+.2%}") for name, was, now in peaks),
        ("fits", *("yes" if one.fits else "no" for one in (old, new)), ""),
    ]
    out.print(make_table("lrrr", ("", "before", "after", "change"), rows))


def _print_causes(out: Console, diff: StepDiff) -> None:
    shown = {name: pair for name, pair in diff.causes.items() if abs(pair[1] - pair[0]) >= _CAUSE_LEAST_S}
    if not shown:
        return
    rows = (
        (name.replace("_", " "), seconds(before), seconds(after), _signed(after - before))
        for name, (before, after) in shown.items()
    )
    out.print()
    print_table(out, "Where the step lost and won time", "lrrr", ("cause", "before", "after", "lost"), rows)


def _print_work(out: Console, changes: Sequence[WorkChange], top: int) -> None:
    if not changes:
        return
    shown = _ends(changes, top)
    rows = (
        (
            *(one.how, one.what, one.name, one.module or "-", one.phase),
            _counts(one.before.count, one.after.count),
            _times(one),
            _signed(one.lost_s),
        )
        for one in shown
    )
    title = f"Kernels, collectives and copies by lost time ({len(shown)} of {len(changes)})"
    out.print()
    print_table(out, title, "lllllrrr", ("", "what", "name", "module", "phase", "count", "time", "lost"), rows)


def _print_tensors(out: Console, changes: Sequence[TensorChange], top: int) -> None:
    if not changes:
        return
    shown = _ends(changes, top)
    rows = (
        (
            *(one.how, one.category, one.name, one.module or "-"),
            _counts(one.before_count, one.after_count),
            f"{one.before_bytes / GIB:.3g} -> {one.after_bytes / GIB:.3g}",
            f"{one.grown_bytes / MIB:+,.1f} MiB",
        )
        for one in shown
    )
    title = f"Tensors at the peak by grown bytes ({len(shown)} of {len(changes)})"
    out.print()
    print_table(out, title, "llllrrr", ("", "category", "made by", "module", "count", "GiB", "grown"), rows)


def _ends(changes: Sequence[Any], top: int) -> list[Any]:
    """Returns the first and the last changes, `top` of them: the largest losses and the largest gains."""
    if len(changes) <= top:
        return list(changes)
    first = -(-top // 2)
    return [*changes[:first], *changes[len(changes) - (top - first) :]]


def _counts(before: int, after: int) -> str:
    return f"{after:,}" if before == after else f"{before:,} -> {after:,}"


def _times(change: WorkChange) -> str:
    return f"{seconds(change.before.time_s)} -> {seconds(change.after.time_s)}"


def _signed(time_s: float) -> str:
    return f"{'-' if time_s < 0 else '+'}{seconds(abs(time_s))}"
