"""The forward, recompute and backward blocks of a tape.

This is an autograd in miniature: backward walks the tape in reverse, and the gradient of a tensor takes memory from its
last reader to its maker.
"""

from __future__ import annotations

from forerun.core.program.builder import BlockBuilder
from forerun.core.program.types import Category, Phase, Stream
from forerun.sources.symbolic.tape import EXCHANGE, Held, Region, Stage, Tape, TapeOp

# Looking up a member of an IntEnum takes time at every use, and every node uses these.
_COMPUTE, _TEMPORARY, _ACTIVATION = Stream.COMPUTE, Category.TEMPORARY, Category.ACTIVATION
_FORWARD, _BACKWARD, _RECOMPUTE, _UNSHARDED = Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE, Category.UNSHARDED


def forward_block(tape: Tape, keeps: bool = True) -> BlockBuilder:
    """Returns the block of the forward pass; kept tensors stay allocated after it, unless it `keeps` none."""
    writer = _Writer(tape.marker)
    kept = tape.kept if keeps else frozenset()
    last_reader = {n: i for i, op in enumerate(tape.ops) for n in op.reads}
    live: dict[str, tuple[int, int, Category]] = {}

    def keep(size: int, category: Category, node: int) -> None:
        for part in tape.parts(size):
            writer.block.tensor(part, category, node, -1)

    for tensor, size in tape.inputs:
        if tensor in kept and tensor not in tape.held:
            keep(size, _ACTIVATION, 0)
    for i, op in enumerate(tape.ops):
        first = len(writer.block)
        ends = writer.stages(op.forward, _FORWARD, op.module, op.awaited, op.beside)
        writer.hold(op.forward_held, ends, op.passing)
        first, last = writer.span(first)
        for tensor, size in op.makes:
            if tensor in kept:
                keep(size, op.category, first)
            else:
                live[tensor] = (size, first, op.passing)
        for tensor in [t for t in live if last_reader.get(t, -1) <= i]:
            size, start, category = live.pop(tensor)
            writer.block.tensor(size, category, start, last)
    writer.join()
    if tape.offload_op >= 0 and keeps:
        last = max(0, len(writer.block) - 1)
        writer.block.node(tape.offload_op, Stream.COPY, _FORWARD, after=(last,))
    return writer.block


def transit_blocks(tape: Tape) -> tuple[BlockBuilder, BlockBuilder]:
    """Returns two blocks without time: one frees the offloaded tensors on the device, one allocates them again."""
    leaving, returning = BlockBuilder(), BlockBuilder()
    gone, back = leaving.node(tape.marker, phase=_FORWARD), returning.node(tape.marker, phase=_BACKWARD)
    kept = tape.kept - tape.held
    made = [(name, size, _ACTIVATION) for name, size in tape.inputs]
    made += [(name, size, op.category) for op in tape.ops for name, size in op.makes]
    for name, size, category in made:
        for share in tape.parts(size)[1:] if name in kept else ():
            leaving.tensor(share, category, -1, gone)
            returning.tensor(share, category, back, -1)
    return leaving, returning


def backward_block(tape: Tape, split: bool = False, late: bool = False) -> tuple[BlockBuilder, BlockBuilder | None]:
    """Returns the block of the backward pass, and with `split` a second one of the weight gradients.

    With `late` the weight gradients of the operations before an exchange run beside it, so that it starts earlier.
    """
    writer = _Writer(tape.marker)
    weights = _Writer(tape.marker) if split else None
    fetched: tuple[tuple[int, Stream], ...] = ()
    if tape.offload_op >= 0:  # the copy back runs beside the block's own kernels
        fetched = ((writer.block.node(tape.offload_op, Stream.COPY, _BACKWARD), Stream.COPY),)
    _Backward(tape, writer, weights, late).run()
    writer.before += fetched
    writer.join()
    if weights is not None:
        weights.join()
    return writer.block, None if weights is None else weights.block


