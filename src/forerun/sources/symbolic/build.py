"""build makes the Program of a model under a plan on a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from forerun.core.memory.workspaces import workspace_bytes
from forerun.core.program.builder import BlockBuilder
from forerun.core.program.types import I64, Block, Category, Channel, Collective, Phase, Program, RankClass, Stream
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.describe.plan.rules import DTYPE_BYTES
from forerun.describe.stacks.catalog import load_stack
from forerun.describe.stacks.stack import Stack
from forerun.sources.symbolic import data_parallel
from forerun.sources.symbolic.activation_offload import ActivationOffload
from forerun.sources.symbolic.data_parallel import REDUCED, DataParallel
from forerun.sources.symbolic.exchanges import gathered_bytes, held_frozen_bytes, sharded
from forerun.sources.symbolic.fsdp_units import Staged, Unit, staged_transformer
from forerun.sources.symbolic.gradient_steps import GradientSteps
from forerun.sources.symbolic.kernels import TransformerKernels
from forerun.sources.symbolic.layered import staged_layers
from forerun.sources.symbolic.mesh import groups_of
from forerun.sources.symbolic.optimizer import optimizer_block, resident_bytes
from forerun.sources.symbolic.pipeline import Wires
from forerun.sources.symbolic.repeated_turns import OrderedTurns, RepeatedTurns, ordered_turns
from forerun.sources.symbolic.schedule import Action, Turn, rank_stages, stage_rank
from forerun.sources.symbolic.segments import exchanges_tokens, in_turns, segments
from forerun.sources.symbolic.steps import Around, Blocks, Part, Steps
from forerun.sources.symbolic.weights import Weights


def build(model: ModelSpec | LayeredModel, plan: Plan, cluster: Cluster, stack: Stack | None = None) -> Program:
    """Returns the Program of one optimizer step of `model` under `plan`, run by `stack` (None: the plan's stack).

    Raises ImpossiblePlan for an impossible schedule.
    """
    return _Builder(staged_model(model, plan, cluster, stack)).program()


def staged_model(model: ModelSpec | LayeredModel, plan: Plan, cluster: Cluster, stack: Stack | None = None) -> Staged:
    """Returns the units of `model` on each stage of `plan`, with the kernels that they run."""
    chosen, groups = stack or load_stack(plan.stack), groups_of(plan, cluster.node_size)
    architecture = cluster.device.architecture
    if isinstance(model, LayeredModel):
        return staged_layers(model, plan, chosen, groups, architecture)
    kernels = TransformerKernels(model, plan, chosen, groups, architecture)
    return staged_transformer(kernels, plan.splits_backward)


_GRADIENT = int(Category.GRADIENT)
_Piece = tuple[Action, Part, int, bool]
"""a piece of a pass: its action, its unit, the number of its block, and whether it is the last one of the unit"""


class _Builder:
    def __init__(self, staged: Staged) -> None:
        self.staged, self.kernels, self.plan = staged, staged.kernels, staged.kernels.plan
        plan, stack = self.plan, self.kernels.stack
        self.parallel = DataParallel(self.kernels)
        self.blocks = Blocks()
        self.split, self.reshards = plan.splits_backward, plan.reshards
        self.first, self.last = staged.first, staged.stages[-1][-1][0]
        self._parts: dict[int, tuple[Any, ...]] = {}
        """fields that the parts of a unit share: all fields of Part after its layer"""
        self._exchanging: dict[int, bool] = {}
        self.wires = Wires(self.kernels, self.blocks.add, [self._carried(stage) for stage in staged.stages[1:]])
        self.gather_again = stack.reuse_elements > 0 and plan.activation_checkpointing == "full"
        wider = DTYPE_BYTES[self.kernels.accumulate_dtype] > self.kernels.grad_bytes
        self.late = stack.late_accumulation and wider and not self.parallel.fsdp
        self.root = self._root() if stack.joint_ends and self.parallel.fsdp and plan.pp == 1 else None
        self.gradients = GradientSteps(self.kernels, self.parallel, self.blocks.add)
        self._left: list[int] = []
        """bytes of gradients that each of the first blocks leaves allocated"""

    def _carried(self, stage: list[tuple[Unit, int]]) -> int:
        """Returns the bytes that a stage gets beside the output of the layer before its first one."""
        return self.kernels.carried_bytes(stage[0][1]) if stage and stage[0][1] > 0 else 0

    # -- parts -----------------------------------------------------------------------------------------------

    def _part(self, unit: Unit, layer: int) -> Part:
        found = self._parts.get(id(unit))
        if found is None:
            weights = self.blocks.add(unit.weight_backward)
            passes = (self.blocks.add(unit.forward), self.blocks.add(unit.backward), weights)
            moved = (self.blocks.add(unit.leaving), self.blocks.add(unit.returning))
            pieces = [tuple(map(self.blocks.add, some)) for some in (unit.forward_pieces, unit.backward_pieces)]
            sizes = gathered_bytes(self.plan, unit.weights), unit.weights.gradients
            around = (*self._arounds(unit), *self._scoring(unit))
            joined = self.root is not None and (unit is self.first or unit is self.last)
            alone = not joined and unit.weights.held > 0
            found = self._parts[id(unit)] = (*sizes, *passes, *moved, *pieces, *around, alone)
        return Part(unit, layer, *found)

    def _arounds(self, unit: Unit) -> tuple[Around, Around, Around | None, Around | None]:
        """Returns the blocks around four sets of a unit's weights.

        The sets are all weights, those freed after the forward pass, those gathered again for the backward pass, and
        those freed after the backward pass. The last two are None if they are empty.
        """
        whole = Around(self.parallel, self.blocks.add, unit.name, unit.weights, unit.gradient_bytes)
        if unit.gathering is None:
            return whole, whole, whole, whole
        held, again, once = unit.gathering.held, unit.gathering.again, unit.gathering.once
        gone = Weights.joined((again, once) if self.reshards else (once,))
        there = Weights.joined((held, again))

        def around(weights: Weights) -> Around:
            return Around(self.parallel, self.blocks.add, unit.name, weights, 0)

        return whole, around(gone), around(again) if again.total else None, around(there) if there.total else None

    def _scoring(self, unit: Unit) -> tuple[int, Around | None]:
        """Returns the block of the reference model's pass, and the blocks around its weights."""
        if unit.reference is None:
            return -1, None
        around = Around(self.parallel, self.blocks.add, unit.name + ".reference", unit.reference.weights, 0)
        return self.blocks.add(unit.reference.forward), around

    def _root(self) -> Part:
        """Joins the first and last unit into one FSDP unit, gathered from the first layer to the end of backward."""
        first, last = self.first, self.last
        weights = Weights.joined((first.weights, last.weights))
        if self.staged.tied:
            weights.drop_tied(self.kernels.tied_elements)
        around = Around(self.parallel, self.blocks.add, "root", weights, first.gradient_bytes + last.gradient_bytes)
        unit, size = replace(last, name="root", weights=weights), gathered_bytes(self.plan, weights)
        none = (-1, -1, -1, -1, -1, (), ())
        return Part(unit, -1, size, weights.gradients, *none, around, around, around, around)

    # -- steps of one rank -------------------------------------------------------------------------------------

    def program(self) -> Program:
        stages = [[self._part(unit, layer) for unit, layer in stage] for stage in self.staged.stages]
        classes = []
        for rank in range(self.plan.pp):
            order, mine = ordered_turns(self.plan, rank), rank_stages(self.plan, rank)
            parts = [part for stage in mine for part in stages[stage]]
            steps = self._steps(order, stages)
            weights = self._weights(parts, rank)
            self._finish(steps, parts, weights, rank)
            classes.append(
                RankClass(
                    name=f"stage {', '.join(map(str, mine))}" if self.plan.pp > 1 else "every rank",
                    n_ranks=self.plan.world_size // self.plan.pp,
                    block=np.array(steps.block, np.int32),
                    microbatch=np.array(steps.microbatch, np.int32),
                    layer=np.array(steps.layer, np.int32),
                    resident_bytes=self._resident(weights, mine, parts),
                )
            )
        return Program(
            ops=self.kernels.ops.build(),
            blocks=tuple(self.blocks),
            rank_classes=tuple(classes),
            groups=self.kernels.groups,
            channels=tuple(self.wires.channels),
            modules=self.kernels.modules,
        )

    def _resident(self, weights: Weights, stages: list[int], parts: list[Part]) -> I64:
        resident = np.array(resident_bytes(self.kernels, weights), np.int64)
        if self.plan.reference and not self.plan.lora_rank and self.plan.offload != "params":
            # with adapters or offloaded parameters the reference is the frozen model itself
            resident[Category.PARAMETER] += round(held_frozen_bytes(self.plan, self._reference_weights(parts)))
        resident[Category.COMMUNICATION] += self.wires.buffer_bytes(stages)
        resident[Category.TEMPORARY] += workspace_bytes(self.kernels.stack, self.kernels.architecture)
        return resident

    def _weights(self, parts: list[Part], rank: int) -> Weights:
        """Returns all parameters of a rank; a tied head shares the embedding's matrix where both are on the rank."""
        weights = Weights.joined(part.unit.weights for part in parts)
        units = [part.unit for part in parts]
        if self.staged.tied and any(unit is self.first for unit in units) and any(unit is self.last for unit in units):
            weights.drop_tied(self.kernels.tied_elements)
        return weights

    def _reference_weights(self, parts: list[Part]) -> Weights:
        """Returns the parameters of a rank's reference model; none where the plan has no reference."""
        units = [part.unit for part in parts if part.unit.reference is not None]
        weights = Weights.joined(unit.reference.weights for unit in units if unit.reference is not None)
        if self.staged.tied and units:
            weights.drop_tied(self.kernels.tied_elements)
        return weights

    def _steps(self, turns: OrderedTurns, stages: list[list[Part]]) -> Steps:
        steps, plan = Steps(), self.plan
        steps.add(self.blocks.add(self.staged.opening))
        order, ends = turns.turns, turns.ends
        if plan.activation_offload:
            whole = self.kernels.stack.offload_turn == "pass"
            passes = (action for turn in order for action in turn)
            steps.activation_offload = ActivationOffload(passes, [len(parts) for parts in stages], whole)
            steps.stages = stages
        blocking = plan.pp > 1 and not self.kernels.stack.p2p_overlap
        known = RepeatedTurns(turns, self.parallel.depth)
        i = known.repeat(steps, 0)
        while i < len(order):
            turn = order[i]
            steps.now = turn[0].microbatch
            self._receive(steps, order, i, blocking)
            if len(turn) > 1:
                self._side_by_side(steps, turn, stages, ends[turn[1].stage])
            else:
                self._alone_in_turn(steps, turn[0], stages[turn[0].stage], ends[turn[0].stage])
            for action in turn:
                self._send(steps, action)
            known.keep(steps, i)
            i = known.repeat(steps, i + 1)
        return steps

    def _alone_in_turn(self, steps: Steps, action: Action, parts: list[Part], ends: tuple[int, int]) -> None:
        """Appends one pass; `ends` are the first and the last micro batch of its stage."""
        first, last = action.microbatch == ends[0], action.microbatch == ends[1]
        if action.kind == "F":
            self._score(steps, parts)
            self._forward(steps, parts, first)
        elif action.kind == "B":
            self._backward(steps, parts, first, last)
        else:
            for part in reversed(parts):
                steps.add(part.weights, part.layer)
                self.gradients.take(steps, part, first, last)
            self.gradients.let_go(steps)

    def _side_by_side(self, steps: Steps, turn: Turn, stages: list[list[Part]], ends: tuple[int, int]) -> None:
        """Appends a forward pass and a backward pass with its weight gradients, cut at their exchanges of tokens."""
        forward, backward = turn[:2]
        first, last = (backward.microbatch == end for end in ends)
        ahead, back = stages[forward.stage], stages[backward.stage][::-1]
        there = [(forward, part, block, False) for part in ahead for block in part.forward_pieces]
        ends_of = [(part, len(part.backward_pieces) - 1) for part in back]
        home = [
            (backward, part, block, n == end) for part, end in ends_of for n, block in enumerate(part.backward_pieces)
        ]
        for action, part, block, done in in_turns(segments(there, self._exchanges), segments(home, self._exchanges)):
            steps.now = action.microbatch
            steps.add(block, part.layer)
            if done and not self.late:
                self.gradients.take(steps, part, first, last)
        steps.now = backward.microbatch
        for part in back if self.late else ():
            self.gradients.take(steps, part, first, last)
        self.gradients.let_go(steps)

    def _exchanges(self, piece: _Piece) -> bool:
        """Says whether `piece` has an exchange of tokens."""
        block = piece[2]
        found = self._exchanging.get(block)
        if found is None:
            found = self._exchanging[block] = exchanges_tokens(self.blocks[block])
        return found

    def _send(self, steps: Steps, action: Action) -> None:
        """Sends the result of a pass to the rank of the next pass. Some frameworks read the loss after the last one."""
        steps.now = action.microbatch
        last_stage = self.plan.n_stages - 1
        if action.kind == "F" and action.stage == last_stage and self.kernels.stack.reads_loss:
            steps.add(self.wires.read_loss())
        if action.kind == "F" and action.stage < last_stage and self.wires.crosses(action.stage):
            steps.add(self.wires.block("send", "activations", action.stage))
        if action.kind == "B":
            if self.kernels.stack.pipeline_keeps and action.stage < last_stage and self.wires.crosses(action.stage):
                steps.add(self.wires.forget())
            if action.stage > 0 and self.wires.crosses(action.stage - 1):
                steps.add(self.wires.block("send", "gradients", action.stage - 1))

    def _receive(self, steps: Steps, order: Sequence[Turn], i: int, blocking: bool) -> None:
        """Posts the receives of this turn (and, with overlap, of the next one), then waits for this turn's."""
        if self.plan.pp == 1:
            return
        if blocking or i == 0:
            self._post(steps, order[i])
        needs = [self.wires.needs.get((action.kind, action.stage)) for action in order[i]]
        forward, backward = "activations" in needs, "gradients" in needs
        # interleaved receivers take an output long before they use it; zero-bubble schedules do not wait for sends
        sent = blocking and self.plan.virtual_stages == 1 and not self.split
        if forward or backward or sent:
            steps.add(self.wires.wait(forward, backward, sent))
        if not blocking and i + 1 < len(order):
            self._post(steps, order[i + 1])

    def _post(self, steps: Steps, turn: Turn) -> None:
        for action in turn:
            needs = self.wires.needs.get((action.kind, action.stage))
            if needs:
                border = action.stage - 1 if needs == "activations" else action.stage
                steps.add(self.wires.block("recv", needs, border))

    def _forward(self, steps: Steps, parts: list[Part], first: bool) -> None:
        gathers = self.parallel.fsdp and (first or not self.plan.gathers_once)
        apart = [part for part in parts if part.alone]
        if gathers and self.root is not None:
            self._gather(steps, self.root)
            self._open(steps, self.root, "open")
        for part in parts:
            alone = gathers and part.alone
            if alone:
                self._gather(steps, part)
                self._open(steps, part, "open" if part is not apart[-1] else "open_last")
            steps.run(part.forward, part.layer)
            kept = part.unit is self.last  # the backward pass starts with this unit
            if alone and not kept and (self.reshards or part.unit.gathering is not None):
                steps.add(part.after_forward["close", 0, 0], part.layer)

    def _score(self, steps: Steps, parts: list[Part]) -> None:
        """Appends the forward pass of the reference model, where there is one."""
        for part in parts:
            around = part.around_reference
            if around is None:
                continue
            if self.parallel.fsdp:
                self._gather_of(steps, around, part.layer)
                steps.add(around["reopen", steps.opens % self.parallel.depth, 0], part.layer)
                steps.opens += 1
            steps.add(part.reference, part.layer)
            if self.parallel.fsdp:
                steps.add(around["close", 0, 0], part.layer)

    def _gather(self, steps: Steps, part: Part) -> None:
        self._gather_of(steps, part.parallel, part.layer)

    def _gather_again(self, steps: Steps, part: Part) -> None:
        assert part.again is not None
        self._gather_of(steps, part.again, part.layer)

    def _gather_of(self, steps: Steps, around: Around, layer: int) -> None:
        steps.add(around["gather", steps.gathers % self.parallel.depth, 0], layer)
        steps.gathers += 1

    def _open(self, steps: Steps, part: Part, action: data_parallel.Action) -> None:
        """Opens the next gather: gathers are opened in the order in which they were issued."""
        around = part.again if action == "reopen" and part.again is not None else part.parallel
        steps.add(around[action, steps.opens % self.parallel.depth, steps.gathered], part.layer)
        steps.opens += 1
        kept = self.parallel.buffers and action == "open"
        steps.gathered = part.gathered_bytes if kept else 0

    def _backward(self, steps: Steps, parts: list[Part], first: bool, last: bool) -> None:
        regather = self.parallel.fsdp and self.reshards
        backward = parts[::-1]
        held = bool(backward) and backward[0].unit is self.last  # the forward pass has left it gathered
        waiting = [part for part in backward[held:] if part.alone and part.again is not None] if regather else []
        for i, part in enumerate(backward):
            loss = held and i == 0  # FSDP gathers nothing before the loss has its gradient
            alone = part.alone
            if regather and alone and not loss and part.again is not None:
                if steps.gathers == steps.opens:  # no gather was issued ahead
                    self._gather_again(steps, waiting.pop(0))
                self._open(steps, part, "reopen")
                if self.gather_again:
                    steps.add(part.parallel["gather_again", 0, 0], part.layer)
                self._gather_ahead(steps, waiting)
            steps.run(part.backward, part.layer)
            if loss:
                self._gather_ahead(steps, waiting)
            if alone and not self.late:
                self._done(steps, part, first, last)
        for part in backward if self.late else [self.root] if self.root is not None else []:
            self._done(steps, part, first, last)
        self.gradients.let_go(steps)

    def _done(self, steps: Steps, part: Part, first: bool, last: bool) -> None:
        """Frees a unit's parameters after its backward pass and reduces its gradients."""
        if self.parallel.fsdp and (self.reshards or last):
            last_use = part.parallel if part.unit is self.last else part.after_backward
            if last_use is not None:
                steps.add(last_use["close", 0, 0], part.layer)
        if not self.split:
            self.gradients.take(steps, part, first, last)

    def _gather_ahead(self, steps: Steps, waiting: list[Part]) -> None:
        while waiting and steps.gathers - steps.opens < self.parallel.ahead:
            self._gather_again(steps, waiting.pop(0))

    # -- end of the step -----------------------------------------------------------------------------------------

    def _finish(self, steps: Steps, parts: list[Part], weights: Weights, rank: int) -> None:
        """Appends the end of the step: remaining reductions, tied embeddings, the optimizer."""
        plan, kernels = self.plan, self.kernels
        steps.now = plan.n_microbatches
        self.gradients.finish(steps, weights)
        ends = {stage_rank(plan, 0), stage_rank(plan, plan.n_stages - 1)}
        if self.staged.tied and not plan.lora_rank and len(ends) == 2 and rank in ends:
            steps.add(self.blocks.add(self._tied_embedding_reduction(tuple(sorted(ends)))))
        steps.add(self.blocks.add(optimizer_block(kernels, weights, self._gradient_bytes(steps))))

    def _tied_embedding_reduction(self, ends: tuple[int, ...]) -> Block:
        """Returns the block in which first and last stage sum the gradients of their copies of the embedding."""
        kernels = self.kernels
        name = "tied embedding gradients"
        number = next((i for i, c in enumerate(self.wires.channels) if c.name == name), None)
        if number is None:
            number = len(self.wires.channels)
            self.wires.channels.append(Channel(name, ends))
        elements = kernels.tied_elements
        if self.plan.shards_gradients:
            elements = sharded(elements, self.plan.state_ranks)
        size = elements * self.parallel.reduce_bytes
        op = kernels.collective_op("embedding.tied", Collective.ALL_REDUCE, "pp_far", size, self.kernels.reduce_dtype)
        block = BlockBuilder()
        start = block.node(kernels.marker, Stream.COMPUTE, Phase.BACKWARD, wait=(REDUCED,))
        block.node(op, Stream.REDUCE, Phase.BACKWARD, after=(start,), record=REDUCED, channel=number)
        return block.build(name)

    def _gradient_bytes(self, steps: Steps) -> int:
        """Returns the bytes of gradients that the steps have allocated and not freed."""
        for block in self.blocks[len(self._left) :]:
            self._left.append(_gradients_left(block))
        times = Counter(steps.block)
        return sum(times[number] * left for number, left in enumerate(self._left) if left)


def _gradients_left(block: Block) -> int:
    """Returns the bytes of gradients that a block leaves allocated, less those of other blocks that it frees."""
    if _GRADIENT not in block.tensor_category.tobytes():
        return 0
    change = (block.tensor_free < 0).astype(np.int64) - (block.tensor_alloc < 0)
    change[block.tensor_category != Category.GRADIENT] = 0
    return int(block.tensor_bytes @ change)
