"""The answers of experiments: iterations of a run, points of a study. Plain data; `report/` shows it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from forerun.answers.analysis.prediction import Prediction
from forerun.answers.analysis.reading import Simulation
from forerun.answers.analysis.stepper import CAUSES as CAUSES
from forerun.answers.experiment.request import Request
from forerun.common.shown import Shown


@dataclass(frozen=True)
class Iteration:
    """One optimizer step, or `repeats` equal ones after each other."""

    first: int
    """number of the iteration, from 0"""
    repeats: int
    start_s: float
    """seconds since the beginning of the run"""
    step_time_s: float
    samples: int
    seq_len: int
    breakdown_s: dict[str, float]
    """CAUSES -> seconds; the sum is step_time_s. `waiting` is the time that the slowest rank costs
    (experiment/pace.py)
    """
    slowest_rank: int
    """the rank that the others wait for; -1 for none"""
    note: str = ""
    """the peculiarity of the iteration: warm-up, straggler, batch 64"""


@dataclass(frozen=True)
class Bill:
    """The cost of a run, in dollars; None if no price is known."""

    gpu_hours: float
    dollars: float | None
    dollars_per_hour: float | None
    dollars_per_billion_tokens: float | None
    dollars_per_million_samples: float | None
    energy_kwh: float
    energy_dollars: float | None


@dataclass(frozen=True)
class RunResult(Shown):
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
    """None if samples have no tokens"""
    bill: Bill
    notes: tuple[str, ...] = ()
    """what the figures leave out, one line each"""
    fullest: Prediction | None = None
    """the iteration that takes most memory, where a schedule changes its batch or sequence length; None: the first"""

    @property
    def prediction(self) -> Prediction:
        """Returns the undisturbed iteration."""
        return self.simulation.prediction

    @property
    def peak_reserved_gib(self) -> float:
        """Returns the most memory of any iteration, GiB."""
        return (self.fullest or self.prediction).peak_reserved_gib

    @property
    def fits(self) -> bool:
        """Returns whether every iteration fits in memory."""
        return (self.fullest or self.prediction).fits

    @property
    def breakdown_s(self) -> dict[str, float]:
        """Returns CAUSES -> seconds of the mean iteration; the sum is mean_s."""
        return mean_breakdown_s(self.iterations)

    def summary(self) -> dict[str, Any]:
        """Returns the figures of the run with their units in the keys; None if something is not known."""
        prediction = self.prediction
        figures: dict[str, Any] = {
            "name": self.request.name,
            "model": prediction.model,
            "cluster": prediction.cluster,
            "n_gpus": prediction.n_gpus,
            "num_iterations": self.request.num_iterations,
            "total_s": self.total_s,
            "step_mean_s": self.mean_s,
            "step_p50_s": self.p50_s,
            "step_p99_s": self.p99_s,
            "step_undisturbed_s": prediction.step_time_s,
            "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "mfu": prediction.mfu,
            "hfu": prediction.hfu,
            "peak_allocated_gib": (self.fullest or prediction).peak_allocated_gib,
            "peak_reserved_gib": self.peak_reserved_gib,
            "memory_limit_gib": prediction.memory_limit_gib,
            "fits": self.fits,
        }
        figures |= {f"{cause}_s": seconds for cause, seconds in self.breakdown_s.items()}
        return figures | asdict(self.bill)

    def to_rows(self) -> list[dict[str, Any]]:
        """Returns a flat dict for each of `iterations`, with its causes as `compute_s` and so on."""
        rows = []
        for each in self.iterations:
            row = {name: value for name, value in asdict(each).items() if name != "breakdown_s"}
            rows.append(row | {f"{cause}_s": seconds for cause, seconds in each.breakdown_s.items()})
        return rows


def mean_breakdown_s(iterations: Sequence[Iteration]) -> dict[str, float]:
    """Returns CAUSES -> seconds of the mean iteration."""
    count = sum(each.repeats for each in iterations)
    return {cause: sum(each.repeats * each.breakdown_s[cause] for each in iterations) / count for cause in CAUSES}


def percentile_s(iterations: Iterable[Iteration], percent: int) -> float:
    """Returns the least step time that at least `percent` of a hundred iterations don't exceed (nearest rank)."""
    ordered = sorted((each.step_time_s, each.repeats) for each in iterations)
    left = ceil(percent * sum(repeats for _, repeats in ordered) / 100)
    for time_s, repeats in ordered:
        left -= repeats
        if left <= 0:
            return time_s
    raise ValueError("no iterations")


@dataclass(frozen=True)
class ScalePoint:
    """One scale of a scaling study."""

    num_nodes: int
    n_gpus: int
    step_time_s: float
    """seconds of a step, mean over the iterations"""
    samples_per_step: int
    """samples of the first iteration"""
    samples_per_s: float
    efficiency: float
    """speed-up over the smallest scale that runs, divided by how many times as many GPUs there are"""
    breakdown_s: dict[str, float]
    """CAUSES -> seconds of the mean iteration"""
    peak_reserved_gib: float
    fits: bool
    bill: Bill
    error: str = ""
    """why there are no figures (those above are 0 then)"""
    note: str = ""
    """differences from the experiment other than the scale"""


