"""A fit to whole steps as tables, as plain data, and row by row as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from forerun.core.program.types import F64
from forerun.evidence.fitting.fit import Fit
from forerun.evidence.fitting.left_out import AnchoredErrors, mean_errors
from forerun.interfaces.report.console import print_table

_COLUMNS = (
    "id",
    "source",
    "family",
    "stack",
    "device",
    "measured_s",
    "shipped_s",
    "fitted_s",
    "left_out_s",
    "anchored_mape",
)
_FIGURES = ("rows", "MAPE", "median", "p90", "signed")
_ANCHORS = {
    "same_cluster": "another step of its source and device as anchor, each in turn",
    "same_run": "another step of its source, device and model, each in turn",
    "best": "the step of its source, device and model that tells most about the others",
}


@dataclass(frozen=True, slots=True)
class Anchored:
    """What an anchor corrects, of constants that are fitted to all steps and with a step's family left out."""

    fitted: AnchoredErrors
    left_out: AnchoredErrors


def step_fit_record(fit: Fit, anchored: Anchored | None) -> dict[str, Any]:
    """Constants and errors as one object; errors are fractions, times in seconds."""
    by_family, by_anchor = {}, {}
    if anchored is not None:
        by_family = _families(fit, lambda own: _figures(anchored.left_out.errors[own]))
        each = {"fitted": anchored.fitted, "left_out": anchored.left_out}
        by_anchor = {
            anchor: {name: _anchored_by_family(fit, getattr(errors, anchor)) for name, errors in each.items()}
            for anchor in _ANCHORS
        }
    return {
        "kinds": [
            {"name": one.name, "prior": one.prior, "value": one.value, "sigma": one.sigma, "source": one.kind.source}
            for one in fit.kinds
        ],
        "constants": [
            {
                "name": one.constant.name,
                "of": list(one.constant.of),
                "kind": one.constant.kind,
                "prior": one.prior,
                "shipped": one.constant.shipped,
                "value": one.value,
                "sigma": one.sigma,
                "rows": one.rows,
                "source": one.constant.source,
            }
            for one in fit.constants
        ],
        "shipped": _figures(_errors(fit, fit.shipped_s)),
        "fitted": _figures(_errors(fit, fit.fitted_s)),
        "left_out": by_family,
        "anchored": by_anchor,
    }


def print_step_fit(out: Console, fit: Fit, anchored: Anchored | None, written: Sequence[object] | None) -> None:
    """Constants with what they were and what they are, errors, and what was written."""
    record = step_fit_record(fit, anchored)
    kinds = (
        (kind["name"], _number(kind["prior"]), _number(kind["value"]), f"{kind['sigma']:.3f}")
        for kind in record["kinds"]
    )
    print_table(out, "Kinds of constants", "lrrr", ("kind", "prior", "fitted", "sigma"), kinds)
    constants = (
        (
            one["name"],
            one["kind"] or "",
            *map(_number, (one["prior"], one["shipped"], one["value"])),
            f"{one['sigma']:.3f}",
            str(one["rows"]),
        )
        for one in record["constants"]
    )
    title = "Constants (rows: steps that inform it; sigma: of its logarithm)"
    headings = ("constant", "kind", "prior", "shipped", "fitted", "sigma", "rows")
    print_table(out, title, "llrrrrr", headings, constants)
    errors = ((name, *_percents(record[name])) for name in ("shipped", "fitted"))
    print_table(out, "Step time, %", "lrrrrr", ("constants", *_FIGURES), errors)
    _print_families(out, "Step time with a family of stacks left out of the fit, %", record["left_out"])
    for anchor, words in _ANCHORS.items():
        families = record["anchored"].get(anchor, {})
        _print_families(out, f"The same with {words}, %", families.get("left_out", {}))
        _print_families(out, f"Fitted to all steps, with {words}, %", families.get("fitted", {}))
    if written is None:
        out.print("Not written; --write puts the constants into Forerun's files.")
    else:
        out.print(f"Written: {', '.join(map(str, written)) or 'nothing changed'}", soft_wrap=True)


def step_fit_csv(fit: Fit, anchored: Anchored | None) -> str:
    """One line a step: seconds measured and predicted; mean absolute error left out, with another step as anchor."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for number, step in enumerate(fit.steps):
        cells = [step.name, step.source, step.family, step.setup.stack.name, step.setup.cluster.device.name]
        times = [step.measured_s, float(fit.shipped_s[number]), float(fit.fitted_s[number])]
        if anchored is not None:
            times.append(step.measured_s * float(np.exp(anchored.left_out.errors[number])))
            times += mean_errors(anchored.left_out.same_cluster[number : number + 1]).tolist()
        figures = [f"{time:.6g}" for time in times]
        writer.writerow([*cells, *figures, *[""] * (len(_COLUMNS) - len(cells) - len(figures))])
    return text.getvalue()


def _print_families(out: Console, title: str, families: dict[str, dict[str, float]]) -> None:
    if families:
        rows = ((name, *_percents(figures)) for name, figures in families.items())
        print_table(out, title, "lrrrrr", ("family", *_FIGURES), rows)


def _errors(fit: Fit, seconds: F64) -> F64:
    """log(predicted / measured)."""
    out: F64 = np.log(seconds) - np.log([step.measured_s for step in fit.steps])
    return out


def _families(fit: Fit, figures: Callable[[list[int]], dict[str, float]]) -> dict[str, dict[str, float]]:
    """Figures of the steps of each family, and of all of them."""
    numbers: dict[str, list[int]] = {}
    for number, step in enumerate(fit.steps):
        numbers.setdefault(step.family, []).append(number)
    numbers["all"] = list(range(len(fit.steps)))
    return {name: figures(own) for name, own in numbers.items()}


def _anchored_by_family(fit: Fit, anchored: Sequence[F64]) -> dict[str, dict[str, float]]:
    """Every step under each anchor; a step counts once, however many anchors there are."""

    def figures(own: list[int]) -> dict[str, float]:
        some = [anchored[number] for number in own if len(anchored[number])]
        if not some:
            return _figures(np.array([]))
        weights = np.concatenate([np.full(len(each), 1 / len(each)) for each in some])
        return {**_figures(np.concatenate(some), weights), "rows": len(some)}

    return _families(fit, figures)


def _figures(errors: F64, weights: F64 | None = None) -> dict[str, float]:
    """Figures of errors that are logarithms, as fractions of the measured time; nan where there is none."""
    if not len(errors):
        return dict.fromkeys(_FIGURES, float("nan")) | {"rows": 0}
    share = np.ones(len(errors)) if weights is None else weights
    relative = np.exp(errors) - 1
    return {
        "rows": len(errors),
        "MAPE": float(np.average(np.abs(relative), weights=share)),
        "median": _quantile(np.abs(relative), share, 0.5),
        "p90": _quantile(np.abs(relative), share, 0.9),
        "signed": float(np.average(relative, weights=share)),
    }


def _quantile(values: F64, weights: F64, share: float) -> float:
    """Quantile of weighted values, linear between their middles: numpy's own where all weigh the same."""
    order = np.argsort(values, kind="stable")
    ends = np.cumsum(weights[order])
    middles = (ends - ends[0]) / max(ends[-1] - ends[0], 1e-300)
    return float(np.interp(share, middles, values[order]))


def _percents(figures: dict[str, float]) -> list[str]:
    if not figures["rows"]:
        return ["0", "-", "-", "-", "-"]
    sizes = [f"{figures[name] * 100:.2f}" for name in ("MAPE", "median", "p90")]
    return [f"{figures['rows']:.0f}", *sizes, f"{figures['signed'] * 100:+.2f}"]


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
