"""A ranking of saved programs: as text, as a JSON object and as CSV rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from forerun.analysis.prediction import Prediction
from forerun.report.console import make_table, print_figures, print_histogram, print_missing
from forerun.report.histogram import histogram
from forerun.report.records import bin_record, prediction_record, write_rows
from forerun.report.wording import percent, rate, seconds
from forerun.search.programs import ProgramRanking


def programs_record(ranking: ProgramRanking, top: int) -> dict[str, Any]:
    """A ranking: the counts, the reasons, and the `top` best programs that fit (`best` is null for none)."""
    best = [{"file": each.file, **prediction_record(each.prediction)} for each in ranking.ranked[:top]]
    return {
        "folder": ranking.folder,
        "cluster": ranking.cluster,
        "memory_limit_gib": ranking.memory_limit_gib,
        "counts": ranking.counts,
        "out_of_memory": [asdict(each) for each in ranking.too_large],
        "refused": [asdict(each) for each in ranking.refused],
        "runtime_histogram": [bin_record(each) for each in histogram(_times(ranking))],
        "best": best[0] if best else None,
        "top": best,
    }


def write_programs_csv(path: str | Path, ranking: ProgramRanking) -> None:
    """Every file as one row, the fastest first. Raises ForerunError where the file can't be written."""
    write_rows(path, ranking.to_rows())


def print_programs(out: Console, ranking: ProgramRanking, top: int) -> None:
    """What fits by step time, how the times spread, what does not fit and what could not be predicted."""
    counts = ranking.counts
    out.print(Text(f"{counts['considered']} programs of {ranking.folder} on {ranking.cluster}", style="bold"))
    out.print()
    if ranking.ranked:
        _print_ranking(out, ranking, top)
        if len({round(_tokens(each.prediction)) for each in ranking.ranked}) > 1:
            out.print("! their steps train different numbers of tokens: tok/s/GPU compares them")
        out.print()
        print_histogram(out, histogram(_times(ranking)))
        out.print()
    _print_left_out(out, ranking)
    if ranking.best is None:
        out.print("Nothing fits. The nearest miss is the first of those that don't.")
        return
    best = ranking.best
    out.print(Text(f"Best by time: {best.file}, {seconds(best.prediction.step_time_s)}", style="bold"))
    out.print()
    print_figures(out, best.prediction)
    print_missing(out, best.prediction)


def _tokens(prediction: Prediction) -> float:
    """Tokens of a step over all GPUs, 0 where they are not known."""
    return (prediction.tokens_per_s_per_gpu or 0.0) * prediction.step_time_s * prediction.n_gpus


def _times(ranking: ProgramRanking) -> list[float]:
    return [each.prediction.step_time_s for each in ranking.ranked]


def _print_ranking(out: Console, ranking: ProgramRanking, top: int) -> None:
    columns = (("step\ntime", "right"), ("tok/s\n/GPU", "right"), ("MFU", "right"), ("HFU", "right"))
    shown = make_table(("#", "right"), ("program", "left"), ("GPUs", "right"), *columns, ("peak\nGiB", "right"))
    for rank, each in enumerate(ranking.ranked[:top], 1):
        prediction = each.prediction
        shown.add_row(
            str(rank),
            each.file,
            f"{prediction.n_gpus:,}",
            seconds(prediction.step_time_s),
            rate(prediction.tokens_per_s_per_gpu),
            percent(prediction.mfu),
            percent(prediction.hfu),
            f"{prediction.peak_reserved_gib:.1f}",
        )
    out.print(shown)


def _print_left_out(out: Console, ranking: ProgramRanking) -> None:
    if ranking.too_large:
        causes = Counter(each.cause for each in ranking.too_large).most_common()
        parts = ", ".join(f"{cause} is the largest part of {n}" for cause, n in causes)
        title = f"{len(ranking.too_large)} run out of {ranking.memory_limit_gib:.1f} GiB ({parts})"
        out.print(Text(title, style="bold"))
        for each in ranking.too_large:
            out.print(f"  {each.file}: {each.reason}")
        out.print()
    if ranking.refused:
        out.print(Text(f"{len(ranking.refused)} could not be predicted", style="bold"))
        for refused in ranking.refused:
            out.print(f"  {refused.file}: {refused.reason}")
        out.print()
