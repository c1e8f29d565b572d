"""Plausible training steps under FSDP, of any depth: what a tracer would record of them."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from made_recordings import Recorder

from forerun.core.program.types import Category, Collective, Phase

COPY_IN, GATHER, REDUCE, HOST = 1, 2, 3, 1 << 17
EMBEDDING, HEAD = "embedding", "head"


@dataclass(frozen=True)
class Options:
    kernels: int = 4
    """of a layer's forward pass"""
    kinds: int = 1
    """of layers, which take turns"""
    dense: int = 0
    """first layers that are other than all others"""
    prefetch: bool = True
    shards: bool = True
    """False: parameters stay gathered, gradients are reduced at the end of each backward pass"""
    recompute: bool = False
    microbatches: int = 1
    optimizer: str = "fused"
    """or foreach, or each"""
    clips: bool = True
    logs: bool = True
    """the host waits for the loss"""


@st.composite
def options(draw: st.DrawFn) -> Options:
    return Options(
        kernels=draw(st.integers(1, 6)),
        kinds=draw(st.integers(1, 3)),
        dense=draw(st.integers(0, 2)),
        prefetch=draw(st.booleans()),
        shards=draw(st.booleans()),
        recompute=draw(st.booleans()),
        microbatches=draw(st.integers(1, 3)),
        optimizer=draw(st.sampled_from(["fused", "foreach", "each"])),
        clips=draw(st.booleans()),
        logs=draw(st.booleans()),
    )


def training_step(n_layers: int, chosen: Options, rank: int = 0):
    """The recording of one step of a model with so many layers."""
    return _Step(n_layers, chosen, rank).record()


