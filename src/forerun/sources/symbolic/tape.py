"""A tape of the operations of one unit of a model, which writes its forward, recompute and backward blocks.

An operation says which kernels it runs in each direction, and which tensors it reads, makes and needs again in
backward. The tape is an autograd in miniature: backward walks it in reverse, the gradient of a tensor takes memory from
its last reader to its maker, and a checkpointed region drops what it saved and runs forward again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forerun.core.program.builder import BlockBuilder
from forerun.core.program.types import Category, Phase, Stream

# Looking up a member of an IntEnum takes time at every use, and every node uses these.
_COMPUTE, _TEMPORARY, _ACTIVATION = Stream.COMPUTE, Category.TEMPORARY, Category.ACTIVATION
_FORWARD, _BACKWARD, _RECOMPUTE, _UNSHARDED = Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE, Category.UNSHARDED

Kernel = tuple[int, Stream]
Stage = tuple[Kernel, ...]
"""kernels that may run side by side; a stage waits for the stage before it"""
Held = tuple[int, int, int]
"""temporary memory of an operation: bytes, and the first and last of its stages that need it"""


EXCHANGE = "exchange"
"""kind of the operations that bring tokens to other ranks"""


def on_compute(*ops: int) -> list[Stage]:
    """Returns one stage for each op, one after the other on the compute stream."""
    return [((op, _COMPUTE),) for op in ops]


@dataclass(slots=True)
class TapeOp:
    """One operation; `saves` names the tensors that its backward reads."""

    name: str
    kind: str
    """word by which checkpoint policies choose: matmul, attention, absolutes, norm, pointwise, residual, loss, ..."""
    module: int
    forward: list[Stage]
    backward: list[Stage]
    """kernels of the gradients of the inputs (and of small weights)"""
    weight_backward: list[Stage] = field(default_factory=list)
    """kernels of the weight gradients, which zero-bubble schedules run separately"""
    reads: tuple[str, ...] = ()
    saves: tuple[str, ...] = ()
    makes: tuple[tuple[str, int], ...] = ()
    """(tensor, bytes)"""
    parameters: tuple[int, ...] = ()
    """elements of each tensor of weights that a product's backward reads"""
    weight_grad_bytes: int = 0
    """bytes of gradients that the weight backward allocates"""
    gradless: bool = False
    """whether its inputs need no gradient (the first operation of a model)"""
    category: Category = _ACTIVATION
    """memory category of the tensors that it keeps for backward"""
    passing: Category = _TEMPORARY
    """memory category of its temporaries: outputs that are not kept, gradients, scratch"""
    scratch_bytes: int = 0
    """bytes of temporary memory in its backward"""
    forward_held: tuple[Held, ...] = ()
    """temporary memory of some of its forward stages"""
    backward_held: tuple[Held, ...] = ()
    """temporary memory of some of its backward stages"""
    awaited: bool = False
    """whether the host waits for the end of its forward kernels, because what it launches next depends on them"""
    in_place: bool = False
    """whether its backward overwrites the tensor that it reads and has saved with that tensor's gradient"""


@dataclass(frozen=True, slots=True)
class Region:
    """Operations first..last (inclusive) that a checkpoint runs again, except those that `keep` chooses.

    Outputs of a region that later operations save are kept too, as in autograd. With `discard_output` they are made
    again just before their first use in backward (Megatron-Core's CheckpointWithoutOutput).
    """

    first: int
    last: int
    keep: Callable[[TapeOp], bool]
    discard_output: bool = False


def keep_nothing(_: TapeOp) -> bool:
    return False


