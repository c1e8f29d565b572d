"""Recordings of a training step on a mesh of pipeline stages, data and tensor parallelism."""

from __future__ import annotations

from made_recordings import Recorder

from forerun.core.program.types import Category, Collective, Phase

DATA, TENSOR, PIPELINE, WORLD = range(4)
GATHER, REDUCE, MESSAGES = 1, 2, 3


class Mesh:
    """Ranks of named axes, the outermost first."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes
        self.world = 1
        self.step = {}
        for name in reversed(sizes):
            self.step[name] = self.world
            self.world *= sizes[name]

    def rank(self, **place: int) -> int:
        return sum(self.step[name] * place.get(name, 0) for name in self.sizes)

    def group(self, axis: str, **place: int) -> tuple[int, ...]:
        return tuple(self.rank(**{**place, axis: k}) for k in range(self.sizes[axis]))


def pipeline_stages(mesh: Mesh, n_micro: int = 8, layers: int = 2):
    """1F1B on `mesh` (axes pp, dp_shard and tp), one recording a stage."""
    return [_Stage(mesh, stage, n_micro, layers).record() for stage in range(mesh.sizes["pp"])]


class _Stage:
    def __init__(self, mesh: Mesh, stage: int, n_micro: int, layers: int) -> None:
        self.mesh, self.stage, self.n_micro, self.layers = mesh, stage, n_micro, layers
        groups = [
            ("dp_shard", mesh.group("dp_shard", pp=stage)),
            ("tp", mesh.group("tp", pp=stage)),
            ("pp", mesh.group("pp")),
            ("world", tuple(range(mesh.world))),
        ]
        meta = {"world_size": mesh.world, "gpus_per_node": 8, "data_parallel": ["dp_shard"], "sharded": ["dp_shard"]}
        self.made = Recorder(mesh.rank(pp=stage), groups, **meta, tokens=100, data_parallel_size=mesh.sizes["dp_shard"])
        self.saved = []

    @property
    def last(self) -> int:
        return self.mesh.sizes["pp"] - 1

    def message(self, sends: bool, to: int, phase: Phase, waits=()) -> int:
        peer = self.mesh.rank(pp=self.stage + to)
        return self.made.message(sends, peer, PIPELINE, 1 << 20, 20_000, MESSAGES, phase=phase, waits=waits)

    def work(self, name: str, phase: Phase, got: int | None) -> int:
        made, waits = self.made, () if got is None else (got,)
        order = range(self.layers) if phase == Phase.FORWARD else reversed(range(self.layers))
        for layer in order:
            where = {"phase": phase, "module": f"layers.{self.stage * self.layers + layer}.mlp"}
            done = made.kernel(name, 400_000, waits=waits, **where)
            made.collective(Collective.ALL_REDUCE, TENSOR, 1 << 20, 30_000, **where)
            waits = ()
            if phase == Phase.FORWARD:
                self.saved.append(made.tensor(1 << 20, Category.ACTIVATION, done, -1))
            else:
                made.tensors[self.saved.pop(0)][3] = done
        return len(made) - 1

    def record(self):
        made, phase = self.made, Phase.FORWARD
        made.tensor(1 << 22, Category.PARAMETER, -1, -1)
        whole = made.collective(Collective.ALL_GATHER, DATA, 1 << 25, 50_000, GATHER)
        made.kernel("copy out", 10_000, waits=(whole,))
        forward = backward = 0
        got = self.message(False, -1, phase) if self.stage else None
        while backward < self.n_micro:
            if forward < self.n_micro and forward - backward <= self.last - self.stage:
                done = self.work("multiply", Phase.FORWARD, got)
                forward += 1
                steady = forward - backward > self.last - self.stage
                # In the steady state the output goes as the gradient comes, in one batch.
                if self.stage < self.last:
                    self.message(True, 1, phase, (done,))
                more = forward < self.n_micro and not steady
                got = self.message(False, -1, phase) if self.stage and more else None
            else:
                gradient = self.message(False, 1, Phase.BACKWARD) if self.stage < self.last else None
                done = self.work("gradient", Phase.BACKWARD, gradient)
                backward += 1
                if self.stage:
                    self.message(True, -1, Phase.BACKWARD, (done,))
                    got = self.message(False, -1, phase) if forward < self.n_micro else None
        made.collective(Collective.REDUCE_SCATTER, DATA, 1 << 25, 90_000, REDUCE, phase=Phase.BACKWARD, waits=(done,))
        reduced = len(made) - 1
        made.kernel("norm", 5_000, phase=Phase.OPTIMIZER, waits=(reduced,))
        made.collective(Collective.ALL_REDUCE, WORLD, 4, 20_000, phase=Phase.OPTIMIZER)
        made.kernel("adam", 100_000, phase=Phase.OPTIMIZER)
        return made.recording()
