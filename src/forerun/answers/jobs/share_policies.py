"""The policies for unlike GPUs by the names that files and options use."""

from __future__ import annotations

from collections.abc import Callable

from forerun.answers.jobs.packing import PACKING
from forerun.answers.jobs.shares import (
    Blind,
    FinishTimeFairness,
    InOrder,
    InOrderAnywhere,
    Isolated,
    LeastMakespan,
    MaxMinFairness,
    MostThroughput,
    Shares,
)
from forerun.answers.jobs.water_filling import WaterFilling, WaterFillingByGroup
from forerun.common.errors import UnknownName

SHARES: dict[str, Callable[[], Shares]] = {
    "fifo": InOrderAnywhere,
    "fifo-perf": InOrder,
    "isolated": Isolated,
    "max-min-fairness": lambda: Blind(MaxMinFairness(), 1.0),
    "max-min-fairness-perf": MaxMinFairness,
    "max-min-fairness-water-filling": lambda: Blind(WaterFilling(), 1.0),
    "max-min-fairness-water-filling-perf": WaterFilling,
    "max-min-fairness-water-filling-by-group": lambda: Blind(WaterFillingByGroup(), 1.0),
    "max-min-fairness-water-filling-by-group-perf": WaterFillingByGroup,
    "finish-time-fairness": lambda: Blind(FinishTimeFairness()),
    "finish-time-fairness-perf": FinishTimeFairness,
    "min-total-duration": lambda: Blind(LeastMakespan()),
    "min-total-duration-perf": LeastMakespan,
    "max-sum-throughput-perf": MostThroughput,
    **PACKING,
}
"""name -> policy; the names are those of Gavel"""


def shares(name: str) -> Shares:
    """Returns a new policy called `name`. Raises UnknownName if there is none."""
    if name not in SHARES:
        raise UnknownName("policy for unlike GPUs", name, list(SHARES))
    return SHARES[name]()
