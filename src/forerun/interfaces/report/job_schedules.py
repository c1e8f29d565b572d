"""Schedules of many jobs in tables, plain data and a page; the console and the page print the same rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from forerun.answers.jobs.outcome import ClusterRequest, GroupOutcome, PolicyOutcome, in_use
from forerun.common.units import HOUR_S
from forerun.interfaces.report.console import make_table, print_title
from forerun.interfaces.report.drawing import short
from forerun.interfaces.report.figures import percent
from forerun.interfaces.report.page import Document, Heading, Listing, Part, Plot, Table, plot_text
from forerun.interfaces.report.page import Text as Paragraph
from forerun.interfaces.report.page_sections import reproduce_section
from forerun.interfaces.report.pictures import picture
from forerun.interfaces.report.plots import axis, layout, rounded
from forerun.interfaces.report.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION
from forerun.interfaces.report.whole_run import duration

COLUMNS = ("policy", "mean JCT", "median", "99 %", "wait", "makespan", "use", "goodput")
FAIRNESS_COLUMNS = ("policy", "Jain", "finish ratio", "99 %", "fragmentation", "preemptions", "failures")
_FAIRNESS_TITLE = "Fairness, fragmentation and stops"
_COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK)
_MOST_POINTS = 2_000
_LANES = 40
"""jobs in a Gantt chart"""
_LETTERS = 24
"""of a job's name in it"""
_LANE_PX, _AXIS_PX = 22, 130
_WAITS = "#d5d9de"


def heading(request: ClusterRequest) -> str:
    """Returns the line that says which jobs run where."""
    return f"{request.name}: {len(request.jobs):,} jobs on {request.cluster_words}"


def subtitle(request: ClusterRequest) -> str:
    """Returns a line on the placement of jobs and the meaning of the columns."""
    return (
        f"placement {request.placement}; JCT: job completion time; wait: mean time without GPUs; use:"
        " share of GPU time that jobs occupy; goodput: share of that time which the jobs would need at"
        " full speed without failures"
    )


def fairness_subtitle() -> str:
    """Returns a line on the meaning of the columns of fairness."""
    return (
        "Jain: Jain's fairness index of the jobs' slowdowns, 1 if all are equal; finish ratio: JCT"
        " divided by the JCT on an equal share of the cluster, median and 99th percentile; fragmentation:"
        " share of GPU time that is idle while a job waits that would fit"
    )


def rows(outcomes: Sequence[PolicyOutcome]) -> list[tuple[str, ...]]:
    """Returns one row of COLUMNS for each policy."""
    return [
        (
            one.policy,
            duration(one.mean_jct_s),
            duration(one.jct_s(0.5)),
            duration(one.jct_s(0.99)),
            duration(one.mean_wait_s),
            duration(one.makespan_s),
            percent(one.utilisation),
            percent(one.goodput),
        )
        for one in outcomes
    ]


def fairness_rows(outcomes: Sequence[PolicyOutcome]) -> list[tuple[str, ...]]:
    """Returns one row of FAIRNESS_COLUMNS for each policy."""
    return [
        (
            one.policy,
            f"{one.fairness:.2f}",
            f"{one.finish_time_ratio(0.5):.2f}",
            f"{one.finish_time_ratio(0.99):.2f}",
            percent(one.fragmentation),
            f"{one.preemptions:,}",
            f"{one.failures:,}",
        )
        for one in outcomes
    ]


def group_tables(outcomes: Sequence[PolicyOutcome]) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """Returns column names and rows of figures by group and policy; no tables where there are no groups."""
    groups = [one.by_group() for one in outcomes]
    names = sorted({name for each in groups for name in each if name})
    figures: dict[str, Callable[[GroupOutcome], str]] = {
        "mean JCT of group": lambda group: duration(group.mean_jct_s),
        "mean wait of group": lambda group: duration(group.mean_wait_s),
        "goodput of group": lambda group: percent(group.goodput),
        "mean finish ratio of group": lambda group: f"{group.finish_time_ratio:.2f}",
    }
    policies = tuple(one.policy for one in outcomes)
    return [
        ((title, *policies), [(name, *(words(each[name]) for each in groups)) for name in names])
        for title, words in (figures.items() if names else ())
    ]


