"""Predicts many plans in this process, in local processes or on Ray; answers come in the order of the plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Protocol, TypeAlias

from forerun.answers.analysis.predict import predict, predict_if_it_fits
from forerun.answers.analysis.prediction import DoesNotFit, Prediction
from forerun.answers.analysis.setup import Setup
from forerun.common.content import digest_of
from forerun.common.errors import ForerunError
from forerun.common.workers import Workers
from forerun.core.cost.measured import Measured
from forerun.core.cost.profile import load_profile
from forerun.core.network.network_file import Network
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan

Predictor: TypeAlias = Callable[[ModelSpec, Plan, Cluster], Prediction]
Answer: TypeAlias = "Prediction | DoesNotFit | Refused"
WORTH_A_POOL = 8
"""fewer plans than this are predicted in this process"""


@dataclass(frozen=True, slots=True)
class Refused:
    """A plan that the predictor refused."""

    reason: str


@dataclass(frozen=True, slots=True)
class Question:
    """The part of a prediction that all plans of a search share: model, cluster and predictor."""

    predictor: Predictor
    model: ModelSpec
    cluster: Cluster
    network: Network | None = None
    """argument of `predict`; another predictor brings its own network and measurements"""
    measured: Measured | None = None
    """argument of `predict`"""

    def basis(self) -> str:
        """Returns a digest of all inputs of an answer except the plan, including Forerun itself and the user's cost
        profile.

        Raises ForerunError if the profile can't be read.
        """
        profile = load_profile(self.cluster.device.cost_profile)
        parts = [getattr(self, field.name) for field in fields(self)]
        return digest_of(parts, profile)

    def answer(self, plan: Plan) -> Answer:
        """Returns the predictor's answer for `plan`; `predict` runs only plans that fit in memory."""
        try:
            if self.predictor is predict:
                setup = Setup(self.model, plan, self.cluster, self.network, self.measured, replays=True)
                return predict_if_it_fits(setup)
            return self.predictor(self.model, plan, self.cluster)
        except ForerunError as error:
            return Refused(str(error))


class AnswersPlans(Protocol):
    """Answers plans in their order."""

    def run(self, tasks: Sequence[Plan], /) -> Iterator[Answer]:
        """Yields an answer for each plan, in order."""


def executor_of(
    question: Question, name: str, workers: int | None, ray_address: str | None
) -> AbstractContextManager[AnswersPlans]:
    """Returns the executor `name`: `local` processes (one for each CPU unless `workers` is given), or a `ray` cluster.

    Raises ForerunError for another name, a Ray address with local processes, fewer than one worker, and like
    `RayCluster`.
    """
    return Workers(workers, name, ray_address).answering(question.answer, question.basis, WORTH_A_POOL)