class _Step:
    def __init__(self, n_layers: int, chosen: Options, rank: int) -> None:
        self.chosen = chosen
        self.units = [EMBEDDING, *range(n_layers), HEAD]
        self.made = Recorder(rank, [("dp_shard", tuple(range(8)))], data_parallel=["dp_shard"])
        self.waits: dict[int, int] = {}
        """of the next compute node, by stream"""
        self.last = -1
        """last compute node"""
        self.gathered: dict[object, int] = {}
        self.whole: dict[object, int] = {}
        self.saved: dict[object, list[int]] = {}
        self.reduced: int | None = None
        self.reducing: int | None = None

    # -- nodes -------------------------------------------------------------------------------------------------

    def compute(self, name, time_ps, phase, module="", **more):
        waits, self.waits = tuple(self.waits.values()), {}
        self.last = self.made.kernel(name, time_ps, 0, phase=phase, module=module, waits=waits, **more)
        return self.last

    def wait(self, stream, node):
        self.waits[stream] = max(node, self.waits.get(stream, -1))

    def kind(self, unit):
        if isinstance(unit, str):
            return 7 if unit == EMBEDDING else 11
        return 5 if unit < self.chosen.dense else (unit - self.chosen.dense) % self.chosen.kinds

    def size(self, unit):
        return 512 * (10 + 3 * self.kind(unit))

    def path(self, unit, part):
        return f"{unit}.{part}" if isinstance(unit, str) else f"model.layers.{unit}.{part}"

    # -- parameters --------------------------------------------------------------------------------------------

    def gather(self, unit, phase):
        if unit in self.gathered or unit in self.whole or not self.chosen.shards:
            return
        made, module = self.made, self.path(unit, "")[:-1]
        after = (self.last,) if self.last >= 0 else ()
        copied = made.kernel("copy in", 5 + self.kind(unit), COPY_IN, phase=phase, module=module, waits=after)
        node = made.collective(
            Collective.ALL_GATHER, 0, 8 * self.size(unit), 90, GATHER, phase=phase, module=module, waits=(copied,)
        )
        self.whole[unit] = made.tensor(8 * self.size(unit), Category.UNSHARDED, node, -1)
        self.gathered[unit] = node

    def open(self, unit, phase):
        self.gather(unit, phase)
        if unit in self.gathered:
            self.wait(GATHER, self.gathered.pop(unit))
            node = self.compute("copy out", 8, phase, self.path(unit, "")[:-1])
            self.free(self.whole[unit], node)
            self.whole[unit] = self.made.tensor(8 * self.size(unit), Category.UNSHARDED, node, -1)

    def close(self, unit):
        if unit in self.whole:
            self.free(self.whole.pop(unit), self.last)

    def free(self, tensor, node):
        self.made.tensors[tensor][3] = node

    # -- the step ----------------------------------------------------------------------------------------------

    def record(self):
        for unit in self.units:
            self.made.tensor(self.size(unit), Category.PARAMETER, -1, -1)
            self.made.tensor(2 * self.size(unit), Category.OPTIMIZER, -1, -1)
        start = self.compute("zero", 1, Phase.FORWARD)
        for unit in self.units:
            self.made.tensor(self.size(unit), Category.GRADIENT, -1, start)
        for micro in range(self.chosen.microbatches):
            for at, unit in enumerate(self.units):
                self.forward(at, unit)
            if self.chosen.logs:
                self.made.node(self.made.ops.delay("synchronize", 0), HOST, sync=1, waits=(self.last,))
            for at in reversed(range(len(self.units))):
                self.backward(at, self.units[at], micro == 0)
        if self.reduced is not None:
            self.wait(REDUCE, self.reduced)
            self.free(self.reducing, self.compute("finish", 1, Phase.BACKWARD))
        self.optimizer()
        return self.made.recording()

    def forward(self, at, unit):
        self.open(unit, Phase.FORWARD)
        if self.chosen.prefetch and at + 1 < len(self.units):
            self.gather(self.units[at + 1], Phase.FORWARD)
        self.saved[unit] = []
        for k in range(self.chosen.kernels):
            node = self.compute(
                f"kernel {k}", 20 + 7 * self.kind(unit) + k, Phase.FORWARD, self.path(unit, f"part{k % 12}")
            )
            self.made.tensor(1024 * (k + 1), Category.TEMPORARY, node, node)
            if k == 0 or not self.chosen.recompute:
                self.saved[unit].append(self.made.tensor(2048 + 512 * k, Category.ACTIVATION, node, -1))
        if unit != HEAD:
            self.close(unit)

    def backward(self, at, unit, first):
        self.open(unit, Phase.BACKWARD)
        if self.chosen.prefetch and at:
            self.gather(self.units[at - 1], Phase.BACKWARD)
        if self.chosen.recompute:
            for k in range(1, self.chosen.kernels):
                node = self.compute(
                    f"kernel {k}", 20 + 7 * self.kind(unit) + k, Phase.RECOMPUTE, self.path(unit, f"part{k % 12}")
                )
                self.saved[unit].append(self.made.tensor(2048 + 512 * k, Category.ACTIVATION, node, -1))
        gradient = self.made.tensor(8 * self.size(unit), Category.UNSHARDED, len(self.made), -1)
        for k in reversed(range(self.chosen.kernels)):
            node = self.compute(
                f"gradient {k}", 50 + 7 * self.kind(unit) + k, Phase.BACKWARD, self.path(unit, f"part{k % 12}")
            )
            self.free(self.saved[unit].pop(), node)
        self.close(unit)
        if self.chosen.shards:
            self.reduce(unit, gradient, first)
        else:
            self.free(gradient, self.last)

    def reduce(self, unit, gradient, first):
        """The previous reduction must have ended before its input goes."""
        if self.reduced is not None:
            self.wait(REDUCE, self.reduced)
            self.free(self.reducing, self.compute("drop", 1, Phase.BACKWARD))
        made, where = self.made, {"phase": Phase.BACKWARD, "module": self.path(unit, "")[:-1]}
        copied = made.kernel("copy in", 9, REDUCE, waits=(self.last,), **where)
        self.reduced = made.collective(Collective.REDUCE_SCATTER, 0, 8 * self.size(unit), 120, REDUCE, **where)
        self.reducing = gradient
        if first:
            made.tensor(self.size(unit), Category.GRADIENT, copied, -1)

    def optimizer(self):
        n = len(self.units)
        if self.chosen.clips:
            op = self.made.ops.memory("norms", 4.0 * n, 4.0 * n, flops=3.0 * n)
            node = self.last = self.made.node(op, phase=Phase.OPTIMIZER)
            norms = [self.made.tensor(512, Category.TEMPORARY, node, -1) for _ in self.units]
            total = self.compute("total norm", 4, Phase.OPTIMIZER)
            for norm in norms:
                self.free(norm, total)
            self.made.collective(Collective.ALL_REDUCE, 0, 4, 30, phase=Phase.OPTIMIZER)
        sizes = [self.size(unit) for unit in self.units]
        if self.chosen.optimizer == "each":
            for size in sizes:
                for name in ("decay", "moments", "update"):
                    op = self.made.ops.memory(name, float(size), 0.0, flops=size / 512)
                    node = self.last = self.made.node(op, phase=Phase.OPTIMIZER)
                    self.made.tensor(size, Category.TEMPORARY, node, node)
            return
        for name in ("adam",) if self.chosen.optimizer == "fused" else ("decay", "moments", "update"):
            op = self.made.ops.memory(name, float(sum(sizes)), float(sum(sizes)), flops=sum(sizes) / 512)
            node = self.last = self.made.node(op, phase=Phase.OPTIMIZER)
            if self.chosen.optimizer == "foreach":
                for size in sizes:
                    self.made.tensor(size, Category.TEMPORARY, node, node)
