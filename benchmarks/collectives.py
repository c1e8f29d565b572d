"""Seconds and events of collectives against the number of NPUs, on one core.

Run `python benchmarks/collectives.py`. Three curves: a ring all-reduce on a 3-D torus, whose ranks are all alike, so
that one stands for all ("folded"); the same with every rank simulated ("full"); a congestion-aware all-to-all in which
every message meets others at the links. Compilation is not counted.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from forerun.astrasim.astra.collective_cases import implementations
from forerun.astrasim.astra.run import SlotRun
from forerun.astrasim.astra.single import collective_times
from forerun.astrasim.astra.system import System, system_from
from forerun.astrasim.chakra.trace import CommType
from forerun.core.network.network_file import Network, parse_topology
from forerun.core.program.types import I64

BYTES = 1 << 30
TORI = ("4x4x4", "8x8x8", "16x16x16", "32x32x16", "32x32x32", "32x32x64")
FULL = 3
"""tori of which every rank is simulated too, unless all are asked for with --full"""
SQUARES = (8, 16, 24, 32)


def torus(sizes: str) -> Network:
    """A 3-D torus as rings stacked by dimension, 50 GB/s and 500 ns a link."""
    return parse_topology(",".join(f"ring:{n}" for n in sizes.split("x")), [50], [500])


def system(*algorithms: str) -> System:
    return system_from(
        {
            "preferred-dataset-splits": 1,
            "active-chunks-per-dimension": 1,
            "collective-optimization": "localBWAware",
            "local-mem-bw": 1600,
            **implementations(list(algorithms)),
        },
        "benchmark",
    )


def timed(
    network: Network, algorithms: tuple[str, ...], kind: CommType, aware: bool = False, mirror: bool = True
) -> tuple[float, I64, SlotRun]:
    """Seconds it takes, when each rank ends, and the run."""
    begin = time.perf_counter()
    times = collective_times(network, system(*algorithms), kind, BYTES, (), aware, mirror=mirror)
    return time.perf_counter() - begin, times.ends_ns, times.run


def all_reduce_curve(with_full: bool) -> None:
    print("ring all-reduce of 1 GiB on a 3-D torus, congestion-unaware")
    columns = f"{'events':>13}{'M events/s':>12}{'full/folded':>13}"
    print(f"{'torus':>10}{'NPUs':>8}{'time ms':>10}{'folded s':>10}{'full s':>9}{columns}")
    for number, sizes in enumerate(TORI):
        network = torus(sizes)
        folded_s, ends, _ = timed(network, ("ring",) * 3, CommType.ALL_REDUCE)
        line = f"{sizes:>10}{network.n_npus:>8,}{ends.max() / 1e6:>10.3f}{folded_s:>10.4f}"
        if number < FULL or with_full:
            full_s, every_end, run = timed(network, ("ring",) * 3, CommType.ALL_REDUCE, mirror=False)
            if not np.array_equal(ends, every_end):
                sys.exit(f"{sizes}: one rank for all gives {ends.max()} ns, all ranks {every_end.max()} ns")
            line += f"{full_s:>9.2f}{run.n_events:>13,}{run.n_events / full_s / 1e6:>12.1f}{full_s / folded_s:>12,.0f}x"
        print(line, flush=True)


def all_to_all_curve() -> None:
    print("\ndirect all-to-all of 1 GiB, congestion-aware: every message of every rank over every link")
    print(f"{'topology':>10}{'NPUs':>8}{'time ms':>10}{'s':>8}{'events':>13}{'M events/s':>12}{'hottest link':>14}")
    for side in SQUARES:
        for name, text in (
            ("switch", f"switch:{side**2}"),
            ("mesh", f"mesh2d:{side}x{side}"),
            ("torus", f"torus2d:{side}x{side}"),
        ):
            taken_s, ends, run = timed(parse_topology(text, [50], [500]), ("direct",), CommType.ALL_TO_ALL, aware=True)
            rate = run.n_events / taken_s / 1e6
            busy = run.link_busy_ns.max() / ends.max()
            line = f"{name:>10}{side**2:>8,}{ends.max() / 1e6:>10.3f}{taken_s:>8.2f}"
            print(f"{line}{run.n_events:>13,}{rate:>12.1f}{busy:>14.1%}", flush=True)


def main() -> None:
    timed(torus("2x2x2"), ("ring",) * 3, CommType.ALL_REDUCE)  # compiles
    timed(torus("2x2x2"), ("ring",) * 3, CommType.ALL_TO_ALL, aware=True)
    all_reduce_curve("--full" in sys.argv[1:])
    all_to_all_curve()


if __name__ == "__main__":
    main()
