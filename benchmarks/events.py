"""Events per second and memory of the engine on Programs of ten million nodes, on one core.

Run `python benchmarks/events.py`. The Programs are those of `engine.py`, with gathers one layer ahead and as many micro
batches as it takes. Stream order is *fixed* where nothing slows anything, so that no clock is needed; *contended* runs
go from event to event. Every measurement is a process of its own, whose memory is counted from after a small run of the
same kind.

`unfold s` and `run s` are seconds of expanding the blocks and of running the nodes. Events are starts and ends of
nodes. `over asked` is nodes/s over 15 million where stream order is fixed, else events/s over 3 million.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from dataclasses import dataclass

import numpy as np
from engine import pipeline

from forerun.core.engine.simulate import simulate
from forerun.core.program.kinds import OpKind
from forerun.core.program.types import Program
from forerun.core.program.unfold import unfold

NODES = 10_000_000
PIPELINES = {"one class": (1, 32), "16 stages": (16, 8)}
"""name -> stages, layers of each"""
ASKED_EVENTS_PER_S = 3e6
ASKED_NODES_PER_S = 15e6


@dataclass(frozen=True)
class Measured:
    """One run of one Program."""

    nodes: int
    unfold_s: float
    run_s: float
    peak_bytes: int = 0


def program_of(stages: int, layers: int, nodes: int) -> Program:
    """A pipeline of about `nodes` nodes."""
    few = len(unfold(pipeline(stages, layers, 1, limited=True)))
    return pipeline(stages, layers, max(1, round(nodes / few)), limited=True)


def run(program: Program, slow: float) -> Measured:
    """Run `program` once."""
    n_ops = len(program.ops)
    network = np.array([kind != OpKind.GEMM for kind in program.ops.kind])
    slowed = np.full(n_ops, slow)
    costs = (np.full(n_ops, 50_000_000), np.full(n_ops, 5_000_000), slowed, slowed, network)
    begin = time.perf_counter()
    flat = unfold(program)
    unfolded = time.perf_counter()
    simulate(flat, *costs)
    return Measured(len(flat), unfolded - begin, time.perf_counter() - unfolded)


def resident_bytes() -> int:
    """The most that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(stages: int, layers: int, nodes: int, slow: float) -> Measured:
    """One run in this process, after a small one that compiles."""
    run(pipeline(stages, layers, 1, limited=True), slow)
    program = program_of(stages, layers, nodes)
    before = resident_bytes()
    done = run(program, slow)
    return Measured(done.nodes, done.unfold_s, done.run_s, resident_bytes() - before)


def in_own_process(*arguments: object) -> Measured:
    """`measure` where no other run has taken memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=NODES, help="of each Program (%(default)s)")
    nodes = parser.parse_args().nodes
    columns = ("nodes", "unfold s", "run s", "nodes M/s", "events M/s", "over asked", "peak MiB", "bytes/node")
    print(f"{'program':<11}{'stream order':<14}" + "".join(f"{column:>11}" for column in columns))
    for name, (stages, layers) in PIPELINES.items():
        for mode, slow in (("fixed", 0.0), ("contended", 0.1)):
            m = in_own_process(stages, layers, nodes, slow)
            rate = m.nodes / m.run_s
            over = 2 * rate / ASKED_EVENTS_PER_S if slow else rate / ASKED_NODES_PER_S
            figures = f"{m.nodes:>11}{m.unfold_s:>11.2f}{m.run_s:>11.2f}{rate / 1e6:>11.1f}{2 * rate / 1e6:>11.1f}"
            memory = f"{m.peak_bytes / 2**20:>11.1f}{m.peak_bytes / m.nodes:>11.2f}"
            print(f"{name:<11}{mode:<14}{figures}{over:>11.1f}{memory}")


if __name__ == "__main__":
    main()
