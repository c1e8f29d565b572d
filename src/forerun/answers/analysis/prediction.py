"""Prediction: what a user reads. Every figure can say where it came from (`explain`)."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.answers.analysis.loop_time import LoopTime
from forerun.answers.analysis.network_use import NetworkUse
from forerun.common.errors import ForerunError
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.training_state import InitStage


@dataclass(frozen=True)
class Prediction:
    """The outcome of one plan or Program. Times in seconds, memory in GiB (2**30 bytes), of the slowest or fullest
    rank.

    What a Program does not tell (its plan, tokens, model FLOPs) and what follows from it is None.
    """

    model: str
    cluster: str
    plan: Plan | None
    n_gpus: int

    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    """the 80 % band (analysis/uncertainty.py): low <= step_time_s <= high"""
    tokens_per_s_per_gpu: float | None
    mfu: float | None
    """model FLOP/s over dense peak: 6 N + 12 L h s per token, attention not halved for causal masks (PaLM, app. B);
    of models given layer by layer the FLOPs of all layers. Where GPUs differ, over the mean of their peaks"""
    hfu: float
    """FLOP/s that the kernels execute, recomputation included and causal attention halved, over dense peak"""

    peak_allocated_gib: float
    peak_reserved_gib: float
    peak_reserved_low_gib: float
    peak_reserved_high_gib: float
    """its 80 % band; no more than the device has, where the prediction fits"""
    device_gib: float
    """what nvidia-smi shows: what is reserved, the context and the buffers of NCCL"""
    memory_limit_gib: float
    """of the device of the fullest rank: where GPUs differ, that which takes most of its own"""
    fits: bool
    """on every rank"""
    fit_in_doubt: bool
    """the limit lies within the 80 % band of what is needed at least: `fits` is the likelier answer"""
    warnings: tuple[str, ...]
    """what the figures leave out and a user should know, one line each"""
    memory_by_category_gib: dict[str, float]
    """at the peak of the fullest rank class; the sum is peak_allocated_gib"""
    peak_rank_class: str
    peak_owner: str
    """block and node at which the peak stands, for people"""

    exposed_comm_s: float
    """time in which communication runs and no compute does"""
    bubble_s: float
    """time in which a rank waits for other pipeline stages, mean over ranks"""
    breakdown: dict[str, float]
    """seconds by cause on the slowest rank; the sum is step_time_s"""
    bottleneck: str
    dollars_per_billion_tokens: float | None
    coverage: float
    """share of kernel time in calibrated shapes, 0 to 1"""
    explain: tuple[str, ...]
    """one line a figure: where it comes from"""
    network: NetworkUse | None = None
    """the network that collectives ran on in place of the cluster's links, where one was given"""
    missing: tuple[str, ...] | None = None
    """where the user's own measurements were given: what they lack, most time first; the shipped model stood in"""
    sample: str | None = None
    """what a model given layer by layer takes (image, sequence); None for a model of tokens"""
    samples_per_s_per_gpu: float | None = None
    """of those"""
    shared_links_s: float = 0.0
    """by how much the collectives and transfers of the slowest rank, hidden or not, outlast their times alone because
    others use the same links"""
    init: tuple[InitStage, ...] = ()
    """memory at the stages of initialisation, of a plan whose stack makes its model as PyTorch's FSDP has it"""
    loop: LoopTime | None = None
    """steps with the periodic work of the training loop, where somebody said what that is"""

    def rate_band(self, rate: float) -> tuple[float, float]:
        """The 80 % band of a rate of this step (tokens/s, MFU): what it is at both ends of the band of the time."""
        return rate * self.step_time_s / self.step_time_high_s, rate * self.step_time_s / self.step_time_low_s

    def own_plan(self) -> Plan:
        """The plan. Raises ForerunError for the prediction of a saved Program, which has none."""
        if self.plan is None:
            raise ForerunError(f"{self.model}: predicted from a saved Program, which has no plan")
        return self.plan
