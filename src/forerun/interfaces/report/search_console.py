"""Searches as text: the best plans, the distribution of times, the plans left out and why, and ranges of searches.

Readable at 80 columns and without colour.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from forerun.answers.search.sweep import Sweep, SweepPoint, tokens_per_s
from forerun.describe.stacks.catalog import DEFAULT_STACK
from forerun.interfaces.report.console import (
    make_table,
    print_figures,
    print_histogram,
    print_missing,
    print_table,
    print_title,
)
from forerun.interfaces.report.figures import dollars, percent, rate, seconds
from forerun.interfaces.report.histogram import runtime_histogram
from forerun.interfaces.report.wording import RENAMED, SAME, choice_words, log_line, mark, notes_on, plan_words

if TYPE_CHECKING:
    from forerun.answers.analysis.prediction import Prediction
    from forerun.answers.search.front import Front
    from forerun.answers.search.result import SearchResult
    from forerun.answers.search.standing import Standing
    from forerun.answers.search.why import Verdict


def print_search(out: Console, result: SearchResult, top: int, flops_per_token: float, again: str) -> None:
    """Prints a search: the best plans, the distribution of the times, the omitted plans with reasons, and the winner in
    detail.

    `again` is the command that predicts the best plan.
    """
    question = f"{result.model} on {result.n_gpus} x {result.cluster}"
    print_title(out, f"{question}: seq {result.seq_len}, global batch {result.global_batch}")
    out.print()
    if result.ranked:
        out.print(_ranking(result, top))
        for note in notes_on(result.top(top)):
            out.print(note)
        _print_choices(out, result)
        out.print()
        print_histogram(out, runtime_histogram(result))
        out.print()
    _print_counts(out, result)
    best = result.best
    if best is None:
        out.print()
        out.print(f"Nothing fits. The nearest miss: {plan_words(result.too_large[0].plan)}")
        out.print(f"  {result.too_large[0].reason}")
        return
    if result.front is not None:
        out.print()
        _print_front(out, result.front)
    out.print()
    print_title(out, f"Best by {result.objective}: {plan_words(best.own_plan(), with_stack=len(result.stacks) > 1)}")
    _print_best(out, best, flops_per_token, again)


def print_verdict(out: Console, asked: str, verdict: Verdict) -> None:
    """Prints the outcome of the plans that the user asked about, in one line."""
    plan = "" if verdict.plan is None else f" ({plan_words(verdict.plan)})"
    out.print(f"{asked}: {verdict.text}{plan}", soft_wrap=True)


def print_standing(out: Console, stands: Standing, top: int) -> None:
    """Prints in one line where a recipe's own plan stands among the `top` best ones."""
    own, place = stands.prediction.own_plan(), f"place {stands.rank}" if stands.rank <= top else f"behind place {top}"
    apart = f"{abs(stands.behind):.1%} {'slower' if stands.behind >= 0 else 'faster'} than the best plan that fits"
    fits = "" if stands.prediction.fits else "; it does not fit"
    words = f"The recipe's own plan ({plan_words(own)}): {stands.step_time_s:.4g} s a step, {place}, {apart}{fits}"
    out.print(words, soft_wrap=True)


def print_sweep(out: Console, sweep: Sweep, flops_per_token: float, again: str) -> None:
    """Prints a sweep: the best of each point, their plans or why there is none, the best of all in detail.

    `again` is the command that predicts the best plan.
    """
    print_title(out, f"{sweep.model} on {sweep.cluster}: seq {sweep.seq_len}, {len(sweep.points)} searches")
    out.print()
    front = {id(point) for point, _ in sweep.front}
    out.print(_points(sweep, front))
    if sweep.best is not None:
        out.print(f"*: best by {sweep.objective}")
    if front:
        out.print(f"P: on the Pareto front; no other plan has {sweep.wishes}, or equals all of them")
    out.print()
    print_title(out, "Their plans")
    for point in sweep.points:
        outcome = point.reason if point.best is None else _words(point.best)
        out.print(Padding(f"{_question(point)}: {outcome}", (0, 0, 0, 2)))
    if sweep.with_memory:
        out.print()
        _print_front_of_sweep(out, sweep)
    best = sweep.best
    out.print()
    if best is None or best.best is None:
        out.print("Nothing fits anywhere.")
        return
    words = f"{_question(best)}: {_words(best.best)}"
    print_title(out, f"Best by {sweep.objective}: {words}")
    _print_best(out, best.best, flops_per_token, again)


def _print_best(out: Console, best: Prediction, flops_per_token: float, again: str) -> None:
    out.print()
    print_figures(out, best)
    out.print()
    out.print(log_line(best, flops_per_token))
    print_missing(out, best)
    out.print()
    out.print("In detail:")
    out.print(f"  {again} --explain", soft_wrap=True)


