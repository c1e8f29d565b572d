"""The generated traces of all ranks, whichever generation of STAGE makes them, and their files.

Ranks and communicator groups have STAGE's numbers: the number of a rank counts its place in the spatial dimensions (the
first varies fastest), then its pipeline stage.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from forerun.astrasim.chakra.trace import CommGroups, RankTrace
from forerun.astrasim.chakra.writer import write_rank
from forerun.common.errors import ForerunError
from forerun.common.files import make_folder, whole_files
from forerun.core.program.types import I32, I64


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
        """Returns the trace of the first rank of each pipeline stage, without names."""

    @cached_property
    def class_of_rank(self) -> I32:
        """Returns the index into `classes` for each rank, (n_ranks,)."""
        return np.repeat(np.arange(self.args.pp, dtype=np.int32), self.args.ranks_a_stage)

    @cached_property
    def groups(self) -> CommGroups:
        """Returns the communicator groups of all ranks, numbered from 1, with groups of one rank."""
        return communicator_groups(self.args.degrees, self._stage_order)

    def group_names(self, rank: int) -> tuple[str, ...]:
        """Returns the groups of more than one rank that `rank` is in, as column `group` of its trace numbers them."""
        return names_of_groups(np.array([rank]), self.args.degrees, self._stage_order)[0]

    @cached_property
    def group_names_of_ranks(self) -> Sequence[tuple[str, ...]]:
        """Returns `group_names` of all ranks."""
        return names_of_groups(np.arange(len(self)), self.args.degrees, self._stage_order)

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


def communicator_groups(degrees: Mapping[str, int], stage_order: Sequence[int]) -> CommGroups:
    """Returns all groups, also of one rank, numbered from 1 by dimension, pipeline stage and the other dimensions.

    The first of the other dimensions varies slowest. `degrees` are the ranks in each dimension, and `stage_order` holds
    the stages in the order of their ranks.
    """
    step = _steps(degrees)
    place = {stage: number for number, stage in enumerate(stage_order)}
    a_stage = math.prod(degrees.values())
    found: dict[str, tuple[int, ...]] = {}
    for degree, ranks in degrees.items():
        others = [other for other in degrees if other != degree]
        first = np.array([place[stage] for stage in range(len(place))]) * a_stage
        for other in others:
            first = np.add.outer(first, step[other] * np.arange(degrees[other]))
        members = np.add.outer(first.reshape(-1), step[degree] * np.arange(ranks)).tolist()
        found |= {str(number): tuple(ranks) for number, ranks in enumerate(members, 1 + len(found))}
    return found


def names_of_groups(ranks: I64, degrees: Mapping[str, int], stage_order: Sequence[int]) -> list[tuple[str, ...]]:
    """Returns the names of the groups of more than one rank that each of `ranks` is in, by dimension."""
    own, index = np.divmod(ranks, math.prod(degrees.values()))
    place = {degree: index // step % degrees[degree] for degree, step in _steps(degrees).items()}
    n_ranks = len(stage_order) * math.prod(degrees.values())
    before, names = 1, []
    for degree, size in degrees.items():
        number = np.array(stage_order)[own]
        for other in degrees:
            if other != degree:
                number = number * degrees[other] + place[other]
        if size > 1:
            names.append([str(group) for group in (before + number).tolist()])
        before += n_ranks // size
    return list(zip(*names, strict=True)) if names else [()] * len(ranks)


def _steps(degrees: Mapping[str, int]) -> dict[str, int]:
    """Returns the distance in rank numbers of neighbours in each dimension."""
    steps, step = {}, 1
    for degree, ranks in degrees.items():
        steps[degree] = step
        step *= ranks
    return steps


RANK = "%d"
"""the part of a file name that the number of a rank replaces"""


def trace_name(output_name: str) -> str:
    """Returns the file name of every rank's trace, with %d for the rank."""
    return output_name if RANK in output_name else f"{output_name}.{RANK}.et"


def write_traces(traces: GeneratedTraces, folder: Path, output_name: str, comm_group_file: str) -> None:
    """Writes `<output_name>.<rank>.et` (or `output_name` with the rank in place of %d) and the groups to a folder.

    Files are compressed if their names end in .gz or .zst. The folder is made if it is missing.

    Raises ForerunError if a file can't be written.
    """
    make_folder(folder)
    name = trace_name(output_name)
    with whole_files() as files:
        with files.open(folder / comm_group_file) as file:
            file.write(json.dumps(traces.groups).encode())
        for rank in range(len(traces)):
            write_rank(folder / name.replace(RANK, str(rank)), traces.rank(rank, names=True), files)
