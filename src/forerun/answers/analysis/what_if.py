"""What-if: how a step changes where one part of the machine is better, found by simulating it again.

Every row changes one thing and leaves everything else as it was:

* twice as fast is twice the figure of the data sheet: bandwidth of links (latencies stay) and of the way through host
  memory of GPUs without peer access, peaks of the matrix units of every dtype, bandwidth of the device's memory (which
  also feeds matrix products and attention), rate of the host link;
* no launch overhead: the host issues a kernel in no time, and the device has no gap between two;
* no host work between steps: what the stack's host does outside forward, backward and optimizer takes no time;
* no contention: kernels run as fast beside collectives as alone;
* a free network: collectives and transfers take no time, which is the most that hiding them could gain.

The user's own measurements stay as they were measured, and a communication pattern that is a function says its own
seconds: rows say nothing about these, except the free network, which takes collectives away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class WhatIf:
    """One part of the machine changed, and the step simulated again."""

    label: str
    """`network twice as fast`"""
    step_time_s: float
    change: float
    """step time over the base's, less 1: -0.11 is 11 % shorter"""
    how: str
    """what was changed and what was left, in words"""


@dataclass(frozen=True)
class Machine:
    """Everything that a what-if may change."""

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
    """What `setup`, which takes the time of `base`, would gain by a better machine; the largest gain first.

    Raises ForerunError as `simulate_setup`.
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
    """As `sensitivities`, of a saved `program` that `predict_program` predicted as `base` on the same machine.

    What the host does between steps is part of a saved Program, so there is no question about it.
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
    """The answers to all questions that change `machine`; equal ones in the order of the questions."""
    base_s = base.prediction.step_time_s
    found = []
    for question in questions:
        changed = question.change(machine)
        if changed != machine:
            time_s = step_s(changed)
            found.append(WhatIf(question.label, time_s, time_s / base_s - 1.0, question.how))
    return tuple(sorted(found, key=lambda row: row.change))


def _questions(machine: Machine, base: Simulation, saved: bool = False) -> Iterator[_Question]:
    """What is worth asking of a step that looks like `base`, of a Program that was built for it or is `saved`."""
    yield _Question("matrix units twice as fast", "peaks of every dtype x 2", lambda m: _devices(m, _peaks))
    yield _Question("HBM twice as fast", "bandwidth of the device's memory x 2", lambda m: _devices(m, _memory))
    yield _Question(
        "no launch overhead", "kernels are issued in no time and follow each other without gaps", _no_launches
    )
    if not saved:
        yield _Question(
            "no host work between steps", "the host's time outside forward, backward and optimizer is 0", _no_host_work
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
        yield _Question(f"{name} twice as fast", how, _of_level(level))
    if crosses_nodes:
        how = "latency of every link / 2, that of NCCL itself as it was"
        yield _Question("network latency halved", how, lambda m: _links(m, later=0.5))
    yield _Question("all links sound", "links run at their rate", lambda m: replace(m, slow_links=1.0))
    if machine.network is None and not machine.cluster.links[0].peer_to_peer:
        yield _Question("peer access", "GPUs of a node reach each other's memory over their links", _peer_access)
    how = "kernels run as fast beside collectives as alone"
    yield _Question("no contention", how, lambda m: _habits(m, overlap_slowdown=0.0))
    yield _Question("free network", "collectives and transfers take no time", _free_network)


def _used_groups(base: Simulation) -> list[CommGroup]:
    """Groups of more than one rank that collectives or transfers run in."""
    ops, groups = base.program.ops, base.program.groups
    used = [groups[number] for number in np.unique(ops.group[ops.group >= 0]).tolist()]
    return [group for group in used if group.size > 1]


def _levels(machine: Machine, n_gpus: int) -> list[tuple[int, str]]:
    """Number and name of the levels of the network that the run reaches, innermost first."""
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
    """Every device of the run changed."""
    kinds = tuple(kind if kind.device is None else replace(kind, device=change(kind.device)) for kind in machine.kinds)
    return replace(machine, cluster=replace(machine.cluster, device=change(machine.cluster.device)), kinds=kinds)


def _peaks(device: Device) -> Device:
    return replace(device, peak_flops={dtype: TWICE * peak for dtype, peak in device.peak_flops.items()})


def _memory(device: Device) -> Device:
    return replace(device, memory_bytes_per_s=TWICE * device.memory_bytes_per_s)


def _habits(machine: Machine, **values: float) -> Machine:
    return replace(machine, stack=replace(machine.stack, **values))  # type: ignore[arg-type]


def _no_launches(machine: Machine) -> Machine:
    return _habits(machine, issue_us=0.0, compiled_issue_us=0.0, kernel_gap_us=0.0, launch_blocking_us=0.0)


def _no_host_work(machine: Machine) -> Machine:
    return _habits(machine, step_us=0.0)


def _host_link(machine: Machine) -> Machine:
    cluster = machine.cluster
    return replace(machine, cluster=replace(cluster, host_bytes_per_s=TWICE * cluster.host_bytes_per_s))


def _sound_gpus(machine: Machine) -> Machine:
    return replace(machine, kinds=tuple(replace(kind, slowdown=min(1.0, kind.slowdown)) for kind in machine.kinds))


def _free_network(machine: Machine) -> Machine:
    measured = None if machine.measured is None else replace(machine.measured, network=None)
    return replace(_habits(_peer_access(machine), network_rate=inf), measured=measured)


def _peer_access(machine: Machine) -> Machine:
    inner, *outer = machine.cluster.links
    return replace(machine, cluster=replace(machine.cluster, links=(replace(inner, peer_to_peer=True), *outer)))


def _of_level(level: int) -> Callable[[Machine], Machine]:
    return lambda machine: _links(machine, faster=TWICE, only=level)


def _links(machine: Machine, faster: float = 1.0, later: float = 1.0, only: int | None = None) -> Machine:
    """The links of all levels, or of one, `faster` times as fast and with `later` times the latency."""
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
