"""Shows predictions, simulated steps, searches and ranges of searches in a notebook."""

from __future__ import annotations

from forerun.answers.analysis.prediction import Prediction
from forerun.answers.analysis.reading import Simulation
from forerun.answers.experiment.result import Comparison, RunResult, ScalingStudy, StragglerStudy
from forerun.answers.search.result import SearchResult
from forerun.answers.search.sweep import Sweep
from forerun.common.errors import ForerunError
from forerun.common.shown import Picture, looks_like
from forerun.interfaces.report.documents import plan_line
from forerun.interfaces.report.documents_of_searches import ranking_parts
from forerun.interfaces.report.experiment_files import Result, document_of
from forerun.interfaces.report.in_notebook import document_html, parts_html, shown_picture
from forerun.interfaces.report.page import Part, Text
from forerun.interfaces.report.page_sections import figures, warnings
from forerun.interfaces.report.pictures_of_results import plots_of_study
from forerun.interfaces.report.plots import iterations_plot, labelled_bars, memory_plot, step_plot, timeline_plot
from forerun.interfaces.report.plots_of_searches import figures_of, plans_plot, sweep_plot
from forerun.interfaces.report.style import MEMORY_LOOKS
from forerun.interfaces.report.sweep_document import sweep_document

_TOP = 10
"""places of a search that a notebook shows"""


def show_in_notebooks() -> None:
    """Sets how the answers of the packages below are shown."""
    looks_like(Prediction, prediction_html, prediction_picture)
    looks_like(Simulation, lambda found: prediction_html(found.prediction), simulation_picture)
    looks_like(SearchResult, search_html, search_picture)
    looks_like(Sweep, lambda found: document_html(sweep_document(found, None, "", "")), sweep_picture)
    for kind in (RunResult, ScalingStudy, Comparison, StragglerStudy):
        looks_like(kind, lambda found: document_html(document_of(found)), result_picture)


def prediction_html(prediction: Prediction) -> str:
    """Returns the figures of a prediction. Warnings come first."""
    return parts_html(_title(prediction), plan_line(prediction), [*warnings(prediction), figures(prediction)])


def prediction_picture(prediction: Prediction) -> Picture:
    """Returns a picture of the time and the memory of a step by part."""
    sizes = sorted(prediction.memory_by_category_gib.items(), key=lambda item: -item[1])
    rows = [(MEMORY_LOOKS[name].label, f"{gib:.1f} GiB", gib) for name, gib in sizes if gib > 0]
    memory = labelled_bars(rows, "memory at its peak, GiB", f"Memory: {'; '.join(f'{n} {w}' for n, w, _ in rows)}")
    return shown_picture(_title(prediction), step_plot(prediction), memory)


def simulation_picture(simulation: Simulation) -> Picture:
    """Returns the timeline of the slowest rank beside the memory of the fullest one."""
    return shown_picture(_title(simulation.prediction), timeline_plot(simulation), memory_plot(simulation))


def search_html(result: SearchResult) -> str:
    """Returns the best plans of a search, and the counts of the others."""
    nothing: list[Part] = [] if result.ranked else [Text("Nothing fits in memory.")]
    counts = ", ".join(f"{name.replace('_', ' ')} {number:,}" for name, number in result.counts.items())
    question = f"{result.seq_len:,} tokens a sequence, global batch {result.global_batch:,}, best by {result.objective}"
    parts = [*nothing, *ranking_parts(result, _TOP), Text(f"Plans: {counts}; {result.proof}.")]
    return parts_html(f"{result.model} on {result.n_gpus:,} x {result.cluster}", question, parts)


def search_picture(result: SearchResult) -> Picture:
    """Returns time and memory of the plans. Raises ForerunError if none was simulated to its end."""
    if not result.ranked:
        raise ForerunError(f"{result.model}: no plan fits, so there is nothing to draw; to_dataframe() says why")
    return shown_picture(f"{result.model} on {result.n_gpus:,} x {result.cluster}", plans_plot(result))


def sweep_picture(sweep: Sweep) -> Picture:
    """Returns a picture of the gain of more GPUs or larger batches. Raises ForerunError if no plan fits anywhere."""
    if sweep.best is None:
        raise ForerunError(f"{sweep.model}: no plan fits anywhere, so there is nothing to draw")
    title = f"{sweep.model} on {sweep.cluster}, best by {sweep.objective}"
    return shown_picture(title, *(sweep_plot(sweep, panel) for panel in figures_of(sweep)))


def result_picture(result: Result) -> Picture:
    """Returns the iterations of a run, or the points of a study."""
    if isinstance(result, RunResult):
        name = f"{result.request.name}: where the time of each iteration goes"
        return shown_picture(name, iterations_plot(result.iterations))
    title, plots, note = plots_of_study(result)
    return shown_picture(title, *plots, note=note)


def _title(prediction: Prediction) -> str:
    return f"{prediction.model} on {prediction.n_gpus:,} x {prediction.cluster}"
