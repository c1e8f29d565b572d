"""`forerun collective`: how long collectives take on a network."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from itertools import takewhile
from pathlib import Path
from typing import Annotated, TextIO

import typer

from forerun.astrasim.astra.collective_cases import case_results, strided_groups
from forerun.astrasim.astra.collective_sweep import KINDS, Setting, default_algorithms, fitting_setting, sweep
from forerun.astrasim.astra.system import system_from
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import Network, parse_topology, read_network
from forerun.interfaces.cli.numbers import parse_bytes
from forerun.interfaces.report.collective_table import collectives_record, print_collectives
from forerun.interfaces.report.console import console
from forerun.interfaces.report.records import to_json

_MOST_SIZES = 1000
_MANY_NPUS = 1024
"""up to so many, the queues of every link take seconds"""


class Backend(str, Enum):
    """Whether messages wait for each other."""

    auto = "auto"
    unaware = "unaware"
    aware = "aware"


class Optimization(str, Enum):
    """How an all-reduce goes through several dimensions."""

    baseline = "baseline"
    localBWAware = "localBWAware"


def collective(
    kind: Annotated[
        str | None, typer.Argument(metavar="COLLECTIVE", help=f"One of {', '.join(KINDS)}; none with --cases.")
    ] = None,
    cases: Annotated[
        Path | None, typer.Option(help="File of cases, one JSON object a line (- for standard input).")
    ] = None,
    size: Annotated[
        list[str] | None, typer.Option("--bytes", help="Size, such as 64MiB, 1GB or 1048576; may be given again.")
    ] = None,
    first: Annotated[str | None, typer.Option("--from", help="Smallest of a range of sizes.")] = None,
    last: Annotated[str | None, typer.Option("--to", help="Largest of a range of sizes.")] = None,
    factor: Annotated[float, typer.Option(min=1.01, help="Ratio of neighbouring sizes of the range.")] = 2.0,
    topology: Annotated[
        str | None, typer.Option(help="Network, as ring:8,switch:4@50/500 (GB/s and ns), innermost dimension first.")
    ] = None,
    network: Annotated[Path | None, typer.Option(help="Network file, in place of --topology.")] = None,
    bandwidth: Annotated[str, typer.Option(help="GB/s of links; one, or one a dimension: 50,25.")] = "50",
    latency: Annotated[str, typer.Option(help="ns of links; one, or one a dimension: 500,700.")] = "500",
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="Algorithms to compare, with commas: names, direct with a window (direct4), ring+direct by dimension, "
            "or custom ones as module:Class or file.py:Class."
        ),
    ] = None,
    splits: Annotated[int, typer.Option(min=1, help="Chunks that a collective is cut into.")] = 4,
    active: Annotated[int, typer.Option(min=1, help="Chunks that a dimension works on at the same time.")] = 1,
    optimization: Annotated[Optimization, typer.Option(help="Scheduling of chunks.")] = Optimization.localBWAware,
    endpoint_delay: Annotated[int, typer.Option(min=0, help="ns between messages of a rank.")] = 10,
    local_mem_bw: Annotated[float, typer.Option(min=0, help="GB/s that reductions run at.")] = 1600.0,
    backend: Annotated[
        Backend,
        typer.Option(
            help="unaware: messages never wait for each other; aware: every link is a queue; "
            "auto: unaware on rings, switches and full connections, aware on every other topology."
        ),
    ] = Backend.auto,
    group_size: Annotated[int | None, typer.Option(min=2, help="Ranks of a group; all groups run at once.")] = None,
    stride: Annotated[int, typer.Option(min=1, help="Distance of neighbours in a group.")] = 1,
    hottest: Annotated[int, typer.Option(min=0, help="Links to list (aware).")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Simulate collectives: a table by size and algorithm, or a JSON line for each case of a file.

    Sizes and bandwidths are those of nccl-tests, also for all_gather: its size is what it makes.
    """
    if cases is not None:
        if kind is not None:
            raise ForerunError("--cases says which collectives run; leave the name away")
        _run_cases(cases)
        return
    if kind is None:
        raise ForerunError(f"name a collective ({', '.join(KINDS)}) or give --cases FILE")
    where = _network(topology, network, bandwidth, latency)
    keys = {
        "preferred-dataset-splits": splits,
        "active-chunks-per-dimension": active,
        "collective-optimization": optimization.value,
        "endpoint-delay": endpoint_delay,
        "local-mem-bw": local_mem_bw,
    }
    groups = () if group_size is None else strided_groups(where.n_npus, group_size, stride)
    system = system_from(keys, "options")
    if backend is Backend.auto:
        setting = fitting_setting(where, system, groups, hottest)
        if setting.aware and where.n_npus > _MANY_NPUS:
            typer.echo(f"queues for {where.n_npus:,} NPUs can take minutes; --backend unaware is quick", err=True)
    else:
        setting = Setting(where, system, groups, backend is Backend.aware, hottest)
    names = [name.strip() for name in algorithm.split(",")] if algorithm else default_algorithms(kind, bool(groups))
    points = sweep(setting, kind, _sizes(size or [], first, last, factor), names)
    if as_json:
        print(to_json(collectives_record(setting, kind, points)))
    else:
        print_collectives(console(), setting, kind, points)


def _run_cases(path: Path) -> None:
    with _lines(path) as lines:
        for record in case_results(lines):
            print(json.dumps(record, allow_nan=False), flush=True)


@contextmanager
def _lines(path: Path) -> Iterator[TextIO]:
    try:
        opened = nullcontext(sys.stdin) if str(path) == "-" else path.open(encoding="utf-8", errors="replace")
    except (OSError, ValueError) as error:
        raise ForerunError(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from None
    with opened as file:
        yield file


def _network(topology: str | None, network: Path | None, bandwidth: str, latency: str) -> Network:
    if (topology is None) == (network is None):
        raise ForerunError("give the network as --topology, such as ring:8,switch:4, or as --network FILE")
    if network is not None:
        return read_network(network)
    figures = [_figures(text, name) for text, name in ((bandwidth, "bandwidth"), (latency, "latency"))]
    return parse_topology(topology or "", *figures)


def _figures(text: str, name: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ForerunError(f"--{name} is {text!r}, it has to be a number, or one a dimension: 50,25") from None


def _sizes(given: list[str], first: str | None, last: str | None, factor: float) -> list[int]:
    sizes = [parse_bytes(text) for text in given]
    if first is not None or last is not None:
        if first is None or last is None:
            raise ForerunError("a range of sizes needs both --from and --to")
        low, high = parse_bytes(first), parse_bytes(last)
        in_range = takewhile(lambda size: size <= high, (round(low * factor**k) for k in range(_MOST_SIZES)))
        sizes += dict.fromkeys(in_range)
    if not sizes:
        raise ForerunError("give sizes, as --bytes 64MiB or --from 1KiB --to 1GiB")
    return sizes