@dataclass(frozen=True)
class ScalingStudy(Shown):
    """Strong scaling keeps the global batch, weak scaling the batch of each GPU."""

    request: Request
    strong: bool
    points: tuple[ScalePoint, ...]
    break_down: int | None
    """num_nodes at which efficiency first falls below the threshold; None: nowhere"""
    cause: str
    """which share of the step grew most up to there, in words; "" without a break-down"""
    best_by_time: int | None
    """num_nodes with the most samples a second, of the scales that fit; None if none does"""
    best_by_efficiency: int | None
    """the most nodes whose efficiency is not below the threshold"""
    best_by_cost: int | None
    """num_nodes with the fewest dollars (GPU hours where no price is known) for a sample"""

    def to_rows(self) -> list[dict[str, Any]]:
        """Returns a flat dict for each point, with its causes as `compute_s` and so on, and its bill."""
        return [_flat(asdict(point)) for point in self.points]

    def summary(self) -> dict[str, Any]:
        """Returns the findings of the study."""
        return {
            "name": self.request.name,
            "scaling": "strong" if self.strong else "weak",
            "num_nodes": [point.num_nodes for point in self.points],
            "efficiency": [None if point.error else point.efficiency for point in self.points],
            "break_down_num_nodes": self.break_down,
            "cause": self.cause,
            "best_by_time_num_nodes": self.best_by_time,
            "best_by_efficiency_num_nodes": self.best_by_efficiency,
            "best_by_cost_num_nodes": self.best_by_cost,
        }


@dataclass(frozen=True)
class Variant:
    """One row of a comparison."""

    label: str
    axis: str
    """the changes: pattern, topology, device, precision; base for the experiment as it is"""
    prediction: Prediction | None
    samples_per_s: float
    breakdown_s: dict[str, float]
    bill: Bill | None
    error: str = ""


@dataclass(frozen=True)
class Comparison(Shown):
    """Variants of one experiment side by side, the experiment itself first."""

    request: Request
    variants: tuple[Variant, ...]

    def to_rows(self) -> list[dict[str, Any]]:
        """Returns a flat dict for each variant."""
        return [_variant_row(variant) for variant in self.variants]

    def summary(self) -> dict[str, Any]:
        """Returns the fastest variant that fits, and by how much it is faster than the experiment as it is."""
        running = [each for each in self.variants if each.prediction is not None and each.prediction.fits]
        best = max(running, key=lambda each: each.samples_per_s, default=None)
        base = self.variants[0]
        faster = None if best is None or not base.samples_per_s else best.samples_per_s / base.samples_per_s
        return {
            "name": self.request.name,
            "n_variants": len(self.variants),
            "n_errors": sum(1 for each in self.variants if each.error),
            "fastest": None if best is None else best.label,
            "fastest_samples_per_s": None if best is None else best.samples_per_s,
            "fastest_speed_up": faster,
        }


@dataclass(frozen=True)
class Severity:
    """One row of a sweep: stragglers of another probability or slowness."""

    probability: float
    slowdown: float
    mean_s: float
    p99_s: float
    lost_share: float
    lost_dollars: float | None


@dataclass(frozen=True)
class StragglerStudy(Shown):
    """Step times under disturbances, and the cost of the slowest rank."""

    request: Request
    undisturbed_s: float
    mean_s: float
    p50_s: float
    p99_s: float
    steps_s: tuple[float, ...]
    """seconds of every iteration"""
    lost_share: float
    """share of the run's time that goes to waiting for the slowest rank"""
    lost_dollars: float | None
    blame: tuple[tuple[int, int], ...]
    """(rank, iterations in which it was the slowest), most first"""
    blame_s: tuple[float, ...] = ()
    """for each rank of `blame`: seconds that the others waited for it over the run"""
    lost_s: float = 0.0
    """seconds of the run that go to waiting for the slowest rank"""
    sweep: tuple[Severity, ...] = ()
    """the same with other stragglers, if the user asks for them"""
    notes: tuple[str, ...] = ()
    """what the figures leave out, one line each"""

    def summary(self) -> dict[str, Any]:
        """Returns the figures of the study with their units in the keys."""
        return {
            "name": self.request.name,
            "seed": self.request.disturbance.seed,
            "n_iterations": len(self.steps_s),
            "step_undisturbed_s": self.undisturbed_s,
            "step_mean_s": self.mean_s,
            "step_p50_s": self.p50_s,
            "step_p99_s": self.p99_s,
            "lost_s": self.lost_s,
            "lost_share": self.lost_share,
            "lost_dollars": self.lost_dollars,
            "slowest_rank": self.blame[0][0] if self.blame else None,
        }

    def to_rows(self) -> list[dict[str, Any]]:
        """Returns a flat dict for each iteration."""
        return [{"iteration": number, "step_time_s": time_s} for number, time_s in enumerate(self.steps_s)]


def _variant_row(variant: Variant) -> dict[str, Any]:
    prediction = variant.prediction
    row = _flat({"label": variant.label, "axis": variant.axis, "breakdown_s": variant.breakdown_s})
    figures = ("step_time_s", "tokens_per_s_per_gpu", "mfu", "peak_reserved_gib", "memory_limit_gib", "fits")
    row |= {name: None if prediction is None else getattr(prediction, name) for name in figures}
    bill = {} if variant.bill is None else asdict(variant.bill)
    return row | {"samples_per_s": variant.samples_per_s, **bill, "error": variant.error}


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """Returns a record with its causes and its bill one level up."""
    record = dict(record)
    causes, bill = record.pop("breakdown_s"), record.pop("bill", {})
    return {**record, **{f"{cause}_s": seconds for cause, seconds in causes.items()}, **bill}
