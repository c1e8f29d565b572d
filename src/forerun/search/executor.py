"""Predictions of many plans, in this process or in local ones; the order of the answers is that of the plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from forerun.analysis.prediction import Prediction
from forerun.cluster.types import Cluster
from forerun.errors import ForerunError
from forerun.model.spec import ModelSpec
from forerun.plan.plan import Plan
from forerun.processes import Processes

Predictor: TypeAlias = Callable[[ModelSpec, Plan, Cluster], Prediction]
Answer: TypeAlias = "Prediction | Refused"
WORTH_A_POOL = 64
"""fewer plans than this are predicted here"""


@dataclass(frozen=True, slots=True)
class Refused:
    """A plan that the predictor refused."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Task:
    predictor: Predictor
    model: ModelSpec
    cluster: Cluster

    def answer(self, plan: Plan) -> Answer:
        try:
            return self.predictor(self.model, plan, self.cluster)
        except ForerunError as error:
            return Refused(str(error))


class Executor(Processes[Plan, Answer]):
    """Predicts plans of one model on one cluster with `workers` processes (1: here). A context manager.

    Raises ForerunError for fewer than one worker.
    """

    def __init__(self, predictor: Predictor, model: ModelSpec, cluster: Cluster, workers: int) -> None:
        super().__init__(_Task(predictor, model, cluster).answer, workers, WORTH_A_POOL)
