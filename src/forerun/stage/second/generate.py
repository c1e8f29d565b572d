"""Traces of STAGE's second generation: from its flags to every rank's trace and the communicator groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import product

import numpy as np

from forerun.chakra.trace import RankTrace
from forerun.errors import ForerunError, UnknownName
from forerun.stage.second.columns import Numbering, StageColumns, stage_columns
from forerun.stage.second.memory import Counting, footprint
from forerun.stage.second.models import Shape, gpt, llama, mixture_of_experts, model
from forerun.stage.second.nodes import Numbers, stage_nodes
from forerun.stage.second.pipeline import StageGraph, split, stage_of_layers
from forerun.stage.second.sizes import ONE, size

MODEL_TYPES = ("dense", "gpt", "llama", "moe")


@dataclass(frozen=True, slots=True)
class SecondStageArgs:
    """The flags of STAGE's second generation, with its defaults."""

    dp: int = 1
    tp: int = 1
    sp: int = 1
    """context parallelism: the sequence split over ranks that share keys and values"""
    ep: int = 1
    """expert parallelism; dense models add it to tp"""
    pp: int = 1
    weight_sharded: bool = False
    activation_recompute: bool = False
    """accepted as STAGE accepts it: its second generation recomputes nothing"""
    tpsp: bool = True
    """split the sequence over tp between blocks; mixed-precision dense models always do"""
    dvocal: int = 32000
    dmodel: int = 8192
    dff: int = 28672
    batch: int = 64
    micro_batch: int = -1
    """-1: the whole batch"""
    seq: int = 1024
    head: int = 64
    kvhead: int = 8
    num_stacks: int = 80
    experts: int = 8
    kexperts: int = 2
    model_type: str = "dense"
    mixed_precision: bool = False

    @property
    def is_mixture(self) -> bool:
        return self.model_type == "moe"

    @property
    def micro_batches(self) -> int:
        return 1 if self.micro_batch == -1 else self.batch // self.micro_batch

    @property
    def degrees(self) -> dict[str, int]:
        """Ranks by spatial dimension, in the order of STAGE: the first varies fastest with the rank."""
        if self.is_mixture:
            return {"dp": self.dp, "tp": self.tp, "cp": self.sp, "ep": self.ep}
        return {"dp": self.dp, "tp": self.tp * self.ep, "cp": self.sp}

    @property
    def ranks_a_stage(self) -> int:
        return int(np.prod(list(self.degrees.values())))

    def check(self) -> None:
        """Raises ForerunError where STAGE cannot make a trace of these flags."""
        for name in fields(self):
            value = getattr(self, name.name)
            if type(value) is int and value < 1 and (name.name, value) != ("micro_batch", -1):
                raise ForerunError(f"--{name.name} {value}: give a whole number of at least 1")
        if self.model_type not in MODEL_TYPES:
            raise UnknownName("--model_type", self.model_type, list(MODEL_TYPES))
        if self.micro_batch > 0 and self.batch % self.micro_batch:
            raise ForerunError(f"--micro_batch {self.micro_batch} does not divide --batch {self.batch}")
        if self.is_mixture and not self.tpsp:
            raise ForerunError("--model_type moe needs --tpsp true")
        if self.is_mixture and self.experts % self.ep:
            raise ForerunError(f"--ep {self.ep} does not divide --experts {self.experts}")


def _shape(args: SecondStageArgs) -> Shape:
    shards = size("dp") if args.weight_sharded else ONE
    if args.is_mixture:
        return mixture_of_experts(args.experts // args.ep, shards)
    if args.mixed_precision and args.model_type in ("dense", "llama"):
        return llama(shards)
    return gpt(args.tpsp, shards)


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
        "ep": args.ep,
        **args.degrees,
    }


def _graphs(args: SecondStageArgs) -> tuple[list[StageGraph], Numbers, Counting]:
    args.check()
    stage_of = stage_of_layers(args.num_stacks, args.pp, head_on_last=args.mixed_precision)
    graphs = split(model(_shape(args), args.num_stacks), stage_of, args.pp)
    numbers = Numbers(_values(args), tuple(degree for degree, ranks in args.degrees.items() if ranks > 1))
    return graphs, numbers, Counting(args.mixed_precision, args.weight_sharded and args.dp > 1)


