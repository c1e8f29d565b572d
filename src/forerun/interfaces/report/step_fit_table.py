"""A fit to whole steps as tables, as plain data, and row by row as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from forerun.describe.model.parameters import parameter_count
from forerun.describe.model.spec import ModelSpec
from forerun.evidence.fitting.left_out import AnchoredErrors, mean_errors
from forerun.interfaces.report.console import print_table

if TYPE_CHECKING:
    from forerun.core.program.types import F64
    from forerun.evidence.fitting.fit import Fit
    from forerun.evidence.fitting.steps import Step

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
    "best": "the step of its source, device and model that is most informative about the others",
}


LARGE_PARAMETERS = 1e9
"""parameters from which a model counts as large"""


@dataclass(frozen=True, slots=True)
class Anchored:
    """Compares what an anchor corrects of constants fitted to all steps and of those with a step's family left out."""

    fitted: AnchoredErrors
    left_out: AnchoredErrors


def step_fit_record(fit: Fit, anchored: Anchored | None, by_source: F64 | None = None) -> dict[str, Any]:
    """Returns the constants and errors as one object; errors are fractions, times in seconds.

    `by_source` are log(predicted / measured) of every step with its source left out of the fit.
    """
    informing = np.array([step.informs for step in fit.steps])
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
        "shipped": _figures(_errors(fit, fit.shipped_s)[informing]),
        "fitted": _figures(_errors(fit, fit.fitted_s)[informing]),
        "left_out": by_family,
        "left_out_sources": {} if by_source is None else _by_source(fit, by_source),
        "anchored": by_anchor,
    }


def _by_source(fit: Fit, errors: F64) -> dict[str, Any]:
    """Returns the figures of sources and stacks, and means in which every source counts once."""

    def means(numbers: Sequence[int]) -> dict[str, float]:
        each = _grouped(fit, lambda step: step.source, numbers)
        figures = [_figures(errors[own]) for own in each.values()]
        over = {name: float(np.mean([one[name] for one in figures])) for name in _FIGURES if name != "rows"}
        return {"rows": len(figures), **over}

    everyone = range(len(fit.steps))
    large = [number for number in everyone if _parameters(fit.steps[number]) >= LARGE_PARAMETERS]
    sources = {name: _figures(errors[own]) for name, own in _grouped(fit, lambda step: step.source, everyone).items()}
    stacks = _grouped(fit, lambda step: step.setup.stack.name, everyone)
    return {
        "sources": sources,
        "stacks": {name: {**_figures(errors[own]), "sources": means(own)["rows"]} for name, own in stacks.items()},
        "mean_over_sources": means(everyone),
        "mean_over_sources_of_large_models": means(large) if large else _figures(np.array([])),
        "all_rows": _figures(errors),
    }


def _parameters(step: Step) -> float:
    model = step.setup.model
    return parameter_count(model) if isinstance(model, ModelSpec) else LARGE_PARAMETERS


def _grouped(fit: Fit, key: Callable[[Step], str], numbers: Sequence[int]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for number in numbers:
        found.setdefault(key(fit.steps[number]), []).append(number)
    return dict(sorted(found.items()))


def print_step_fit(
    out: Console,
    fit: Fit,
    anchored: Anchored | None,
    written: Sequence[object] | None,
    by_source: F64 | None = None,
) -> None:
    """Prints constants with their old and new values, errors, and the written files."""
    record = step_fit_record(fit, anchored, by_source)
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
    if record["left_out_sources"]:
        _print_sources(out, record["left_out_sources"])
    if written is None:
        out.print("Not written; --write puts the constants into Forerun's files.")
    else:
        out.print(f"Written: {', '.join(map(str, written)) or 'nothing changed'}", soft_wrap=True)


def _print_sources(out: Console, record: dict[str, Any]) -> None:
    """Prints errors with sources left out: by source, by stack, and their means."""
    title = "Step time with a source left out of the fit, %"
    means = {
        "mean over sources": record["mean_over_sources"],
        "mean over sources, models from 1B": record["mean_over_sources_of_large_models"],
        "all rows": record["all_rows"],
    }
    rows = [(name, *_percents(figures)) for name, figures in (record["sources"] | means).items()]
    print_table(out, title, "lrrrrr", ("source", *_FIGURES), rows)
    stacks = ((name, str(one["sources"]), *_percents(one)) for name, one in record["stacks"].items())
    print_table(out, "The same by stack, %", "lrrrrrr", ("stack", "sources", *_FIGURES), stacks)


def step_fit_csv(fit: Fit, anchored: Anchored | None, by_source: F64 | None = None) -> str:
    """Returns one line a step: seconds measured and predicted; mean absolute error left out, with another step as
    anchor."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for number, step in enumerate(fit.steps):
        cells = [step.name, step.source, step.family, step.setup.stack.name, step.setup.cluster.device.name]
        times = [step.measured_s, float(fit.shipped_s[number]), float(fit.fitted_s[number])]
        if anchored is not None:
            times.append(step.measured_s * float(np.exp(anchored.left_out.errors[number])))
            times += mean_errors(anchored.left_out.same_cluster[number : number + 1]).tolist()
        elif by_source is not None:
            times.append(step.measured_s * float(np.exp(by_source[number])))
        figures = [f"{time:.6g}" for time in times]
        writer.writerow([*cells, *figures, *[""] * (len(_COLUMNS) - len(cells) - len(figures))])
    return text.getvalue()


def _print_families(out: Console, title: str, families: dict[str, dict[str, float]]) -> None:
    if families:
        rows = ((name, *_percents(figures)) for name, figures in families.items())
        print_table(out, title, "lrrrrr", ("family", *_FIGURES), rows)


def _errors(fit: Fit, seconds: F64) -> F64:
    """Returns log(predicted / measured)."""
    out: F64 = np.log(seconds) - np.log([step.measured_s for step in fit.steps])
    return out


def _families(fit: Fit, figures: Callable[[list[int]], dict[str, float]]) -> dict[str, dict[str, float]]:
    """Returns the figures of the steps of each family, and of all of them."""
    numbers: dict[str, list[int]] = {}
    for number, step in enumerate(fit.steps):
        numbers.setdefault(step.family, []).append(number)
    numbers["all"] = list(range(len(fit.steps)))
    return {name: figures(own) for name, own in numbers.items()}


def _anchored_by_family(fit: Fit, anchored: Sequence[F64]) -> dict[str, dict[str, float]]:
    """Returns every step under each anchor; a step counts once, however many anchors there are."""

    def figures(own: list[int]) -> dict[str, float]:
        some = [anchored[number] for number in own if len(anchored[number])]
        if not some:
            return _figures(np.array([]))
        weights = np.concatenate([np.full(len(each), 1 / len(each)) for each in some])
        return {**_figures(np.concatenate(some), weights), "rows": len(some)}

    return _families(fit, figures)


def _figures(errors: F64, weights: F64 | None = None) -> dict[str, float]:
    """Returns the figures of errors that are logarithms, as fractions of the measured time; nan if there is none."""
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
    """Returns the quantile of weighted values, linear between their middles: numpy's own where all weigh the same."""
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
