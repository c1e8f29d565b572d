"""Searching: the work of the search process for a question, reported step by step.

The page gets events: the size of the space, first plans, proved places, then the front and the choices. The server gets
each answer as an object (`Answered`), and keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from forerun.answers.analysis.prediction import Prediction
from forerun.answers.search.first_look import first_look
from forerun.answers.search.result import SearchResult
from forerun.answers.search.search import search
from forerun.answers.search.space import Tally, make_spaces
from forerun.answers.search.spaces import Spaces
from forerun.answers.search.sweep import SweepPoint, sweep
from forerun.common.errors import ForerunError
from forerun.interfaces.report.records_of_searches import sweep_record
from forerun.interfaces.serve.question import Asked
from forerun.interfaces.serve.records import answer_record, place_record
from forerun.interfaces.serve.worker import Check, Tell

_FRONT = 100
"""plans that are simulated for the front of time and memory"""
_SCALES = (0.25, 0.5, 1, 2, 4)
"""sizes of the run on the scaling curve, as multiples of the question's"""


@dataclass(frozen=True)
class Answered:
    """A question and the result of its search. `whole` says whether the result has the front and the choices."""

    asked: Asked
    result: SearchResult
    whole: bool


@dataclass(frozen=True)
class Task:
    """A question for the search process: its plans, or the best plan on fewer and more GPUs."""

    asked: Asked
    kind: Literal["plans", "scaling"]
    most_plans: int
    """plans of a space that may be searched"""


def work(task: Task, tell: Tell, check: Check) -> None:
    """Does a task. Raises ForerunError for a question without an answer, and the errors of `check`."""
    if task.kind == "plans":
        _look(task, tell, check)
        _search(task.asked, tell, check)
    else:
        _scale(task.asked, tell, check)


def answer_event(answered: Answered) -> dict[str, object]:
    """Returns the event that shows an answer."""
    return {"kind": "answer", "whole": answered.whole, **answer_record(answered.result)}


def _look(task: Task, tell: Tell, check: Check) -> None:
    """Tells of plans that are likely to be good, so that there is something to see."""
    made = task.asked
    spaces = Spaces.of(make_spaces(*made.place, made.searched), Tally())
    n_plans = len(spaces.table)
    if n_plans > task.most_plans:
        raise ForerunError(
            f"{n_plans:,} plans are possible, and this server searches at most {task.most_plans:,}; fix a field of the"
            " plan, or use forerun plan"
        )
    tell({"kind": "space", "plans": n_plans})
    if not n_plans:
        return
    found: list[Prediction] = []
    for prediction in first_look(made.model, made.where, spaces.table):
        check()
        found.append(prediction)
        found.sort(key=lambda each: (not each.fits, each.step_time_s))
        tell({"kind": "places", "proved": False, "top": [place_record(each) for each in found]})


def _search(made: Asked, tell: Tell, check: Check) -> None:
    """Reports the answer twice: with proved places, and then with the front and the gains of other choices."""
    is_proved = False

    def keep(result: SearchResult, whole: bool) -> None:
        nonlocal is_proved
        is_proved = True
        answered = Answered(made, result, whole)
        tell(answered)
        tell(answer_event(answered))

    def found(places: Sequence[Prediction]) -> None:
        if not is_proved:
            tell({"kind": "places", "proved": False, "top": [place_record(each) for each in places]})

    result = search(
        *made.place,
        objective=made.question.objective,
        memory_limit_gib=made.question.memory_limit,
        fixed=made.searched,
        workers=1,
        progress=check,
        found=found,
        proved=lambda first: keep(first, whole=False),
        pareto=_FRONT,
        choices=made.choices if made.question.objective == "time" else None,
    )
    keep(result, whole=True)


def _scale(made: Asked, tell: Tell, check: Check) -> None:
    """Tells of the scaling curve point by point: the best plan on fewer and more GPUs for the same global batch."""
    model, cluster, gpus, seq_len, batch = made.place
    sizes = [n for n in dict.fromkeys(round(scale * gpus) for scale in _SCALES) if n >= 1]
    points: list[SweepPoint] = []
    for n_gpus in sizes:
        check()
        one = sweep(
            *(model, cluster, [n_gpus], seq_len, [batch]),
            objective="tokens",
            memory_limit_gib=made.question.memory_limit,
            fixed=made.searched,
            workers=1,
        )
        points += one.points
        rows = sweep_record(replace(one, points=tuple(points)))["points"]
        for row, point in zip(rows, points, strict=True):
            row["best"] = None if point.best is None else place_record(point.best)
        tell({"kind": "scaling", "points": rows, "done": n_gpus == sizes[-1]})
