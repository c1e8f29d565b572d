"""The lines that a build of ASTRA-sim prints, so that scripts that read them go on working."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from string import Formatter
from typing import Any

import numpy as np

from forerun.astrasim.astra.node_kinds import overlap
from forerun.astrasim.astra.release import Release
from forerun.astrasim.astra.rings import DimensionRing, GroupRing
from forerun.astrasim.astra.statistics import RankStatistics

_WHERE_ANY = ("cpu_time", "remote_mem_time")
"""printed only for ranks that have such nodes"""
_TIMES = ("cpu_time", "gpu_time", "comm_time", "remote_mem_time")
"""times of the kinds of nodes"""
_UNITS = ("B", "KB", "MB", "GB", "TB")


def output_lines(
    release: Release,
    statistics: Sequence[RankStatistics],
    now: datetime,
    rings_of_rank_0: Sequence[DimensionRing] = (),
    group_rings: Sequence[GroupRing] = (),
    kinds: Sequence[tuple[str, ...]] = (),
) -> Iterator[str]:
    """Yields the lines of a run as `release` prints them; `now` is the time stamp of every line.

    The rings of rank 0 come first. Then come the rings of groups when they are first used, and the statistics of each
    rank when it ends. In the same ns, rings precede statistics, and ranks are in the order of their numbers.
    """
    stamp = release.time.text(now)
    happenings: list[tuple[int, int, int, Sequence[Sequence[str]], dict[str, Any]]] = []
    if release.node_0_ring:
        happenings += [(-1, 0, 0, [release.node_0_ring], asdict(ring)) for ring in rings_of_rank_0]
    if release.group_ring:
        happenings += [(ring.start_ns, 0, ring.rank, [release.group_ring], asdict(ring)) for ring in group_rings]
    for rank, of_rank in enumerate(statistics):
        texts: Sequence[Sequence[str]] = release.rank
        values = _values(rank, of_rank)
        if release.kinds_as_run and kinds:
            texts = _as_run(texts, kinds[rank])
            if above := overlap(of_rank, kinds[rank]):
                values["overlap"] = above
        happenings.append((of_rank.wall_cycles_finished, 1, rank, texts, values))
    for *_, lines, values in sorted(happenings, key=lambda happening: happening[:3]):
        for logger, text in lines:
            if _names(text) <= values.keys():
                yield release.line.format(stamp=stamp, logger=logger, text=text.format_map(values))
    if release.last:
        yield release.last.format(stamp=stamp)


def _values(rank: int, of_rank: RankStatistics) -> dict[str, Any]:
    """Returns the values that the texts of a rank may name, without unknown ones and times of missing nodes."""
    known = {name: value for name, value in asdict(of_rank).items() if value is not None}
    if of_rank.peak_memory_bytes is not None:
        known["peak_memory"] = _in_units(of_rank.peak_memory_bytes)
    return {"rank": rank} | {name: value for name, value in known.items() if value or name not in _WHERE_ANY}


def _as_run(texts: Sequence[Sequence[str]], kinds: Sequence[str]) -> list[Sequence[str]]:
    """Returns the lines with the times of kinds in the order of `kinds`, without those of others."""
    of_kind = {name: line for line in texts for name in _names(line[1]).intersection(_TIMES)}
    first = min((texts.index(line) for line in of_kind.values()), default=0)
    others = [line for line in texts if line not in of_kind.values()]
    return [*others[:first], *(of_kind[kind] for kind in kinds if kind in of_kind), *others[first:]]


def _in_units(size: int) -> str:
    """Returns a number of bytes as `LocalMemUsageTracker` prints it: a 32-bit float in the largest unit that fits."""
    power = min(max(size.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{float(np.float32(size)) / 1024**power:.2f} {_UNITS[power]}"


def _names(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name}
