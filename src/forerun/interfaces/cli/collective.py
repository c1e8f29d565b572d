"""`forerun collective`: how long collectives take on a network."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from io import TextIOWrapper
from itertools import count, takewhile
from pathlib import Path
from typing import Annotated, TextIO

import typer

from forerun.astrasim.astra.collective_cases import case_results, strided_groups
from forerun.astrasim.astra.collective_sweep import KINDS, Setting, default_algorithms, fitting_setting, sweep
from forerun.astrasim.astra.system import System, system_from
from forerun.common.admission import opened
from forerun.common.errors import ForerunError
from forerun.core.cost.nccl_choice import nccl_choices
from forerun.core.network.network_file import Network, parse_topology, read_network
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.types import Cluster
from forerun.interfaces.cli.numbers import parse_bytes
from forerun.interfaces.cli.option_groups import grouped
from forerun.interfaces.report.collective_table import (
    collectives_record,
    nccl_record,
    print_collectives,
    print_nccl,
)
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.written import to_json

_MOST_SIZES = 1000
_MANY_NPUS = 1024
"""up to this many NPUs, simulating a queue at every link takes seconds"""


class Backend(str, Enum):
    """Says whether messages wait for each other."""

    auto = "auto"
    both = "both"
    unaware = "unaware"
    aware = "aware"


class Optimization(str, Enum):
    """Holds the ways in which an all-reduce passes several dimensions."""

    baseline = "baseline"
    localBWAware = "localBWAware"


@dataclass(frozen=True)
class SizeOptions:
    """Holds the options for the simulated sizes: single sizes, a range, or both."""

    size: Annotated[
        list[str] | None,
        typer.Option("--bytes", help="Size of the collective, such as 64MiB, 1GB or 1048576. May be repeated."),
    ] = None
    first: Annotated[str | None, typer.Option("--from", help="Smallest of a range of sizes.")] = None
    last: Annotated[str | None, typer.Option("--to", help="Largest of a range of sizes.")] = None
    factor: Annotated[float, typer.Option(min=1.01, help="Ratio between neighbouring sizes of the range.")] = 2.0

    def bytes(self) -> list[int]:
        """Returns all sizes. Raises ForerunError if there is none."""
        sizes = [parse_bytes(text) for text in self.size or ()]
        if self.first is not None or self.last is not None:
            if self.first is None or self.last is None:
                raise ForerunError("--from and --to: give both for a range of sizes")
            low, high = parse_bytes(self.first), parse_bytes(self.last)
            every = takewhile(lambda size: size < high + 0.5, (low * self.factor**k for k in count()))
            range_of_sizes = dict.fromkeys(map(round, every))
            if len(range_of_sizes) > _MOST_SIZES:
                told = f"{len(range_of_sizes):,} sizes; at most {_MOST_SIZES:,} are simulated"
                raise ForerunError(f"--from {self.first} --to {self.last}: {told}, give a larger --factor")
            sizes += range_of_sizes
        if not sizes:
            raise ForerunError("collective: no sizes are given; give --bytes 64MiB, or --from 1KiB --to 1GiB")
        return sizes


@dataclass(frozen=True)
class NetworkOptions:
    """Holds the options for the network, on the command line or in a file."""

    topology: Annotated[
        str | None,
        typer.Option(help="Network such as ring:8,switch:4@50/500 (GB/s and ns), with the innermost dimension first."),
    ] = None
    network: Annotated[Path | None, typer.Option(help="Network file, instead of --topology.")] = None
    bandwidth: Annotated[
        str, typer.Option(help="Link bandwidth in GB/s: one number, or one for each dimension (50,25).")
    ] = "50"
    latency: Annotated[
        str, typer.Option(help="Link latency in ns: one number, or one for each dimension (500,700).")
    ] = "500"
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Name or file of a cluster. Shows the algorithms that NCCL chooses on its links, and their times."
        ),
    ] = None
    gpus: Annotated[
        int | None, typer.Option(min=2, help="Number of GPUs of --cluster; by default those of one node.")
    ] = None

    def read_cluster(self) -> tuple[Cluster, int] | None:
        """Returns the cluster and the number of GPUs; None without --cluster. Raises ForerunError for options that
        contradict each other.
        """
        if self.cluster is None:
            if self.gpus is not None:
                raise ForerunError("--gpus goes with --cluster; a network says how many NPUs it joins")
            return None
        if self.topology is not None or self.network is not None:
            raise ForerunError("--cluster: NCCL runs on the cluster's own links; leave out --topology and --network")
        found = load_cluster(self.cluster)
        return found, self.gpus or found.node_size

    def read(self) -> Network:
        """Returns the network. Raises ForerunError for none or both, and for text that is wrong."""
        if (self.topology is None) == (self.network is None):
            raise ForerunError("collective: give one network, as --topology ring:8,switch:4 or --network FILE")
        if self.network is not None:
            return read_network(self.network)
        texts = ((self.bandwidth, "bandwidth"), (self.latency, "latency"))
        return parse_topology(self.topology or "", *(_figures(text, name) for text, name in texts))


@dataclass(frozen=True)
class SystemOptions:
    """Holds the options for chunks and scheduling, which are keys of ASTRA-sim's system file."""

    splits: Annotated[int, typer.Option(min=1, help="Number of chunks in a collective.")] = 4
    active: Annotated[
        int, typer.Option(min=1, help="Number of chunks that a dimension processes at the same time.")
    ] = 1
    optimization: Annotated[Optimization, typer.Option(help="How the chunks are scheduled over the dimensions.")] = (
        Optimization.localBWAware
    )
    endpoint_delay: Annotated[int, typer.Option(min=0, help="Delay between two messages of a rank in ns.")] = 10
    local_mem_bw: Annotated[float, typer.Option(min=0, help="Memory bandwidth of reductions in GB/s.")] = 1600.0

    def system(self) -> System:
        """Returns the system that the options describe."""
        keys = {
            "preferred-dataset-splits": self.splits,
            "active-chunks-per-dimension": self.active,
            "collective-optimization": self.optimization.value,
            "endpoint-delay": self.endpoint_delay,
            "local-mem-bw": self.local_mem_bw,
        }
        return system_from(keys, "options")


