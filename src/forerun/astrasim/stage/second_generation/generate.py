"""Traces of STAGE's second generation: from its flags to every rank's trace and the communicator groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import product

import numpy as np

from forerun.astrasim.chakra.trace import CommGroups, RankTrace
from forerun.astrasim.stage.ranks import communicator_groups, groups_of
from forerun.astrasim.stage.second_generation.args import SecondStageArgs
from forerun.astrasim.stage.second_generation.columns import Numbering, StageColumns, stage_columns
from forerun.astrasim.stage.second_generation.memory import Counting, Footprint, footprint
from forerun.astrasim.stage.second_generation.models import Shape, gpt, llama, mixture_of_experts, model
from forerun.astrasim.stage.second_generation.nodes import Numbers, stage_nodes
from forerun.astrasim.stage.second_generation.pipeline import split, stage_of_layers
from forerun.astrasim.stage.sizes import ONE, size
from forerun.common.errors import ForerunError
from forerun.core.program.types import I32

_FAMILY = {"moe": "MoE", "gpt": "GPT"}


class SecondStageTraces:
    """The traces of all ranks. Ranks of one pipeline stage differ only in peers and group names."""

    def __init__(self, args: SecondStageArgs) -> None:
        self.args = args
        stage_of = stage_of_layers(args.num_stacks, args.pp, head_on_last=args.mixed_precision)
        self._graphs = split(model(_shape(args), args.num_stacks), stage_of, args.pp)
        self._numbers = Numbers(_values(args), tuple(degree for degree, ranks in args.degrees.items() if ranks > 1))
        self._counting = Counting(args.mixed_precision, args.weight_sharded and args.dp > 1)

    @property
    def n_ranks(self) -> int:
        return self.args.n_ranks

    def __len__(self) -> int:
        return self.n_ranks

    def __getitem__(self, rank: int) -> RankTrace:
        """The trace of `rank`, without names."""
        return self.rank(rank)

    def __iter__(self) -> Iterator[RankTrace]:
        return (self.rank(rank) for rank in range(self.n_ranks))

    @cached_property
    def classes(self) -> tuple[RankTrace, ...]:
        """The trace of each stage's first rank, without names."""
        first_ranks = range(0, self.n_ranks, self.args.ranks_a_stage)
        return tuple(
            _rank_trace(columns, self._peers(columns, 0), self.group_names(rank))
            for columns, rank in zip(self._columns, first_ranks, strict=True)
        )

    @cached_property
    def class_of_rank(self) -> I32:
        """Which of `classes` each rank belongs to, (n_ranks)."""
        return np.repeat(np.arange(self.args.pp, dtype=np.int32), self.args.ranks_a_stage)

    @cached_property
    def groups(self) -> CommGroups:
        """The communicator groups, numbered from 1; groups of one rank too."""
        return communicator_groups(self.args.degrees, range(self.args.pp))

    def group_names(self, rank: int) -> tuple[str, ...]:
        """Names of the groups of `rank`, by dimension (those of more than one rank), as its trace numbers them."""
        return groups_of(rank, self.args.degrees, range(self.args.pp))

    def rank(self, rank: int, names: bool = False) -> RankTrace:
        """The trace of `rank`; `names` adds node and tensor names.

        Raises:
            ForerunError: there is no such rank.
        """
        if not 0 <= rank < self.n_ranks:
            raise ForerunError(f"rank {rank}: there are ranks 0 to {self.n_ranks - 1}")
        stage, index = divmod(rank, self.args.ranks_a_stage)
        columns = self._columns[stage]
        trace = replace(self.classes[stage], peer=self._peers(columns, index), group_names=self.group_names(rank))
        return replace(trace, names=columns.names, tensor_names=columns.tensor_names) if names else trace

    @cached_property
    def footprints(self) -> tuple[Footprint, ...]:
        """What each rank of a pipeline stage keeps in memory, per stage, as STAGE counts it."""
        batches = self.args.micro_batches
        return tuple(footprint(graph, batches, self._numbers, self._counting) for graph in self._graphs)

    def footprint_lines(self) -> list[str]:
        """What STAGE's `--print_gpu_vram` prints: a line a rank."""
        args = self.args
        slowest_first = {"pp": args.pp} | dict(reversed(args.degrees.items()))
        lines = []
        for place in product(*(range(ranks) for ranks in slowest_first.values())):
            where = ",".join(f"{name}={index}" for name, index in zip(slowest_first, place, strict=True))
            lines.append(f"[{_FAMILY.get(args.model_type, 'Dense')}] [GPU {where}] {self.footprints[place[0]]}")
        return lines

    @cached_property
    def _columns(self) -> tuple[StageColumns, ...]:
        batches = self.args.micro_batches
        nodes = [stage_nodes(graph, self._numbers) for graph in self._graphs]
        links_a_batch = np.array([len(graph.received_from) for graph in self._graphs], dtype=np.int64)
        first_link = np.cumsum(links_a_batch * batches) - links_a_batch * batches
        counts = [batches * (own.ids[0] + own.ids[2]) + own.ids[1] for own in nodes]
        columns = []
        for stage, (graph, own) in enumerate(zip(self._graphs, nodes, strict=True)):
            numbering = Numbering(1 + sum(counts[:stage]), 1 + sum(counts), first_link, links_a_batch)
            columns.append(stage_columns(stage, graph, own, batches, numbering, self._numbers, self._counting))
        return tuple(columns)

    def _peers(self, columns: StageColumns, index: int) -> I32:
        """Messages are between ranks in the same place of two stages."""
        peers = columns.partner * self.args.ranks_a_stage + index
        return np.where(columns.partner < 0, -1, peers).astype(np.int32)