class _Backward:
    """One walk of a tape in reverse."""

    def __init__(self, tape: Tape, writer: _Writer, weights: _Writer | None, late: bool) -> None:
        self.tape = tape
        self.late = late
        self.waiting: list[tuple[int, TapeOp]] = []
        """operations whose weight gradients wait for the launch of the next exchange"""
        self.beside: list[int] = []
        """operations that wait for the launch of the exchange beside which they run"""
        self.writer = writer
        self.weights = weights
        self.sizes = tape.sizes()
        self.kept = tape.kept
        self.categories = {name: op.category for op in reversed(tape.ops) for name, _ in op.makes}
        """tensor -> memory category of its first maker"""
        self.overwritten = {name for op in tape.ops if op.in_place for name in op.reads if name in op.saves}
        """kept tensors that their gradients overwrite"""
        self.release = self._releases()
        self.grads: dict[str, tuple[int, int, Category]] = {}
        """tensor -> (bytes, first node, category) of its gradient, which waits for the tensor's maker"""
        self.remade: dict[str, tuple[int, int]] = {}

    def _releases(self) -> dict[int, list[str]]:
        """Returns the saved tensors by the operation whose backward reads them last."""
        ops, last_use = self.tape.ops, {}
        for i in range(len(ops) - 1, -1, -1):
            last_use.update(dict.fromkeys(ops[i].saves, i))
        for region in self.tape.regions:
            inside = ops[region.first : region.last + 1]
            made = {name for op in inside for name, _ in op.makes}
            for tensor in {self.tape.narrow.get(name, name) for op in inside for name in op.reads if name not in made}:
                last_use[tensor] = min(region.first, last_use.get(tensor, region.first))
        for i, op in enumerate(ops):
            for name, _ in op.makes:
                last_use.setdefault(name, i)
        maker = {name: i for i, op in enumerate(ops) for name, _ in op.makes}
        for tensor in self.overwritten:
            last_use[tensor] = min(last_use[tensor], maker[tensor])
        releases: dict[int, list[str]] = {}
        for tensor, i in last_use.items():
            releases.setdefault(i, []).append(tensor)
        return releases

    def run(self) -> None:
        ops = self.tape.ops
        regions: dict[int, list[Region]] = {}
        for region in self.tape.regions:
            regions.setdefault(self.tape.recompute_before(region), []).append(region)
        if ops and ops[-1].kind != "loss":
            for tensor, size in ops[-1].makes:
                self.grads[tensor] = (size, 0, _TEMPORARY)
        for i in range(len(ops) - 1, -1, -1):
            for region in regions.get(i, ()):
                self._recompute(region)
            if ops[i].beside:
                self.beside.append(i)
                continue
            self._op(i, ops[i])
            if ops[i].kind == EXCHANGE:
                while self.beside:
                    turn = self.beside.pop(0)
                    self._op(turn, ops[turn])
        self._catch_up()
        end = len(self.writer.block) - 1
        for size, start, category in self.grads.values():
            self.writer.block.tensor(size, category, start, end)

    def _recompute(self, region: Region) -> None:
        block = self.writer.block
        needed = self.tape.remade(region) - self.kept
        for i in self.tape.recomputed(region):
            op, first = self.tape.ops[i], len(block)
            ends = self.writer.stages(op.forward, _RECOMPUTE, op.module, op.awaited, op.beside)
            self.writer.hold(op.forward_held, ends, op.passing)
            for tensor, size in op.makes:
                if tensor in needed:
                    self.remade[tensor] = (size, first)
                elif tensor not in self.kept:
                    block.tensor(size, _TEMPORARY, *self.writer.span(first))

    def _op(self, i: int, op: TapeOp) -> None:
        block = self.writer.block
        first = len(block)
        ahead = self.tape.weights_first and self.weights is None and bool(op.weight_backward)
        turn = first
        if ahead:
            self.writer.stages(op.weight_backward, _BACKWARD, op.module, beside=op.beside)
            turn = len(block)
        ends = self.writer.stages(op.backward, _BACKWARD, op.module, beside=op.beside)
        self.writer.hold(op.backward_held, ends, op.passing)
        wait = self.late and self.weights is None and bool(op.weight_backward)
        if wait:
            self.waiting.append((i, op))
        elif not ahead:
            (self.weights or self.writer).stages(op.weight_backward, _BACKWARD, op.module, beside=op.beside)
        if op.weight_grad_bytes and not wait:
            self._weight_gradient(op)
        first, last = self.writer.span(first)
        if op.scratch_bytes:
            block.tensor(op.scratch_bytes, op.passing, first, last)
        self._gradients(op, turn if ahead else first, last)
        if not wait:
            self._release(i, op, turn if ahead else -1, last)
        if op.kind == EXCHANGE:
            self._catch_up()

    def _weight_gradient(self, op: TapeOp) -> None:
        target = (self.weights if self.weights and op.weight_backward else self.writer).block
        target.tensor(op.weight_grad_bytes, _UNSHARDED, max(0, len(target) - 1), -1)

    def _catch_up(self) -> None:
        """Writes the weight gradients that have waited, beside the exchange that was written last."""
        before, self.writer.before = self.writer.before, ()
        for i, op in self.waiting:
            self.writer.stages(op.weight_backward, _BACKWARD, op.module)
            if op.weight_grad_bytes:
                self._weight_gradient(op)
            self._release(i, op, -1, len(self.writer.block) - 1)
        self.waiting.clear()
        self.writer.before = before or self.writer.before

    def _release(self, i: int, op: TapeOp, turn: int, last: int) -> None:
        """Frees the tensors that operation `i` reads last; its inputs before node `turn`, unless that is negative."""
        block = self.writer.block
        for tensor in self.release.get(i, ()):
            if tensor in self.tape.held:
                continue
            if tensor in self.kept:
                category = self.categories.get(tensor, _ACTIVATION)
                target = self.weights.block if self.weights and op.weight_backward else block
                end = max(0, (turn if turn >= 0 and tensor in op.reads else len(target)) - 1)
                for part in self.tape.parts(self.sizes[tensor]):
                    target.tensor(part, category, -1, end)
            elif tensor in self.remade:
                size, start = self.remade.pop(tensor)
                block.tensor(size, _TEMPORARY, start, last)

    def _gradients(self, op: TapeOp, first: int, last: int) -> None:
        block = self.writer.block
        made = [name for name, _ in op.makes]
        if op.kind == "residual":  # both branches take over the gradient of the sum
            if made and made[0] in self.grads and op.reads[0] not in self.grads:
                self.grads[op.reads[0]] = self.grads.pop(made[0])
        elif not op.gradless:
            for tensor in op.reads:
                if tensor not in self.grads and tensor not in self.overwritten and self.sizes.get(tensor):
                    self.grads[tensor] = (self.sizes[tensor], first, op.passing)
        for tensor in made:
            if tensor in self.grads:
                size, start, category = self.grads.pop(tensor)
                block.tensor(size, category, start, last)