@dataclass(frozen=True)
class GroupOptions:
    """Says in which groups collectives run; without any, the whole network is one group."""

    group_size: Annotated[
        int | None, typer.Option(min=2, help="Number of ranks in a group; all groups run at the same time.")
    ] = None
    stride: Annotated[int, typer.Option(min=1, help="Distance between neighbouring ranks of a group.")] = 1

    def on(self, network: Network) -> tuple[tuple[int, ...], ...]:
        """Returns the groups on `network`; none where one group has all NPUs."""
        return () if self.group_size is None else strided_groups(network.n_npus, self.group_size, self.stride)


@grouped
def collective(
    sizes: SizeOptions,
    network: NetworkOptions,
    scheduling: SystemOptions,
    joined: GroupOptions,
    kind: Annotated[
        str | None, typer.Argument(metavar="COLLECTIVE", help=f"One of {', '.join(KINDS)}. Leave it out with --cases.")
    ] = None,
    cases: Annotated[
        Path | None, typer.Option(help="File with one case as a JSON object in each line (- for standard input).")
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            help=(
                "Algorithms to compare, separated by commas: a name, direct with a window (direct4), one for"
                " each dimension (ring+direct), or your own as module:Class or file.py:Class."
            )
        ),
    ] = None,
    backend: Annotated[
        Backend,
        typer.Option(
            help=(
                "Congestion model. aware: messages queue at every link; unaware: messages never wait for each"
                " other, as in ASTRA-sim's analytical network; auto: on rings, switches and full connections,"
                " links carry bytes one after the other, and other networks use aware; both: auto, and a"
                " column of the times without queues."
            )
        ),
    ] = Backend.auto,
    hottest: Annotated[int, typer.Option(min=0, help="Number of busiest links to list (congestion-aware only).")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Simulate collectives on a network, and print a table by size and algorithm, or a JSON line for each case.

    With --cluster Forerun prints the algorithm that NCCL chooses on it and the time, and simulates no messages.
    Sizes and bandwidths are defined as in nccl-tests; the size of an all_gather is that of its output.
    """
    if cases is not None:
        if kind is not None:
            raise ForerunError("--cases: the file names the collectives; leave out the one on the command line")
        _run_cases(cases)
        return
    if kind is None:
        raise ForerunError(f"collective: none is named; name one of {', '.join(KINDS)} or give --cases FILE")
    if (of_cluster := network.read_cluster()) is not None:
        if algorithm is not None:
            raise ForerunError("--cluster: NCCL chooses the algorithm; leave out --algorithm")
        _print_nccl(kind, sizes.bytes(), *of_cluster, as_json)
        return
    where, system = network.read(), scheduling.system()
    groups = joined.on(where)
    names = [name.strip() for name in algorithm.split(",")] if algorithm else default_algorithms(kind, bool(groups))
    if backend in (Backend.auto, Backend.both):
        setting = fitting_setting(where, system, groups, hottest)
        one_ring = len(where.dims) == 1 and not groups and set(names) <= {"ring", "oneRing"}
        if setting.aware and where.n_npus > _MANY_NPUS and not one_ring:
            typer.echo(f"queues for {where.n_npus:,} NPUs can take minutes; --backend unaware is quick", err=True)
    else:
        setting = Setting(where, system, groups, backend is Backend.aware, hottest)
    points = sweep(setting, kind, sizes.bytes(), names)
    if as_json:
        print(to_json(collectives_record(setting, kind, points)))
    else:
        print_collectives(console(), setting, kind, points, both=backend is Backend.both and not setting.aware)


def _print_nccl(kind: str, sizes: list[int], cluster: Cluster, n_gpus: int, as_json: bool) -> None:
    points = nccl_choices(kind, sizes, cluster, n_gpus)
    if as_json:
        print(to_json(nccl_record(cluster, n_gpus, kind, points)))
    else:
        print_nccl(console(), cluster, n_gpus, kind, points)


def _run_cases(path: Path) -> None:
    with _lines(path) as lines:
        for record in case_results(lines):
            print(json.dumps(record, allow_nan=False), flush=True)


@contextmanager
def _lines(path: Path) -> Iterator[TextIO]:
    if str(path) == "-":
        yield sys.stdin
        return
    with opened(path) as file, TextIOWrapper(file, encoding="utf-8-sig", errors="replace") as text:
        yield text


def _figures(text: str, name: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ForerunError(f"--{name}: expected a number or one for each dimension (50,25), got {text!r}") from None