class Tape:
    """The operations of a unit in forward order, with its checkpointed regions."""

    def __init__(self, inputs: Sequence[tuple[str, int]], marker: int) -> None:
        """`inputs` are the (tensor, bytes) that come from outside; `marker` is an op that takes no time."""
        self.inputs = tuple(inputs)
        self.marker = marker
        self.ops: list[TapeOp] = []
        self.regions: list[Region] = []
        self.early_stop = True
        self.compiled = False
        """whether checkpoints keep only what backward uses, as torch.compile's partitioner does"""
        self.weights_first = False
        """whether weight gradients run before input gradients, so that the saved input is freed earlier (Inductor's
        order for the least peak)"""
        self.offload = 0.0
        """fraction of each kept tensor that waits for backward in host memory"""
        self.offload_op = -1
        """op number of the copy of that fraction over the host link; -1 without offload"""
        self.narrow: dict[str, str] = {}
        """tensors that are kept as narrower copies -> the copies"""
        self.held: frozenset[str] = frozenset()
        """inputs that another tape already keeps"""

    def kept_bytes(self) -> int:
        """Returns the bytes of the tensors that are kept from forward to backward, offloaded or not."""
        sizes = self._sizes()
        return sum(sizes[name] for name in self.kept() if name in sizes and name not in self.held)

    def _parts(self, size: int) -> tuple[int, ...]:
        """Returns the bytes of a kept tensor of `size` bytes that stay on the device, and those on the host if any."""
        away = int(size * self.offload)
        return (size - away, away) if away else (size,)

    def add(self, op: TapeOp) -> None:
        self.ops.append(op)

    # -- what survives the forward pass ------------------------------------------------------------------

    def _sizes(self) -> dict[str, int]:
        sizes = dict(self.inputs)
        for op in self.ops:
            sizes.update(op.makes)
        return sizes

    def kept(self) -> set[str]:
        """Returns the names of the tensors that are kept from forward to backward."""
        region_of = {i: region for region in self.regions for i in range(region.first, region.last + 1)}
        maker = {name: i for i, op in enumerate(self.ops) for name, _ in op.makes}
        kept: set[str] = set()
        for i, op in enumerate(self.ops):
            region = region_of.get(i)
            for name in op.saves:
                made = maker.get(name, -1)
                home = region_of.get(made)
                dropped = home is not None and (home is region or home.discard_output) and not home.keep(self.ops[made])
                if not dropped:
                    kept.add(name)
            if region is not None:
                if region.keep(op) and not self.compiled:
                    kept.update(name for name, _ in op.makes)
                runs_again = not (region.discard_output and region.keep(op))
                outside = (name for name in op.reads if not region.first <= maker.get(name, -1) <= region.last)
                kept.update(self.narrow.get(name, name) for name in outside if runs_again)
        if self.compiled:
            again = [i for region in self.regions for i in self._recomputed(region)]
            outside = (name for i in again for name in self.ops[i].reads if maker.get(name, i) not in again)
            kept.update(self.narrow.get(name, name) for name in outside)
        return kept

    def _recomputed(self, region: Region) -> list[int]:
        """Returns the operations that run again in the backward pass of a region, in forward order."""
        again = [i for i in range(region.first, region.last + 1) if not region.keep(self.ops[i])]
        if not self.early_stop:
            return again
        needed = self.remade(region)
        last = max((i for i in again if any(name in needed for name, _ in self.ops[i].makes)), default=-1)
        return [i for i in again if i <= last]

    def remade(self, region: Region) -> set[str]:
        """Returns the tensors that backward needs and the second run of a region makes."""
        made = {name for i in range(region.first, region.last + 1) for name, _ in self.ops[i].makes}
        users = self.ops if region.discard_output else self.ops[region.first : region.last + 1]
        return made & {name for op in users for name in op.saves}

    def recompute_before(self, region: Region) -> int:
        """Returns the operation before whose backward a region runs again."""
        if not region.discard_output:
            return region.last
        needed = self.remade(region)
        return max((i for i, op in enumerate(self.ops) if needed & set(op.saves)), default=region.last)

    # -- writing blocks ----------------------------------------------------------------------------------

    def forward_block(self) -> BlockBuilder:
        """Returns the block of the forward pass; kept tensors stay allocated after it."""
        writer = _Writer(self.marker)
        kept = self.kept()
        last_reader = {n: i for i, op in enumerate(self.ops) for n in op.reads}
        live: dict[str, tuple[int, int, Category]] = {}

        def keep(size: int, category: Category, node: int) -> None:
            for part in self._parts(size):
                writer.block.tensor(part, category, node, -1)

        for tensor, size in self.inputs:
            if tensor in kept and tensor not in self.held:
                keep(size, _ACTIVATION, 0)
        for i, op in enumerate(self.ops):
            first = len(writer.block)
            writer.hold(op.forward_held, writer.stages(op.forward, _FORWARD, op.module, op.awaited), op.passing)
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
        if self.offload_op >= 0:
            last = max(0, len(writer.block) - 1)
            writer.block.node(self.offload_op, Stream.COPY, _FORWARD, after=(last,))
        return writer.block

    def transit_blocks(self) -> tuple[BlockBuilder, BlockBuilder]:
        """Returns two blocks without time: one frees the offloaded tensors on the device, one allocates them again."""
        leaving, returning = BlockBuilder(), BlockBuilder()
        gone, back = leaving.node(self.marker, phase=_FORWARD), returning.node(self.marker, phase=_BACKWARD)
        kept = self.kept() - self.held
        made = [(name, size, _ACTIVATION) for name, size in self.inputs]
        made += [(name, size, op.category) for op in self.ops for name, size in op.makes]
        for name, size, category in made:
            for share in self._parts(size)[1:] if name in kept else ():
                leaving.tensor(share, category, -1, gone)
                returning.tensor(share, category, back, -1)
        return leaving, returning

    def backward_block(self, split: bool = False, late: bool = False) -> tuple[BlockBuilder, BlockBuilder | None]:
        """Returns the block of the backward pass, and with `split` a second one of the weight gradients.

        With `late` the weight gradients of the operations before an exchange run beside it, so that it starts earlier.
        """
        writer = _Writer(self.marker)
        weights = _Writer(self.marker) if split else None
        fetched: tuple[tuple[int, Stream], ...] = ()
        if self.offload_op >= 0:  # the copy back runs beside the block's own kernels
            fetched = ((writer.block.node(self.offload_op, Stream.COPY, _BACKWARD), Stream.COPY),)
        _Backward(self, writer, weights, late).run()
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
        self.writer = writer
        self.weights = weights
        self.sizes = tape._sizes()
        self.kept = tape.kept()
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
            self._op(i, ops[i])
        self._catch_up()
        end = len(self.writer.block) - 1
        for size, start, category in self.grads.values():
            self.writer.block.tensor(size, category, start, end)

    def _recompute(self, region: Region) -> None:
        block = self.writer.block
        needed = self.tape.remade(region) - self.kept
        for i in self.tape._recomputed(region):
            op, first = self.tape.ops[i], len(block)
            self.writer.hold(
                op.forward_held, self.writer.stages(op.forward, _RECOMPUTE, op.module, op.awaited), op.passing
            )
            for tensor, size in op.makes:
                if tensor in needed:
                    self.remade[tensor] = (size, first)
                elif tensor not in self.kept:
                    block.tensor(size, _TEMPORARY, *self.writer.span(first))

    def _op(self, i: int, op: TapeOp) -> None:
        block, first = self.writer.block, len(self.writer.block)
        ahead = self.tape.weights_first and self.weights is None and bool(op.weight_backward)
        if ahead:
            self.writer.stages(op.weight_backward, _BACKWARD, op.module)
        turn = len(block)
        self.writer.hold(op.backward_held, self.writer.stages(op.backward, _BACKWARD, op.module), op.passing)
        wait = self.late and self.weights is None and bool(op.weight_backward)
        if wait:
            self.waiting.append((i, op))
        elif not ahead:
            (self.weights or self.writer).stages(op.weight_backward, _BACKWARD, op.module)
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
        target = (self.weights or self.writer).block
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
                category = self._category(tensor)
                target = self.weights.block if self.weights and op.weight_backward else block
                end = max(0, (turn if turn >= 0 and tensor in op.reads else len(target)) - 1)
                for part in self.tape._parts(self.sizes[tensor]):
                    target.tensor(part, category, -1, end)
            elif tensor in self.remade:
                size, start = self.remade.pop(tensor)
                block.tensor(size, _TEMPORARY, start, last)

    def _category(self, tensor: str) -> Category:
        for op in self.tape.ops:
            if any(name == tensor for name, _ in op.makes):
                return op.category
        return _ACTIVATION

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

    def stages(self, stages: list[Stage], phase: Phase, module: int, awaited: bool = False) -> list[int]:
        """Writes `stages`; returns the last node of each. With `awaited` the host waits for the end of each."""
        node, before = self.block.node, self.before
        ends = []
        for stage in stages:
            if not before and any(stream != _COMPUTE for _, stream in stage):
                before = ((node(self.marker, _COMPUTE, phase, module), _COMPUTE),)
            now = []
            for op, stream in stage:
                after = [n for n, s in before if s != stream]
                now.append((node(op, stream, phase, module, after, sync=awaited), stream))
            before = tuple(now)
            ends.append(len(self.block) - 1)
        self.before = before
        return ends

    def hold(self, held: tuple[Held, ...], ends: list[int], category: Category) -> None:
        """Adds the temporaries of an operation whose stages end with the nodes `ends`."""
        for size, first, last in held:
            self.block.tensor(size, category, ends[first], ends[last])

    def span(self, first: int) -> tuple[int, int]:
        """Returns the first and last node written since `first`; twice the last node when there is none."""
        last = max(0, len(self.block) - 1)
        return min(first, last), last

    def join(self) -> None:
        """Ends the block on the compute stream, so that the next block starts after all of its nodes."""
        others = [n for n, s in self.before if s != _COMPUTE]
        if others:
            self.before = ((self.block.node(self.marker, _COMPUTE, after=others), _COMPUTE),)
