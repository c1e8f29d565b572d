"""Checks across ranks: every send has its receive, and the members of a group run the same collectives."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from forerun.astrasim.chakra.checks import Findings, Severity
from forerun.astrasim.chakra.graph import as_numpy
from forerun.astrasim.chakra.trace import CommGroups, CommType

_End = tuple[int, str]
"""node id and name"""
ALL_RANKS = ""
"""name of the group of all ranks"""


class Messages:
    """Matches sends with receives by sender, receiver, tag and size, and keeps the unmatched ones."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int, int, int], tuple[bool, deque[_End]]] = {}

    def add(self, is_send: bool, route: tuple[int, int, int, int], node: int, name: str) -> None:
        """Adds a send or a receive; `route` is sender, receiver, tag and size."""
        waits_for_send, ends = self._waiting.setdefault(route, (not is_send, deque()))
        if waits_for_send != is_send:
            ends.append((node, name))
            return
        ends.popleft()
        if not ends:
            del self._waiting[route]

    def report(self, findings: Findings) -> None:
        """Reports every unmatched send and receive."""
        sizes: dict[tuple[int, int, int, bool], list[int]] = {}
        for (src, dst, tag, size), (waits_for_send, _) in self._waiting.items():
            sizes.setdefault((src, dst, tag, waits_for_send), []).append(size)
        for (src, dst, tag, size), (waits_for_send, ends) in self._waiting.items():
            others = sizes.get((src, dst, tag, not waits_for_send), [])
            what = (
                f"receive of {size} bytes with tag {tag} from rank {src} has no send"
                if waits_for_send
                else f"send of {size} bytes with tag {tag} to rank {dst} has no receive"
            )
            hint = f"; its peer says {others[0]} bytes" if others else ""
            for node, name in ends:
                findings.add("message", what + hint, dst if waits_for_send else src, node, name)


@dataclass(slots=True)
class _Sequence:
    """The collectives of one rank on one group, in file order."""

    rank: int
    kinds: array[int] = field(default_factory=lambda: array("b"))
    sizes: array[int] = field(default_factory=lambda: array("q"))
    nodes: array[int] = field(default_factory=lambda: array("q"))

    def words(self, place: int) -> str:
        if place >= len(self.kinds):
            return "no more collectives"
        return f"{CommType(self.kinds[place]).name.lower()} of {self.sizes[place]} bytes in node {self.nodes[place]}"


class Collectives:
    """Compares the collectives of the members of each group. It keeps those of one member.

    Without a file of groups, it takes the ranks that name a group for its members. As names may mean different groups
    then, differences are warnings.
    """

    def __init__(self, groups: CommGroups | None) -> None:
        self._groups = groups
        self._rank: dict[str, _Sequence] = {}
        self._first: dict[str, _Sequence] = {}
        self._seen: dict[str, set[int]] = {}
        self._severity: Severity = "error" if groups is not None else "warning"

    def add(self, rank: int, group: str, comm_type: int, size: int, node: int) -> str:
        """Adds a collective of the current rank. Returns the error in its group, or an empty text."""
        sequence = self._rank.get(group)
        if sequence is None:
            sequence = self._rank[group] = _Sequence(rank)
        sequence.kinds.append(comm_type)
        sequence.sizes.append(size)
        sequence.nodes.append(node)
        if self._groups is None or group == ALL_RANKS:
            return ""
        if group not in self._groups:
            return f"unknown group {group!r}: the file of groups does not name it"
        return "" if rank in self._groups[group] else f"group {group!r} does not contain rank {rank}"

    def end_rank(self, rank: int, findings: Findings) -> None:
        """Compares the collectives of the rank just read with those of the ranks before it."""
        for group, mine in self._rank.items():
            if self._groups is not None and group != ALL_RANKS and rank not in self._groups.get(group, ()):
                continue
            self._seen.setdefault(group, set()).add(rank)
            first = self._first.setdefault(group, mine)
            if mine.kinds != first.kinds or mine.sizes != first.sizes:
                self._report(group, mine, first, findings)
        self._rank = {}

    def _report(self, group: str, mine: _Sequence, first: _Sequence, findings: Findings) -> None:
        shared = min(len(mine.kinds), len(first.kinds))
        differs = np.flatnonzero(
            (as_numpy(mine.kinds[:shared]) != as_numpy(first.kinds[:shared]))
            | (as_numpy(mine.sizes[:shared]) != as_numpy(first.sizes[:shared]))
        )
        place = int(differs[0]) if len(differs) else shared
        reordered = sorted(zip(mine.kinds, mine.sizes, strict=True)) == sorted(
            zip(first.kinds, first.sizes, strict=True)
        )
        kind = "the same collectives in another order" if reordered else "other collectives"
        findings.add(
            "collective",
            f"{_group(group)}: {kind} than on rank {first.rank}: number {place} is {mine.words(place)}, "
            f"but there it is {first.words(place)}",
            mine.rank,
            mine.nodes[place] if place < len(mine.nodes) else None,
            severity="warning" if reordered else self._severity,
        )

    def report(self, present: set[int], findings: Findings) -> None:
        """Reports members that run no collective of a group although others do; `present` are ranks with a trace."""
        everyone: Mapping[str, Iterable[int]] = {**(self._groups or {}), ALL_RANKS: present}
        for group, first in self._first.items():
            for rank in sorted(set(everyone.get(group, ())) & present - self._seen[group]):
                what = f"{_group(group)}: runs none of its collectives, but rank {first.rank} runs {len(first.kinds)}"
                findings.add("collective", what, rank)


def _group(name: str) -> str:
    return f"group {name!r}" if name else "the group of all ranks"
