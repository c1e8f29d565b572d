"""Collectives by size and algorithm as a table, and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.astrasim.astra.collective_sweep import Point, Setting
from forerun.core.network.network_file import Network
from forerun.interfaces.report.wording import percent, seconds

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def print_collectives(out: Console, setting: Setting, collective: str, points: Sequence[Point]) -> None:
    """The setting, a row for each size and algorithm, and the hottest links of the largest size."""
    out.print(Text(f"{collective} of {_ranks(setting)} on {network_words(setting.network)}", style="bold"))
    out.print(_system_words(setting), soft_wrap=True)
    out.print()
    table = _table("size", "algorithm", "time", "algbw GB/s", "busbw GB/s")
    for point in points:
        figures = ["-", "", ""]
        if point.time_ns is not None:
            beyond = "!" * point.beyond_links
            figures = [
                seconds(point.time_ns * 1e-9), _bandwidth(point.algbw_gbps), _bandwidth(point.busbw_gbps) + beyond
            ]  # fmt: skip
        table.add_row(size_words(point.size_bytes), point.algorithm, *figures)
    out.print(table)
    if any(point.beyond_links for point in points):
        out.print(
            f"! above the {_bandwidth(setting.rank_links_gbps)} GB/s that all links of a rank carry together: messages "
            "never wait for each other here; --backend aware makes every link a queue",
            soft_wrap=True,
        )
    for text in dict.fromkeys(f"{point.algorithm}: {point.error}" for point in points if point.error):
        out.print(f"- {text}")
    _print_links(out, setting, points)


def collectives_record(setting: Setting, collective: str, points: Sequence[Point]) -> dict[str, Any]:
    """The same figures as one object."""
    return {
        "collective": collective,
        "network": network_words(setting.network),
        "npus": setting.network.n_npus,
        "ranks": setting.n_ranks,
        "congestion_aware": setting.aware,
        "rank_links_gbps": setting.rank_links_gbps,
        "points": [{key: value for key, value in asdict(point).items() if value != ""} for point in points],
    }


def network_words(network: Network) -> str:
    """The dimensions of a network, with bandwidths and latencies."""
    unit = "GiB/s" if network.gib else "GB/s"
    return ", ".join(
        f"{dim.topology} {'x'.join(map(str, dim.sizes))} ({dim.bandwidth_gbps:g} {unit}, {dim.latency_ns:g} ns)"
        for dim in network.dims
    )


def size_words(size: int) -> str:
    """A size as a whole number of KiB, MiB or GiB if it is one, else in bytes."""
    factor, unit = next(((f, u) for f, u in _UNITS if size >= f and size % f == 0), (1, "B"))
    return f"{size // factor:,} {unit}"


def _ranks(setting: Setting) -> str:
    if not setting.groups:
        return f"{setting.network.n_npus} ranks"
    return f"{len(setting.groups)} groups of {setting.n_ranks} ranks each"


def _system_words(setting: Setting) -> str:
    system = setting.system
    words = [
        f"{_backend_words(setting)}; {system.preferred_dataset_splits} splits",
        f"{system.active_chunks_per_dimension} active in a dimension",
        system.collective_optimization,
        f"endpoint delay {system.endpoint_delay} ns",
        f"memory {system.local_mem_bw:g} GB/s",
    ]
    return ", ".join(words)


def _backend_words(setting: Setting) -> str:
    names = " and ".join(dict.fromkeys(dim.topology for dim in setting.network.dims))
    if setting.aware:
        why = f" (on {names}, routes share links; --backend unaware lets every message pass)"
        return "congestion-aware" + why * setting.fitting
    why = f" (as ASTRA-sim reckons {names}; --backend aware makes messages wait for each other)"
    return "congestion-unaware" + why * setting.fitting


def _print_links(out: Console, setting: Setting, points: Sequence[Point]) -> None:
    largest = max((point.size_bytes for point in points), default=0)
    shown = [point for point in points if point.size_bytes == largest and point.hottest]
    if not shown:
        return
    out.print()
    out.print(Text(f"Hottest links at {size_words(largest)}", style="bold"))
    table = _table("algorithm", "link", "busy", "bytes")
    for point in shown:
        for link in point.hottest:
            ends = f"{_device(link.source, setting)} -> {_device(link.target, setting)}"
            table.add_row(point.algorithm, ends, percent(link.busy), f"{link.size_bytes:,}")
    out.print(table)


def _device(device: int, setting: Setting) -> str:
    n = setting.network.n_npus
    return str(device) if device < n else f"switch {device - n}"


def _bandwidth(gbps: float) -> str:
    return f"{gbps:,.2f}"


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("algorithm", "link") else "right", no_wrap=True)
    return table
