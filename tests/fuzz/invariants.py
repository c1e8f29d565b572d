"""What must hold for every plan: better hardware is never slower, folding changes nothing, and answers repeat.

Run: python tests/fuzz/invariants.py 5000 --seed 3. It prints what is violated, with the plan, and exits with 1 then.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from random_plans import random_setups

from forerun.answers.analysis.prediction import Prediction
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.describe.cluster.types import Cluster, KernelRates

SLACK = 1e-9
"""relative error of sums of times"""


def with_links(factor_bytes: float, factor_latency: float) -> Callable[[Cluster], Cluster]:
    def changed(cluster: Cluster) -> Cluster:
        links = (
            replace(one, bytes_per_s=one.bytes_per_s * factor_bytes, latency_s=one.latency_s * factor_latency)
            for one in cluster.links
        )
        return replace(cluster, links=tuple(links))

    return changed


def with_rate(name: str, factor: float) -> Callable[[Cluster], Cluster]:
    return lambda cluster: replace(cluster, rates=cluster.rates.times(KernelRates(**{name: factor})))


def with_memory(factor: float) -> Callable[[Cluster], Cluster]:
    def changed(cluster: Cluster) -> Cluster:
        return replace(cluster, device=replace(cluster.device, memory_bytes=int(cluster.device.memory_bytes * factor)))

    return changed


BETTER: dict[str, Callable[[Cluster], Cluster]] = {
    "links twice as fast": with_links(2.0, 1.0),
    "latency halved": with_links(1.0, 0.5),
    "products a tenth faster": with_rate("gemm", 1.1),
    "attention a tenth faster": with_rate("attention", 1.1),
    "memory a tenth faster": with_rate("memory", 1.1),
    "network a tenth faster": with_rate("network", 1.1),
    "host twice as fast": with_rate("host", 2.0),
}


def predicted(setup: Setup, folded: bool = True) -> Prediction:
    return simulate_setup(setup, folded=folded).prediction


def violations(setup: Setup) -> Iterator[str]:
    """Yields what does not hold for `setup`, in words."""
    base = predicted(setup)
    yield from wrong_figures(base)
    whole = predicted(setup, folded=False)
    if abs(whole.step_time_s / base.step_time_s - 1) > SLACK or whole.peak_allocated_gib != base.peak_allocated_gib:
        yield f"unfolded: {whole.step_time_s} s, {whole.peak_allocated_gib} GiB; folded: {base.step_time_s} s"
    if predicted(setup) != base:
        yield "a second time it is another prediction"
    for name, better in BETTER.items():
        found = predicted(replace(setup, cluster=better(setup.cluster)))
        if found.step_time_s > base.step_time_s * (1 + SLACK):
            yield f"{name}: {found.step_time_s / base.step_time_s - 1:.2e} slower"
        if found.peak_allocated_gib != base.peak_allocated_gib:
            yield f"{name}: {found.peak_allocated_gib} GiB in place of {base.peak_allocated_gib}"
    more = predicted(replace(setup, cluster=with_memory(2.0)(setup.cluster)))
    if more.fits < base.fits or more.step_time_s != base.step_time_s:
        yield "twice the memory: it fits no more, or takes another time"


def wrong_figures(one: Prediction) -> Iterator[str]:
    if not one.step_time_low_s <= one.step_time_s <= one.step_time_high_s:
        yield "the band does not hold the step"
    if one.mfu is not None and not 0 < one.mfu <= one.hfu <= 1:
        yield f"MFU {one.mfu}, HFU {one.hfu}"
    if not 0 < one.peak_allocated_gib <= one.peak_reserved_gib:
        yield f"allocated {one.peak_allocated_gib}, reserved {one.peak_reserved_gib} GiB"
    if abs(sum(one.memory_by_category_gib.values()) / one.peak_allocated_gib - 1) > SLACK:
        yield "categories of memory don't add up to the peak"


def digest(number: int, seed: int) -> str:
    """Returns a digest of the predictions of random plans, which no hash seed and no number of threads changes."""
    found = hashlib.sha256()
    for setup in random_setups(number, seed):
        found.update(repr(predicted(setup)).encode())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int, nargs="?", default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--digest", action="store_true", help="print a digest of all predictions, and check nothing")
    given = parser.parse_args()
    if given.digest:
        print(digest(given.number, given.seed))
        return
    kinds: Counter[str] = Counter()
    for setup in random_setups(given.number, given.seed):
        for problem in violations(setup):
            kinds[problem.split(":")[0]] += 1
            print(f"{setup.model.name} on {setup.cluster.name}, {setup.plan}\n  {problem}", flush=True)
    print(f"{given.number} plans; {sum(kinds.values())} violations {dict(kinds) or ''}")
    sys.exit(bool(kinds))


if __name__ == "__main__":
    main()
