"""Predictions and catalogues as text. Readable at 80 columns and without colour; bars are plain '#'."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.interfaces.report import bands
from forerun.interfaces.report.around_step import (
    INIT,
    INIT_COLUMNS,
    LOOP,
    LOOP_COLUMNS,
    checkpoint_words,
    init_rows,
    loop_rows,
    mean_step,
)
from forerun.interfaces.report.figures import percent, seconds
from forerun.interfaces.report.histogram import Bin, bar
from forerun.interfaces.report.wording import log_line, plan_words

if TYPE_CHECKING:
    from forerun.answers.analysis.loop_time import LoopTime
    from forerun.answers.analysis.prediction import Prediction
    from forerun.describe.cluster.catalog import ClusterRow
    from forerun.describe.model.catalog import ModelRow
    from forerun.describe.stacks.stack import Stack

_BAR_WIDTH = 40
_LISTED = 10
"""the most lines about kernels that the measurements lack, most time first"""
_SHORT = 0.001
"""shares of the step below this are summed up as 'other'"""


def print_prediction(out: Console, prediction: Prediction, flops_per_token: float | None, *, explain: bool) -> None:
    """Prints one prediction: figures, breakdown, memory, and with `explain` where each figure comes from."""
    print_heading(out, prediction)
    out.print()
    print_figures(out, prediction)
    out.print()
    out.print(log_line(prediction, flops_per_token))
    print_missing(out, prediction)
    if prediction.loop is not None:
        print_loop(out, prediction.loop)
    if explain:
        if prediction.init:
            out.print()
            print_table(out, INIT, "llrr", INIT_COLUMNS, indented(init_rows(prediction.init)))
        out.print()
        out.print(Text("Where the figures come from", style="bold"))
        for line in prediction.explain:
            out.print(f"  {line}")


def print_heading(out: Console, prediction: Prediction) -> None:
    """Prints the model and the cluster of a prediction."""
    plan = prediction.plan
    out.print(Text(f"{prediction.model} on {prediction.n_gpus} x {prediction.cluster}", style="bold"))
    if plan is None:
        out.print("a saved program")
    elif prediction.sample is not None:
        out.print(f"{plan_words(plan)}, global batch {plan.global_batch} {prediction.sample}s, stack {plan.stack}")
    else:
        out.print(f"{plan_words(plan)}, seq {plan.seq_len}, global batch {plan.global_batch}, stack {plan.stack}")


def print_missing(out: Console, prediction: Prediction) -> None:
    """Prints the gaps in the user's measurements, if the user gave any."""
    if prediction.missing is None:
        return
    out.print()
    if not prediction.missing:
        out.print("Your measurements cover everything that the step runs.")
        return
    out.print(Text("Not in your measurements: times from Forerun's model, or extrapolated", style="bold"))
    for line in prediction.missing[:_LISTED]:
        out.print(f"  {line}")
    if len(prediction.missing) > _LISTED:
        out.print(f"  and {len(prediction.missing) - _LISTED} more (--json lists them)")


def print_loop(out: Console, loop: LoopTime) -> None:
    """Prints the time that the periodic work of the training loop adds to a step."""
    out.print()
    print_table(out, LOOP, "lrrrr", ("", *LOOP_COLUMNS[1:]), indented(loop_rows(loop)))
    out.print(f"  {mean_step(loop)}")
    if loop.checkpoint is not None:
        out.print(f"  {checkpoint_words(loop.checkpoint)}")


def indented(rows: Iterable[Sequence[str]]) -> Iterator[Sequence[str]]:
    """Returns the rows of a table that stands under a title, two letters further right."""
    return ((f"  {first}", *others) for first, *others in rows)


def print_models(out: Console, rows: Sequence[ModelRow]) -> None:
    """Prints the model presets."""
    cells = (
        (
            row.name,
            f"{row.parameters:,}",
            "" if row.active_parameters == row.parameters else f"{row.active_parameters:,}",
            str(row.layers),
            str(row.hidden or ""),
        )
        for row in rows
    )
    out.print(make_table("lrrrr", ("model", "parameters", "active", "layers", "hidden"), cells))


def print_clusters(out: Console, rows: Sequence[ClusterRow]) -> None:
    """Prints the cluster presets; rates for each GPU and direction."""
    speeds = ("in a node\nGB/s", "between nodes\nGbit/s")
    headings = ("cluster", "memory\nGiB", "bf16\nTFLOP/s", "GPUs in\na node", *speeds)
    cells = (
        (
            row.name,
            f"{row.memory_gib:.0f}",
            "" if row.bf16_tflops is None else f"{row.bf16_tflops:.0f}",
            str(row.gpus_per_node or ""),
            f"{row.intra_node} {row.intra_node_gb_s:.0f}",
            "" if row.inter_node is None else f"{row.inter_node} {row.inter_node_gbit_s:.0f}",
        )
        for row in rows
    )
    out.print(make_table("lrrrrr", headings, cells))


def print_stacks(out: Console, stacks: Sequence[Stack]) -> None:
    """Prints the software stacks."""
    out.print(make_table("ll", ("stack", "what it is"), ((stack.name, stack.description) for stack in stacks)))


