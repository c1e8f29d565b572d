"""Prediction: the figures that a user reads. Its field `explain` says where each figure comes from."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from forerun.answers.analysis.loop_time import LoopTime
from forerun.answers.analysis.network_use import NetworkUse
from forerun.common.errors import ForerunError
from forerun.common.shown import Shown
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.training_state import InitStage


@dataclass(frozen=True, slots=True)
class DoesNotFit:
    """The memory that a plan needs on its fullest rank, which is more than there is; its step was not run.

    The fields are those of a Prediction.
    """

    plan: Plan
    peak_allocated_gib: float
    peak_reserved_gib: float
    memory_limit_gib: float
    memory_by_category_gib: dict[str, float]
    peak_rank_class: str


@dataclass(frozen=True)
class Prediction(Shown):
    """The outcome of one plan or Program: times in seconds on the slowest rank, memory in GiB (2**30 bytes) on the
    fullest rank.

    A figure is None if the Program does not state the data that it needs (plan, tokens, model FLOPs).
    """

    model: str
    cluster: str
    plan: Plan | None
    n_gpus: int

    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    """upper end of the 80 % band (analysis/uncertainty.py): low <= step_time_s <= high"""
    tokens_per_s_per_gpu: float | None
    mfu: float | None
    """model FLOP/s over dense peak: 6 N + 12 L h s FLOPs per token, attention not halved for causal masks (PaLM, app.
    B); for models given layer by layer, the FLOPs of all layers. If GPUs differ, the peak is their mean"""
    hfu: float
    """FLOP/s of the model and of recomputation, counted as for MFU, over the dense peak; at least MFU"""

    peak_allocated_gib: float
    peak_reserved_gib: float
    peak_reserved_low_gib: float
    peak_reserved_high_gib: float
    """upper end of its 80 % band; at most the device's memory if the prediction fits"""
    device_gib: float
    """memory that nvidia-smi shows: reserved memory, the CUDA context and the buffers of NCCL"""
    memory_limit_gib: float
    """memory of the fullest rank's device; if GPUs differ, the fullest rank is the one that uses the largest share of
    its device"""
    fits: bool
    """whether every rank has enough memory"""
    fit_in_doubt: bool
    """whether the limit is inside the 80 % band of the least memory needed; `fits` is then only the more likely
    answer"""
    warnings: tuple[str, ...]
    """effects that the figures do not include and that a user should know, one line each"""
    memory_by_category_gib: dict[str, float]
    """category -> GiB at the peak of the fullest rank class; the sum is peak_allocated_gib"""
    peak_rank_class: str
    peak_owner: str
    """block and node at which the peak occurs, in words"""

    exposed_comm_s: float
    """seconds in which communication runs and no kernel does"""
    bubble_s: float
    """seconds in which a rank waits for other pipeline stages, mean over ranks"""
    breakdown: dict[str, float]
    """cause -> seconds on the slowest rank; the sum is step_time_s"""
    bottleneck: str
    dollars_per_billion_tokens: float | None
    coverage: float
    """share of kernel time in calibrated shapes, 0 to 1"""
    explain: tuple[str, ...]
    """where each figure comes from, one line each"""
    network: NetworkUse | None = None
    """the network that replaces the cluster's links; None without one"""
    missing: tuple[str, ...] | None = None
    """ops that are not in the user's measurements, longest first; Forerun's model gives their times. None without
    measurements"""
    sample: str | None = None
    """one sample of a model given layer by layer (image, sequence); None for a model of tokens"""
    samples_per_s_per_gpu: float | None = None
    """number of these samples per second"""
    shared_links_s: float = 0.0
    """additional seconds of the slowest rank's collectives and transfers, hidden or exposed, because others use the
    same links"""
    mfu_peak: str = ""
    """the peak that MFU and HFU divide by, in words: bf16, 989 TFLOP/s"""
    memory_recorded: bool = True
    """False for a profiled step whose profile does not record memory; its memory figures are then meaningless"""
    utilization: float = 0.0
    """time of the executed FLOPs (products, attention without masked pairs, recurrences) at the peaks of their own
    dtypes, as a share of the step, mean over ranks; at most 1"""
    init: tuple[InitStage, ...] = ()
    """memory at the stages before the first step, for plans whose stack builds its model like PyTorch's FSDP, and for
    traces"""
    loop: LoopTime | None = None
    """steps with the periodic work of the training loop; None if no training loop is known"""

    def rate_band(self, rate: float) -> tuple[float, float]:
        """Returns the 80 % band of a rate of this step (tokens/s, MFU), from the band of the step time."""
        return rate * self.step_time_s / self.step_time_high_s, rate * self.step_time_s / self.step_time_low_s

    def to_rows(self) -> list[dict[str, Any]]:
        """Returns one flat dict: the figures, causes as `matmul_s`, categories of memory as `activation_gib`, and the
        fields of the plan as `plan_tp`."""
        row = {name: value for name in _FLAT if (value := getattr(self, name)) is not None}
        row |= {f"{cause}_s": time_s for cause, time_s in self.breakdown.items()}
        row |= {f"{category}_gib": gib for category, gib in self.memory_by_category_gib.items()}
        if self.plan is not None:
            row |= {f"plan_{field.name}": getattr(self.plan, field.name) for field in fields(self.plan)}
        return [row]

    def own_plan(self) -> Plan:
        """Returns the plan. Raises ForerunError for the prediction of a saved Program, which has no plan."""
        if self.plan is None:
            raise ForerunError(f"{self.model}: predicted from a saved Program, which has no plan")
        return self.plan


_FLAT = (
    *("model", "cluster", "n_gpus", "step_time_s", "step_time_low_s", "step_time_high_s", "tokens_per_s_per_gpu"),
    *("samples_per_s_per_gpu", "mfu", "hfu", "utilization", "peak_allocated_gib", "peak_reserved_gib"),
    *("peak_reserved_low_gib", "peak_reserved_high_gib", "device_gib", "memory_limit_gib", "fits", "fit_in_doubt"),
    *("exposed_comm_s", "shared_links_s", "bottleneck", "dollars_per_billion_tokens", "coverage"),
)
"""figures that are one number or one word"""
