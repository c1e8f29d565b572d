"""Replicas that train alone for some steps and then synchronise in an outer step: local SGD, DiLoCo, Streaming DiLoCo.

The inner step is that of one replica alone on its GPUs. The cost of an outer step follows torchft's `LocalSGD` and
`DiLoCo`: their kernels, host copies, exchanges and waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Any

import numpy as np

from forerun.answers.analysis.prediction import Prediction
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.common.errors import ForerunError, UnknownName
from forerun.common.shipped import shipped_data
from forerun.common.units import GIB, GIGA
from forerun.core.cost.gradient_exchange import wires_of
from forerun.core.cost.memory_bound import host_copy_s, memory_bound_s, memory_rates
from forerun.core.network.nccl import wire_efficiency
from forerun.core.network.outer_exchange import WIRE_BYTES, outer_exchange_s
from forerun.core.program.groups import CommGroup
from forerun.describe.cluster.types import Link
from forerun.describe.plan.rules import DTYPE_BYTES
from forerun.sources.symbolic.training_state import trained_elements

METHODS = ("local_sgd", "diloco")
KEEPS = ("cpu", "gpu")
_PLACE = "--outer-steps"
_ALLOWED = 0.05
"""share of the time that outer steps may take at the bandwidth that is looked for"""
_STEPS = 12
_WIDEST = 1024.0
"""that bandwidth is sought up to this factor from the cluster's"""


@dataclass(frozen=True)
class OuterSteps:
    """Describes how replicas agree. `wire`, `keep`, `fragments` and `delay` default to the values of torchft."""

    method: str
    every: int = 100
    """inner steps between two outer steps of the same parameters (torchft's sync_every)"""
    fragments: int = 1
    """parts of the model that take turns"""
    delay: int = 0
    """inner steps that run beside the exchange of a fragment (fragment_sync_delay)"""
    wire: str = "fp32"
    """dtype of the exchanged values"""
    keep: str = "cpu"
    """memory that holds the parameters of the last outer step (backup_device)"""
    link_gb_s: float | None = None
    """GB/s that NCCL reaches between a replica and the others, where another link than the cluster's joins them"""
    link_ms: float = 0.0
    """latency of that link"""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ForerunError(f"{_PLACE}: {UnknownName('method', self.method, list(METHODS))}")
        for name, known in (("wire", list(WIRE_BYTES)), ("keep", list(KEEPS))):
            if getattr(self, name) not in known:
                raise ForerunError(f"{_PLACE}: {UnknownName(name, getattr(self, name), known)}")
        if self.every < 1 or self.fragments < 1 or self.every % self.fragments:
            raise ForerunError(
                f"{_PLACE}: every must be a multiple of fragments, got {self.every} and {self.fragments}"
            )
        if not 0 <= self.delay < self.every // self.fragments:
            most = self.every // self.fragments - 1
            raise ForerunError(f"{_PLACE}: delay must be between 0 and {most} steps, got {self.delay}")
        if self.method == "local_sgd" and (self.fragments, self.delay) != (1, 0):
            raise ForerunError(f"{_PLACE}: local_sgd takes no fragments and no delay; use diloco")
        if self.link_gb_s is not None and not 0 < self.link_gb_s < inf:
            raise ForerunError(f"{_PLACE}: link_gb_s must be above 0, got {self.link_gb_s:g}")
        if not 0 <= self.link_ms < inf or (self.link_ms and self.link_gb_s is None):
            raise ForerunError(f"{_PLACE}: link_ms must be at least 0, and it needs link_gb_s")

    @staticmethod
    def of_text(text: str) -> OuterSteps:
        """Reads the text of an option: a method, and its settings after a colon, such as diloco:every=500,wire=fp8.

        Raises ForerunError for an unknown method or setting, or a value that makes no sense.
        """
        method, _, rest = text.partition(":")
        given: dict[str, Any] = {}
        for part in filter(None, (piece.strip() for piece in rest.split(","))):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if name not in _SETTINGS:
                raise ForerunError(f"{_PLACE} {text}: {UnknownName('setting', name, list(_SETTINGS))}")
            try:
                given[name] = _SETTINGS[name](value)
            except ValueError:
                equals = ""
            if not equals:
                raise ForerunError(f"{_PLACE} {text}: expected a value for {name}, as in {_EXAMPLES[name]}")
        return OuterSteps(method.strip(), **given)