def make_table(
    sides: str, headings: Sequence[str], rows: Iterable[Sequence[str]], gap: int = 1, whole: str | None = None
) -> Table:
    """Returns a table without lines, and without a heading where `headings` are empty.

    `sides` has a letter for each column: `l` for text, which stands on the left, `r` for figures. Cells of columns of
    the side `whole` never break into lines. Columns are `gap` letters apart.
    """
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="bold", pad_edge=False, show_header=bool(headings))
    for side, heading in zip(sides, headings or [""] * len(sides), strict=True):
        justify: Literal["left", "right"] = "right" if side == "r" else "left"
        table.add_column(heading, justify=justify, vertical="top", no_wrap=whole is not None and side in whole)
    for row in rows:
        table.add_row(*row)
    return table


def print_title(out: Console, text: str) -> None:
    """Prints a line in bold."""
    out.print(Text(text, style="bold"))


def print_table(out: Console, title: str, sides: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table, described as for `make_table`, under a title."""
    print_title(out, title)
    out.print(make_table(sides, headings, rows))


def print_histogram(out: Console, bins: Sequence[Bin]) -> None:
    """Prints how the step times are distributed."""
    most = max(each.simulated + each.bounded for each in bins)
    bounded = any(each.bounded for each in bins)
    note = "# simulated" + (", . lower bound, not simulated" if bounded else "")
    print_title(out, f"Step times ({note})")
    cells = (
        (
            seconds(each.low_s),
            f"to {seconds(each.high_s)}",
            f"{each.simulated + each.bounded:,}",
            bar(each.simulated, each.bounded, most, _BAR_WIDTH),
        )
        for each in bins
    )
    out.print(make_table("rlrl", (), cells))


def print_figures(out: Console, prediction: Prediction) -> None:
    """Prints the figures, where the step goes, and memory."""
    out.print(_figures(prediction))
    out.print()
    _print_breakdown(out, prediction)
    out.print()
    if prediction.memory_recorded:
        _print_memory(out, prediction)
    _print_network(out, prediction)


def _pace(prediction: Prediction) -> tuple[str, str]:
    if prediction.sample is not None:
        return f"{prediction.sample}s/s/GPU", bands.rate_in_band(prediction, prediction.samples_per_s_per_gpu)
    return "tokens/s/GPU", bands.rate_in_band(prediction, prediction.tokens_per_s_per_gpu)


def _figures(prediction: Prediction) -> Table:
    step = prediction.step_time_s
    limit = prediction.memory_limit_gib
    rows = [
        ("step time", bands.step_time(prediction)),
        _pace(prediction),
        ("MFU, HFU", f"{bands.mfu(prediction)}, {percent(prediction.hfu)} of {prediction.mfu_peak}"),
        ("utilization", f"{percent(prediction.utilization)} of the peak FLOP/s of each kernel's dtype"),
        (
            "peak memory",
            f"{prediction.peak_allocated_gib:.1f} GiB allocated, {bands.reserved(prediction)}"
            f" of {limit:.1f}: {bands.fits(prediction)}"
            if prediction.memory_recorded
            else bands.fits(prediction),
        ),
        *[("nvidia-smi shows", f"{prediction.device_gib:.1f} GiB, with CUDA's context and NCCL's buffers")]
        * prediction.memory_recorded,
        ("exposed comm", f"{seconds(prediction.exposed_comm_s)} ({percent(prediction.exposed_comm_s / step)})"),
        ("bubble", f"{seconds(prediction.bubble_s)} ({percent(prediction.bubble_s / step)})"),
        ("bottleneck", prediction.bottleneck.replace("_", " ")),
    ]
    if prediction.dollars_per_billion_tokens is not None:
        rows.append(("cost", f"{prediction.dollars_per_billion_tokens:,.2f} dollars per billion tokens"))
    return make_table("ll", (), [*rows, *(("warning", text) for text in prediction.warnings)])


def _print_breakdown(out: Console, prediction: Prediction) -> None:
    out.print(Text("Where the step goes (slowest rank)", style="bold"))
    step = prediction.step_time_s
    causes = sorted(prediction.breakdown.items(), key=lambda item: -item[1])
    shown = {name.replace("_", " "): time for name, time in causes if time / step >= _SHORT}
    other = step - sum(shown.values())
    if other / step >= _SHORT:
        shown["other"] = other
    bars(out, {name: (seconds(time), time / step) for name, time in shown.items()})


def _print_memory(out: Console, prediction: Prediction) -> None:
    out.print(Text(f"Memory at the peak ({prediction.peak_rank_class}, {prediction.peak_owner})", style="bold"))
    parts = sorted(prediction.memory_by_category_gib.items(), key=lambda item: -item[1])
    total = prediction.peak_allocated_gib
    bars(out, {name: (f"{size:.2f} GiB", size / total) for name, size in parts if size / total >= _SHORT})


def _print_network(out: Console, prediction: Prediction) -> None:
    use = prediction.network
    if use is None:
        return
    out.print()
    out.print(Text(f"Busiest links of {use.topology}", style="bold"))
    rows = {f"{axis.axis}: {axis.busiest_link}": axis for axis in use.axes}
    bars(out, {name: (seconds(axis.busy_s), axis.utilisation) for name, axis in rows.items()})


def bars(out: Console, rows: Mapping[str, tuple[str, float]]) -> None:
    """Prints a bar for each name -> (figure, share of 1)."""
    cells = (
        (f"  {name}", text, percent(share), "#" * round(_BAR_WIDTH * max(0.0, min(1.0, share))))
        for name, (text, share) in rows.items()
    )
    out.print(make_table("lrrl", (), cells))
