"""Reads the tables that nccl-tests print (all_reduce_perf and the others) as measured collectives.

The columns differ between versions, so that the table's own heading names them. All other text of a log (prefixes of
mpirun and srun, NCCL's messages, totals) has no effect. Sizes are bytes of the full buffer, as everywhere in Forerun.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from forerun.common.admission import read_bytes
from forerun.common.errors import ForerunError
from forerun.common.units import US
from forerun.core.program.types import Collective

TESTS = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "alltoall": Collective.ALL_TO_ALL,
    "broadcast": Collective.BROADCAST,
    "sendrecv": Collective.SEND_RECV,
}
"""name of a test without _perf -> collective that it runs"""
_TEST = re.compile(r"(?<![a-z])(" + "|".join(TESTS) + r")(?![a-z])")
_PREFIX = re.compile(r"^\s*(?:\[\d+(?:,\d+)*\]\s*<std\w+>:\s?|\d+:\s)")
"""prefixes that `mpirun --tag-output` and `srun --label` put before a line"""
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)", re.IGNORECASE)
_THREADS = re.compile(r"#\s*nThread\s+(\d+)\s+nGpus\s+(\d+)")
_NUMBER = re.compile(r"\d+(?:\.\d*)?(?:e[+-]?\d+)?", re.IGNORECASE)
_KILO = 1e3
"""bytes per microsecond in 1 GB/s"""
_ROUNDED, _LAST_DIGIT = 0.02, 0.01
"""how far a printed bandwidth may lie from that of the printed time: as a fraction, and in GB/s"""

Key = tuple[Collective, int, int, float]
"""kind, ranks, ranks between neighbours, bytes"""


@dataclass
class _Table:
    """The facts in the lines above a table."""

    kind: Collective | None
    members: dict[int, tuple[int, str]] = field(default_factory=dict)
    """rank -> group and host"""
    threads: int = 0
    header: list[str] = field(default_factory=list)


def is_nccl_log(path: Path) -> bool:
    """Returns whether a file has the heading of nccl-tests' tables. Raises ForerunError if it is unreadable."""
    return any(_header(line) for line in _lines(path))


def read_nccl_log(path: Path) -> dict[Key, float]:
    """Returns the median seconds of a log's collectives, in and out of place, by kind, ranks, stride and bytes.

    Raises:
        ForerunError: The file is unreadable or holds no table, or a table names no test or no ranks.
    """
    found: dict[Key, list[float]] = {}
    table = _Table(_named(path.name))
    for number, line in enumerate(_lines(path), 1):
        row = _row(table, line)
        if row is None:
            _look_around(table, line)
            continue
        size, times_us = row
        kind, ranks, stride = _group(table, f"{path}, line {number}")
        if ranks > 1:
            found.setdefault((kind, ranks, stride, size), []).extend(times_us)
    if not found:
        raise ForerunError(f"{path}: no table of nccl-tests among more than one rank (all_reduce_perf and the others)")
    return {key: float(np.median(times)) * US for key, times in sorted(found.items())}


def nodes_of(path: Path) -> int:
    """Returns the number of hosts that a log names; 1 if it names none."""
    matches = (_RANK.search(line) for line in _lines(path))
    return max(1, len({match.group(3) for match in matches if match}))


def network_csv(times_s: Mapping[Key, float]) -> str:
    """Returns the text of a file for `--network-profile`."""
    lines = ["collective,ranks,stride,bytes,time_us"]
    for (kind, ranks, stride, size), time_s in sorted(times_s.items()):
        lines.append(f"{kind.name.lower()},{ranks},{stride},{size:.0f},{time_s / US:.6g}")
    return "\n".join(lines) + "\n"


def _lines(path: Path) -> Iterator[str]:
    for line in read_bytes(path).decode("utf-8", errors="replace").splitlines():
        yield _PREFIX.sub("", line)


def _named(text: str) -> Collective | None:
    match = _TEST.search(text.lower())
    return None if match is None else TESTS[match.group(1)]


def _header(line: str) -> list[str]:
    """Returns the names of the columns, where the line is the heading of a table."""
    cells = line.strip().lstrip("#").split()
    return cells if cells[:2] == ["size", "count"] and "time" in cells else []


def _look_around(table: _Table, line: str) -> None:
    """Stores the facts about the next table that a line between tables states."""
    header = _header(line)
    if header:
        table.header = header
        return
    if re.search(r"#\s*nThread\b", line) or "Using devices" in line:
        table.members.clear()
    threads = _THREADS.search(line)
    if threads is not None:
        table.threads = int(threads.group(1)) * int(threads.group(2))
    member = _RANK.search(line)
    if member is not None:
        table.members[int(member.group(1))] = int(member.group(2) or 0), member.group(3)
    elif "_perf" in line or "test starting" in line.lower():
        table.kind = _named(line) or table.kind


def _row(table: _Table, line: str) -> tuple[float, list[float]] | None:
    """Returns bytes and times in microseconds, where the line is a row of the table."""
    cells = line.split()
    if not table.header or not cells or not cells[0].isdigit():
        return None
    size = float(cells[0])
    pairs = [cells[place : place + 2] for place, name in enumerate(table.header) if name == "time"]
    times = [float(time) for time, rate in filter(_are_numbers, pairs) if _agree(size, float(time), float(rate))]
    return (size, times) if times else None


def _are_numbers(pair: list[str]) -> bool:
    return len(pair) == 2 and all(_NUMBER.fullmatch(cell) for cell in pair)


def _agree(size: float, time_us: float, algbw: float) -> bool:
    """Returns whether a time and the bandwidth beside it agree: lines may lack cells or run into each other."""
    return size > 0 and time_us > 0 and abs(size / time_us / _KILO - algbw) <= _ROUNDED * algbw + _LAST_DIGIT


def _group(table: _Table, place: str) -> tuple[Collective, int, int]:
    """Returns kind, ranks and stride of a row's collective; the ranks are those of the first rank's group."""
    if table.kind is None:
        known = ", ".join(f"{name}_perf" for name in TESTS)
        raise ForerunError(f"{place}: the log doesn't name its test; put the name ({known}) into the file's name")
    if not table.members and not table.threads:
        raise ForerunError(
            f"{place}: the log doesn't state its number of ranks; keep the lines '#  Rank  0 Pid ... on'"
        )
    ranks = _first_group(table)
    if table.kind == Collective.SEND_RECV:
        return table.kind, min(2, len(ranks)), 1
    return table.kind, len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1


def _first_group(table: _Table) -> Sequence[int]:
    if not table.members:
        return range(table.threads)
    first = table.members[min(table.members)][0]
    return sorted(rank for rank, (group, _) in table.members.items() if group == first)
