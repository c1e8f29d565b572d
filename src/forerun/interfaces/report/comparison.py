"""Shows a profiled step beside its prediction: console tables, a record for JSON, a page, and correction files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from rich.console import Console

from forerun.answers.analysis.timeline_lanes import lanes
from forerun.answers.comparison.ran_step import WAITING
from forerun.answers.comparison.ranks import label_of
from forerun.answers.comparison.verdict import LEAST, name_of, verdict
from forerun.answers.profile.kernel_types import short_name
from forerun.common.files import whole_file
from forerun.common.units import GIGA
from forerun.interfaces.report.console import make_table, print_table
from forerun.interfaces.report.figures import percent, seconds
from forerun.interfaces.report.page import Code, Document, Figures, Heading, Listing, Part, Plot, Table, Text
from forerun.interfaces.report.plots import lanes_plot
from forerun.interfaces.report.records import anchor_record
from forerun.interfaces.report.written import write_table

if TYPE_CHECKING:
    from forerun.answers.analysis.reading import Simulation
    from forerun.answers.comparison.compare import Comparison
    from forerun.answers.comparison.corrections import Corrections
    from forerun.answers.comparison.matching import Pair
    from forerun.answers.comparison.ranks import RankDifference
    from forerun.describe.cluster.types import KernelRates

_NAME = 44
_NOTHING_S = 1e-8
"""differences of sums of times below this are rounding"""
_COLLECTIVE = ("part", "count", "bytes", "measured GB/s", "predicted GB/s", "waiting", "lost")
_PAIR = ("work", "kernel", "module", "shape", "count", "measured", "predicted", "lost")
_RANKS = ("rank", "work, measured", "predicted", "lost", "waiting, measured", "predicted", "most lost in")
_BREAKS = ("function", "place", "module", "calls", "GPU idle after it")
_RANKS_TITLE = "Each rank beside its stage"
_PARTS = ("part of the step", "measured", "predicted", "lost", "of the step")


def comparison_record(found: Comparison) -> dict[str, Any]:
    """Returns every figure of a comparison. What the parts lost adds up to the difference of the step times."""
    prediction = found.simulation.prediction
    return {
        "verdict": verdict(found),
        "measured_step_s": found.measured_s,
        "predicted_step_s": found.predicted_s,
        "slowdown": found.slowdown,
        "parts": [part._asdict() | {"lost_s": part.lost_s} for part in found.parts],
        "slowest_rank": found.rank.rank,
        "ranks": [_rank_record(rank) for rank in found.ranks],
        "work": [_pair_record(pair) for pair in found.pairs],
        "modules": [row._asdict() | {"lost_s": row.lost_s} for row in found.modules],
        "overlap": {
            side: {"communicating_s": step.communicating_s, "hidden_s": step.hidden_s}
            for side, step in (("measured", found.measured), ("predicted", found.predicted))
        },
        "launches": {"measured": found.measured.launches, "predicted": found.predicted.launches},
        "graph_breaks": [one._asdict() for one in found.graph_breaks],
        "idle_before_s": found.measured.idle_before,
        "memory": {
            "measured_peak_allocated_gib": found.measured_peak_gib,
            "predicted_peak_allocated_gib": prediction.peak_allocated_gib if prediction.memory_recorded else None,
        },
        "notes": list(found.notes),
    }


def _rank_record(one: RankDifference) -> dict[str, Any]:
    measured, predicted = one.work_s
    return {
        "rank": one.rank,
        "stage": one.stage,
        "measured_work_s": measured,
        "predicted_work_s": predicted,
        "measured_waiting_s": one.measured.step_s - measured,
        "predicted_waiting_s": one.predicted.step_s - predicted,
        "parts": [part._asdict() | {"lost_s": part.lost_s} for part in one.parts],
    }


def _pair_record(pair: Pair) -> dict[str, Any]:
    measured, predicted = pair.counts
    return {
        "part": pair.part,
        "name": pair.name,
        "kernel": pair.kernel,
        "modules": list(pair.modules),
        "phase": pair.phase,
        "shape": list(pair.shape),
        "measured_count": measured,
        "predicted_count": predicted,
        "measured_s": pair.measured_s,
        "predicted_s": pair.predicted_s,
        "lost_s": pair.lost_s,
        "waiting_s": sum(line.waiting_s for line in pair.measured),
        "measured_bytes_per_s": pair.rate(pair.measured, "moved_bytes"),
        "predicted_bytes_per_s": pair.rate(pair.predicted, "moved_bytes"),
    }


def print_comparison(out: Console, found: Comparison, top: int) -> None:
    """Prints the verdict, the parts, and the `top` pairs of work and modules that lost and won most."""
    out.print(verdict(found), soft_wrap=True)
    out.print()
    out.print(make_table("lr", (), _figures(found), gap=2))
    out.print()
    print_table(out, "Where the step lost and won time", "lrrrr", _PARTS, _part_rows(found))
    if len(found.ranks) > 1:
        out.print()
        print_table(out, _RANKS_TITLE, "lrrrrrl", _RANKS, _rank_rows(found))
    rows = _collective_rows(found)
    if rows:
        out.print()
        print_table(out, "Collectives", "lrrrrrr", _COLLECTIVE, rows)
    shown = _ends(found.pairs, top)
    out.print()
    title = f"Work by lost time ({len(shown)} of {len(found.pairs)})"
    print_table(out, title, "llllrrrr", _PAIR, [_pair_row(pair) for pair in shown])
    if found.graph_breaks:
        out.print()
        print_table(out, "Graph breaks", "lllrr", _BREAKS, _break_rows(found)[:top])
    modules = _ends(found.modules, top)
    out.print()
    rows_ = [(row.module, seconds(row.measured_s), seconds(row.predicted_s), _signed(row.lost_s)) for row in modules]
    title = f"Modules by lost time ({len(modules)} of {len(found.modules)})"
    print_table(out, title, "lrrr", ("module", "measured", "predicted", "lost"), rows_)
    for note in found.notes:
        out.print(f"note: {note}")


def _figures(found: Comparison) -> list[tuple[str, str]]:
    measured, predicted = found.measured, found.predicted
    peak = found.measured_peak_gib
    prediction = found.simulation.prediction
    rows = [
        ("step, measured", seconds(found.measured_s)),
        ("step, predicted", seconds(found.predicted_s)),
        ("launches", f"{measured.launches:,}, predicted {predicted.launches:,}"),
    ]
    if measured.communicating_s or predicted.communicating_s:
        shares = [_share(step.hidden_s, step.communicating_s) for step in (measured, predicted)]
        rows.append(("communication beside kernels", f"{shares[0]}, predicted {shares[1]}"))
    if found.graph_breaks:
        count = sum(one.calls for one in found.graph_breaks)
        idle = seconds(sum(one.idle_s for one in found.graph_breaks))
        rows.append(("graph breaks", f"{count:,} at {len(found.graph_breaks)} places, GPU idle for {idle} after them"))
    memory = "not recorded" if peak is None else f"{peak:.2f} GiB"
    expected = f", predicted {prediction.peak_allocated_gib:.2f} GiB" if prediction.memory_recorded else ""
    rows.append(("peak allocated", f"{memory}{expected}"))
    return rows


def _share(part: float, whole: float) -> str:
    return f"{percent(part / whole)} of {seconds(whole)}" if whole else "none"


def _part_rows(found: Comparison) -> list[tuple[str, ...]]:
    rows = [
        (
            part.label,
            seconds(part.measured_s),
            seconds(part.predicted_s),
            _signed(part.lost_s),
            f"{part.lost_s / found.predicted_s:+.1%}",
        )
        for part in found.parts
    ]
    lost = found.measured_s - found.predicted_s
    total = ("all", seconds(found.measured_s), seconds(found.predicted_s), _signed(lost), f"{found.slowdown:+.1%}")
    return [*rows, total]


def _break_rows(found: Comparison) -> list[tuple[str, ...]]:
    return [
        (one.function, one.place, one.module or "-", f"{one.calls:,}", seconds(one.idle_s))
        for one in found.graph_breaks
    ]


def _rank_rows(found: Comparison) -> list[tuple[str, ...]]:
    return [_rank_row(rank, found) for rank in found.ranks]


def _rank_row(one: RankDifference, found: Comparison) -> tuple[str, ...]:
    measured, predicted = one.work_s
    most = max((part for part in one.parts if part.part != WAITING), key=lambda part: part.lost_s)
    return (
        name_of(one, found),
        seconds(measured),
        seconds(predicted),
        _signed(measured - predicted),
        seconds(one.measured.step_s - measured),
        seconds(one.predicted.step_s - predicted),
        f"{most.label} ({_signed(most.lost_s)})" if most.lost_s > LEAST * predicted else "-",
    )


def _collective_rows(found: Comparison) -> list[tuple[str, ...]]:
    pairs = [pair for pair in found.pairs if any(len(line.shape) == 3 for line in pair.lines)]
    return [
        (
            label_of(pair.part),
            _counts(pair),
            _bytes(pair),
            *(_rate(pair.rate(side, "moved_bytes")) for side in (pair.measured, pair.predicted)),
            seconds(sum(line.waiting_s for line in pair.measured)),
            _signed(pair.lost_s),
        )
        for pair in pairs
    ]


def _bytes(pair: Pair) -> str:
    sizes = sorted({line.shape[2] for line in pair.lines if len(line.shape) == 3})
    return f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{bytes_per_s / GIGA:,.1f}"


def _pair_row(pair: Pair) -> tuple[str, ...]:
    shape = " x ".join(map(str, pair.shape)) if len(pair.shape) > 3 else ""
    modules = [module for module in pair.modules if module]
    more = f" +{len(modules) - 1}" if len(modules) > 1 else ""
    return (
        _cut(short_name(pair.name) if pair.predicted else "(not predicted)"),
        _cut(short_name(pair.kernel) if pair.measured else "(not measured)"),
        (modules[0] if modules else "-") + more,
        shape,
        _counts(pair),
        seconds(pair.measured_s),
        seconds(pair.predicted_s),
        _signed(pair.lost_s),
    )


def _cut(name: str) -> str:
    return name if len(name) <= _NAME else f"{name[: _NAME - 3]}..."


def _counts(pair: Pair) -> str:
    measured, predicted = pair.counts
    return f"{measured:,}" if measured == predicted else f"{measured:,} / {predicted:,}"


def _ends(rows: Sequence[Any], top: int) -> list[Any]:
    """Returns the first and the last rows, `top` of them: the largest losses and the largest gains."""
    if len(rows) <= top:
        return list(rows)
    first = -(-top * 2 // 3)
    return [*rows[:first], *rows[len(rows) - (top - first) :]]


def _signed(time_s: float) -> str:
    return "0 s" if abs(time_s) < _NOTHING_S else f"{'-' if time_s < 0 else '+'}{seconds(abs(time_s))}"


# -- the page ----------------------------------------------------------------------------------------------------------


def comparison_document(found: Comparison, command: str) -> Document:
    """Returns the page of a comparison, with both timelines on one axis."""
    entries = tuple((name, value, "") for name, value in _figures(found))
    parts: list[Part] = [
        Text(f"The measured step is {verdict(found)}.", "warning" if found.slowdown > 0 else "good"),
        Figures(entries),
        Heading("Where the step lost and won time"),
        Text("Every moment of a step counts as one part, so the parts add up to the difference of the step times."),
        Table(_PARTS, tuple(_part_rows(found)), numeric=frozenset({1, 2, 3, 4})),
        *_ranks_of_page(found),
        Heading("Both timelines"),
        Text("The streams of the measured step, and below them those of the predicted one, on one axis.", "hint"),
        _both_timelines(found),
        Heading("Work by lost time"),
        Table(_PAIR, tuple(map(_pair_row, found.pairs)), numeric=frozenset({4, 5, 6, 7})),
    ]
    rows = _collective_rows(found)
    if rows:
        parts += [Heading("Collectives"), Table(_COLLECTIVE, tuple(rows), numeric=frozenset(range(1, 7)))]
    modules = tuple(
        (row.module, seconds(row.measured_s), seconds(row.predicted_s), _signed(row.lost_s)) for row in found.modules
    )
    if found.graph_breaks:
        parts += [Heading("Graph breaks"), Table(_BREAKS, tuple(_break_rows(found)), numeric=frozenset({3, 4}))]
    columns = ("module", "measured", "predicted", "lost")
    parts += [Heading("Modules"), Table(columns, modules, numeric=frozenset({1, 2, 3}))]
    if found.notes:
        parts += [Heading("Notes"), Listing(found.notes)]
    parts.append(Code(command, "The command of this page"))
    name = found.simulation.prediction.model
    return Document(
        f"{found.imported.name} beside the prediction of {name}", found.simulation.prediction.cluster, tuple(parts)
    )


def _ranks_of_page(found: Comparison) -> list[Part]:
    if len(found.ranks) < 2:
        return []
    text = f"The parts above, and all that follows, are those of {name_of(found.rank, found)}, which waits least."
    table = Table(_RANKS, tuple(_rank_rows(found)), numeric=frozenset(range(1, 6)))
    return [Heading(_RANKS_TITLE), Text(text), table]


def _both_timelines(found: Comparison) -> Plot:
    shown = [
        replace(lane, name=f"{side}: {lane.name}")
        for side, simulation, number in (
            ("measured", _as_simulation(found), found.rank.run_class),
            ("predicted", found.simulation, found.rank.rank_class),
        )
        for lane in lanes(simulation, number)
    ]
    until_ps = max(found.run.timeline.end_of_step_ps, found.simulation.timeline.end_of_step_ps)
    times = f"{seconds(found.measured_s)} measured, {seconds(found.predicted_s)} predicted"
    return lanes_plot(shown, until_ps, f"What the streams of both steps do: {times}")


def _as_simulation(found: Comparison) -> Simulation:
    """Returns the measured step in the form that timelines are drawn from."""
    run, n_ops = found.run, len(found.run.program.ops)
    costs = replace(found.simulation.costs, issue_ps=np.zeros(n_ops, np.int64))
    return replace(
        found.simulation,
        program=run.program,
        flat=run.flat,
        timeline=run.timeline,
        costs=costs,
        slowest=found.rank.run_class,
    )


# -- files -------------------------------------------------------------------------------------------------------------


def write_corrections(found: Corrections, kernels: Path | None, collectives: Path | None) -> None:
    """Writes the measured times of kernels and of collectives. Raises ForerunError if that fails."""
    if kernels is not None:
        write_table(kernels, found.kernel_columns, found.kernels)
    if collectives is not None:
        write_table(collectives, found.network_columns, found.collectives)


def write_anchor(path: Path, found: Comparison, rates: KernelRates, cluster: str) -> None:
    """Writes the measured step and the factors on rates as an --anchor file. Raises ForerunError if that fails."""
    plan = found.simulation.subject.plan
    record = anchor_record(plan, found.measured_s) | {"cluster": cluster}
    record["rates"] = {name: round(float(value), 6) for name, value in asdict(rates).items()}
    text = "# written by forerun profile compare; rates are factors on those of the prediction\n"
    with whole_file(path) as file:
        file.write((text + yaml.safe_dump(record, sort_keys=False)).encode())
