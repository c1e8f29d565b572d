"""Finds which rank has which role. A role is a set of ranks that do the same work at the same kind of position; one of
them is recorded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.common.errors import ForerunError
from forerun.core.program.groups import CommGroup
from forerun.core.program.places import role_ranks
from forerun.sources.trace.recording import Recording

_NO_NAMES = {"default", "default_pg", "undefined"}
_NAME = re.compile(r"[A-Za-z][A-Za-z_]*[A-Za-z]|[A-Za-z]")


def axis_of(name: str) -> str:
    """Returns the mesh dimension that a process group is named after (`mesh_dp_shard` and `dp_shard#2` are dp_shard);
    "group" where its name says nothing."""
    text = name.partition("#")[0].removeprefix("mesh_")
    found = _NAME.fullmatch(text)
    return "group" if found is None or text.lower() in _NO_NAMES or text.startswith("dim_") else text


@dataclass(frozen=True)
class Roles:
    """The recordings of one run, one for each role."""

    recordings: tuple[Recording, ...]
    world_size: int
    ranks: tuple[tuple[int, ...], ...]
    """The ranks of each role where the roles repeat regularly over the world, else only the recorded one."""
    of_rank: dict[int, int]

    @staticmethod
    def of(recordings: Sequence[Recording]) -> Roles:
        """Returns the roles of `recordings`.

        Raises:
            ForerunError: no recording, an empty one, or two of one rank.
        """
        if not recordings:
            raise ForerunError("trace: there is no recording to make a Program of; give one for each role")
        own = [one.rank for one in recordings]
        for one in recordings:
            if not len(one):
                raise ForerunError(f"trace: rank {one.rank} ran no kernel in its step; does it train on 'cuda'?")
            if own.count(one.rank) > 1:
                raise ForerunError(f"trace: rank {one.rank} is recorded twice; give one recording for each role")
        worlds = {int(one.meta.get("world_size") or 0) for one in recordings}
        if len(worlds) > 1:
            raise ForerunError(f"trace: recordings of runs of different size: world sizes {sorted(worlds)}")
        world = max(max(worlds), *own, len(own) - 1) if max(worlds) == 0 else max(worlds)
        ranks = role_ranks(own, world) or tuple((rank,) for rank in own)
        of_rank = {rank: role for role, members in enumerate(ranks) for rank in members}
        return Roles(tuple(recordings), max(1, world), ranks, of_rank | {rank: k for k, rank in enumerate(own)})

    def __len__(self) -> int:
        return len(self.recordings)

    def counts(self) -> list[int]:
        """Returns the number of ranks of each role; where they don't divide evenly the first roles have one more."""
        share, rest = divmod(max(self.world_size, len(self)), len(self))
        return [share + (role < rest) for role in range(len(self))]

    def of_peer(self, role: int, group: int, peer: int) -> int:
        """Returns the role of global rank `peer`, the other end of a message of `role` over `group` of its recording.

        A rank without a known role has the role that is at its position in the group, if there is one, else the
        sender's own: then all ranks do the same.
        """
        found = self.of_rank.get(peer)
        if found is not None:
            return found
        name, ranks = self.recordings[role].groups[group] if group >= 0 else ("", ())
        place = ranks.index(peer) if peer in ranks else -1
        for other, recording in enumerate(self.recordings):
            for other_name, members in recording.groups:
                if other != role and other_name == name and recording.rank in members:
                    if members.index(recording.rank) == place:
                        return other
                    break
        return role

    def in_group(self, role: int, ranks: Sequence[int]) -> tuple[int, ...]:
        """Returns the roles that have a rank among `ranks`, including `role`."""
        return tuple(sorted({self.of_rank[rank] for rank in ranks if rank in self.of_rank} | {role}))

    def names(self) -> list[str]:
        """Returns the names of the rank classes: stages where recorded ranks send to each other."""
        if len(self) == 1:
            return ["every rank"]
        own = [one.rank for one in self.recordings]
        piped = any(np.isin(one.peer, own).any() for one in self.recordings)
        return [f"stage {role}" if piped else f"ranks like {rank}" for role, rank in enumerate(own)]


class Groups:
    """The groups of all recordings; groups with the same part in several recordings are one entry."""

    def __init__(self, roles: Roles, node_size: int) -> None:
        self.entries: list[CommGroup] = []
        self.ranks: list[list[int]] = []
        self.names: list[str] = []
        self._roles, self._node_size = roles, node_size
        self._known: dict[tuple[str, int, CommGroup], int] = {}
        self.numbers = [self._of_role(one) for one in roles.recordings]
        """For each recording: the entry of each of its groups."""

    def _of_role(self, recording: Recording) -> list[int]:
        seen: dict[str, int] = {}
        numbers = []
        for name, ranks in recording.groups:
            turn = seen[name] = seen.get(name, -1) + 1
            numbers.append(
                self._entry(name, turn, CommGroup.of_ranks(axis_of(name), sorted(ranks), self._node_size), ranks)
            )
        return numbers

    def _entry(self, name: str, turn: int, group: CommGroup, ranks: Sequence[int]) -> int:
        key = (name, turn, group)
        if key not in self._known:
            self._known[key] = len(self.entries)
            self.entries.append(group)
            self.ranks.append(sorted(ranks))
            self.names.append(name)
        return self._known[key]

    def border(self, rank: int, peer: int, borders: int) -> int:
        """Returns the entry of the two ends of a transfer between pipeline stages. The run has `borders` such
        transfers.
        """
        ends = sorted((rank, peer))
        group = CommGroup.of_ranks("pp", ends, self._node_size, borders)
        return self._entry("", -1, group, ends)
