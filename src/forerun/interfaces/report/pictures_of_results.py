"""Lists the pictures of a result: its plots by the name of the PNG file, drawn when asked for. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from forerun.answers.experiment.result import Comparison, RunResult, ScalingStudy, StragglerStudy
from forerun.interfaces.report.documents_of_studies import comparison_plot
from forerun.interfaces.report.heat_cells import heat_title, heat_words
from forerun.interfaces.report.pictures import picture
from forerun.interfaces.report.plots import iterations_plot, memory_plot, timeline_plot, use_plot
from forerun.interfaces.report.plots_of_searches import figures_of, heat_plot, plans_plot, sweep_plot
from forerun.interfaces.report.plots_of_studies import cumulated_plot, efficiency_plot, spread_plot, throughput_plot

if TYPE_CHECKING:
    from forerun.answers.analysis.bottlenecks import Usage
    from forerun.answers.search.heat import HeatMap
    from forerun.answers.search.result import SearchResult
    from forerun.answers.search.sweep import Sweep
    from forerun.interfaces.report.page import Plot

Study: TypeAlias = ScalingStudy | Comparison | StragglerStudy
Pictures: TypeAlias = dict[str, Callable[[], bytes]]


def run_pictures(result: RunResult, usages: Sequence[Usage]) -> Pictures:
    """Returns the pictures of a run; `usages` are those of its bottlenecks."""
    simulation, name = result.simulation, result.request.name
    prediction, cls = simulation.prediction, simulation.program.rank_classes[simulation.slowest]
    ranks = f" ({cls.n_ranks:,} of {prediction.n_gpus:,} ranks)" if len(simulation.program.rank_classes) > 1 else ""
    fullest = f"memory of {prediction.peak_rank_class}" + (", the fullest rank" if len(simulation.memory) > 1 else "")
    return {
        "iteration_breakdown": lambda: picture(
            f"{name}: where the time of each iteration goes", iterations_plot(result.iterations)
        ),
        "resource_utilization": lambda: picture(f"{name}: use of resources", use_plot(usages)),
        "memory_over_time": lambda: picture(f"{prediction.model}: {fullest}", memory_plot(simulation)),
        "timeline": lambda: picture(f"{prediction.model}: what {cls.name} does{ranks}", timeline_plot(simulation)),
    }


def study_pictures(study: Study) -> Pictures:
    """Returns the picture of a study."""
    name = {ScalingStudy: "scaling_efficiency", Comparison: "comparison", StragglerStudy: "straggler_distribution"}

    def draw() -> bytes:
        title, plots, note = plots_of_study(study)
        return picture(title, *plots, note=note)

    return {name[type(study)]: draw}


def plots_of_study(study: Study) -> tuple[str, tuple[Plot, ...], str]:
    """Returns the title of the picture of a study, its plots, and the note under them."""
    name = study.request.name
    if isinstance(study, ScalingStudy):
        kept = "strong scaling, global batch kept" if study.strong else "weak scaling, batch of each GPU kept"
        broken = next((point.n_gpus for point in study.points if point.num_nodes == study.break_down), None)
        note = "" if broken is None else f"Breaks down at {broken:,} GPUs: {study.cause}"
        return f"{name}: {kept}", (efficiency_plot(study), throughput_plot(study)), note
    if isinstance(study, Comparison):
        return f"{name}: variants side by side", (comparison_plot(study),), ""
    note = f"{study.lost_share:.1%} of the time goes to waiting for the slowest rank"
    return f"{name}: {len(study.steps_s):,} steps", (spread_plot(study), cumulated_plot(study)), note


def search_pictures(result: SearchResult, maps: Sequence[HeatMap]) -> Mapping[str, bytes]:
    """Returns the plans of a search, where one fits, and its heat maps."""
    title = f"{result.model} on {result.n_gpus:,} x {result.cluster}, global batch {result.global_batch:,}"
    plans = {} if result.best is None else {"plans": picture(title, plans_plot(result))}
    return plans | {f"heat-{shown.x}-{shown.y}": heat_picture(shown) for shown in maps}


def heat_picture(shown: HeatMap) -> bytes:
    """Returns the best plan for each pair of values."""
    return picture(heat_title(shown), heat_plot(shown), note=heat_words(shown))


def sweep_pictures(sweep: Sweep) -> Mapping[str, bytes]:
    """Returns plots of what more GPUs or larger batches bring; nothing if no plan fits."""
    if sweep.best is None:
        return {}
    plots: list[Plot] = [sweep_plot(sweep, panel) for panel in figures_of(sweep)]
    return {"range": picture(f"{sweep.model} on {sweep.cluster}, best by {sweep.objective}", *plots)}
