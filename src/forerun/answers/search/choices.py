"""Tries the choices that a search leaves open, and finds the gain of each.

Compilation and the framework change the speed of a run but not its results, so a search that leaves them open tries
their values. It tries current frameworks whose rates were fitted to measured steps; others have wide bands. A narrower
precision changes the results. The search never chooses a precision or a framework without measured steps by itself: a
`Choice` says how much they would gain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from forerun.answers.analysis.prediction import Prediction
from forerun.answers.analysis.uncertainty import is_fitted
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.constraints import refuse
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import DEFAULT_STACK, load_stack, stack_names

UNMEASURED = "no measured step informs its rates"
OTHER_NUMERICS = "this changes rounding"
LISTED = 4
"""best plans that are tried in narrower precisions"""


@dataclass(frozen=True)
class Choice:
    """The best plan with another value of a choice than some plan has, which is the best with its own value."""

    field: str
    """the field of a plan that is chosen: compile, stack or precision"""
    value: str
    """the other value"""
    best: Prediction
    instead: Prediction
    """the plan with the usual value: the best of all, or, where only compilation differs, the best of its stack"""
    caution: str = ""
    """why a search does not choose this unasked; empty if it was among the plans of the search"""


def open_stacks(tool: str | None = None) -> tuple[str, ...]:
    """Returns the stacks that a search tries where the user leaves the framework open, the default one first.

    With `tool`, those that this tool of `--launch` starts, or the default one where it starts none of them.
    """
    found = [name for name in _todays() if is_fitted(load_stack(name))]
    started = [name for name in found if tool is None or tool in load_stack(name).launch]
    return tuple(sorted(started, key=lambda name: name != DEFAULT_STACK)) or (DEFAULT_STACK,)


def with_open_stacks(fixed: Mapping[str, Any] | None, tool: str | None = None) -> dict[str, Any]:
    """Returns the fixed fields of a plan, with the stacks to try where the user leaves the framework open."""
    return {"stack": list(open_stacks(tool)), **(fixed or {})}


def unmeasured_stacks() -> tuple[str, ...]:
    """Returns the stacks of today to whose rates no measured step was fitted."""
    return tuple(name for name in _todays() if not is_fitted(load_stack(name)))


def _todays() -> list[str]:
    return [name for name in stack_names() if load_stack(name).today]


def narrower(model: ModelSpec, plan: Plan, cluster: Cluster) -> list[Plan]:
    """Returns `plan` in each narrower precision that its stack offers and the device has."""
    offered = load_stack(plan.stack).search_space().narrow
    plans = (replace(plan, precision=precision, fp8_recipe=recipe) for precision, recipe in offered)  # type: ignore[arg-type]
    return [other for other in plans if plan.precision == "bf16" and refuse(model, other, cluster) is None]
