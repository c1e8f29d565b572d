"""A search as text: the best plans, how times spread, what was left out and why, the best one in detail.

Readable at 80 columns and without colour.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forerun.report.console import make_table, print_figures, print_histogram, print_missing
from forerun.report.histogram import runtime_histogram
from forerun.report.wording import command_line, log_line, percent, plan_words, rate, seconds
from forerun.search.result import SearchResult


def print_search(
    out: Console,
    result: SearchResult,
    top: int,
    flops_per_token: float,
    *,
    model: str,
    cluster: str,
    network: str | None = None,
) -> None:
    """A search: the best plans, how the times spread, what was left out and why, the winner in detail.

    `model`, `cluster` and `network` are what the user called them, for the command that repeats the winner.
    """
    question = f"{result.model} on {result.n_gpus} x {result.cluster}"
    out.print(Text(f"{question}: seq {result.seq_len}, global batch {result.global_batch}", style="bold"))
    out.print()
    if result.ranked:
        out.print(_ranking(result, top))
        warned = next((place.warnings[0] for place in result.top(top) if place.warnings), None)
        if warned:
            out.print(f"! {warned}")
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
    out.print()
    out.print(Text(f"Best by {result.objective}: {plan_words(best.own_plan())}", style="bold"))
    out.print()
    print_figures(out, best)
    out.print()
    out.print(log_line(best, flops_per_token))
    print_missing(out, best)
    out.print()
    out.print("In detail:")
    place = f" --network {shlex.quote(network)}" if network else ""
    out.print(f"  {command_line(best.own_plan(), model, cluster)}{place} --explain", soft_wrap=True)


def _ranking(result: SearchResult, top: int) -> Table:
    table = make_table(
        ("#", "right"),
        ("plan", "left"),
        ("step\ntime", "right"),
        ("tok/s\n/GPU", "right"),
        ("MFU", "right"),
        ("HFU", "right"),
        ("peak\nGiB", "right"),
        ("expos.\ncomm", "right"),
        ("bubble", "right"),
    )
    for column in table.columns:
        column.no_wrap = column.header != "plan"
    for rank, prediction in enumerate(result.top(top), 1):
        table.add_row(
            str(rank),
            plan_words(prediction.own_plan()),
            seconds(prediction.step_time_s),
            rate(prediction.tokens_per_s_per_gpu),
            percent(prediction.mfu),
            percent(prediction.hfu),
            f"{prediction.peak_reserved_gib:.1f}{'!' if prediction.warnings else ''}",
            percent(prediction.exposed_comm_s / prediction.step_time_s),
            percent(prediction.bubble_s / prediction.step_time_s),
        )
    return table


def _print_counts(out: Console, result: SearchResult) -> None:
    counts = result.counts
    valid = counts["considered"] - counts["impossible"]
    out.print(Text(f"{counts['considered']:,} configurations, {valid:,} of them valid", style="bold"))
    _print_shares(out, "fit", counts["ok"], {})
    by_cause = {f"{cause} is the largest part": n for cause, n in result.out_of_memory.items()}
    _print_shares(out, f"run out of {result.memory_limit_gib:.1f} GiB", counts["out_of_memory"], by_cause)
    if result.too_large:
        out.print(Padding(f"nearest miss {result.too_large[0].reason}", (0, 0, 0, 12)))
    worse = "larger" if result.objective == "memory" else "slower"
    _print_shares(out, f"not simulated: a bound shows they are {worse}", counts["skipped"], {})
    _print_shares(out, "impossible", counts["impossible"], result.impossible)


def _print_shares(out: Console, what: str, count: int, parts: Mapping[str, int]) -> None:
    if not count:
        return
    out.print(f"  {count:>8,}  {what}")
    for name, n in parts.items():
        out.print(f"  {'':8}  {n:>8,}  {name}")
