"""RunRequest: a training run of days or weeks as it is simulated. Times are seconds, rates are per second."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Scope = Literal["process", "node", "domain"]
"""What a failure destroys: the memory of the processes, a node's host memory too, or that of neighbouring nodes too."""
SCOPES: tuple[Scope, ...] = ("process", "node", "domain")


@dataclass(frozen=True, slots=True)
class FailureKind:
    """Failures of one cause."""

    name: str
    rate_per_s: float
    """failures per second of all components of the run together"""
    components: int = 1
    """the number of components that fail independently"""
    shape: float = 1.0
    """shape of the Weibull distribution of a component's lifetime; 1 is the exponential distribution"""
    scope: Scope = "node"
    nodes: int = 1
    """nodes that leave the run at each failure; 0 if the same nodes start again"""
    repair_s: float = 86_400.0
    """seconds until the nodes are back among the spares"""
    hang_share: float = 0.0
    """share of failures that show as a hang, which only a timeout detects"""
    found_after_s: float = 0.0
    """mean seconds until silent corruption is found; every checkpoint since is lost with it"""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Periods in which one node or link slows all steps."""

    name: str
    rate_per_s: float
    """onsets per second in the whole run"""
    factor: float
    """step time during the period over the usual one"""
    duration_s: float
    """mean of the exponentially distributed length of a period"""


@dataclass(frozen=True, slots=True)
class Lemons:
    """Nodes that fail more often than others."""

    nodes: float
    """their mean number among the nodes of a new run"""
    rate_per_s: float
    """failures per second of each"""
    evict_after: int
    """failures after which a node is taken out for good"""


@dataclass(frozen=True, slots=True)
class CheckpointLevel:
    """One kind of checkpoint and where it lies."""

    name: str
    every: int
    """saves of the level below for each of this one; 1 for the first level"""
    blocking_s: float
    """seconds in which training waits for a save"""
    persist_s: float
    """seconds after them until the checkpoint can be restored"""
    load_s: float
    survives: Scope
    """the widest failure that the checkpoint survives"""
    drag: float = 0.0
    """share by which steps take longer while the checkpoint is persisted"""


@dataclass(frozen=True, slots=True)
class Recovery:
    """The stages from a failure to the next step. A failure in between begins them again."""

    crash_detect_s: float
    hang_detect_s: float
    restart_s: float
    """seconds to stop, reschedule and start the processes"""
    communicators_s: float
    """seconds to set up the communicators"""
    warmup_s: float
    """seconds that the first steps take longer than others"""
    start_s: float = 0.0
    """seconds to start the run for the first time"""


@dataclass(frozen=True, slots=True)
class Spares:
    """Nodes that stand by."""

    nodes: int
    swap_s: float
    """seconds to put a spare in the place of a failed node"""
    replace_s: float | None = None
    """seconds to get a node from elsewhere where no spare is left; None waits for a repair"""


@dataclass(frozen=True, slots=True)
class Elastic:
    """Training goes on with fewer data-parallel replicas while nodes are missing."""

    replicas: int
    least_replicas: int
    resize_s: float
    """seconds to shrink or grow, without loading a checkpoint"""
    step_factors: tuple[float, ...] = ()
    """step time with r replicas over that with all, for r from 1; empty: in inverse proportion to r"""
    shards: bool = False
    """whether each replica holds a part of the state, as under FSDP: without it, the others load a checkpoint"""

    def factor(self, replicas: int) -> float:
        """Returns the time of a step of the same batch on `replicas` over that on all replicas."""
        return self.step_factors[replicas - 1] if self.step_factors else self.replicas / replicas


@dataclass(frozen=True, slots=True)
class Maintenance:
    """Planned stops of the whole run, before which it saves."""

    every_s: float
    down_s: float


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the run with steps of one length."""

    steps: int
    step_s: float
    tokens_per_step: float


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One run: its work, its disturbances, and the system's reactions to them."""

    name: str
    gpus: int
    nodes: int
    phases: tuple[Phase, ...]
    save_every_s: float
    """seconds of undisturbed steps between two saves; infinite if the run writes none"""
    levels: tuple[CheckpointLevel, ...]
    recovery: Recovery
    failures: tuple[FailureKind, ...] = ()
    lemons: Lemons | None = None
    slowdowns: tuple[Slowdown, ...] = ()
    spares: Spares | None = None
    elastic: Elastic | None = None
    maintenance: Maintenance | None = None
    searches_interval: bool = False
    """whether the best `save_every_s` is to be found by simulation"""
    wall_s: float | None = None
    """seconds after which the run ends, finished or not"""
    by_the_clock: bool = False
    """whether only the clock ends the run, as nobody said how many tokens it needs"""
    dollars_per_gpu_hour: float | None = None
    gpu_power_w: float | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)
    """assumptions, one sentence each"""

    @property
    def steps(self) -> int:
        """Returns the number of steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    @property
    def ideal_s(self) -> float:
        """Returns the seconds of all steps without any disturbance."""
        return sum(phase.steps * phase.step_s for phase in self.phases)

    @property
    def failures_per_s(self) -> float:
        """Returns the failures per second of the whole run, lemon nodes included."""
        lemons = 0.0 if self.lemons is None else self.lemons.nodes * self.lemons.rate_per_s
        return sum(kind.rate_per_s for kind in self.failures) + lemons
