"""Answers what-if questions: simulates a step again with one part of the machine improved, and compares the times.

Every row changes one part and leaves everything else as it was:

* twice as fast doubles the figure of the data sheet: bandwidth of links (latencies stay) and of the path through host
  memory between GPUs without peer access, peaks of the matrix units of every dtype, bandwidth of the device's memory
  (which also feeds matrix products and attention), rate of the host link;
* no launch overhead: the host issues a kernel in no time, and the device has no gap between two kernels;
* no host work between steps: the host's work outside forward, backward and optimizer takes no time;
* no contention: kernels run as fast beside collectives as alone;
* a free network: collectives and transfers take no time, which is the most that hiding them could gain.

The user's own measurements stay as they were measured, and a communication pattern that is a function computes its own
seconds. Rows don't change these, except the free network, which removes collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import numpy as np

from forerun.answers.analysis.predict_program import placed_program
from forerun.answers.analysis.reading import Simulation, simulate_program
from forerun.answers.analysis.setup import RankKind, Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.core.cost.measured import Measured
from forerun.core.network.host_path import host_path_bytes_per_s
from forerun.core.network.network_file import Network
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import Program
from forerun.describe.cluster.types import Cluster, Device
from forerun.describe.stacks.stack import Stack

TWICE = 2.0
_NO_LAUNCHES = dict.fromkeys(("issue_us", "compiled_issue_us", "kernel_gap_us", "launch_blocking_us"), 0.0)


@dataclass(frozen=True)
class WhatIf:
    """The outcome of simulating the step again with one part of the machine changed."""

    label: str
    """`network twice as fast`"""
    step_time_s: float
    change: float
    """step time over that of the base, less 1: -0.11 is 11 % shorter"""
    how: str
    """the changed and the unchanged parts, in words"""


@dataclass(frozen=True)
class Machine:
    """The parts of the machine that a what-if may change."""

    cluster: Cluster
    stack: Stack
    network: Network | None = None
    measured: Measured | None = None
    kinds: tuple[RankKind, ...] = ()
    slow_links: float = 1.0


@dataclass(frozen=True)
class _Question:
    label: str
    how: str
    change: Callable[[Machine], Machine]


def sensitivities(setup: Setup, base: Simulation) -> tuple[WhatIf, ...]:
    """Returns the change in step time of `setup` on better machines, the largest gain first; `base` simulates `setup`.

    Raises ForerunError like `simulate_setup`.
    """
    machine = Machine(setup.cluster, setup.stack, setup.network, setup.measured, setup.kinds, setup.slow_links)

    def step_s(changed: Machine) -> float:
        other = replace(
            setup,
            cluster=changed.cluster,
            changed_stack=changed.stack,
            network=changed.network,
            measured=changed.measured,
            kinds=changed.kinds,
            slow_links=changed.slow_links,
            replays=False,
        )
        return simulate_setup(other, folded=True).prediction.step_time_s

    return _ask(machine, base, step_s, _questions(machine, base))


def sensitivities_of_program(
    program: Program,
    cluster: Cluster,
    base: Simulation,
    *,
    network: Network | None = None,
    measured: Measured | None = None,
) -> tuple[WhatIf, ...]:
    """Returns `sensitivities` of a saved `program` that `predict_program` predicted as `base` on the same machine.

    A saved Program contains the host's work between steps, so no row is about it.
    """
    machine = Machine(cluster, base.subject.stack, network, measured)
    placed = placed_program(program, cluster, base.subject.n_gpus)

    def step_s(changed: Machine) -> float:
        subject = replace(base.subject, stack=changed.stack)
        again = simulate_program(
            placed, subject, changed.cluster, folded=True, network=changed.network, measured=changed.measured
        )
        return again.prediction.step_time_s

    return _ask(machine, base, step_s, _questions(machine, base, saved=True))


def _ask(
    machine: Machine, base: Simulation, step_s: Callable[[Machine], float], questions: Iterable[_Question]
) -> tuple[WhatIf, ...]:
    """Answers all questions that change `machine`, the largest gain first; equal gains keep the questions' order."""
    base_s = base.prediction.step_time_s
    found = []
    for question in questions:
        changed = question.change(machine)
        if changed != machine:
            time_s = step_s(changed)
            found.append(WhatIf(question.label, time_s, time_s / base_s - 1.0, question.how))
    return tuple(sorted(found, key=lambda row: row.change))


def _questions(machine: Machine, base: Simulation, saved: bool = False) -> Iterator[_Question]:
    """Yields the questions worth asking of a step like `base`, whose Program was built from a plan or is `saved`."""
    yield _Question("matrix units twice as fast", "peaks of every dtype x 2", lambda m: _devices(m, _peaks))
    yield _Question("HBM twice as fast", "bandwidth of the device's memory x 2", lambda m: _devices(m, _memory))
    yield _Question(
        "no launch overhead",
        "kernels are issued in no time and follow each other without gaps",
        lambda m: _with_stack(m, **_NO_LAUNCHES),
    )
    if not saved:
        yield _Question(
            "no host work between steps",
            "the host's time outside forward, backward and optimizer is 0",
            lambda m: _with_stack(m, step_us=0.0),
        )
    if base.program.ops.is_host_copy.any():
        yield _Question("host link twice as fast", "rate between device and host memory x 2", _host_link)
    groups = _used_groups(base)
    if groups:
        yield from _network_questions(machine, base.subject.n_gpus, any(group.nodes > 1 for group in groups))
    yield _Question("all GPUs sound", "no GPU runs its kernels slower than its device does", _sound_gpus)


