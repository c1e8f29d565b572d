"""What experiments answer: iterations of a run, points of a study. Plain data; `report/` shows it."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.analysis.prediction import Prediction
from forerun.analysis.reading import Simulation
from forerun.analysis.stepper import CAUSES as CAUSES
from forerun.experiment.request import Request


@dataclass(frozen=True)
class Iteration:
    """One optimizer step, or `repeats` equal ones after each other."""

    first: int
    """number of the iteration, from 0"""
    repeats: int
    start_s: float
    """since the beginning of the run"""
    step_time_s: float
    samples: int
    seq_len: int
    breakdown_s: dict[str, float]
    """CAUSES -> seconds on the rank that sets the pace; the sum is step_time_s"""
    slowest_rank: int
    """-1: all ranks are alike"""
    note: str = ""
    """what sets it apart: warm-up, straggler, batch 64"""


@dataclass(frozen=True)
class Bill:
    """What a run costs. Dollars; None where no price is known."""

    gpu_hours: float
    dollars: float | None
    dollars_per_hour: float | None
    dollars_per_billion_tokens: float | None
    dollars_per_million_samples: float | None
    energy_kwh: float
    energy_dollars: float | None


@dataclass(frozen=True)
class RunResult:
    """A run of `request.num_iterations` iterations."""

    request: Request
    simulation: Simulation
    """the first undisturbed iteration, whole: its timeline and memory"""
    iterations: tuple[Iteration, ...]
    total_s: float
    mean_s: float
    p50_s: float
    p99_s: float
    samples_per_s: float
    tokens_per_s: float | None
    """None where samples have no tokens"""
    bill: Bill

    @property
    def prediction(self) -> Prediction:
        """The undisturbed iteration."""
        return self.simulation.prediction


@dataclass(frozen=True)
class ScalePoint:
    """One scale of a scaling study."""

    num_nodes: int
    n_gpus: int
    step_time_s: float
    samples_per_step: int
    samples_per_s: float
    efficiency: float
    """speed-up over the smallest scale, divided by that of the GPUs"""
    breakdown_s: dict[str, float]
    """CAUSES -> seconds"""
    peak_reserved_gib: float
    fits: bool
    bill: Bill
    error: str = ""
    """why there are no figures (those above are 0 then)"""


@dataclass(frozen=True)
class ScalingStudy:
    """Strong scaling keeps the global batch, weak scaling the batch of each GPU."""

    request: Request
    strong: bool
    points: tuple[ScalePoint, ...]
    break_down: int | None
    """num_nodes at which efficiency first falls below the threshold; None: nowhere"""
    cause: str
    """which share of the step grew most up to there, in words; "" without a break-down"""
    best_by_time: int | None
    best_by_efficiency: int | None
    best_by_cost: int | None
    """num_nodes; None where nothing fits"""


@dataclass(frozen=True)
class Variant:
    """One row of a comparison."""

    label: str
    axis: str
    """what was changed: pattern, topology, device, precision; base for the experiment as it is"""
    prediction: Prediction | None
    samples_per_s: float
    breakdown_s: dict[str, float]
    bill: Bill | None
    error: str = ""


@dataclass(frozen=True)
class Comparison:
    """Variants of one experiment side by side, the experiment itself first."""

    request: Request
    variants: tuple[Variant, ...]


@dataclass(frozen=True)
class StragglerStudy:
    """Step times under disturbances, and what the slowest rank costs."""

    request: Request
    undisturbed_s: float
    mean_s: float
    p50_s: float
    p99_s: float
    steps_s: tuple[float, ...]
    """of every iteration"""
    lost_share: float
    """of the run's time: what goes to waiting for the slowest rank"""
    lost_dollars: float | None
    blame: tuple[tuple[int, int], ...]
    """(rank, iterations in which it was the slowest), most first"""
