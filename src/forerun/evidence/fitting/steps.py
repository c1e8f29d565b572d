"""Measured steps, and the derivatives of their predicted times by each constant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from forerun.answers.analysis.predict import is_worth_folding, predict_setup
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import Prepared, prepare
from forerun.common.errors import ForerunError
from forerun.core.program.types import F64
from forerun.describe.model.spec import ModelSpec
from forerun.evidence.fitting.constants import IN_PROGRAM, Registry, What, changed
from forerun.evidence.validation.hardware import Hardware
from forerun.evidence.validation.mapping import map_row
from forerun.evidence.validation.metrics import measured_time_s
from forerun.evidence.validation.plan_mapping import Inexpressible
from forerun.evidence.validation.rows import Measurement

TIER = "A"
"""tier of the rows that state everything that a simulation needs"""
_STEP = 0.02
"""change of a constant's logarithm by which the derivative is taken"""


@dataclass(frozen=True, slots=True)
class Step:
    """One measured step. Steps of one `source` were measured alike; `family` is that of its stack."""

    name: str
    source: str
    family: str
    setup: Setup
    measured_s: float
    informs: bool = True
    """whether constants are fitted to it; one that states too little is predicted only"""


def steps_of(
    rows: Iterable[Measurement],
    models: Mapping[str, ModelSpec],
    hardware: Hardware,
    registry: Registry,
    further_tiers: str = "",
) -> list[Step]:
    """Returns the steps of the rows of TIER that have a measured time and can be expressed.

    Rows of `further_tiers` are steps that inform no constant. Raises ForerunError if there is no row of TIER.
    """
    steps = []
    for row in rows:
        time_s = measured_time_s(row)
        if row.tier not in TIER + further_tiers or time_s is None:
            continue
        try:
            inputs = map_row(row, models, hardware)
        except Inexpressible:
            continue
        setup = Setup(inputs.model, inputs.plan, inputs.cluster)
        steps.append(Step(row.id, row.source_id, setup.stack.family, setup, time_s, row.tier == TIER))
    if not any(step.informs for step in steps):
        raise ForerunError(f"nothing to fit: no row of tier {TIER} with a measured time can be expressed")
    return steps


class StepTimes:
    """Predicts the times of steps from the constants of a registry."""

    def __init__(self, steps: Sequence[Step], registry: Registry, progress: Callable[[], object] = lambda: None):
        self.steps = tuple(steps)
        self.registry = registry
        self._progress = progress
        self._prepared: list[Prepared | None] = [None] * len(self.steps)
        """the steps' Programs, which most constants do not change"""
        self.constants = [registry.constants_of(step.setup) for step in steps]
        """for each step: quantity on which its time depends -> number of the constant and of its place"""
        self.shipped = np.log([constant.shipped for constant in registry.constants])
        """logarithms of the present values, (n_constants,)"""
        self.log_measured = np.log([step.measured_s for step in steps])

    def seconds(self, values: F64, numbers: Iterable[int] | None = None) -> F64:
        """Returns the predicted seconds of all steps, or of `numbers`; `values` are the logarithms of the constants."""
        chosen = range(len(self.steps)) if numbers is None else numbers
        return np.array([self._seconds(number, values) for number in chosen])

    def errors(self, values: F64) -> F64:
        """Returns log(predicted / measured), (n_steps,)."""
        out: F64 = np.log(self.seconds(values)) - self.log_measured
        return out

    def slopes(self, values: F64, seconds: F64) -> F64:
        """Returns d log(predicted) / d log(constant) at `values`, whose times are `seconds`; (n_steps, n_constants)."""
        out = np.zeros((len(self.steps), len(values)))
        for number, constants in enumerate(self.constants):
            for what, (constant, _) in constants.items():
                time_s = self._seconds(number, values, {what: float(np.exp(_STEP))})
                out[number, constant] = np.log(time_s / seconds[number]) / _STEP
        return out

    def _seconds(self, number: int, values: F64, further: Mapping[What, float] | None = None) -> float:
        setup = self.steps[number].setup
        moved = values - self.shipped
        factors = {what: float(np.exp(moved[constant])) for what, (constant, _) in self.constants[number].items()}
        for what, factor in (further or {}).items():
            factors[what] = factors.get(what, 1.0) * factor
        self._progress()
        stack = changed(setup.stack, factors)
        if not IN_PROGRAM.isdisjoint(factors):
            return predict_setup(replace(setup, changed_stack=stack)).step_time_s
        if self._prepared[number] is None:
            self._prepared[number] = prepare(setup)
        prepared = self._prepared[number]
        assert prepared is not None
        return prepared.under(stack).run(is_worth_folding(setup.plan)).prediction.step_time_s