def stages(args: SecondStageArgs, named: bool = True) -> list[StageColumns]:
    """The columns of each pipeline stage's ranks.

    Raises:
        ForerunError: where STAGE cannot make a trace of the flags.
    """
    graphs, numbers, counting = _graphs(args)
    batches = args.micro_batches
    nodes = [stage_nodes(graph, numbers) for graph in graphs]
    links_a_batch = np.array([len(graph.received_from) for graph in graphs], dtype=np.int64)
    first_link = np.cumsum(links_a_batch * batches) - links_a_batch * batches
    counts = [batches * (own.ids[0] + own.ids[2]) + own.ids[1] for own in nodes]
    first_ids = [1 + sum(counts[:stage]) for stage in range(args.pp)]
    return [
        stage_columns(
            stage,
            graph,
            own,
            batches,
            Numbering(first_ids[stage], 1 + sum(counts), first_link, links_a_batch),
            numbers,
            counting,
            named,
        )
        for stage, (graph, own) in enumerate(zip(graphs, nodes, strict=True))
    ]


def footprint_lines(args: SecondStageArgs) -> list[str]:
    """What `--print_gpu_vram` prints: one line a rank.

    Raises:
        ForerunError: where STAGE cannot make a trace of the flags.
    """
    graphs, numbers, counting = _graphs(args)
    family = {"moe": "MoE", "gpt": "GPT"}.get(args.model_type, "Dense")
    slowest_first = {"pp": args.pp} | dict(reversed(args.degrees.items()))
    each = [footprint(graph, args.micro_batches, numbers, counting) for graph in graphs]
    lines = []
    for place in product(*(range(ranks) for ranks in slowest_first.values())):
        where = ",".join(f"{name}={index}" for name, index in zip(slowest_first, place, strict=True))
        lines.append(f"[{family}] [GPU {where}] {each[place[0]]}")
    return lines


def groups(args: SecondStageArgs) -> dict[str, tuple[int, ...]]:
    """All communicator groups, numbered from 1: by dimension, then stage, then the other dimensions (the first of them
    slowest); groups of one rank too."""
    found: dict[str, tuple[int, ...]] = {}
    degrees = args.degrees
    for dimension, ranks in degrees.items():
        others = [name for name in degrees if name != dimension]
        for stage, *place in product(range(args.pp), *(range(degrees[name]) for name in others)):
            here = dict(zip(others, place, strict=True))
            members = (rank_of(args, stage, here | {dimension: index}) for index in range(ranks))
            found[str(len(found) + 1)] = tuple(members)
    return found


def rank_of(args: SecondStageArgs, stage: int, place: dict[str, int]) -> int:
    """Number of the rank at this place of this stage."""
    rank = stage
    for name, ranks in reversed(args.degrees.items()):
        rank = rank * ranks + place[name]
    return rank


def rank_traces(args: SecondStageArgs, columns: list[StageColumns]) -> Iterator[RankTrace]:
    """Every rank's trace, in the order of ranks; those of a stage share their columns."""
    degrees = [degree for degree, ranks in args.degrees.items() if ranks > 1]
    names_of_rank: dict[int, list[str]] = {rank: [] for rank in range(args.pp * args.ranks_a_stage)}
    for name, members in groups(args).items():
        for rank in members:
            names_of_rank[rank].append(name)
    above_1 = [index for index, degree in enumerate(args.degrees) if degree in degrees]
    for stage, own in enumerate(columns):
        for index in range(args.ranks_a_stage):
            names = names_of_rank[stage * args.ranks_a_stage + index]
            peer = np.where(own.partner < 0, -1, own.partner * args.ranks_a_stage + index).astype(np.int32)
            yield _rank_trace(own, tuple(names[place] for place in above_1), peer)


def _rank_trace(own: StageColumns, group_names: tuple[str, ...], peer: np.ndarray) -> RankTrace:
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
        names=own.names,
        tensor_names=own.tensor_names,
    )
