"""Data parallelism around a unit: blocks that gather and free its parameters, and reduce its gradients.

Every action is a small block. So the order of blocks alone determines which gathers are prefetched:

* `gather` starts the all-gather of a unit's parameters. With prefetching it starts once the unit before has its
  parameters (one unit ahead, as FSDP's rate limiter and FSDP2's buffers allow). Without prefetching it starts when
  compute reaches the unit. Compiled code does so and waits for each gather at once. FSDP1 gathers into the parameters
  themselves, FSDP2 into a buffer.
* `open` makes compute wait for the unsharded parameters and copies them out of the buffer. FSDP2 keeps a unit's buffer
  until the next unit has its own in the forward pass, and frees it at once in the backward pass.
* `close` frees the parameters.
* `reduce` reduces the unit's gradients after its backward pass; `accumulate` adds them to a buffer. FSDP2 keeps the
  buffer of a reduction until the next unit has gradients.

Gathers and reductions of one process group run in issue order on one stream, as in NCCL's communicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Literal

from forerun.common.units import MIB
from forerun.core.program.builder import BlockBuilder
from forerun.core.program.types import Block, Category, Collective, Phase, Stream
from forerun.describe.plan import rules
from forerun.describe.plan.rules import DTYPE_BYTES
from forerun.sources.symbolic.exchanges import (
    Exchange,
    gathered_bytes,
    gathered_weights,
    gathers,
    held_frozen_bytes,
    reductions,
    shard_axis,
    shard_elements,
    sharded,
)
from forerun.sources.symbolic.kernels import PlanKernels
from forerun.sources.symbolic.states import accumulation_bytes
from forerun.sources.symbolic.weights import Weights

REDUCED = 2
"""event slot that a reduction records; the slots of gathers follow it"""


def gathered_slot(turn: int) -> int:
    """Returns the event slot that the gather of this turn records."""
    return 8 + 2 * turn


def opened_slot(turn: int) -> int:
    """Returns the event slot that compute records when it has taken the parameters of this turn."""
    return 9 + 2 * turn


Action = Literal[
    "gather",
    "open",
    "open_last",  # `open` of the last unit: no later unit frees its buffer
    "reopen",  # `open` in the backward pass
    "gather_again",  # gather what was freed, between recomputation and backward pass
    "close",
    "reduce_first",  # reduction in the first micro batch: it allocates the sharded gradients
    "reduce",
    "reduce_accumulated",  # reduction of the buffer that micro batches were added into
    "accumulate_first",
    "accumulate",  # add this micro batch's gradients to the buffer
]


class DataParallel:
    """Writes the data-parallel blocks of one plan."""

    def __init__(self, kernels: PlanKernels) -> None:
        self.kernels = kernels
        plan = kernels.plan
        self.simple = kernels.stack.fsdp == "simple"
        self.fsdp = bool(rules.gathers_parameters(plan, kernels.stack))
        self.by_module = kernels.stack.parametrized and not kernels.whole_graph
        """whether eager modules gather their parameters one by one"""
        self.buffers = kernels.stack.fsdp == "fsdp2"
        """whether gathers and reductions use buffers beside the parameters and gradients"""
        self.reduce_bytes = DTYPE_BYTES[kernels.reduce_dtype]
        self.param_bytes = kernels.weight_bytes
        self.master_bytes = DTYPE_BYTES[plan.master_dtype]
        self.ahead = 0 if self.simple else plan.prefetch
        """number of units that are gathered before compute reaches them"""
        self.depth = max(1, self.ahead)
        """number of gathers in flight, each with its own event slots"""
        self.fetched: set[int] = set()
        """op numbers at the end of gathers for which the host waits"""

    def block(self, action: Action, turn: int, name: str, weights: Weights, made: int, before: int) -> Block | None:
        """Returns the block of one action around a unit whose backward pass leaves `made` bytes of gradients.

        `turn` is the number of the gather modulo the prefetch depth, `before` the bytes of the buffer that the unit
        before has kept. The result is None if there is nothing to do.
        """
        if action == "gather":
            return self._gather(name, weights, turn)
        if action in ("open", "open_last", "reopen"):
            return self._open(name, gathered_bytes(self.kernels.plan, weights), turn, action, before)
        if action == "gather_again":
            return self._gather_again(name, weights)
        if action == "close":
            return self._free(name, gathered_bytes(self.kernels.plan, weights))
        if action.startswith("accumulate"):
            return self._accumulate(name, weights, made, first=action == "accumulate_first")
        if action == "reduce_accumulated":
            return self._reduce_scatter(name, weights, -1, True, before)
        return self._reduce_scatter(name, weights, made, action == "reduce_first", before)

    # -- fully sharded -------------------------------------------------------------------------------------

    def _collectives(self, name: str, exchanges: Sequence[Exchange], dtype: str) -> list[int]:
        """Returns the op numbers of one collective for each exchange, or for each tensor of one."""
        ops, asked = [], name
        for each in exchanges:
            name = asked + (".whole" if each.kind == Collective.ALL_REDUCE else "")
            if self.kernels.group_size.get(each.axis, 1) == 1:
                continue
            for size in each.tensors if self.simple else [sum(each.tensors)]:
                if size:
                    size_bytes = size * each.element_bytes
                    op = self.kernels.collective_op(name, each.kind, each.axis, size_bytes, dtype)
                    ops += self._of_list(name, each.kind, op, size_bytes, self.kernels.group_size[each.axis])
        return ops

    def _of_list(self, name: str, kind: Collective, op: int, size_bytes: float, ranks: int) -> list[int]:
        """Returns the collective `op` with the cost of its list of pieces (ProcessGroupNCCL's lists of tensors).

        The host spends about one launch on each piece, and each is copied between the list and NCCL's buffer.
        """
        if not self.kernels.stack.list_collectives:
            return [op]
        cut = self.kernels.ops.delay(name + ".cut", 0, ranks)
        copy = self.kernels.ops.memory(name + ".pieces", size_bytes, size_bytes, ranks)
        if kind != Collective.ALL_GATHER:
            return [cut, copy, op]
        self.fetched.add(copy)
        return [cut, op, copy]

    def _gather_again(self, name: str, weights: Weights) -> Block | None:
        """Returns the block that gathers freed parameters again between a recomputation and its backward pass."""
        kernels, block = self.kernels, BlockBuilder()
        matrices = gathered_weights(kernels.plan, kernels.stack, weights).matrices
        later = [2 * sum(matrices[i + 1 :]) for i in range(len(matrices))]
        far = [size for size, distance in zip(matrices, later, strict=True) if distance > kernels.stack.reuse_elements]
        again = Exchange(Collective.ALL_GATHER, shard_axis(kernels.plan, False), far, self.param_bytes)
        ops = self._collectives(name + ".gather", [again], kernels.wide_dtype)
        if not ops:
            return None
        node = block.node(kernels.marker, Stream.COMPUTE, Phase.BACKWARD)
        for op in ops:
            node = block.node(op, Stream.GATHER, Phase.BACKWARD, after=(node,), sync=op in self.fetched)
        block.node(kernels.marker, Stream.COMPUTE, Phase.BACKWARD, after=(node,))
        return block.build(name + ".gather_again")

    def _gather(self, name: str, weights: Weights, turn: int) -> Block:
        """Returns the block that fetches, casts and gathers parameters, once the unit before has its own."""
        kernels, block = self.kernels, BlockBuilder()
        serial = self.ahead == 0
        shard, frozen = shard_elements(kernels.plan, weights), held_frozen_bytes(kernels.plan, weights)
        chain: list[tuple[int, Stream]] = []
        if kernels.plan.offload == "params":  # the sharded master weights come from host memory
            chain.append((kernels.ops.host_copy(name + ".fetch", shard * self.master_bytes + frozen), Stream.COPY))
        if self.master_bytes != self.param_bytes or kernels.stack.fsdp == "fsdp2":  # cast and copy in the local shard
            read, written = shard * self.master_bytes + frozen, shard * self.param_bytes + frozen
            op = kernels.ops.memory(name + ".copy_in", read, written)
            chain.append((op, Stream.COMPUTE if serial else Stream.GATHER))
        chain = self._hand_out(name, weights) + chain
        exchanges = gathers(kernels.plan, kernels.stack, weights)
        ops = self._collectives(name + ".gather", exchanges, kernels.wide_dtype)
        chain += [(op, Stream.GATHER) for op in ops]
        after: tuple[int, ...] = (block.node(kernels.marker),) if serial else ()
        for i, (op, stream) in enumerate(chain):
            record = gathered_slot(turn) if i == len(chain) - 1 else -1
            wait = () if serial else (opened_slot(turn),)
            after = (block.node(op, stream, after=after, wait=wait, record=record, sync=op in self.fetched),)
        if not self.simple:
            category = Category.COMMUNICATION if self.buffers else Category.UNSHARDED
            block.tensor(gathered_bytes(self.kernels.plan, weights), category, 0, -1)
        return block.build(name + ".gather")

    def _hand_out(self, name: str, weights: Weights) -> list[tuple[int, Stream]]:
        """Returns the host's delay for the parameters of an eager module, in either direction."""
        launches = len(weights.tensors) * self.kernels.stack.parameter_launches
        if not self.by_module or not launches:
            return []
        return [(self.kernels.ops.delay(name + ".hand_out", 0, launches), Stream.COMPUTE)]

    def _open(self, name: str, gathered: int, turn: int, action: Action, before: int) -> Block:
        kernels, block = self.kernels, BlockBuilder()
        if not self.buffers:
            block.node(kernels.marker, wait=(gathered_slot(turn),), record=opened_slot(turn))
            if self.simple:
                block.tensor(gathered, Category.UNSHARDED, 0, -1)
            return block.build(f"{name}.{action}")
        op = kernels.ops.memory(name + ".copy_out", gathered, gathered)
        node = block.node(op, wait=(gathered_slot(turn),), record=opened_slot(turn))
        block.tensor(gathered, Category.UNSHARDED, node, -1)
        for buffer in (before, 0 if action == "open" else gathered):
            if buffer:
                block.tensor(buffer, Category.COMMUNICATION, -1, node)
        return block.build(f"{name}.{action}")

    def _free(self, name: str, gathered: int) -> Block:
        block = BlockBuilder()
        block.node(self.kernels.marker)
        block.tensor(gathered, Category.UNSHARDED, -1, 0)
        return block.build(name + ".close")

    def let_go(self, buffer: int) -> Block:
        """Returns the block that frees the buffer, in bytes, of the last reduction of a backward pass."""
        block = BlockBuilder()
        block.tensor(
            buffer, Category.COMMUNICATION, -1, block.node(self.kernels.marker, Stream.COMPUTE, Phase.BACKWARD)
        )
        return block.build("reduced")

    def _reduce_scatter(self, name: str, weights: Weights, made: int, first: bool, before: int) -> Block:
        """Returns the block that copies gradients into one buffer, reduce-scatters it and all-reduces it over replicas.

        `made` is the bytes of gradients that the backward pass left, -1 if it added them to a buffer; `before` is
        the bytes of the buffer that the reduction before used.
        """
        kernels, block, plan = self.kernels, BlockBuilder(), self.kernels.plan
        total = weights.gradients
        wire = total * self.reduce_bytes
        if kernels.stack.dtensor:
            self._sum_over_tp(block, name, weights, kernels.wide_dtype if made >= 0 else kernels.accumulate_dtype)
        if before:
            block.tensor(before, Category.COMMUNICATION, -1, block.node(kernels.marker, Stream.COMPUTE, Phase.BACKWARD))
        for op, stream in self._hand_out(name, weights):
            block.node(op, stream, Phase.BACKWARD)
        node = block.node(self._join_gradients(name, total, wire), Stream.COMPUTE, Phase.BACKWARD)
        block.tensor(wire, Category.COMMUNICATION, node, -1 if self.buffers else node)
        if made >= 0:
            block.tensor(made, Category.UNSHARDED, -1, node)
        elif not rules.keeps_gradient_buffer(kernels.stack):
            held = total + weights.beyond
            block.tensor(held * DTYPE_BYTES[kernels.accumulate_dtype], Category.GRADIENT, -1, node)
        dtype = kernels.reduce_dtype
        for op in self._collectives(name + ".reduce", reductions(plan, kernels.stack, weights), dtype):
            node = block.node(op, Stream.GATHER, Phase.BACKWARD, after=(node,), record=REDUCED)
        if self.simple:  # compiled code waits for a collective at once
            node = block.node(kernels.marker, Stream.COMPUTE, Phase.BACKWARD, after=(node,))
        shard = round(shard_elements(plan, weights) * weights.gradient_ratio)
        if plan.dp_replicate > 1:
            op = kernels.collective_op(
                name + ".replicas", Collective.ALL_REDUCE, "dp_replicate", shard * self.reduce_bytes, dtype
            )
            node = block.node(op, Stream.REDUCE, Phase.BACKWARD, after=(node,), record=REDUCED)
        if plan.offload == "params":
            op = kernels.ops.host_copy(name + ".grads_out", shard * self.reduce_bytes)
            block.node(op, Stream.COPY, Phase.BACKWARD, after=(node,), record=REDUCED)
        elif first:
            block.tensor(shard * self.master_bytes, Category.GRADIENT, 0, -1)
        return block.build(name + ".reduce")

    def _join_gradients(self, name: str, total: int, wire: int) -> int:
        """Returns the op that brings gradients of `total` elements into the buffer of `wire` bytes that is reduced.

        FSDP2 joins and casts in one kernel. In FSDP1 autograd copies the split gradients together, then a cast
        follows. Compiled code casts each tensor and reduces it in place.
        """
        kernels, made = self.kernels, total * self.kernels.grad_bytes
        cast = made + wire if self.reduce_bytes != kernels.grad_bytes else 0
        if self.simple and not cast:
            return kernels.marker
        if kernels.stack.fsdp == "fsdp1":
            return kernels.ops.memory(name + ".grad_copy_in", made + cast / 2, made + cast / 2, 2 if cast else 1)
        return kernels.ops.memory(name + ".grad_copy_in", made, wire)

    def _sum_over_tp(self, block: BlockBuilder, name: str, weights: Weights, dtype: str) -> None:
        """Appends the sum over tp of the gradients of weights that each rank of tp uses for a part of the tokens."""
        for size in weights.shared:
            start = block.node(self.kernels.marker, Stream.COMPUTE, Phase.BACKWARD)
            op = self.kernels.collective_op(
                name + ".shared", Collective.ALL_REDUCE, "tp", size * DTYPE_BYTES[dtype], dtype
            )
            end = block.node(op, Stream.TP, Phase.BACKWARD, after=(start,))
            block.node(self.kernels.marker, Stream.COMPUTE, Phase.BACKWARD, after=(end,))

    # -- replicated or optimizer-sharded -------------------------------------------------------------------

    def _accumulate(self, name: str, weights: Weights, made: int, first: bool) -> Block | None:
        """Returns the block that adds a micro batch's gradients to the buffer.

        In plain PyTorch the gradients of the first micro batch become the buffer.
        """
        kernels = self.kernels
        if kernels.stack.fused_accumulation:
            return None
        block, total = BlockBuilder(), weights.gradients
        if not total:
            return None
        buffer = DTYPE_BYTES[kernels.accumulate_dtype]
        persistent = rules.keeps_gradient_buffer(kernels.stack)
        if first and not persistent:
            block.node(kernels.marker, Stream.COMPUTE, Phase.BACKWARD)
            block.tensor(made, Category.UNSHARDED, -1, 0)
            block.tensor((total + weights.beyond) * buffer, Category.GRADIENT, 0, -1)
        else:
            read, written = accumulation_bytes(kernels.grad_bytes, buffer)
            op = kernels.ops.memory(name + ".accumulate", total * read, total * written)
            block.node(op, Stream.COMPUTE, Phase.BACKWARD)
            block.tensor(made, Category.UNSHARDED, -1, 0)
        return block.build(name + (".accumulate_first" if first else ".accumulate"))

    @property
    def bucket_bytes(self) -> float:
        """Returns the bytes of gradients that are reduced together while the backward pass goes on."""
        return (self.kernels.plan.ddp_bucket_mib or self.kernels.stack.bucket_mib) * MIB

    def reduce_replicated(self, name: str, weights: Weights, bucket_bytes: float = inf) -> Block | None:
        """Returns the block that reduces the replicated gradients of `weights` in buckets; None on a single replica."""
        block = BlockBuilder()
        start = block.node(self.kernels.marker, Stream.COMPUTE, Phase.BACKWARD)
        buckets = max(1, round(weights.gradients * self.reduce_bytes / bucket_bytes))
        exchanges = reductions(self.kernels.plan, self.kernels.stack, weights)
        for _ in range(buckets):
            self._reduce_bucket(block, name, exchanges, 1 / buckets, [start])
        if bucket_bytes == inf and self.kernels.stack.step_elements:
            copied = min(weights.gradients, self.kernels.stack.step_elements)
            for dtype in dict.fromkeys((self.kernels.accumulate_dtype, self.kernels.reduce_dtype)):
                block.tensor(copied * DTYPE_BYTES[dtype], Category.COMMUNICATION, start, len(block) - 1)
        return block.build(name) if len(block) > 1 else None

    def _reduce_bucket(
        self, block: BlockBuilder, name: str, exchanges: list[Exchange], share: float, after: list[int]
    ) -> None:
        """Appends the collectives of one bucket, which holds the fraction `share` of the gradients."""
        kernels, plan = self.kernels, self.kernels.plan
        dtype = kernels.reduce_dtype
        for each in exchanges:
            elements, size = sum(each.tensors), each.element_bytes * share
            if elements and kernels.group_size[each.axis] > 1:
                op = kernels.collective_op(name + ".grads", each.kind, each.axis, elements * size, dtype)
                after = [block.node(op, Stream.GATHER, Phase.BACKWARD, after=after, record=REDUCED)]
            if elements and each.kind == Collective.REDUCE_SCATTER and plan.dp_replicate > 1:
                part = sharded(elements, kernels.group_size[each.axis]) * size
                op = kernels.collective_op(name + ".replicas", Collective.ALL_REDUCE, "dp_replicate", part, dtype)
                after = [block.node(op, Stream.GATHER, Phase.BACKWARD, after=after, record=REDUCED)]
