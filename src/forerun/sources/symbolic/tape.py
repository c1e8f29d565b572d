"""A tape of the operations of one unit of a model: which tensors each reads, makes, and needs again in backward.

An operation says which kernels it runs in each direction. `tape_blocks` writes the forward, recompute and backward
blocks that follow. A checkpointed region drops its saved tensors and runs forward again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from forerun.core.program.types import Category, Stream

Kernel = tuple[int, Stream]
Stage = tuple[Kernel, ...]
"""kernels that may run side by side; a stage waits for the stage before it"""
Held = tuple[int, int, int]
"""temporary memory of an operation: bytes, and the first and last of its stages that need it"""


EXCHANGE = "exchange"
"""kind of the operations that bring tokens to other ranks"""


def on_compute(*ops: int) -> list[Stage]:
    """Returns one stage for each op, one after the other on the compute stream."""
    return [((op, Stream.COMPUTE),) for op in ops]


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
    category: Category = Category.ACTIVATION
    """memory category of the tensors that it keeps for backward"""
    passing: Category = Category.TEMPORARY
    """memory category of its temporaries: outputs that are not kept, gradients, scratch"""
    scratch_bytes: int = 0
    """bytes of temporary memory in its backward"""
    forward_held: tuple[Held, ...] = ()
    """temporary memory of some of its forward stages"""
    backward_held: tuple[Held, ...] = ()
    """temporary memory of some of its backward stages"""
    awaited: bool = False
    """whether the host waits for the end of its forward kernels, because its next launches depend on them"""
    beside: bool = False
    """whether it runs beside the exchange before it, forward and backward, and later operations wait for both"""
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
        """whether checkpoints keep only tensors that the backward pass uses, as torch.compile's partitioner does"""
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
        sizes = self.sizes()
        return sum(sizes[name] for name in self.kept if name in sizes and name not in self.held)

    def parts(self, size: int) -> tuple[int, ...]:
        """Returns the bytes of a kept tensor of `size` bytes that stay on the device, and those on the host if any."""
        away = int(size * self.offload)
        return (size - away, away) if away else (size,)

    def add(self, op: TapeOp) -> None:
        self.ops.append(op)

    def rename(self, prefix: str, but: Sequence[str]) -> None:
        """Puts `prefix` before the names of all tensors that operations have made, except `but`, so that another half
        of the same kind can follow."""
        made = {name: prefix + name for op in self.ops for name, _ in op.makes if name not in but}
        for op in self.ops:
            op.reads = tuple(made.get(name, name) for name in op.reads)
            op.saves = tuple(made.get(name, name) for name in op.saves)
            op.makes = tuple((made.get(name, name), size) for name, size in op.makes)
        self.narrow = {made.get(wide, wide): made.get(copy, copy) for wide, copy in self.narrow.items()}

    # -- what survives the forward pass ------------------------------------------------------------------

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of every tensor by name."""
        sizes = dict(self.inputs)
        for op in self.ops:
            sizes.update(op.makes)
        return sizes

    @cached_property
    def kept(self) -> frozenset[str]:
        """Returns the names of the tensors that are kept from forward to backward, once the tape is whole."""
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
            again = [i for region in self.regions for i in self.recomputed(region)]
            outside = (name for i in again for name in self.ops[i].reads if maker.get(name, i) not in again)
            kept.update(self.narrow.get(name, name) for name in outside)
        return frozenset(kept)

    def recomputed(self, region: Region) -> list[int]:
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