_SETTINGS = {
    "every": int, "fragments": int, "delay": int, "wire": str, "keep": str, "link_gb_s": float, "link_ms": float
}  # fmt: skip
_EXAMPLES = {
    name: f"{name}={value}"
    for name, value in zip(_SETTINGS, ("500", "4", "5", "fp8", "gpu", "1.25", "30"), strict=True)
}


@dataclass(frozen=True)
class OuterEffect:
    """Holds the mean time of a step if replicas agree in outer steps only. Times are in seconds."""

    steps: OuterSteps
    replicas: int
    gpus_of_replica: int
    inner_step_s: float
    """a step of one replica alone"""
    exchange_s: float
    """exchange of one fragment"""
    exposed_s: float
    """the part of it that no inner step hides"""
    kernels_s: float
    """kernels and host copies of the outer step of one fragment"""
    mean_step_s: float
    plain_step_s: float
    """the step in which all replicas sum their gradients, over the same links"""
    tokens_per_s: float | None
    """of all replicas on average; None if tokens are not known"""
    sent_gib: float
    """GiB of a fragment that the fullest rank exchanges"""
    gpu_gib: float
    """memory of the fullest rank for outer parameters, momentum and the fragment that is exchanged beside inner
    steps
    """
    host_gib: float
    """host memory of the fullest rank for outer parameters"""
    fits: bool
    """whether the inner step and `gpu_gib` together fit"""
    needed_gb_s: float | None
    """GB/s of each GPU to other replicas, or of each replica where the steps have a link of their own, from which outer
    steps take at most 5 % of the time; None: at any bandwidth they take more"""
    caveat: str
    source: str


def replica_of(setup: Setup, steps: OuterSteps) -> Setup:
    """Returns the setup of one replica alone.

    Raises ForerunError if the plan has one replica only, or one that is not a whole number of nodes on a slow link.
    """
    plan, cluster = setup.plan, setup.cluster
    if plan.dp_replicate == 1:
        raise ForerunError(f"{_PLACE}: the plan has one replica; give the number of replicas with --dp-replicate")
    if setup.network is not None or setup.kinds:
        raise ForerunError(f"{_PLACE}: replicas need equal GPUs on a cluster's own links; leave --network out")
    own = setup.n_gpus // plan.dp_replicate
    if steps.link_gb_s is not None and own % cluster.node_size:
        raise ForerunError(
            f"{_PLACE}: link_gb_s needs replicas of whole nodes ({cluster.node_size} GPUs), got {own} GPUs"
        )
    return replace(setup, plan=replace(plan, dp_replicate=1))


def outer_effect(setup: Setup, steps: OuterSteps, alone: Prediction) -> OuterEffect:
    """Returns the mean time and the memory of a step of `setup`, whose plan has several replicas. `alone` is the
    prediction of its `replica_of`.

    Raises ForerunError as `replica_of` does.
    """
    outer = _Outer.of(setup, steps)
    exchange_s, kernels_s, inner_s = outer.exchange_s(), outer.kernels_s(), alone.step_time_s
    mean_s = inner_s + outer.added_s(inner_s)
    gpu_gib, host_gib = outer.memory_gib()
    rate = alone.tokens_per_s_per_gpu
    said = _said(steps)
    return OuterEffect(
        steps=steps,
        replicas=setup.plan.dp_replicate,
        gpus_of_replica=outer.inner.n_gpus,
        inner_step_s=inner_s,
        exchange_s=exchange_s,
        exposed_s=max(0.0, exchange_s - steps.delay * inner_s),
        kernels_s=kernels_s,
        mean_step_s=mean_s,
        plain_step_s=simulate_setup(replace(outer.joined, replays=False), folded=True).prediction.step_time_s,
        tokens_per_s=None if rate is None else rate * setup.n_gpus * inner_s / mean_s,
        sent_gib=outer.elements * WIRE_BYTES[steps.wire] / GIB,
        gpu_gib=gpu_gib,
        host_gib=host_gib,
        fits=alone.fits and alone.peak_reserved_gib + gpu_gib <= alone.memory_limit_gib,
        needed_gb_s=outer.needed_gb_s(inner_s),
        caveat=said["caveat"],
        source=said["source"],
    )


