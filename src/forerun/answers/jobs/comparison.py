"""Schedules the same jobs under each policy, and keeps schedules in a file, so that an interrupted command can
continue."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from forerun.answers.jobs.description import JobsRequest
from forerun.answers.jobs.job import Scheduled
from forerun.answers.jobs.outcome import PolicyOutcome
from forerun.answers.jobs.unlike_description import UnlikeRequest
from forerun.common.content import digest_of, forerun_digest
from forerun.common.records import Records
from forerun.common.workers import HERE, Workers

_TABLE = "schedule"
_WORTH_A_POOL = 2
"""fewer policies than this are simulated in this process"""
Schedule = tuple[Scheduled, ...]
_SCHEDULE = TypeAdapter(Schedule)


def compare(
    request: JobsRequest | UnlikeRequest, workers: Workers = HERE, store: str | Path | None = None
) -> list[PolicyOutcome]:
    """Returns the schedule of the same jobs under each policy of `request`.

    With `store` schedules are kept in that file, and another command reads them there. Raises as the request's
    `schedule` does, ForerunError for a store that can't be used, and as `Workers` does.
    """
    with ExitStack() as stack:
        kept = None if store is None else stack.enter_context(Records(Path(store), _TABLE))
        keys = [""] * len(request.policies) if kept is None else _keys(request)
        known = {} if kept is None else _read(kept, keys)
        missing = [(key, name) for key, name in zip(keys, request.policies, strict=True) if key not in known]
        found: dict[str, Schedule] = {}
        if missing:
            how = workers.answering(partial(_schedule, request), forerun_digest, _WORTH_A_POOL, chunk=1)
            simulated = stack.enter_context(how).run([name for _, name in missing])
            for (key, name), schedule in zip(missing, simulated, strict=True):
                found[name] = schedule
                if kept is not None:
                    kept.add([(key, _SCHEDULE.dump_python(schedule, mode="json"))])
    schedules = [known[key] if key in known else found[name] for key, name in zip(keys, request.policies, strict=True)]
    outcomes = zip(request.policies, schedules, strict=True)
    return [PolicyOutcome(name, each, request.gpus, request.kinds) for name, each in outcomes]


def _read(store: Records, keys: Sequence[str]) -> dict[str, Schedule]:
    """Returns the schedules that the store has. Raises ForerunError for a damaged one."""
    try:
        return {key: _SCHEDULE.validate_python(record) for key, record in store.of(keys).items()}
    except ValidationError as error:
        raise store.unusable(f"a damaged record: {type(error).__name__}") from None


def _schedule(request: JobsRequest | UnlikeRequest, policy: str) -> Schedule:
    return tuple(request.schedule(policy))


def _keys(request: JobsRequest | UnlikeRequest) -> list[str]:
    """Returns a digest for each policy of everything that its schedule depends on, Forerun's own files too."""
    whole = digest_of(replace(request, name="", policies=(), notes=()))
    return [digest_of(whole, name) for name in request.policies]