def _points(sweep: Sweep, front: Container[int]) -> Table:
    of_plan = ("step\ntime", "tok/s", "tok/s\n/GPU", "MFU", "effi-\nciency", "$ per 10^9\ntokens", "peak\nGiB")
    rows = []
    for point in sweep.points:
        best = point.best
        mark = ("*" if point is sweep.best else "") + ("P" if id(point) in front else "")
        figures = ["" for _ in range(7)]
        if best is not None:
            figures = [
                seconds(best.step_time_s),
                rate(point.tokens_per_s),
                rate(best.tokens_per_s_per_gpu),
                percent(best.mfu),
                percent(sweep.efficiency(point)),
                dollars(best.dollars_per_billion_tokens),
                f"{best.peak_reserved_gib:.1f}",
            ]
        rows.append((mark, f"{point.n_gpus:,}", f"{point.global_batch:,}", *figures))
    return make_table("lrrrrrrrrr", ("", "GPUs", "batch", *of_plan), rows)


def _question(point: SweepPoint) -> str:
    return f"{point.n_gpus:,} GPUs, batch {point.global_batch:,}"


def _print_front(out: Console, front: Front) -> None:
    """Prints the plans that no other beats in both time and memory, and how far this is certain."""
    rows = (
        (seconds(each.step_time_s), rate(each.tokens_per_s_per_gpu), f"{each.peak_reserved_gib:.1f}", _words(each))
        for each in front.places
    )
    headings = ("step\ntime", "tok/s\n/GPU", "peak\nGiB", "plan")
    print_table(out, "Pareto front of step time and memory", "rrrl", headings, rows)
    out.print(f"The front is {front.certainty}.")


def _print_front_of_sweep(out: Console, sweep: Sweep) -> None:
    rows = (
        (
            f"{point.n_gpus:,}",
            f"{point.global_batch:,}",
            rate(tokens_per_s(plan)),
            dollars(plan.dollars_per_billion_tokens),
            f"{plan.peak_reserved_gib:.1f}",
            _words(plan),
        )
        for point, plan in sweep.front
    )
    headings = ("GPUs", "batch", "tok/s", "$ per 10^9\ntokens", "peak\nGiB", "plan")
    title = f"Pareto front: no other plan has {sweep.wishes}, or equals all of them"
    print_table(out, title, "rrrrrl", headings, rows)
    for point in sweep.points:
        if point.uncertain:
            out.print(f"{_question(point)}: the front is {point.uncertain}.")


def _ranking(result: SearchResult, top: int) -> Table:
    headings = ("#", "plan", "step\ntime", "tok/s\n/GPU", "MFU", "HFU", "peak\nGiB", "expos.\ncomm", "bubble")
    rows = (
        (
            str(rank),
            plan_words(prediction.own_plan(), with_stack=len(result.stacks) > 1),
            seconds(prediction.step_time_s),
            rate(prediction.tokens_per_s_per_gpu),
            percent(prediction.mfu),
            percent(prediction.hfu),
            f"{prediction.peak_reserved_gib:.1f}{mark(prediction)}",
            percent(prediction.exposed_comm_s / prediction.step_time_s),
            percent(prediction.bubble_s / prediction.step_time_s),
        )
        for rank, prediction in enumerate(result.top(top), 1)
    )
    return make_table("rlrrrrrrr", headings, rows, whole="r")


def _print_choices(out: Console, result: SearchResult) -> None:
    """Prints the gains of single choices."""
    if not result.choices:
        return
    out.print()
    print_title(out, "Gains of single choices, each with its best plan")
    for choice in result.choices:
        out.print(Padding(choice_words(choice), (0, 0, 0, 2)))


def _words(prediction: Prediction) -> str:
    plan = prediction.own_plan()
    return plan_words(plan, with_stack=plan.stack != DEFAULT_STACK)


def _print_counts(out: Console, result: SearchResult) -> None:
    counts = result.counts
    same, renamed = counts.get("same", 0), counts.get("renamed", 0)
    valid = counts["considered"] - counts["impossible"] - same - renamed
    print_title(out, f"{counts['considered']:,} configurations, {valid:,} of them valid")
    _print_shares(out, "fit", counts["ok"], {})
    by_cause = {f"{cause} is the largest part": n for cause, n in result.out_of_memory.items()}
    _print_shares(out, f"run out of {result.memory_limit_gib:.1f} GiB", counts["out_of_memory"], by_cause)
    if result.too_large:
        out.print(Padding(f"nearest miss {result.too_large[0].reason}", (0, 0, 0, 12)))
    worse = "larger" if result.objective == "memory" else "slower"
    _print_shares(out, f"not simulated: a lower bound proves that they are {worse}", counts["skipped"], {})
    _print_shares(out, SAME, same, {})
    _print_shares(out, RENAMED, renamed, {})
    _print_shares(out, "impossible", counts["impossible"], result.impossible)
    out.print(f"{result.proof[0].upper()}{result.proof[1:]}")


def _print_shares(out: Console, what: str, count: int, parts: Mapping[str, int]) -> None:
    if not count:
        return
    out.print(f"  {count:>8,}  {what}")
    for name, n in parts.items():
        out.print(f"  {'':8}  {n:>8,}  {name}")