def print_schedules(out: Console, request: ClusterRequest, outcomes: Sequence[PolicyOutcome]) -> None:
    """Prints the policies side by side."""
    out.print(Text(heading(request), style="bold"))
    out.print(subtitle(request), soft_wrap=True)
    out.print()
    out.print(make_table("lrrrrrrr", COLUMNS, rows(outcomes), whole="lr"))
    out.print()
    print_title(out, _FAIRNESS_TITLE)
    out.print(fairness_subtitle(), soft_wrap=True)
    out.print(make_table("lrrrrrr", FAIRNESS_COLUMNS, fairness_rows(outcomes), whole="lr"))
    for columns, body in group_tables(outcomes):
        out.print()
        out.print(make_table("l" + "r" * len(outcomes), columns, body, gap=2))
    for note in request.notes:
        out.print(note, soft_wrap=True)


def schedules_record(request: ClusterRequest, outcomes: Sequence[PolicyOutcome]) -> dict[str, Any]:
    """Returns the policies' figures as plain data; units are in the keys."""
    return {
        "name": request.name,
        "jobs": len(request.jobs),
        "gpus": request.gpus,
        "placement": request.placement,
        "policies": [
            {
                "policy": one.policy,
                "mean_jct_s": one.mean_jct_s,
                "p50_jct_s": one.jct_s(0.5),
                "p99_jct_s": one.jct_s(0.99),
                "mean_wait_s": one.mean_wait_s,
                "makespan_s": one.makespan_s,
                "utilisation": one.utilisation,
                "goodput": one.goodput,
                "failures": one.failures,
                "fairness": one.fairness,
                "p50_finish_time_ratio": one.finish_time_ratio(0.5),
                "p99_finish_time_ratio": one.finish_time_ratio(0.99),
                "fragmentation": one.fragmentation,
                "preemptions": one.preemptions,
                "mean_jct_s_by_group": {name: group.mean_jct_s for name, group in one.by_group().items()},
                "by_group": {name: asdict(group) for name, group in one.by_group().items()},
            }
            for one in outcomes
        ],
        "notes": list(request.notes),
    }


def job_rows(outcomes: Sequence[PolicyOutcome]) -> list[Mapping[str, Any]]:
    """Returns a row for each job under each policy, for CSV; units are in the column names."""
    return [
        {
            "policy": one.policy,
            "job": job.job.name,
            "group": job.job.group,
            "gpus": job.job.gpus,
            "submit_s": job.job.submit_s,
            "start_s": job.start_s,
            "end_s": job.end_s,
            "duration_s": job.job.duration_s,
            "jct_s": job.jct_s,
            "waited_s": job.waited_s,
            "preemptions": job.preemptions,
            "failures": job.failures,
            "gpu_s": job.held_gpu_s,
            "finish_time_ratio": ratio,
            "gpu_kinds": " ".join(dict.fromkeys(one.kinds[kind] for kind in job.kinds)),
        }
        for one in outcomes
        for job, ratio in zip(one.jobs, one.finish_time_ratios, strict=True)
    ]


def schedules_document(request: ClusterRequest, outcomes: Sequence[PolicyOutcome], command: str = "") -> Document:
    """Returns the page: the table, GPUs in use over time, completion times."""
    parts: list[Part] = [Heading("Policies side by side"), _table(COLUMNS, rows(outcomes))]
    parts += [Heading(_FAIRNESS_TITLE), Paragraph(fairness_subtitle())]
    parts += [_table(FAIRNESS_COLUMNS, fairness_rows(outcomes)), *(_table(*each) for each in group_tables(outcomes))]
    parts += [Heading("GPUs in use"), _use(request, outcomes), Heading("Completion times"), _completion(outcomes)]
    parts.append(Heading("When jobs run"))
    for one in outcomes:
        parts += [Paragraph(f"{one.policy}{_of_which(one)}"), gantt(one)]
    if request.notes:
        parts.append(Listing(request.notes))
    parts += reproduce_section(command, {}, "", ())
    return Document(heading(request), subtitle(request), tuple(parts))


def _table(columns: Sequence[str], body: Sequence[tuple[str, ...]]) -> Table:
    return Table(tuple(columns), tuple(body), numeric=frozenset(range(1, len(columns))))


def schedules_pictures(request: ClusterRequest, outcomes: Sequence[PolicyOutcome]) -> dict[str, bytes]:
    """Returns the plots of the page as PNG files by name. Needs matplotlib."""
    found = {
        "gpus-in-use": picture("GPUs in use", _use(request, outcomes), note=heading(request)),
        "completion-times": picture("Completion times", _completion(outcomes), note=heading(request)),
    }
    for one in outcomes:
        title = f"When jobs run under {one.policy}{_of_which(one)}"
        found[f"jobs-{one.policy}"] = picture(title, gantt(one), note=heading(request))
    return found


def schedules_plots(request: ClusterRequest, outcomes: Sequence[PolicyOutcome]) -> tuple[Plot, Plot]:
    """Returns the GPUs in use over time, and the completion times."""
    return _use(request, outcomes), _completion(outcomes)


