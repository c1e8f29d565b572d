"""Nodes per second of unfolding, of the clock-free engine and of the contended one, on one core.

Run `python benchmarks/engine.py`. The program is a pipeline of FSDP-like stages: compute layers, gathers and reductions
on their own streams, and sends that meet the next stage's receives.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from forerun.core.engine.simulate import simulate
from forerun.core.program.builder import BlockBuilder, OpTableBuilder
from forerun.core.program.groups import CommGroup
from forerun.core.program.kinds import OpKind
from forerun.core.program.types import (
    N_CATEGORIES,
    Block,
    Channel,
    Collective,
    Phase,
    Program,
    RankClass,
    Stream,
)
from forerun.core.program.unfold import unfold

NODES_PER_LAYER = 20


def layer(gather: int, reduce: int, gemm: int, phase: Phase, limited: bool) -> Block:
    """One gathered layer: the gather of the next layer and the reduction of the last run beside the compute.

    Gathers that are `limited` are one layer ahead at most; others as far as the host is.
    """
    block = BlockBuilder()
    for i in range(NODES_PER_LAYER):
        wait = (0,) if i == 0 else ()
        if i == 1:
            block.node(gather, Stream.GATHER, phase, wait=(1,) if limited else (), record=0)
        block.node(gemm, Stream.COMPUTE, phase, wait=wait, record=1 if i == NODES_PER_LAYER - 1 else -1)
    block.node(reduce, Stream.REDUCE, phase, wait=(1,))
    return block.build(f"layer {phase.name.lower()}")


def transfer(op: int, stream: Stream, channel: int, phase: Phase) -> Block:
    block = BlockBuilder()
    if stream == Stream.PP_SEND:
        block.node(op, stream, phase, wait=(1,), channel=channel)
    else:
        block.node(op, stream, phase, record=0, channel=channel)
    return block.build(f"{stream.name.lower()} {channel}")


def pipeline(stages: int, layers: int, microbatches: int, limited: bool = False) -> Program:
    """`stages` rank classes that run every forward, then every backward (GPipe)."""
    ops = OpTableBuilder()
    gemm = ops.gemm("gemm", 1024, 1024, 1024)
    gather = ops.collective("gather", Collective.ALL_GATHER, 0, 2**20)
    reduce = ops.collective("reduce", Collective.REDUCE_SCATTER, 0, 2**20)
    move = ops.p2p("move", 0, 2**20)
    blocks = [layer(gather, reduce, gemm, phase, limited) for phase in (Phase.FORWARD, Phase.BACKWARD)]
    channels: list[Channel] = []
    transfers: dict[tuple[Phase, Stream, int], int] = {}
    for s in range(stages - 1):
        for phase, members in ((Phase.FORWARD, (s, s + 1)), (Phase.BACKWARD, (s + 1, s))):
            for stream, member in zip((Stream.PP_SEND, Stream.PP_RECV), members, strict=True):
                transfers[phase, stream, member] = len(blocks)
                blocks.append(transfer(move, stream, len(channels), phase))
            channels.append(Channel(f"{phase.name.lower()} {members}", members))
    classes = []
    for s in range(stages):
        sequence = []
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            receive, send = transfers.get((phase, Stream.PP_RECV, s)), transfers.get((phase, Stream.PP_SEND, s))
            for _ in range(microbatches):
                sequence += [receive] if receive is not None else []
                sequence += [int(phase)] * layers
                sequence += [send] if send is not None else []
        steps = np.array(sequence, np.int32)
        resident = np.zeros(N_CATEGORIES, np.int64)
        classes.append(RankClass(f"stage {s}", 1, steps, np.zeros_like(steps), np.zeros_like(steps), resident))
    return Program(ops.build(), tuple(blocks), tuple(classes), (CommGroup("dp", 8, 1, 8),), tuple(channels), ("layer",))


def best_s(run: Callable[[], object], repeats: int = 7) -> float:
    """Fastest of some runs, in seconds; the first run compiles and is not counted."""
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def measure(name: str, program: Program) -> str:
    """One line of the table."""
    flat = unfold(program)
    duration, issue = np.full(flat.n_ops, 50_000_000), np.full(flat.n_ops, 5_000_000)
    free, slow = np.zeros(flat.n_ops), np.full(flat.n_ops, 0.1)
    network = np.array([kind != OpKind.GEMM for kind in program.ops.kind])
    unfold_s = best_s(lambda: unfold(program))
    free_s = best_s(lambda: simulate(flat, duration, issue, free, free, network))
    slow_s = best_s(lambda: simulate(flat, duration, issue, slow, slow, network))
    million = len(flat) / 1e6
    rates = f"{million / unfold_s:>12.1f}{million / free_s:>12.1f}{million / slow_s:>16.1f}"
    return f"{name:<36}{len(flat):>9}{rates}{free_s * 1e6:>10.0f}{slow_s * 1e6:>10.0f}"


def main() -> None:
    rates = f"{'unfold M/s':>12}{'free M/s':>12}{'contended M/s':>16}"
    print(f"{'program':<36}{'nodes':>9}{rates}{'free us':>10}{'cont. us':>10}")
    print(measure("one class, 32 layers", pipeline(1, 32, 1)))
    print(measure("one class, 32 layers x 32 batches", pipeline(1, 32, 32)))
    print(measure("4 stages x 8 layers x 8 batches", pipeline(4, 8, 8)))
    print(measure("16 stages x 8 layers x 64 batches", pipeline(16, 8, 64)))


if __name__ == "__main__":
    main()
