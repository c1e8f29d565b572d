"""Generates the traces of STAGE's first generation from its flags.

Everything that doesn't depend on sizes is made once for each structure. Further flags of the same structure only
evaluate a few hundred sizes and spread them over the nodes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np

from forerun.astrasim.chakra.trace import NodeKind, RankTrace
from forerun.astrasim.stage.first_generation.args import StageArgs
from forerun.astrasim.stage.first_generation.members import Form, stage_order
from forerun.astrasim.stage.first_generation.nodes import SUFFIX
from forerun.astrasim.stage.first_generation.skeleton import ModelSkeleton, Places, StageSkeleton
from forerun.astrasim.stage.first_generation.structure import Structure, structure
from forerun.astrasim.stage.generated import GeneratedTraces
from forerun.core.program.types import I32, I64

FIRST_TAG = 1


def generate(args: StageArgs, copy_layers: bool = True) -> StageTraces:
    """Returns the traces that STAGE's first generation (branch `recomp`, 2025-03-24) makes of these flags.

    Tags count from 1. Without `copy_layers`, the nodes of every layer are made anew, which is slow and gives the same.

    Raises ForerunError if a size doesn't fit in 63 bits.
    """
    degrees = tuple(degree for degree, ranks in args.degrees.items() if ranks > 1)
    made = structure(args.weight_sharded, args.activation_recompute, degrees, args.pp, args.num_stacks, copy_layers)
    symbols = {"Batch": args.batch, "Seq": args.seq, "Dmodel": args.dmodel, "Dff": args.dff, "Head": args.head}
    amounts = made.amounts({**symbols, "Din": args.din, "Dout": args.dout, **args.degrees})
    return StageTraces(args, made, amounts)


class StageTraces(GeneratedTraces):
    """The traces of all ranks of STAGE's first generation."""

    def __init__(self, args: StageArgs, made: Structure, amounts: I64) -> None:
        super().__init__(args, stage_order(args.num_stacks, args.pp))
        self._made = made
        self._amounts = amounts

    @cached_property
    def classes(self) -> tuple[RankTrace, ...]:
        return tuple(self._first_rank(stage) for stage in range(self.args.pp))

    def _trace(self, stage: int, index: int, group_names: tuple[str, ...], names: bool) -> RankTrace:
        layout, trace = self._made.stages[stage], replace(self.classes[stage], group_names=group_names)
        if self.args.pp > 1:
            later = np.where(layout.is_message, index, 0)
            trace = replace(trace, comm_tag=trace.comm_tag + later, peer=trace.peer + later.astype(np.int32))
        ids = trace.node_id + np.where(layout.is_message, 2 * index, layout.n_numbered * index)
        trace = replace(trace, node_id=ids)
        if not names:
            return trace
        nodes, tensors = self._names[stage]
        return replace(trace, names=nodes, tensor_names=tensors)

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
        # Messages get the ids after all other nodes of all ranks; the send of a link precedes its receive.
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


_REVISED = {Form.OWN: "{}@0", Form.UPDATED: "{}@1", Form.RECEIVED: "shadow_{}@0"}


def node_names(model: ModelSkeleton, stage: StageSkeleton) -> tuple[str, ...]:
    """Returns the name of every row, such as `stack_3_mha_q@0_COMP`."""
    ids = _ids(model, stage.places, stage.position, stage.name)
    return tuple(name + SUFFIX[role] for name, role in zip(ids, stage.role.tolist(), strict=True))


def tensor_names(model: ModelSkeleton, stage: StageSkeleton) -> tuple[str, ...]:
    """Returns the name of every tensor with its local shape, such as `in_emb_w@0Din,Dmodel/tp`."""
    tensors = stage.tensors
    ids = _ids(model, tensors.places, tensors.position, tensors.name)
    return tuple(name + model.shapes[number] for name, number in zip(ids, tensors.name.tolist(), strict=True))


def _ids(model: ModelSkeleton, places: Places, positions: I32, names: I32) -> list[str]:
    blocks = ["in_emb", *(f"stack_{layer}" for layer in range(model.layers)), "out_emb"]
    forms = [_REVISED[form] for form in Form]
    rows = zip(places.form.tolist(), positions.tolist(), names.tolist(), strict=True)
    return [forms[form].format(f"{blocks[position]}_{model.names[name]}") for form, position, name in rows]