def _use(request: ClusterRequest, outcomes: Sequence[PolicyOutcome]) -> Plot:
    data = []
    for one, colour in zip(outcomes, _colours(outcomes), strict=True):
        times, gpus = in_use(one.jobs)
        every = max(1, len(times) // _MOST_POINTS)
        hours = rounded([time / HOUR_S for time in times[::every]])
        data.append(_line(one.policy, hours, gpus[::every], colour, "hv"))
    said = "; ".join(f"{one.policy}: {percent(one.utilisation)}" for one in outcomes)
    y = axis("GPUs in use", range=[0, 1.05 * request.gpus])
    return Plot(data, layout(axis("hours since the first job"), y), f"GPUs in use over time, mean of {said}")


def _completion(outcomes: Sequence[PolicyOutcome]) -> Plot:
    data = []
    for one, colour in zip(outcomes, _colours(outcomes), strict=True):
        times = sorted(job.jct_s for job in one.jobs)
        every = max(1, len(times) // _MOST_POINTS)
        shares = rounded([100.0 * (i + 1) / len(times) for i in range(0, len(times), every)])
        data.append(_line(one.policy, rounded([time / HOUR_S for time in times[::every]]), shares, colour, "linear"))
    said = "; ".join(f"{one.policy}: median {duration(one.jct_s(0.5))}" for one in outcomes)
    x = axis("hours from submission to end (logarithmic)", type="log")
    return Plot(data, layout(x, axis("share of jobs that ended, %")), f"Completion times of jobs; {said}")


def _of_which(one: PolicyOutcome) -> str:
    return f": the {_LANES} jobs with the most GPU time of {len(one.jobs):,}" if len(one.jobs) > _LANES else ""


def gantt(one: PolicyOutcome) -> Plot:
    """Shows when each job waits and runs; of many jobs those with the most GPU time, in the order of submission."""
    largest = sorted(one.jobs, key=lambda job: -job.job.gpus * job.job.duration_s)[:_LANES]
    jobs = sorted(largest, key=lambda job: job.job.submit_s)
    lanes = [plot_text(f"{short(job.job.name, _LETTERS)} ({job.job.gpus:,})") for job in jobs]
    lanes = [f"{lane}<br>#{i + 1}" if lanes.count(lane) > 1 else lane for i, lane in enumerate(lanes)]
    waits = [(lane, job.job.submit_s, job.end_s) for lane, job in zip(lanes, jobs, strict=True)]
    runs = [(lane, *period) for lane, job in zip(lanes, jobs, strict=True) for period in job.ran]
    kinds = [kind for job in jobs for kind in job.kinds or (0,) * len(job.ran)]
    data = [_periods("waits", waits, _WAITS)]
    for kind, name in enumerate(f"runs on {kind}" for kind in one.kinds) if one.kinds else [(0, "runs")]:
        on_it = [period for period, own in zip(runs, kinds, strict=True) if own == kind]
        data.append(_periods(plot_text(name), on_it, _COLOURS[kind % len(_COLOURS)]))
    about = f"Periods in which {len(jobs):,} jobs run under {one.policy}, {len(runs):,} in all; GPUs in brackets"
    y = axis("", type="category", categoryarray=lanes, autorange="reversed", fixedrange=True)
    x = axis("hours since the first job", rangemode="tozero")
    return Plot(data, layout(x, y, barmode="overlay", bargap=0.2), about, _LANE_PX * len(lanes) + _AXIS_PX)


def _periods(name: str, periods: Sequence[tuple[str, float, float]], colour: str) -> dict[str, Any]:
    """Returns the bars of (lane, begin, end in seconds)."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [lane for lane, _, _ in periods],
        "x": rounded([(end_s - begin_s) / HOUR_S for _, begin_s, end_s in periods]),
        "base": rounded([begin_s / HOUR_S for _, begin_s, _ in periods]),
        "marker": {"color": colour},
        "customdata": [f"{duration(begin_s)} to {duration(end_s)}" for _, begin_s, end_s in periods],
        "hovertemplate": f"%{{y}} {name}: %{{customdata}}<extra></extra>",
    }


def _colours(outcomes: Sequence[PolicyOutcome]) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(len(outcomes))]


def _line(name: str, x: Sequence[float], y: Sequence[float], colour: str, shape: str) -> dict[str, Any]:
    look = {"color": colour, "width": 1.5, "shape": shape}
    return {"type": "scatter", "mode": "lines", "name": name, "x": list(x), "y": list(y), "line": look}