def _network_questions(machine: Machine, n_gpus: int, crosses_nodes: bool) -> Iterator[_Question]:
    bandwidth = "bandwidth of every link x 2, latencies as they were"
    yield _Question("network twice as fast", bandwidth, lambda m: _links(m, faster=TWICE))
    levels = _levels(machine, n_gpus)
    for level, name in levels if len(levels) > 1 else ():
        how = f"bandwidth of {name} x 2, everything else as it was"
        yield _Question(f"{name} twice as fast", how, partial(_links, faster=TWICE, only=level))
    if crosses_nodes:
        how = "latency of every link / 2, that of NCCL itself as it was"
        yield _Question("network latency halved", how, lambda m: _links(m, later=0.5))
    yield _Question("all links sound", "links run at their rate", lambda m: replace(m, slow_links=1.0))
    if machine.network is None and not machine.cluster.links[0].peer_to_peer:
        yield _Question("peer access", "GPUs of a node reach each other's memory over their links", _peer_access)
    how = "kernels run as fast beside collectives as alone"
    yield _Question("no contention", how, lambda m: _with_stack(m, overlap_slowdown=0.0))
    yield _Question("free network", "collectives and transfers take no time", _free_network)


def _used_groups(base: Simulation) -> list[CommGroup]:
    """Returns the groups of more than one rank in which collectives or transfers run."""
    ops, groups = base.program.ops, base.program.groups
    used = [groups[number] for number in np.unique(ops.group[ops.group >= 0]).tolist()]
    return [group for group in used if group.size > 1]


def _levels(machine: Machine, n_gpus: int) -> list[tuple[int, str]]:
    """Returns the number and the name of each level of the network that the run reaches, innermost first."""
    found, reach = [], 1
    if machine.network is not None:
        dims, strides = machine.network.dims, machine.network.strides
        return [(i, f"dimension {i} ({dim.topology})") for i, dim in enumerate(dims) if strides[i] < n_gpus]
    for number, link in enumerate(machine.cluster.links):
        found.append((number, f"{link.name} links"))
        reach *= link.size or n_gpus
        if reach >= n_gpus:
            break
    return found


# -- changes -------------------------------------------------------------------------------------------------------


def _devices(machine: Machine, change: Callable[[Device], Device]) -> Machine:
    """Applies `change` to every device of the run."""
    kinds = tuple(kind if kind.device is None else replace(kind, device=change(kind.device)) for kind in machine.kinds)
    return replace(machine, cluster=replace(machine.cluster, device=change(machine.cluster.device)), kinds=kinds)


def _peaks(device: Device) -> Device:
    return replace(device, peak_flops={dtype: TWICE * peak for dtype, peak in device.peak_flops.items()})


def _memory(device: Device) -> Device:
    return replace(device, memory_bytes_per_s=TWICE * device.memory_bytes_per_s)


def _with_stack(machine: Machine, **values: float) -> Machine:
    return replace(machine, stack=replace(machine.stack, **values))  # type: ignore[arg-type]


def _host_link(machine: Machine) -> Machine:
    cluster = machine.cluster
    return replace(machine, cluster=replace(cluster, host_bytes_per_s=TWICE * cluster.host_bytes_per_s))


def _sound_gpus(machine: Machine) -> Machine:
    return replace(machine, kinds=tuple(replace(kind, slowdown=min(1.0, kind.slowdown)) for kind in machine.kinds))


def _free_network(machine: Machine) -> Machine:
    measured = None if machine.measured is None else replace(machine.measured, network=None)
    return replace(_with_stack(_peer_access(machine), network_rate=inf), measured=measured)


def _peer_access(machine: Machine) -> Machine:
    inner, *outer = machine.cluster.links
    return replace(machine, cluster=replace(machine.cluster, links=(replace(inner, peer_to_peer=True), *outer)))


def _links(machine: Machine, faster: float = 1.0, later: float = 1.0, only: int | None = None) -> Machine:
    """Makes the links of all levels, or of level `only`, `faster` times as fast, with `later` times the latency."""
    if machine.network is not None:
        dims = tuple(
            dim.scaled(faster, later) if only in (None, number) else dim
            for number, dim in enumerate(machine.network.dims)
        )
        return replace(machine, network=replace(machine.network, dims=dims))
    cluster = machine.cluster
    host_path = host_path_bytes_per_s(cluster, cluster.node_size)
    links = [
        replace(link, bytes_per_s=link.bytes_per_s * faster, latency_s=link.latency_s * later)
        if only in (None, number)
        else link
        for number, link in enumerate(cluster.links)
    ]
    if host_path is not None and only in (None, 0):
        links[0] = replace(links[0], host_path_bytes_per_s=host_path * faster)
    return replace(machine, cluster=replace(cluster, links=tuple(links)))
