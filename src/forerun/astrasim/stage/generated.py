"""The generated traces of all ranks, whichever generation of STAGE makes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from forerun.astrasim.chakra.trace import CommGroups, RankTrace
from forerun.astrasim.stage.ranks import communicator_groups, groups_of
from forerun.common.errors import ForerunError
from forerun.core.program.types import I32


class GeneratedTraces(ABC):
    """A sequence of the traces of all ranks, without names, each made on use.

    Ranks of one pipeline stage differ only in node ids (but not in their order), tags, peers and group names.
    """

    def __init__(self, args: Any, stage_order: Sequence[int]) -> None:
        self.args = args
        """the flags of the generation"""
        self._stage_order = stage_order
        """pipeline stages in the order of their ranks"""

    @property
    def n_ranks(self) -> int:
        n_ranks: int = self.args.n_ranks
        return n_ranks

    def __len__(self) -> int:
        return self.n_ranks

    def __getitem__(self, rank: int) -> RankTrace:
        if rank >= len(self):
            raise IndexError(rank)
        return self.rank(rank)

    def __iter__(self) -> Iterator[RankTrace]:
        return (self.rank(rank) for rank in range(len(self)))

    @cached_property
    @abstractmethod
    def classes(self) -> tuple[RankTrace, ...]:
        """The trace of the first rank of each pipeline stage, without names."""

    @cached_property
    def class_of_rank(self) -> I32:
        """The index into `classes` for each rank, (n_ranks,)."""
        return np.repeat(np.arange(self.args.pp, dtype=np.int32), self.args.ranks_a_stage)

    @cached_property
    def groups(self) -> CommGroups:
        """The communicator groups of all ranks, numbered from 1, with groups of one rank."""
        return communicator_groups(self.args.degrees, self._stage_order)

    def group_names(self, rank: int) -> tuple[str, ...]:
        """Returns the groups of more than one rank that `rank` is in, as column `group` of its trace numbers them."""
        return groups_of(rank, self.args.degrees, self._stage_order)

    def rank(self, rank: int, names: bool = False) -> RankTrace:
        """Returns the trace of `rank`; `names` adds the names of its nodes and tensors.

        Raises ForerunError if there is no such rank.
        """
        if not 0 <= rank < len(self):
            raise ForerunError(f"rank {rank}: there are ranks 0 to {len(self) - 1}")
        stage, index = divmod(rank, self.args.ranks_a_stage)
        return self._trace(stage, index, self.group_names(rank), names)

    @abstractmethod
    def _trace(self, stage: int, index: int, group_names: tuple[str, ...], names: bool) -> RankTrace:
        """Returns the trace of rank number `index` of a stage."""
