"""Micro batches for different GPUs, such that all of them need the same time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from forerun.answers.analysis.setup import RankKind, Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.answers.experiment.advice.change import MIXED, Candidate, batch_caveat, change_of, mixed_of
from forerun.answers.experiment.request import Request
from forerun.common.errors import ForerunError
from forerun.core.program.causes import EXPOSED, Cause

_NO_KERNEL = frozenset(cause.name.lower() for cause in (*EXPOSED, Cause.BUBBLE, Cause.HOST, Cause.WAITING))
_ROUNDS = 2
"""rounds of adjusting the batches to their simulated times, because a sample takes less time in a large batch"""


def balances(request: Request) -> Iterator[Candidate]:
    """Give each kind a micro batch in proportion to its speed, and keep the global batch as nearly as possible."""
    setup = request.setup
    if not setup.kinds:
        return
    batches = _batches(setup)
    for _ in range(_ROUNDS):
        try:
            batches = _balanced(setup, batches)
        except ForerunError:
            return
    if batches == _batches(setup):
        return
    own, *others = batches if len(batches) > len(setup.kinds) else (setup.plan.micro_batch, *batches)
    kinds = tuple(replace(kind, micro_batch=batch) for kind, batch in zip(setup.kinds, others, strict=True))
    balanced = replace(setup, plan=replace(setup.plan, micro_batch=own), kinds=kinds)
    words = ", ".join(f"{batch} on {part.name}" for part, batch in zip(balanced.parts, batches, strict=True))
    fields = {"micro_batch": own}
    change = change_of(request, fields) | {MIXED: mixed_of(request, kinds)}
    caveat = batch_caveat(setup, balanced)
    yield Candidate("batch balance", f"micro batches of {words}", balanced, change, fields, caveat)


def _batches(setup: Setup) -> list[int]:
    """Micro batch of each part."""
    return [part.micro_batch or setup.plan.micro_batch for part in setup.parts]


def _balanced(setup: Setup, batches: list[int]) -> list[int]:
    """Divide the same samples by the speed that each part has at `batches`."""
    speeds = [batch / _kernels_s(setup, part, batch) for part, batch in zip(setup.parts, batches, strict=True)]
    gpus = [part.n_gpus for part in setup.parts]
    samples = sum(n * batch for n, batch in zip(gpus, _batches(setup), strict=True))
    together = sum(n * speed for n, speed in zip(gpus, speeds, strict=True))
    return [max(1, round(samples * speed / together)) for speed in speeds]


def _kernels_s(setup: Setup, part: RankKind, micro_batch: int) -> float:
    """Seconds of a step in which kernels run if all GPUs are those of `part`."""
    cluster = setup.cluster if part.device is None else replace(setup.cluster, device=part.device)
    alone = replace(setup, cluster=cluster, kinds=(), plan=replace(setup.plan, micro_batch=micro_batch))
    breakdown = simulate_setup(alone, folded=True).prediction.breakdown
    return part.slowdown * sum(time_s for cause, time_s in breakdown.items() if cause not in _NO_KERNEL)
