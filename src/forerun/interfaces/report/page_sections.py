"""Sections that pages share: figures of a prediction, where time and memory go, and how to reproduce it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from forerun.answers.analysis.tables import kernel_times
from forerun.common.units import PS_PER_S
from forerun.common.version import __version__
from forerun.interfaces.report import bands
from forerun.interfaces.report.around_step import LOOP, LOOP_COLUMNS, checkpoint_words, loop_rows, mean_step
from forerun.interfaces.report.figures import percent, rate, seconds
from forerun.interfaces.report.page import Code, Figures, Heading, Listing, Part, Table, Text
from forerun.interfaces.report.plots import memory_plot, shares_plot, step_plot, timeline_plot, use_plot
from forerun.interfaces.report.plots_of_studies import sensitivities_plot
from forerun.interfaces.report.style import MEMORY_LOOKS, WORK_LOOKS

if TYPE_CHECKING:
    from forerun.answers.analysis.bottlenecks import Bottlenecks, Usage
    from forerun.answers.analysis.communication import CollectiveTime
    from forerun.answers.analysis.critical_path import CriticalPath
    from forerun.answers.analysis.prediction import Prediction
    from forerun.answers.analysis.reading import Simulation
    from forerun.answers.analysis.what_if import WhatIf
    from forerun.answers.experiment.result import Bill

_KERNELS = 15
_CONTRIBUTORS = 10
_LEAST = 0.001
"""contributors below this share are left out"""


def figures(prediction: Prediction) -> Figures:
    """Returns the figures of one step."""
    step, plan = prediction.step_time_s, prediction.plan
    low, high = seconds(prediction.step_time_low_s), seconds(prediction.step_time_high_s)
    entries = [("step time", seconds(step), f"{bands.in_band(low, high)} on {prediction.n_gpus:,} GPUs")]
    for what, per_s in (
        ("tokens", prediction.tokens_per_s_per_gpu),
        (f"{prediction.sample}s", prediction.samples_per_s_per_gpu),
    ):
        if per_s is not None:
            entries.append((f"{what}/s of a GPU", rate(per_s), f"{rate(per_s * prediction.n_gpus)} of all"))
    if prediction.mfu is not None:
        entries.append(("MFU", percent(prediction.mfu), f"HFU {percent(prediction.hfu)}"))
    limit = f"of {prediction.memory_limit_gib:.1f} GiB: {bands.fits(prediction)}"
    entries += [
        ("peak memory, reserved", f"{prediction.peak_reserved_gib:.1f} GiB", limit),
        ("exposed communication", percent(prediction.exposed_comm_s / step), seconds(prediction.exposed_comm_s)),
    ]
    if plan is None or plan.pp > 1:
        entries.append(("waiting for other stages", percent(prediction.bubble_s / step), seconds(prediction.bubble_s)))
    entries.append(("largest cause", WORK_LOOKS[prediction.bottleneck].label, "of the step's time"))
    if prediction.dollars_per_billion_tokens is not None:
        dollars = f"${prediction.dollars_per_billion_tokens:,.2f}"
        entries.append(("cost", dollars, "per billion tokens, list price"))
    return Figures(tuple(entries))


def warnings(prediction: Prediction) -> list[Part]:
    """Returns the warnings that a reader has to know first."""
    lines = [] if prediction.fits else ["This plan does not fit in memory. The times assume GPUs with enough memory."]
    return [Text(line, "warning") for line in (*lines, *prediction.warnings)]


def time_sections(simulation: Simulation, path: CriticalPath) -> list[Part]:
    """Shows where the time of the step goes, the critical path, the kernels, and the timeline."""
    prediction = simulation.prediction
    kernels = kernel_times(simulation, simulation.slowest)
    name = simulation.program.rank_classes[simulation.slowest].name
    alike = len(simulation.program.rank_classes) == 1
    step_ps = path.step_ps
    causes = tuple(
        (WORK_LOOKS[cause].label, seconds(time_ps / PS_PER_S), percent(time_ps / step_ps))
        for cause, time_ps in path.by_cause_ps.items()
    )
    pieces = tuple(
        (
            each.name,
            WORK_LOOKS[each.cause].label,
            f"{each.count:,}",
            seconds(each.time_ps / PS_PER_S),
            percent(each.share),
        )
        for each in path.contributors[:_CONTRIBUTORS]
    )
    return [
        Heading("Where the time goes"),
        Text(f"The step of {seconds(prediction.step_time_s)}{'' if alike else f' on {name}, which sets the pace'}."),
        step_plot(prediction),
        Heading("Critical path"),
        Text(
            "The critical path is the chain of operations that determines the step time. Each one starts"
            " when the one before it ends, on any rank. The step becomes shorter only if an operation on"
            " this path does."
        ),
        Table(("cause", "time", "of the step"), causes, numeric=frozenset({1, 2})),
        Table(
            ("piece", "cause", "count", "time", "of the step"),
            pieces,
            f"The {len(pieces)} largest of {len(path.contributors)} pieces",
            numeric=frozenset({2, 3, 4}),
        ),
        Heading("Timeline of a step"),
        Text(
            f"Activity of the streams of {name}. Drag over a part to zoom in, double-click to zoom out."
            " Operations that are too short to see are merged with their neighbours.",
            "hint",
        ),
        timeline_plot(simulation),
        Table(
            ("kernel", "kind", "count", "time", "of the step"),
            tuple(
                (row.name, row.kind, f"{row.count:,}", seconds(row.total_s), percent(row.share))
                for row in kernels[:_KERNELS]
            ),
            f"The {min(_KERNELS, len(kernels))} of {len(kernels)} kernels and collectives that take most time",
            numeric=frozenset({2, 3, 4}),
        ),
    ]


def communication_section(rows: Sequence[CollectiveTime]) -> list[Part]:
    """Lists the parts of the time of each collective."""
    if not rows:
        return []
    columns = ("collective", "count", "in all", "wire", "latency", "protocol", "sharing", "waiting", "NCCL's way")
    cells = tuple(
        (
            each.name,
            f"{each.count:,}",
            *(
                seconds(max(0.0, part))
                for part in (each.total_s, each.wire_s, each.latency_s, each.protocol_s, each.sharing_s, each.waiting_s)
            ),
            each.way,
        )
        for each in rows
    )
    about = (
        "Time from the moment when a collective could start on this rank to its end, hidden or exposed."
        " The parts add up to it. Wire is the time of the bytes at the full rate of the slowest link."
        " Latency is the time of an empty message. Protocol is what NCCL needs beyond both. Sharing is"
        " the delay by other work on the same links. Waiting is the wait for ranks that arrive later."
    )
    return [Heading("Communication"), Text(about, "note"), Table(columns, cells, numeric=frozenset(range(1, 8)))]


def network_section(prediction: Prediction) -> list[Part]:
    """Returns the busiest links, where collectives run on a topology."""
    use = prediction.network
    if use is None:
        return []
    rows = [(f"{axis.axis}: {axis.busiest_link}", seconds(axis.busy_s), axis.utilisation) for axis in use.axes]
    said = "; ".join(f"{name} {percent(share)}" for name, _, share in rows)
    return [
        Heading("Network"),
        Text(f"The busiest link of {use.topology} for the collectives of each axis of the mesh."),
        shares_plot(rows, f"Use of the busiest links: {said}"),
    ]


def loop_section(prediction: Prediction) -> list[Part]:
    """Returns the periodic work of the training loop, if the user describes it."""
    loop = prediction.loop
    if loop is None:
        return []
    words = [mean_step(loop)] if loop.checkpoint is None else [mean_step(loop), checkpoint_words(loop.checkpoint)]
    table = Table(LOOP_COLUMNS, tuple(loop_rows(loop)), numeric=frozenset(range(1, len(LOOP_COLUMNS))))
    return [Heading(LOOP), table, *(Text(f"{one[0].upper()}{one[1:]}.") for one in words)]


def memory_sections(simulation: Simulation) -> list[Part]:
    """Returns the memory over the step, and the categories of the peak."""
    prediction = simulation.prediction
    total, limit = prediction.peak_allocated_gib or 1.0, prediction.memory_limit_gib
    parts = sorted(prediction.memory_by_category_gib.items(), key=lambda item: -item[1])
    rows = [(MEMORY_LOOKS[name].label, f"{gib:.2f}", percent(gib / total), percent(gib / limit)) for name, gib in parts]
    rows.append(("allocated in all", f"{total:.2f}", "100.0%", percent(total / limit)))
    held = prediction.peak_reserved_gib
    rows.append(("reserved by the allocator (estimate)", f"{held:.2f}", "", percent(held / limit)))
    fullest = "" if len(simulation.memory) == 1 else ", which is the fullest"
    far = limit > 2.5 * total
    beyond = f" The limit of the device, {limit:.1f} GiB, lies far above the plot." if far else ""
    device = prediction.device_gib
    rows.append(("nvidia-smi shows, with context and NCCL", f"{device:.2f}", "", percent(device / limit)))
    return [
        Heading("Memory"),
        Text(
            f"Allocated memory of {prediction.peak_rank_class}{fullest}. The peak stands at"
            f" {prediction.peak_owner}.{beyond}"
        ),
        memory_plot(simulation),
        Table(("at the peak", "GiB", "of the peak", "of the limit"), tuple(rows), numeric=frozenset({1, 2, 3})),
    ]


def bottleneck_sections(found: Bottlenecks) -> list[Part]:
    """Returns the used share of each resource with its threshold, and the work that uses it."""
    named = ", ".join(each.name for each in found.found)
    verdict = (
        Text(f"Above the threshold: {named}.", "warning") if named else Text("Nothing is above its threshold.", "good")
    )
    return [
        Heading("Bottlenecks"),
        verdict,
        use_plot(found.usages),
        Listing(tuple(f"{each.name}: {each.text}" for each in found.usages)),
        Table(
            ("resource", "used by", "how much", "share"),
            tuple(row for each in found.usages for row in _contributors(each)),
            numeric=frozenset({2, 3}),
        ),
    ]


def _contributors(usage: Usage) -> list[tuple[str, ...]]:
    parts = [part for part in usage.contributors[:_CONTRIBUTORS] if part.share >= _LEAST]
    if usage.name == "memory":
        return [
            (usage.name, MEMORY_LOOKS[part.name].label, f"{part.value:.2f} GiB", percent(part.share)) for part in parts
        ]
    return [(usage.name, part.name, seconds(part.value), percent(part.share)) for part in parts]


def sensitivity_sections(rows: Sequence[WhatIf]) -> list[Part]:
    """Shows the gain of a better machine."""
    return [
        Heading("What a better machine would gain"),
        Text("Forerun changes one thing at a time and simulates the step again."),
        sensitivities_plot(rows),
        Table(
            ("what if", "step time", "change", "what was changed"),
            tuple((row.label, seconds(row.step_time_s), f"{row.change:+.1%}", row.how) for row in rows),
            numeric=frozenset({1, 2}),
        ),
    ]


def bill_section(bill: Bill, samples: str) -> list[Part]:
    """Returns the cost of a run. `samples` is the plural name of the samples of a batch."""
    rows = [
        ("GPU hours", f"{bill.gpu_hours:,.2f}"),
        ("dollars of the run", dollars(bill.dollars)),
        ("dollars per hour", dollars(bill.dollars_per_hour)),
        ("dollars per billion tokens", dollars(bill.dollars_per_billion_tokens)),
        (f"dollars per million {samples}", dollars(bill.dollars_per_million_samples)),
        ("energy, kWh", f"{bill.energy_kwh:,.2f}"),
        ("dollars of energy", dollars(bill.energy_dollars)),
    ]
    known = tuple((name, value) for name, value in rows if value)
    unpriced = [] if bill.dollars is not None else [Text("No price is known for these GPUs.", "note")]
    return [Heading("Cost"), Table(("", ""), known, numeric=frozenset({1})), *unpriced]


def dollars(amount: float | None) -> str:
    """Returns dollars with cents; empty if unknown."""
    return "" if amount is None else f"${amount:,.2f}"


def explain_section(prediction: Prediction) -> list[Part]:
    """Lists the source of each figure, and the missing measurements."""
    parts: list[Part] = [Heading("Where the figures come from"), Listing(prediction.explain)]
    if prediction.missing:
        parts += [
            Text("Not in your measurements: times from Forerun's model, or extrapolated:"),
            Listing(prediction.missing[:_CONTRIBUTORS]),
        ]
    return parts


def reproduce_section(command: str, config: Mapping[str, Any], what: str, echo: Sequence[str] = ()) -> list[Part]:
    """Returns the version, command and configuration that reproduce this page; `echo` says how units were
    understood."""
    parts: list[Part] = [
        Heading("Configuration"),
        Text(f"Forerun {__version__}. The same input gives the same figures."),
    ]
    parts += [Code(command, "Command")] if command else []
    parts += [Text("Units, as they were understood:"), Listing(tuple(echo))] if echo else []
    parts += (
        [Code(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=100), what)] if config else []
    )
    return parts
