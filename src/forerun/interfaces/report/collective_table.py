"""Collectives by size and algorithm as a table, and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from forerun.interfaces.report.console import make_table, print_title
from forerun.interfaces.report.figures import percent, seconds

if TYPE_CHECKING:
    from forerun.astrasim.astra.collective_sweep import Point, Setting
    from forerun.core.cost.nccl_choice import NcclChoice
    from forerun.core.network.network_file import Network
    from forerun.describe.cluster.types import Cluster

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def print_collectives(
    out: Console, setting: Setting, collective: str, points: Sequence[Point], both: bool = False
) -> None:
    """Prints the setting, a row for each size and algorithm, and the hottest links of the largest size.

    With `both`, a column has the time without queues.
    """
    print_title(out, f"{collective} of {_ranks(setting)} on {network_words(setting.network)}")
    out.print(_system_words(setting), soft_wrap=True)
    out.print()
    rows = ((size_words(point.size_bytes), point.algorithm, *_cells(point, both)) for point in points)
    headings = ("size", "algorithm", "time", "algbw GB/s", "busbw GB/s", *(["without queues"] if both else []))
    out.print(make_table("rlrrr" + "r" * both, headings, rows, gap=2, whole="lr"))
    if any(point.beyond_links for point in points):
        out.print(
            f"! above the {_bandwidth(setting.rank_links_gbps)} GB/s that all links of a rank carry"
            " together: messages never wait for each other here; --backend aware adds a queue at every"
            " link",
            soft_wrap=True,
        )
    for text in dict.fromkeys(f"{point.algorithm}: {point.error}" for point in points if point.error):
        out.print(f"- {text}")
    _print_links(out, setting, points)


def _cells(point: Point, both: bool) -> tuple[str, ...]:
    without = "" if point.unqueued_ns is None else seconds(point.unqueued_ns * 1e-9)
    if point.time_ns is None:
        return ("-", "", "", "")[: 3 + both]
    bandwidths = _bandwidth(point.algbw_gbps), _bandwidth(point.busbw_gbps) + "!" * point.beyond_links
    return (seconds(point.time_ns * 1e-9), *bandwidths, without)[: 3 + both]


def print_nccl(out: Console, cluster: Cluster, n_gpus: int, collective: str, points: Sequence[NcclChoice]) -> None:
    """Prints a row for each size: NCCL's choice and its time."""
    print_title(out, f"{collective} of {n_gpus:,} GPUs of {cluster.name}")
    rows = (
        (
            size_words(point.size_bytes),
            point.algorithm,
            point.protocol,
            seconds(point.time_s),
            _bandwidth(point.algbw_gb_s),
            _bandwidth(point.busbw_gb_s),
        )
        for point in points
    )
    headings = ("size", "algorithm", "protocol", "time", "algbw GB/s", "busbw GB/s")
    out.print(make_table("rllrrr", headings, rows, gap=2, whole="lr"))


def nccl_record(cluster: Cluster, n_gpus: int, collective: str, points: Sequence[NcclChoice]) -> dict[str, Any]:
    """Returns the same figures as one object."""
    points_record = [asdict(point) for point in points]
    return {"collective": collective, "cluster": cluster.name, "gpus": n_gpus, "points": points_record}


def collectives_record(setting: Setting, collective: str, points: Sequence[Point]) -> dict[str, Any]:
    """Returns the same figures as one object."""
    return {
        "collective": collective,
        "network": network_words(setting.network),
        "npus": setting.network.n_npus,
        "ranks": setting.n_ranks,
        "congestion_aware": setting.aware,
        "serialising": setting.serial,
        "rank_links_gbps": setting.rank_links_gbps,
        "points": [{key: value for key, value in asdict(point).items() if value != ""} for point in points],
    }


def network_words(network: Network) -> str:
    """Returns the dimensions of a network, with bandwidths and latencies."""
    unit = "GiB/s" if network.gib else "GB/s"
    return ", ".join(
        f"{dim.topology} {'x'.join(map(str, dim.sizes))} ({dim.bandwidth_gbps:g} {unit}, {dim.latency_ns:g} ns)"
        for dim in network.dims
    )


def size_words(size: int) -> str:
    """Returns a size as a whole number of KiB, MiB or GiB if it is one, else in bytes."""
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
        why = f" (on {names}, routes share links; with --backend unaware messages never wait)"
        return "congestion-aware" + why * setting.fitting
    if setting.serial:
        return (
            f"without queues, but on {names} links transmit bytes one after the other (--backend unaware:"
            " as ASTRA-sim's analytical network; --backend aware: a queue at every link)"
        )
    return "congestion-unaware"


def _print_links(out: Console, setting: Setting, points: Sequence[Point]) -> None:
    largest = max((point.size_bytes for point in points), default=0)
    shown = [point for point in points if point.size_bytes == largest and point.hottest]
    if not shown:
        return
    out.print()
    rows = (
        (
            point.algorithm,
            f"{_device(link.source, setting)} -> {_device(link.target, setting)}",
            percent(link.busy),
            f"{link.size_bytes:,}",
        )
        for point in shown
        for link in point.hottest
    )
    print_title(out, f"Hottest links at {size_words(largest)}")
    out.print(make_table("llrr", ("algorithm", "link", "busy", "bytes"), rows, gap=2, whole="lr"))


def _device(device: int, setting: Setting) -> str:
    n = setting.network.n_npus
    return str(device) if device < n else f"switch {device - n}"


def _bandwidth(gbps: float) -> str:
    return f"{gbps:,.2f}"
