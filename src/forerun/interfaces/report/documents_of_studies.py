"""Documents: the contents of the pages of scaling studies, comparisons and straggler studies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forerun.interfaces.report.figures import percent, rate, seconds
from forerun.interfaces.report.page import Document, Figures, Heading, Part, Plot, Table, Text
from forerun.interfaces.report.page_sections import dollars, reproduce_section
from forerun.interfaces.report.plots import causes_plot
from forerun.interfaces.report.plots_of_studies import cumulated_plot, efficiency_plot, spread_plot, throughput_plot
from forerun.interfaces.report.study_cells import scale_cells, variant_cells

if TYPE_CHECKING:
    from forerun.answers.experiment.request import Request
    from forerun.answers.experiment.result import Comparison, ScalePoint, ScalingStudy, StragglerStudy, Variant

_BLAMED = 10
_LISTED = 40


def scaling_document(study: ScalingStudy, command: str = "") -> Document:
    """Returns the page of a scaling study. `command` repeats the study."""
    request = study.request
    kind = "strong scaling" if study.strong else "weak scaling"
    kept = "the global batch" if study.strong else "the batch of each GPU"
    ran = [point for point in study.points if not point.error]
    rows = [(f"{point.n_gpus:,} GPUs", point.breakdown_s, _rate(request, point.samples_per_s)) for point in ran]
    parts: list[Part] = [_best_scales(study), _verdict(study), Heading("Efficiency"), efficiency_plot(study)]
    parts += [Heading("Throughput"), throughput_plot(study)]
    if rows:
        parts += [Heading("Where the step goes at each scale"), causes_plot(rows, "Step time by cause at each scale")]
    parts += [Heading("Every scale"), _scales(study)]
    parts += reproduce_section(command, request.config, "The experiment, with every key", request.echo)
    subtitle = f"{_subject(request)}; {kept} is kept, {len(study.points)} scales"
    return Document(f"{request.name}: {kind}", subtitle, tuple(parts))


def comparison_document(comparison: Comparison, command: str = "") -> Document:
    """Returns the page of a comparison. `command` repeats the study."""
    request, variants = comparison.request, comparison.variants
    parts: list[Part] = [*_fastest(comparison), Heading("Where the step goes")]
    if any(not each.error for each in variants):
        parts.append(comparison_plot(comparison))
    parts += [Heading("Every variant"), _variants(comparison)]
    parts += reproduce_section(command, request.config, "The experiment, with every key", request.echo)
    subtitle = f"{_subject(request)}; {len(variants)} variants, the experiment itself first"
    return Document(f"{request.name}: variants side by side", subtitle, tuple(parts))


def comparison_plot(comparison: Comparison) -> Plot:
    """Returns the step time by cause of every variant that runs."""
    shown = [each for each in comparison.variants if not each.error][:_LISTED]
    rows = [(each.label, each.breakdown_s, _variant_words(comparison.request, each)) for each in shown]
    return causes_plot(rows, "Step time by cause of every variant")


def _variant_words(request: Request, each: Variant) -> str:
    fits = each.prediction is None or each.prediction.fits
    return _rate(request, each.samples_per_s) + ("" if fits else ", does not fit")


def straggler_document(study: StragglerStudy, command: str = "") -> Document:
    """Returns the page of a straggler study. `command` repeats the study."""
    request = study.request
    parts: list[Part] = [_straggler_figures(study), *(Text(note, "note") for note in study.notes)]
    parts += [Heading("How step times spread"), spread_plot(study), cumulated_plot(study)]
    parts += [*_blame(study), *_sweep(study)]
    parts += reproduce_section(command, request.config, "The experiment, with every key", request.echo)
    seed = request.disturbance.seed
    subtitle = f"{_subject(request)}; {len(study.steps_s):,} steps with seed {seed}"
    return Document(f"{request.name}: stragglers", subtitle, tuple(parts))


def _subject(request: Request) -> str:
    setup = request.setup
    return f"{setup.model.name} on {setup.n_gpus:,} x {setup.cluster.name}"


def _rate(request: Request, samples_per_s: float) -> str:
    return f"{rate(samples_per_s)} {request.sample}s/s"


def _best_scales(study: ScalingStudy) -> Figures:
    points = {point.num_nodes: point for point in study.points}
    found = (
        ("fastest that fits", study.best_by_time),
        ("largest efficient number of nodes", study.best_by_efficiency),
        ("cheapest", study.best_by_cost),
    )
    entries = [(name, *_scale_words(study, points.get(nodes or 0))) for name, nodes in found]
    broken = points.get(study.break_down or 0)
    remark = f"below {study.request.thresholds.efficiency:.0%} efficiency"
    entries.append(("breaks down", f"{broken.num_nodes:,} nodes" if broken else "nowhere", remark))
    return Figures(tuple(entries))


def _scale_words(study: ScalingStudy, point: ScalePoint | None) -> tuple[str, str]:
    if point is None:
        return "none", ""
    cost = point.bill.dollars_per_million_samples
    priced = "" if cost is None else f", {dollars(cost)} per million {study.request.sample}s"
    return f"{_nodes(point.num_nodes)}", f"{point.n_gpus:,} GPUs, {_rate(study.request, point.samples_per_s)}{priced}"


def _nodes(number: int) -> str:
    return f"{number:,} node" + ("" if number == 1 else "s")


def _verdict(study: ScalingStudy) -> Text:
    threshold = f"{study.request.thresholds.efficiency:.0%}"
    if study.break_down is None:
        return Text(f"The efficiency stays at {threshold} or more at every scale that runs.", "good")
    return Text(
        f"From {_nodes(study.break_down)} on the efficiency is below {threshold}. What grew most: {study.cause}.",
        "warning",
    )


def _scales(study: ScalingStudy) -> Table:
    rows = tuple(
        (
            f"{point.num_nodes:,}",
            f"{point.n_gpus:,}",
            *_scale(point),
            point.error
            or "; ".join(text for text in (point.note, "" if point.fits else "does not fit in memory") if text),
        )
        for point in study.points
    )
    columns = ("nodes", "GPUs", "step time", f"{study.request.sample}s/s", "efficiency", "exposed comm.", "memory, GiB")
    cost = f"$ per million {study.request.sample}s"
    return Table((*columns, cost, ""), rows, numeric=frozenset(range(8)), most=_LISTED)


def _scale(point: ScalePoint) -> tuple[str, ...]:
    cells = scale_cells(point)
    if cells is None:
        return ("",) * 6
    return (
        cells.step_time,
        cells.samples_per_s,
        percent(point.efficiency),
        cells.exposed,
        cells.memory_gib,
        _signed(cells.dollars_per_million),
    )


def _signed(dollars_in_words: str) -> str:
    return dollars_in_words and "$" + dollars_in_words


def _fastest(comparison: Comparison) -> list[Part]:
    summary, base = comparison.summary(), comparison.variants[0]
    if summary["fastest"] is None:
        return [Text("No variant fits in memory.", "warning")]
    faster = summary["fastest_speed_up"]
    remark = "" if faster is None else f"{faster:.2f} times the experiment as it is"
    return [
        Figures(
            (
                ("fastest that fits", str(summary["fastest"]), remark),
                ("its throughput", _rate(comparison.request, summary["fastest_samples_per_s"]), ""),
                ("the experiment as it is", _rate(comparison.request, base.samples_per_s), base.label),
            )
        )
    ]


def _variants(comparison: Comparison) -> Table:
    base = comparison.variants[0].samples_per_s
    rows = tuple(_variant(each, base) for each in comparison.variants)
    columns = (
        "variant",
        "what was changed",
        "step time",
        f"{comparison.request.sample}s/s",
        "to the first",
        "exposed comm.",
    )
    memory = ("memory, GiB", f"$ per million {comparison.request.sample}s", "")
    return Table((*columns, *memory), rows, numeric=frozenset(range(2, 8)), most=_LISTED)


def _variant(each: Variant, base: float) -> tuple[str, ...]:
    cells = variant_cells(each)
    if cells is None or each.prediction is None:
        return each.label, each.axis, "", "", "", "", "", "", each.error
    return (
        each.label,
        each.axis,
        cells.step_time,
        cells.samples_per_s,
        f"x {each.samples_per_s / base:.2f}" if base else "",
        cells.exposed,
        cells.memory_gib,
        _signed(cells.dollars_per_million),
        "" if each.prediction.fits else "does not fit in memory",
    )


def _straggler_figures(study: StragglerStudy) -> Figures:
    base = study.undisturbed_s
    cost = "" if study.lost_dollars is None else f"{dollars(study.lost_dollars)} of the run"
    return Figures(
        (
            ("undisturbed step", seconds(base), ""),
            ("mean step", seconds(study.mean_s), f"{study.mean_s / base - 1:+.1%}"),
            ("p50", seconds(study.p50_s), f"{study.p50_s / base - 1:+.1%}"),
            ("p99", seconds(study.p99_s), f"{study.p99_s / base - 1:+.1%}"),
            ("lost to waiting", percent(study.lost_share), cost),
        )
    )


def _blame(study: StragglerStudy) -> list[Part]:
    """Shows which ranks were the slowest, and how often."""
    if not study.blame:
        return [Heading("Who the others wait for"), Text("No rank: all ranks take equally long in every step.")]
    steps = len(study.steps_s)
    rows = tuple((f"{rank:,}", f"{count:,}", percent(count / steps)) for rank, count in study.blame[:_BLAMED])
    caption = f"The {len(rows)} most frequent of {len(study.blame):,} ranks"
    return [
        Heading("Who the others wait for"),
        Table(("rank", "steps in which it is the slowest", "of all"), rows, caption, numeric=frozenset({0, 1, 2})),
    ]


def _sweep(study: StragglerStudy) -> list[Part]:
    if not study.sweep:
        return []
    rows = tuple(
        (
            f"{each.probability:g}",
            f"{each.slowdown:g}",
            seconds(each.mean_s),
            seconds(each.p99_s),
            percent(each.lost_share),
            dollars(each.lost_dollars),
        )
        for each in study.sweep
    )
    columns = ("probability", "slowdown", "mean step", "p99", "lost to waiting", "lost")
    return [
        Heading("With other stragglers"),
        Table(
            columns,
            rows,
            "Each rank is a straggler with this probability, and slower by this factor",
            frozenset(range(6)),
        ),
    ]