class _Writer:
    """Appends stages to a block: kernels of a stage run side by side, stages one after the other."""

    def __init__(self, marker: int) -> None:
        self.block = BlockBuilder()
        self.marker = marker
        self.before: tuple[tuple[int, Stream], ...] = ()

    def stages(
        self, stages: list[Stage], phase: Phase, module: int, awaited: bool = False, beside: bool = False
    ) -> list[int]:
        """Writes `stages`; returns the last node of each. With `awaited` the host waits for the end of each. With
        `beside` they don't wait for an exchange that was written before them. Later operations wait for both.
        """
        if not stages:
            return []
        node, before = self.block.node, self.before
        exchanges: tuple[tuple[int, Stream], ...] = ()
        if beside:
            exchanges = tuple([last for last in before if last[1] == Stream.EP])
            before = tuple([last for last in before if last not in exchanges])
        ends = []
        for stage in stages:
            if not before and any(stream != _COMPUTE for _, stream in stage):
                before = ((node(self.marker, _COMPUTE, phase, module), _COMPUTE),)
            now = []
            for op, stream in stage:
                after = [n for n, s in before if s != stream]
                last = node(op, stream, phase, module, after, sync=awaited)
                now.append((last, stream))
            before = tuple(now)
            ends.append(last)
        self.before = (*exchanges, *before)
        return ends

    def hold(self, held: tuple[Held, ...], ends: list[int], category: Category) -> None:
        """Adds the temporaries of an operation whose stages end with the nodes `ends`."""
        for size, first, last in held:
            self.block.tensor(size, category, ends[first], ends[last])

    def span(self, first: int) -> tuple[int, int]:
        """Returns the first and last node written since `first`. Returns the last node twice if there is none."""
        last = len(self.block) - 1
        if last < first:
            last = first = max(0, last)
        return first, last

    def join(self) -> None:
        """Ends the block on the compute stream, so that the next block starts after all of its nodes."""
        others = [n for n, s in self.before if s != _COMPUTE]
        if others:
            self.before = ((self.block.node(self.marker, _COMPUTE, after=others), _COMPUTE),)
