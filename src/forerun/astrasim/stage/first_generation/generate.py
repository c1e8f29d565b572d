"""Traces of STAGE's first generation: from its flags to every rank's trace and the communicator groups.

What does not depend on sizes is made once for each structure; a further point of a design space only evaluates some
hundred sizes and spreads them over the nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np

from forerun.astrasim.chakra.trace import CommGroups, NodeKind, RankTrace
from forerun.astrasim.stage.first_generation.args import StageArgs
from forerun.astrasim.stage.first_generation.members import stage_order
from forerun.astrasim.stage.first_generation.naming import node_names, tensor_names
from forerun.astrasim.stage.first_generation.structure import Structure, structure
from forerun.astrasim.stage.ranks import communicator_groups, groups_of
from forerun.common.errors import ForerunError
from forerun.core.program.types import I32, I64

FIRST_TAG = 1


def generate(args: StageArgs, copy_layers: bool = True) -> StageTraces:
    """The traces that STAGE's first generation (branch `recomp`, 2025-03-24) makes of these flags, with tags from 1.

    Without `copy_layers` the nodes of every layer are made on their own: the same, and slow.

    Raises:
        ForerunError: a size that does not fit in 63 bits.
    """
    degrees = tuple(degree for degree, ranks in args.degrees.items() if ranks > 1)
    made = structure(args.weight_sharded, args.activation_recompute, degrees, args.pp, args.num_stacks, copy_layers)
    symbols = {"Batch": args.batch, "Seq": args.seq, "Dmodel": args.dmodel, "Dff": args.dff, "Head": args.head}
    amounts = made.amounts({**symbols, "Din": args.din, "Dout": args.dout, **args.degrees})
    return StageTraces(args, made, amounts)


class StageTraces:
    """The traces of all ranks: a sequence of RankTrace without names, made when asked for.

    Ranks of one pipeline stage differ only in node ids (which keep their order), tags, peers and group names.
    """

    def __init__(self, args: StageArgs, made: Structure, amounts: I64) -> None:
        self.args = args
        self._made = made
        self._amounts = amounts

    @property
    def n_ranks(self) -> int:
        return self.args.n_ranks

    def __len__(self) -> int:
        return self.n_ranks

    def __getitem__(self, rank: int) -> RankTrace:
        if rank >= len(self):
            raise IndexError(rank)
        return self.rank(rank)

    def __iter__(self) -> Iterator[RankTrace]:
        return (self.rank(rank) for rank in range(len(self)))

    @cached_property
    def classes(self) -> tuple[RankTrace, ...]:
        """The trace of the first rank of each pipeline stage, without names."""
        return tuple(self._first_rank(stage) for stage in range(self.args.pp))

    @cached_property
    def class_of_rank(self) -> I32:
        """Which of `classes` each rank is like, (n_ranks)."""
        return np.repeat(np.arange(self.args.pp, dtype=np.int32), self.args.ranks_a_stage)

    @cached_property
    def groups(self) -> CommGroups:
        """The communicator groups of all ranks, groups of one rank too."""
        return communicator_groups(self.args.degrees, self._stage_order)

    def group_names(self, rank: int) -> tuple[str, ...]:
        """Names of the groups of `rank`: those of more than one rank, as column `group` of its trace numbers them."""
        return groups_of(rank, self.args.degrees, self._stage_order)

    @cached_property
    def _stage_order(self) -> list[int]:
        return stage_order(self.args.num_stacks, self.args.pp)

    def rank(self, rank: int, names: bool = False) -> RankTrace:
        """The trace of `rank`; `names` adds the names of its nodes and tensors.

        Raises:
            ForerunError: there is no such rank.
        """
        if not 0 <= rank < len(self):
            raise ForerunError(f"rank {rank}: there are ranks 0 to {len(self) - 1}")
        stage, index = divmod(rank, self.args.ranks_a_stage)
        layout = self._made.stages[stage]
        trace = self._rank(rank)
        ids = trace.node_id + np.where(layout.is_message, 2 * index, layout.n_numbered * index)
        trace = replace(trace, node_id=ids)
        if not names:
            return trace
        nodes, tensors = self._names[stage]
        return replace(trace, names=nodes, tensor_names=tensors)

    def _rank(self, rank: int) -> RankTrace:
        stage, index = divmod(rank, self.args.ranks_a_stage)
        first = self.classes[stage]
        groups = self.group_names(rank)
        if self.args.pp == 1:
            return replace(first, group_names=groups)
        later = np.where(self._made.stages[stage].is_message, index, 0)
        return replace(
            first, comm_tag=first.comm_tag + later, peer=first.peer + later.astype(np.int32), group_names=groups
        )

    @cached_property
    def _names(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        model = self._made.model
        return [(node_names(model, stage), tensor_names(model, stage)) for stage in model.stages]

    def _first_rank(self, stage: int) -> RankTrace:
        layout, ranks = self._made.stages[stage], self.args.ranks_a_stage
        skeleton, is_message = layout.skeleton, layout.is_message
        sizes = self._amounts[skeleton.size]
        computes = skeleton.kind == NodeKind.COMP
        numbered = [other.n_numbered for other in self._made.stages]
        # Messages are numbered behind all other nodes of all ranks, of a link the sending one first.
        first_id, first_message_id = 1 + ranks * sum(numbered[:stage]), 1 + ranks * sum(numbered)
        link = layout.link * ranks
        message_id = first_message_id + 2 * link + (skeleton.kind == NodeKind.RECV)
        return replace(
            layout.trace,
            node_id=np.where(is_message, message_id, first_id + skeleton.number),
            num_ops=self._amounts[skeleton.num_ops],
            tensor_size=np.where(computes, sizes, 0),
            comm_size=np.where(computes, 0, sizes),
            comm_tag=np.where(is_message, FIRST_TAG + link, 0),
            peer=np.where(is_message, layout.partner * ranks, -1).astype(np.int32),
            tensor_bytes=self._amounts[skeleton.tensors.amount],
            group_names=self.group_names(stage * ranks),
        )
