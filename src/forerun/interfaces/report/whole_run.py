"""A study of a whole run in words, tables and plain data; the console and the page print the same rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from forerun.answers.goodput.outcome import MEASURED_AS, Outcome, Spent
from forerun.interfaces.report.console import make_table, print_title
from forerun.interfaces.report.figures import dollars, percent, seconds

if TYPE_CHECKING:
    from forerun.answers.goodput.study import Quantiles, RunStudy

_SPENT_WORDS = {
    Spent.START: "first start",
    Spent.SAVE: "waiting for saves",
    Spent.DETECT: "until failures are detected",
    Spent.REPLACE: "until nodes are replaced",
    Spent.RESTART: "restarting and warming up",
    Spent.RESTORE: "loading checkpoints",
    Spent.WASTED: "steps that were lost",
    Spent.SLOW: "slower steps",
    Spent.RESIZE: "shrinking and growing",
    Spent.FEWER: "steps with fewer replicas",
    Spent.MAINTENANCE: "planned maintenance",
}
QUANTILE_COLUMNS = ("", "5 % of runs below", "median", "95 % below", "mean")
BADPUT_COLUMNS = ("lost to", "share of time", "class of ml-goodput-measurement")
FAILURE_COLUMNS = ("failures", "mean number")
INTERVAL_COLUMNS = ("checkpoint interval", "every", "goodput")
GAIN_COLUMNS = ("change", "goodput", "gain")
RIVAL_COLUMNS = ("alternative", "GPUs", "step", "goodput", "time to train", "95 % below", "tokens", "cost")


def duration(time_s: float) -> str:
    """Returns a time in the largest unit, from seconds to days, in which it is at least 2."""
    if time_s == inf:
        return "never"
    for unit, size in (("days", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if time_s >= 2.0 * size:
            return f"{time_s / size:,.1f} {unit}"
    return f"{time_s:,.1f} s"


def tokens_words(tokens: float) -> str:
    """Returns a number of tokens in billions, or in trillions."""
    return f"{tokens / 1e12:,.2f}T" if tokens >= 1e12 else f"{tokens / 1e9:,.1f}B"


def heading(study: RunStudy) -> str:
    """Returns the line that says which run this is."""
    request = study.request
    work = "a run" if request.by_the_clock else f"{request.steps:,} steps"
    return f"{request.name}: {work} on {request.gpus:,} GPUs in {request.nodes:,} nodes"


def conditions(study: RunStudy) -> str:
    """Returns a line on the conditions of the run: failures, saves, and the number of simulated runs."""
    request = study.request
    saves = "no checkpoints" if request.save_every_s == inf else f"a checkpoint every {duration(request.save_every_s)}"
    failures = f"a failure every {duration(study.mttf_s)}" if study.mttf_s < inf else "no failures"
    length = duration(request.ideal_s) + ("" if request.by_the_clock else " undisturbed")
    return f"{length}, {failures}, {saves}; {len(study.outcomes):,} runs from seed {study.seed}"


def quantile_rows(study: RunStudy) -> list[tuple[str, ...]]:
    """Returns the figures of the run as rows of QUANTILE_COLUMNS."""
    rows = [
        ("goodput", study.goodput, percent),
        ("ETTR", study.ettr, percent),
        ("wall time", study.wall_s, duration),
        ("failures", study.interruptions, lambda value: f"{value:,.0f}"),
        ("tokens", study.tokens, tokens_words),
        ("tokens lost", study.lost_tokens, tokens_words),
    ]
    if study.request.by_the_clock:
        del rows[2]
    return [(name, *(words(value) for value in _values(of))) for name, of, words in rows]


def _values(of: Quantiles) -> tuple[float, ...]:
    return of.p5, of.p50, of.p95, of.mean


def badput_rows(study: RunStudy) -> list[tuple[str, ...]]:
    """Returns the lost time by class, the largest first, as rows of BADPUT_COLUMNS."""
    return [(_SPENT_WORDS[what], f"{share:.2%}", MEASURED_AS[what]) for what, share in study.badput.items()]


def failure_rows(study: RunStudy) -> list[tuple[str, ...]]:
    """Returns the mean number of failures of each kind, as rows of FAILURE_COLUMNS."""
    return [(name, f"{number:,.1f}") for name, number in study.failures.items()]


def interval_rows(study: RunStudy) -> list[tuple[str, ...]]:
    """Returns the best checkpoint interval beside Young's and Daly's, as rows of INTERVAL_COLUMNS."""
    return [(each.name, duration(each.save_every_s), percent(each.goodput)) for each in study.intervals]


def gain_rows(study: RunStudy) -> list[tuple[str, ...]]:
    """Returns the effects of changes of the system, as rows of GAIN_COLUMNS."""
    return [(gain.change, percent(gain.goodput), _saved(study, gain.saved_s)) for gain in study.gains]


def rival_rows(ranked: Sequence[RunStudy]) -> list[tuple[str, ...]]:
    """Returns alternatives, the best first, as rows of RIVAL_COLUMNS; the step is that of the first phase."""
    return [
        (
            study.request.name,
            f"{study.request.gpus:,}",
            seconds(study.request.phases[0].step_s),
            percent(study.goodput.p50),
            *(("", "") if study.finished == 0 else (duration(study.wall_s.p50), duration(study.wall_s.p95))),
            tokens_words(study.tokens.p50),
            "" if study.dollars is None else f"${study.dollars:,.0f}",
        )
        for study in ranked
    ]


def _saved(study: RunStudy, saved_s: float) -> str:
    sooner = "sooner" if study.finished == 1.0 else "of useful steps more"
    later = "later" if study.finished == 1.0 else "of useful steps fewer"
    return f"{duration(abs(saved_s))} {sooner if saved_s >= 0 else later}"


def cost_words(study: RunStudy) -> str:
    """Returns cost and energy of the run in words; empty if neither is known."""
    parts = []
    if study.dollars is not None:
        parts.append(f"${dollars(study.dollars)}")
    if study.energy_mwh is not None:
        parts.append(f"{study.energy_mwh:,.3g} MWh at the GPUs' power limit")
    return ", ".join(parts)


def print_study(out: Console, study: RunStudy, ranked: Sequence[RunStudy] = ()) -> None:
    """Prints a study of a whole run, and its alternatives."""
    out.print(Text(heading(study), style="bold"))
    out.print(conditions(study), soft_wrap=True)
    out.print()
    out.print(make_table("lrrrr", QUANTILE_COLUMNS, quantile_rows(study), gap=2))
    if study.finished < 1.0 and not study.request.by_the_clock:
        out.print(f"{percent(study.finished)} of the runs reach their last step in time")
    if words := cost_words(study):
        out.print(f"mean cost: {words}")
    tables = (
        ("Alternatives, by time to train", "lrrrrrrr", RIVAL_COLUMNS, rival_rows(ranked)),
        ("Where the time goes", "lrl", BADPUT_COLUMNS, badput_rows(study)),
        ("Failures", "lr", FAILURE_COLUMNS, failure_rows(study)),
        ("Checkpoint intervals", "lrr", INTERVAL_COLUMNS, interval_rows(study)),
        ("Effects of changes, each simulated with the same failures", "lrl", GAIN_COLUMNS, gain_rows(study)),
    )
    for title, sides, columns, rows in tables:
        if rows:
            out.print()
            print_title(out, title)
            out.print(make_table(sides, columns, rows, gap=2))
    for note in study.request.notes:
        out.print()
        out.print(note, soft_wrap=True)


def study_record(study: RunStudy, ranked: Sequence[RunStudy] = ()) -> dict[str, Any]:
    """Returns a study and its alternatives, the best first, as plain data; units are in the keys."""
    request = study.request
    return {
        "name": request.name,
        "gpus": request.gpus,
        "nodes": request.nodes,
        "steps": request.steps,
        "ideal_s": request.ideal_s,
        "save_every_s": None if request.save_every_s == inf else request.save_every_s,
        "runs": len(study.outcomes),
        "seed": study.seed,
        "finished": study.finished,
        "mttf_s": None if study.mttf_s == inf else study.mttf_s,
        **_quantiles(study),
        "badput": {what.value: share for what, share in study.badput.items()},
        "failures_by_kind": study.failures,
        "dollars": study.dollars,
        "energy_mwh": study.energy_mwh,
        "intervals": [
            {"name": each.name, "save_every_s": each.save_every_s, "goodput": each.goodput} for each in study.intervals
        ],
        "gains": [{"change": gain.change, "goodput": gain.goodput, "saved_s": gain.saved_s} for gain in study.gains],
        "alternatives": [
            {
                "name": each.request.name,
                "gpus": each.request.gpus,
                "step_s": each.request.phases[0].step_s,
                "finished": each.finished,
                "dollars": each.dollars,
                **_quantiles(each),
            }
            for each in ranked
        ],
        "notes": list(request.notes),
    }


def _quantiles(study: RunStudy) -> dict[str, dict[str, float]]:
    figures = {
        "goodput": study.goodput,
        "ettr": study.ettr,
        "wall_s": study.wall_s,
        "tokens": study.tokens,
        "lost_tokens": study.lost_tokens,
        "failures": study.interruptions,
    }
    return {name: {key: getattr(of, key) for key in ("p5", "p50", "p95", "mean")} for name, of in figures.items()}


def run_rows(outcomes: Sequence[Outcome]) -> list[Mapping[str, Any]]:
    """Returns one row for each run, for CSV; units are in the column names."""
    return [
        {
            "run": number,
            "wall_s": one.wall_s,
            "goodput": one.goodput,
            "ettr": one.ettr,
            "steps": one.steps,
            "tokens": one.tokens,
            "finished": one.finished,
            "failures": one.interruptions,
            "lost_tokens": one.lost_tokens,
            "longest_stop_s": one.longest_stop_s,
            "productive_s": one.productive_s,
            **{f"{what.value}_s": one.spent_s.get(what, 0.0) for what in Spent},
        }
        for number, one in enumerate(outcomes)
    ]
