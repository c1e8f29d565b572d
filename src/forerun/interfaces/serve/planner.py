"""Planner: answers the questions of the page, and keeps the answers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from forerun.answers.analysis.communication import collective_times
from forerun.answers.analysis.prediction import Prediction
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.answers.analysis.what_if import sensitivities
from forerun.answers.search.neighbours import neighbours
from forerun.answers.search.result import SearchResult
from forerun.common.errors import ForerunError
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.interfaces.report.documents import prediction_document
from forerun.interfaces.report.figures import seconds
from forerun.interfaces.report.style import WORK_LOOKS
from forerun.interfaces.report.wording import command_line, plan_words
from forerun.interfaces.serve.question import (
    AboutPlan,
    AboutRows,
    Asked,
    Question,
    asked,
    config_model,
    plan_of,
    wanted_fields,
)
from forerun.interfaces.serve.records import LISTED, document_record, place_record, row_record
from forerun.interfaces.serve.rows import matching
from forerun.interfaces.serve.searching import Answered, Task, answer_event, work
from forerun.interfaces.serve.worker import Job, Worker

MOST_PLANS = 200_000
"""plans of a space that the server searches; one core bounds about 10,000 a second"""
_KEPT = 12
"""answers that the server keeps"""
_MODELS = 32
"""dropped models that the server keeps"""


class Planner:
    """Answers questions, one search at a time."""

    def __init__(self) -> None:
        self._worker = Worker(work)
        self._answered: OrderedDict[str, Answered] = OrderedDict()
        self._dropped: dict[str, ModelSpec] = {}
        self._lock = threading.Lock()

    # -- questions -------------------------------------------------------------------------------------------------

    def ask(self, question: Question, page: str = "") -> Job:
        """Starts to answer a question of `page`. It replaces the page's former question.

        Raises ForerunError for a wrong one.
        """
        made, known = asked(question, self._dropped), self.known(question)
        if known is not None and known.whole:
            job = Job(None, (page, "plans"), self._heard)
            job.tell(answer_event(known))
            job.tell(None)
            return job
        return self._worker.start(Task(made, "plans", MOST_PLANS), (page, "plans"), self._heard)

    def scale(self, question: Question, page: str = "") -> Job:
        """Starts to search for the best plan on fewer and more GPUs."""
        made = asked(question, self._dropped)
        return self._worker.start(Task(made, "scaling", MOST_PLANS), (page, "scaling"), self._heard)

    def known(self, question: Question) -> Answered | None:
        """Returns the answer that the server keeps, if it does."""
        with self._lock:
            found = self._answered.get(_key(question))
            if found is not None:
                self._answered.move_to_end(_key(question))
            return found

    def kept(self, question: Question) -> Answered:
        """Returns the answer that the server keeps. Raises ForerunError if it is no longer kept."""
        found = self.known(question)
        if found is None:
            raise ForerunError("the answer to this question is no longer kept; ask it again")
        return found

    def command(self, question: Question) -> str:
        """Returns the command that asks the same. Raises ForerunError for a wrong question."""
        return asked(question, self._dropped).command()

    def _heard(self, answered: object) -> None:
        """Keeps an answer of the search process."""
        assert isinstance(answered, Answered)
        with self._lock:
            self._answered[_key(answered.asked.question)] = answered
            while len(self._answered) > _KEPT:
                self._answered.popitem(last=False)

    # -- one plan --------------------------------------------------------------------------------------------------

    def plan(self, about: AboutPlan) -> dict[str, Any]:
        """Returns the figures of a plan, and why it is where it is. Raises ForerunError."""
        made, plan, prediction = self.found(about)
        where = command_line(plan, made.question.model, made.question.cluster)
        known = self.known(made.question)
        standing = "" if known is None else _standing(known.result, prediction)
        return place_record(prediction, about.row) | {
            "standing": standing,
            "command": where,
            "warnings": list(prediction.warnings),
            "breakdown": {WORK_LOOKS[name].label: time_s for name, time_s in prediction.breakdown.items()},
            "memory_by_category_gib": dict(prediction.memory_by_category_gib),
        }

    def details(self, about: AboutPlan) -> dict[str, Any]:
        """Returns the page of a plan: timeline, memory, critical path, and the gain of a better machine."""
        made, plan, _ = self.found(about)
        setup = Setup(made.model, plan, made.where, replays=True)
        simulation = simulate_setup(setup)
        command = command_line(plan, made.question.model, made.question.cluster)
        gains, talk = sensitivities(setup, simulation), collective_times(simulation, made.where)
        return document_record(prediction_document(simulation, gains, command, talk))

    def neighbours(self, about: AboutPlan) -> list[dict[str, Any]]:
        """Returns the plans that differ in one choice, and the parts that become longer in each."""
        made, plan, own = self.found(about)
        known = self.kept(made.question)
        out = []
        for each in neighbours(known.result, plan):
            prediction = self._predicted(made, each.plan)
            out.append(
                {
                    "field": each.field,
                    "value": str(each.value),
                    "also": list(each.also),
                    "words": plan_words(each.plan),
                    "change": prediction.step_time_s / own.step_time_s - 1,
                    "why": _why(own, prediction),
                }
                | {"place": place_record(prediction, each.row)}
            )
        return sorted(out, key=lambda row: (not row["place"]["fits"], row["change"]))

    def found(self, about: AboutPlan) -> tuple[Asked, Plan, Prediction]:
        """Returns the question, the plan and its prediction. Raises ForerunError."""
        made = asked(about.question, self._dropped)
        known = self.known(about.question)
        if about.row is not None:
            known = self.kept(about.question)
            if about.row >= len(known.result.outcome.table):
                raise ForerunError(f"row: the search has {len(known.result.outcome.table):,} plans")
            found = known.result.outcome.predictions.get(about.row)
            plan = known.result.outcome.table.plan(about.row)
            return made, plan, found or self._predicted(made, plan)
        if about.plan is None:
            raise ForerunError("give a plan, or its row")
        plan = plan_of(about.plan, made)
        for one in known.result.ranked if known else ():
            if one.plan == plan:
                return made, plan, one
        return made, plan, self._predicted(made, plan)

    def _predicted(self, made: Asked, plan: Plan) -> Prediction:
        return simulate_setup(Setup(made.model, plan, made.where, replays=True), folded=True).prediction

    # -- many plans ------------------------------------------------------------------------------------------------

    def rows(self, about: AboutRows) -> dict[str, Any]:
        """Returns the plans whose fields have the wanted values: those that fit first, the best of them before the
        others."""
        known = self.kept(about.question)
        rows = matching(known.result, wanted_fields(about.wanted), about.status)
        return {"n": len(rows), "rows": [row_record(known.result, row) for row in rows[:LISTED]]}

    # -- models ----------------------------------------------------------------------------------------------------

    def drop_model(self, name: str, config: Any) -> str:
        """Keeps the model of a config.json, and returns the name to ask for it. Raises as `config_model` does."""
        spec = config_model(config, name, name.removesuffix(".json") or "model")
        if len(self._dropped) >= _MODELS:
            self._dropped.pop(next(iter(self._dropped)))
        self._dropped[f"dropped {name}"] = spec
        return f"dropped {name}"


def _key(question: Question) -> str:
    return question.model_dump_json()


def _standing(result: SearchResult, prediction: Prediction) -> str:
    """Ranks a plan among the plans of the search."""
    for place, each in enumerate(result.ranked, 1):
        if each.plan == prediction.plan:
            more = (
                ""
                if place == 1
                else f", {each.step_time_s / result.ranked[0].step_time_s - 1:.1%} slower than the best"
            )
            return f"place {place:,} of {len(result.ranked):,} that were simulated and fit{more}"
    return result.reason_of(prediction.own_plan())


def _why(own: Prediction, other: Prediction) -> str:
    """Names the parts of the step that are longer in another plan, or says that the other plan doesn't fit."""
    if not other.fits:
        beside = "" if other.peak_reserved_gib > other.memory_limit_gib else " beside CUDA and NCCL"
        return f"does not fit: needs {other.peak_reserved_gib:.1f} of {other.memory_limit_gib:.1f} GiB{beside}"
    causes = {*own.breakdown, *other.breakdown}
    changes = {name: other.breakdown.get(name, 0.0) - own.breakdown.get(name, 0.0) for name in causes}
    slower = other.step_time_s >= own.step_time_s
    largest = sorted(changes, key=lambda name: -changes[name] if slower else changes[name])[:2]
    least = 0.1 * abs(other.step_time_s - own.step_time_s)
    named = [name for name in largest if (changes[name] > least if slower else changes[name] < -least)]
    words = (f"{WORK_LOOKS[name].label} {'+' if slower else '-'}{seconds(abs(changes[name]))}" for name in named)
    return ", ".join(words) or "no large change"
