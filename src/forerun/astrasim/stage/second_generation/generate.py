"""Generates the traces of STAGE's second generation from its flags."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import product

import numpy as np

from forerun.astrasim.chakra.trace import RankTrace
from forerun.astrasim.stage.generated import GeneratedTraces
from forerun.astrasim.stage.second_generation.args import SecondStageArgs
from forerun.astrasim.stage.second_generation.columns import Numbering, StageColumns, stage_columns
from forerun.astrasim.stage.second_generation.memory import Counting, Footprint, footprint
from forerun.astrasim.stage.second_generation.models import Shape, gpt, llama, mixture_of_experts, model
from forerun.astrasim.stage.second_generation.nodes import Numbers, stage_nodes
from forerun.astrasim.stage.second_generation.pipeline import split, stage_of_layers
from forerun.astrasim.stage.sizes import ONE, size

_FAMILY = {"moe": "MoE", "gpt": "GPT"}


class SecondStageTraces(GeneratedTraces):
    """The traces of all ranks of STAGE's second generation."""

    def __init__(self, args: SecondStageArgs) -> None:
        super().__init__(args, range(args.pp))
        stage_of = stage_of_layers(args.num_stacks, args.pp, head_on_last=args.mixed_precision)
        self._graphs = split(model(_shape(args), args.num_stacks), stage_of, args.pp)
        self._numbers = Numbers(_values(args), tuple(degree for degree, ranks in args.degrees.items() if ranks > 1))
        self._counting = Counting(args.mixed_precision, args.weight_sharded and args.dp > 1)

    @cached_property
    def classes(self) -> tuple[RankTrace, ...]:
        return tuple(self.rank(rank) for rank in range(0, self.n_ranks, self.args.ranks_a_stage))

    def _trace(self, stage: int, index: int, group_names: tuple[str, ...], names: bool) -> RankTrace:
        columns = self._columns[stage]
        peers = np.where(columns.partner < 0, -1, columns.partner * self.args.ranks_a_stage + index)
        trace = replace(columns.trace, peer=peers.astype(np.int32), group_names=group_names)
        return replace(trace, names=columns.names, tensor_names=columns.tensor_names) if names else trace

    @cached_property
    def footprints(self) -> tuple[Footprint, ...]:
        """Returns the memory of a rank of each pipeline stage, as STAGE counts it."""
        batches = self.args.micro_batches
        return tuple(footprint(graph, batches, self._numbers, self._counting) for graph in self._graphs)

    def footprint_lines(self) -> list[str]:
        """Returns the lines that STAGE's `--print_gpu_vram` prints, one for each rank."""
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


def generate_second(args: SecondStageArgs) -> SecondStageTraces:
    """Returns the traces that STAGE's second generation (its main branch) makes of these flags, with tags from 1.

    Raises ForerunError if a pipeline stage has no layers, or a size doesn't fit in 63 bits.
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