@dataclass(frozen=True)
class _Outer:
    """The outer step of one fragment."""

    steps: OuterSteps
    inner: Setup
    joined: Setup
    """all replicas, over the links that join them"""
    elements: float
    """parameters of the fragment on the fullest rank"""
    element_bytes: int

    @staticmethod
    def of(setup: Setup, steps: OuterSteps) -> _Outer:
        inner = replica_of(setup, steps)
        elements = max(trained_elements(inner.model, inner.plan, inner.cluster, inner.stack))
        size = DTYPE_BYTES[inner.plan.master_dtype]
        return _Outer(steps, inner, _joined(setup, inner.n_gpus, steps), elements / steps.fragments, size)

    def exchange_s(self, factor: float = 1.0) -> float:
        """Returns the seconds of the exchange where the link between replicas is `factor` times as fast."""
        cluster, far_s = self.joined.cluster.with_outermost_link(factor), 0.0
        if self.steps.link_gb_s is not None:  # NCCL's protocols count a link's latency by the delays of a NIC
            *inside, link = cluster.links
            cluster = replace(cluster, links=(*inside, replace(link, latency_s=0.0)))
            far_s = self.steps.link_ms * 1e-3
        group = CommGroup.on_mesh("dp_replicate", self.joined.plan.dp_replicate, self.inner.n_gpus, cluster.node_size)
        wires = wires_of(cluster, self.joined.n_gpus)
        time_s = outer_exchange_s(self.elements, self.element_bytes, self.steps.wire, group, wires, far_s)
        return time_s / cluster.rates.network

    def kernels_s(self) -> float:
        """Returns the seconds of the kernels and host copies, one kernel each for all tensors of the fragment."""
        size, cluster = self.elements * self.element_bytes, self.inner.cluster
        rates = memory_rates(cluster.device)
        work = _said(self.steps)
        moved = np.array([size * work["passes"]])
        copies = work["host_copies"] if self.steps.keep == "cpu" else 0
        copied = float(host_copy_s(np.array([size]), cluster.host_bytes_per_s, rates)[0])
        return float(memory_bound_s(moved, 1.0, rates)[0]) + copies * copied

    def added_s(self, inner_s: float, factor: float = 1.0) -> float:
        """Returns the mean seconds that outer steps add to an inner step of `inner_s`."""
        exposed = max(0.0, self.exchange_s(factor) - self.steps.delay * inner_s)
        return self.steps.fragments * (self.kernels_s() + exposed) / self.steps.every

    def memory_gib(self) -> tuple[float, float]:
        """Returns the GiB that the fullest rank keeps between steps: on its GPU, and in host memory."""
        if self.steps.method == "local_sgd":
            return 0.0, 0.0
        part = self.elements * self.element_bytes / GIB
        whole = self.steps.fragments * part
        beside = part if self.steps.delay else 0.0
        return (whole + beside, whole) if self.steps.keep == "cpu" else (2 * whole + beside, 0.0)

    def needed_gb_s(self, inner_s: float) -> float | None:
        """Returns the bandwidth at which outer steps take `_ALLOWED` of the time, by bisection of its logarithm."""

        def enough(factor: float) -> bool:
            return self.added_s(inner_s, factor) <= _ALLOWED * inner_s

        low, high = 1.0 / _WIDEST, _WIDEST
        if not enough(high):
            return None
        for _ in range(_STEPS if not enough(low) else 0):
            middle = sqrt(low * high)
            low, high = (low, middle) if enough(middle) else (middle, high)
        found = low if enough(low) else high
        if self.steps.link_gb_s is not None:
            return self.steps.link_gb_s * found
        return self.joined.cluster.links[-1].bytes_per_s * found / GIGA


def _said(steps: OuterSteps) -> Mapping[str, Any]:
    """Returns the method's entry of the data file."""
    found: Mapping[str, Any] = shipped_data(__package__, "outer_steps.yaml")[steps.method]
    return found


def _joined(setup: Setup, own: int, steps: OuterSteps) -> Setup:
    """Returns the setup on a cluster whose outermost link joins the replicas, of `own` GPUs each."""
    if steps.link_gb_s is None:
        return setup
    cluster, inside, within = setup.cluster, 1, []
    for link in cluster.links:
        size = min(link.size or own, max(1, own // inside))
        within.append(replace(link, size=size))
        inside *= size
    far = Link("between_replicas", "ethernet", 0, steps.link_gb_s * GIGA / own, steps.link_ms * 1e-3)
    far = replace(far, bytes_per_s=far.bytes_per_s / wire_efficiency(far))
    return replace(setup, cluster=replace(cluster, links=(*within, far)))
