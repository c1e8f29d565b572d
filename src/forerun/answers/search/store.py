"""A file of predictions by plan, so that an interrupted search can continue.

A search that starts again with the same file simulates only the plans that are missing there, and has the same result.
The key of an answer contains all inputs of its figures, so any searches may share a file. It does not contain the
objective, the number of places or the limits of axes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from forerun.answers.analysis.prediction import DoesNotFit, Prediction
from forerun.answers.search.executor import Answer, AnswersPlans, Refused
from forerun.common.records import Records
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import own_stack

if TYPE_CHECKING:
    from typing_extensions import Self

_TABLE = "plan"
_PREDICTION = TypeAdapter(Prediction)
_DOES_NOT_FIT = TypeAdapter(DoesNotFit)


class AnswerStore:
    """A context manager for a file of answers; `basis` is a digest of all that they depend on beside the plan.

    Raises ForerunError if the file can't be read or written, or is no store of answers.
    """

    def __init__(self, path: Path, basis: str) -> None:
        self._records = Records(path, _TABLE)
        self._basis = basis

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._records.__exit__(kind, error, trace)

    def known(self, plans: Sequence[Plan]) -> dict[Plan, Answer]:
        """Returns the stored answers to `plans`. Raises ForerunError if they can't be read."""
        keys = {self._key(plan): plan for plan in plans}
        try:
            return {keys[key]: _answer(record) for key, record in self._records.of(list(keys)).items()}
        except (KeyError, TypeError, ValidationError) as error:
            raise self._records.unusable(f"a damaged record: {type(error).__name__}") from None

    def keep(self, plan: Plan, answer: Answer) -> None:
        """Writes an answer at once. Raises ForerunError if the file can't be written; earlier answers stay in it."""
        self._records.add([(self._key(plan), _record(answer))])

    def _key(self, plan: Plan) -> str:
        own = own_stack(plan.stack)
        parts = (self._basis, repr(plan), *([] if own is None else [repr(own)]))
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()


class Remembering:
    """Answers plans from `store`; answers the others with `others` and stores these answers as they come."""

    def __init__(self, others: AnswersPlans, store: AnswerStore) -> None:
        self._others = others
        self._store = store

    def run(self, plans: Sequence[Plan], /) -> Iterator[Answer]:
        """Returns an iterator of an answer for each plan, in order."""
        known = self._store.known(plans)
        return self._kept(plans, known, self._others.run([plan for plan in plans if plan not in known]))

    def _kept(self, plans: Sequence[Plan], known: dict[Plan, Answer], fresh: Iterator[Answer]) -> Iterator[Answer]:
        """Yields an answer for each plan: a `known` one, or the next one of `fresh`, which goes into the store."""
        for plan in plans:
            if plan in known:
                yield known[plan]
                continue
            answer = next(fresh)
            self._store.keep(plan, answer)
            yield answer


def _record(answer: Answer) -> dict[str, Any]:
    if isinstance(answer, Refused):
        return {"refused": answer.reason}
    if isinstance(answer, DoesNotFit):
        return {"does_not_fit": _DOES_NOT_FIT.dump_python(answer, mode="json")}
    return {"prediction": _PREDICTION.dump_python(answer, mode="json")}


def _answer(record: dict[str, Any]) -> Answer:
    if "refused" in record:
        return Refused(str(record["refused"]))
    if "does_not_fit" in record:
        return _DOES_NOT_FIT.validate_python(record["does_not_fit"])
    return _PREDICTION.validate_python(record["prediction"])