def generate_second(args: SecondStageArgs) -> SecondStageTraces:
    """The traces that STAGE's second generation (its main branch) makes of these flags, with tags from 1.

    Raises:
        ForerunError: a pipeline stage is left without layers, or a size does not fit in 63 bits.
    """
    return SecondStageTraces(args)


def _shape(args: SecondStageArgs) -> Shape:
    shards = size("dp") if args.weight_sharded else ONE
    if args.is_mixture:
        return mixture_of_experts(args.experts // args.ep, shards)
    return llama(shards) if args.is_llama else gpt(args.tpsp, shards)


def _values(args: SecondStageArgs) -> dict[str, int]:
    return {
        "Dvocal": args.dvocal,
        "Dmodel": args.dmodel,
        "Dff": args.dff,
        "MicroBatch": args.batch // args.micro_batches,
        "Seq": args.seq,
        "Head": args.head,
        "KVHead": args.kvhead,
        "Experts": args.experts,
        "KExperts": args.kexperts,
    } | args.degrees


def _rank_trace(own: StageColumns, peer: I32, group_names: tuple[str, ...]) -> RankTrace:
    rows = len(own.node_id)
    return RankTrace(
        node_id=own.node_id,
        kind=own.kind,
        is_cpu=np.zeros(rows, dtype=np.bool_),
        duration_us=np.zeros(rows, dtype=np.int64),
        num_ops=own.num_ops,
        tensor_size=own.tensor_size,
        comm_type=own.comm_type,
        comm_size=own.comm_size,
        comm_tag=own.comm_tag,
        peer=peer,
        group=own.degree,
        priority=np.zeros(rows, dtype=np.int32),
        data_ptr=own.data_ptr,
        data=own.data,
        ctrl_ptr=np.zeros(rows + 1, dtype=np.int64),
        ctrl=np.zeros(0, dtype=np.int32),
        input_ptr=own.input_ptr,
        input_tensor=own.input_tensor,
        output_ptr=own.output_ptr,
        output_tensor=own.output_tensor,
        tensor_bytes=own.tensor_bytes,
        group_names=group_names,
    )
