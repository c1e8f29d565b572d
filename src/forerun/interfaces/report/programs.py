"""A ranking of saved programs: as text, as a JSON object and as CSV rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from forerun.interfaces.report.console import make_table, print_figures, print_histogram, print_missing, print_title
from forerun.interfaces.report.figures import dollars, percent, rate, seconds
from forerun.interfaces.report.histogram import histogram
from forerun.interfaces.report.records import prediction_record
from forerun.interfaces.report.records_of_searches import bin_record
from forerun.interfaces.report.written import write_rows

if TYPE_CHECKING:
    from forerun.answers.search.programs import Fitting, ProgramRanking
    from forerun.answers.search.result import Objective


def programs_record(ranking: ProgramRanking, top: int) -> dict[str, Any]:
    """Returns a ranking: the counts, the reasons, and the `top` best programs that fit (`best` is null for none)."""
    best = [_fitting_record(each) for each in ranking.ranked[:top]]
    unranked = {"unranked": [_fitting_record(each) for each in ranking.unranked]} if ranking.unranked else {}
    return {
        "folder": ranking.folder,
        "cluster": ranking.cluster,
        "memory_limit_gib": ranking.memory_limit_gib,
        "objective": ranking.objective,
        "because": ranking.because,
        "counts": ranking.counts,
        "out_of_memory": [asdict(each) for each in ranking.too_large],
        "refused": [asdict(each) for each in ranking.refused],
        "runtime_histogram": [bin_record(each) for each in histogram(_times(ranking))],
        **unranked,
        "best": best[0] if best else None,
        "top": best,
    }


def _fitting_record(each: Fitting) -> dict[str, Any]:
    told = {"file": each.file, "tokens_per_step": each.tokens_per_step, "groups": dict(each.groups)}
    return told | prediction_record(each.prediction)


def write_programs_csv(path: str | Path, ranking: ProgramRanking) -> None:
    """Writes every file as one row, the best first. Raises ForerunError if the file can't be written."""
    write_rows(path, ranking.to_rows())


def print_programs(out: Console, ranking: ProgramRanking, top: int) -> None:
    """Prints the ranking, the distribution of times, and the programs that do not fit or can't be predicted."""
    counts = ranking.counts
    print_title(out, f"{counts['considered']} programs of {ranking.folder} on {ranking.cluster}")
    if ranking.fitting:
        out.print(f"Ranked by {RANKED_BY[ranking.objective]}: {ranking.because}.", soft_wrap=True)
    out.print()
    if ranking.ranked:
        _print_ranking(out, ranking, top)
        _print_warning(out, ranking)
        out.print()
    _print_unranked(out, ranking)
    if ranking.fitting:
        print_histogram(out, histogram(_times(ranking)))
        out.print()
    _print_left_out(out, ranking)
    if not ranking.fitting:
        out.print("Nothing fits. The nearest miss is the first of those that don't.")
    if ranking.best is not None:
        best = ranking.best
        words = f"Best by {ranking.objective}: {best.file}{_mesh(best)}, {_headline(best, ranking.objective)}"
        out.print(Text(words, style="bold"), soft_wrap=True)
        out.print()
        print_figures(out, best.prediction)
        print_missing(out, best.prediction)


RANKED_BY: dict[Objective, str] = {
    "time": "step time",
    "tokens": "tokens/s of a GPU",
    "cost": "dollars a token",
    "memory": "reserved memory",
}


def _headline(best: Fitting, objective: Objective) -> str:
    """Returns the figure that decides the ranking, and the step time."""
    prediction = best.prediction
    figures = {
        "tokens": f"{rate(prediction.tokens_per_s_per_gpu)} tok/s/GPU, ",
        "cost": f"{dollars(prediction.dollars_per_billion_tokens)} $ per 10^9 tokens, ",
        "memory": f"{prediction.peak_reserved_gib:.1f} GiB, ",
    }
    return f"{figures.get(objective, '')}{seconds(prediction.step_time_s)}"


def _mesh(each: Fitting) -> str:
    """Returns the groups in which a Program communicates, in parentheses; empty for none."""
    return f" ({', '.join(f'{axis} {size:,}' for axis, size in each.groups.items())})" if each.groups else ""


def _print_warning(out: Console, ranking: ProgramRanking) -> None:
    """Prints a warning if programs with different tokens are ranked by time."""
    tokens = {each.tokens_per_step for each in ranking.ranked}
    if ranking.objective == "time" and tokens == {None}:
        out.print("! the order holds if all steps train on the same tokens; --tokens-per-step N says how many")
    elif ranking.objective == "time" and len(tokens) > 1:
        out.print("! their steps train on different numbers of tokens: tok/s/GPU compares them")


def _print_unranked(out: Console, ranking: ProgramRanking) -> None:
    if not ranking.unranked:
        return
    title = f"{len(ranking.unranked)} fit and are not ranked: the tokens of their step are unknown"
    out.print(Text(f"{title} (--tokens-per-step N says them)", style="bold"), soft_wrap=True)
    for each in ranking.unranked:
        prediction = each.prediction
        out.print(
            f"  {each.file}: {seconds(prediction.step_time_s)} on {prediction.n_gpus:,} GPUs,"
            f" {prediction.peak_reserved_gib:.1f} GiB"
        )
    out.print()


def _times(ranking: ProgramRanking) -> list[float]:
    return [each.prediction.step_time_s for each in ranking.fitting]


def _print_ranking(out: Console, ranking: ProgramRanking, top: int) -> None:
    priced = ranking.objective == "cost"
    rows = (
        (
            str(rank),
            each.file,
            f"{each.prediction.n_gpus:,}",
            seconds(each.prediction.step_time_s),
            rate(each.prediction.tokens_per_s_per_gpu),
            percent(each.prediction.mfu),
            percent(each.prediction.hfu),
            f"{each.prediction.peak_reserved_gib:.1f}",
            *([dollars(each.prediction.dollars_per_billion_tokens)] if priced else []),
        )
        for rank, each in enumerate(ranking.ranked[:top], 1)
    )
    headings = ("#", "program", "GPUs", "step\ntime", "tok/s\n/GPU", "MFU", "HFU", "peak\nGiB", "$ per 10^9\ntokens")
    shown = len(headings) - (not priced)
    out.print(make_table("rlrrrrrrr"[:shown], headings[:shown], rows))


def _print_left_out(out: Console, ranking: ProgramRanking) -> None:
    if ranking.too_large:
        causes = Counter(each.cause for each in ranking.too_large).most_common()
        parts = ", ".join(f"{cause} is the largest part of {n}" for cause, n in causes)
        title = f"{len(ranking.too_large)} run out of {ranking.memory_limit_gib:.1f} GiB ({parts})"
        print_title(out, title)
        for each in ranking.too_large:
            out.print(f"  {each.file}: {each.reason}")
        out.print()
    if ranking.refused:
        print_title(out, f"{len(ranking.refused)} could not be predicted")
        for refused in ranking.refused:
            out.print(f"  {refused.file}: {refused.reason}")
        out.print()
