"""What a software stack offers to a search: data in `spaces.yaml`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

import pydantic
import yaml

from forerun.common.errors import ForerunError
from forerun.describe.plan.plan import Schedule
from forerun.describe.plan.stack import load_stack


@dataclass(frozen=True)
class Habits:
    """The axes that a family of stacks has, and the values worth trying."""

    stacks: tuple[str, ...]
    source: str
    axes: tuple[str, ...]
    """mesh axes beside data parallelism"""
    zero_stages: tuple[int, ...]
    schedules: tuple[tuple[Schedule, int], ...]
    """(name, virtual stages) to try where pp is above 1"""
    selective_policy: str
    cp_method: str
    reshard: tuple[str, ...] = ("default",)
    more_schedules: tuple[tuple[Schedule, int], ...] = ()
    """what the whole space has beside `schedules`"""
    offload: tuple[str, ...] = ("none",)
    """what the whole space keeps in host memory"""

    @property
    def all_schedules(self) -> tuple[tuple[Schedule, int], ...]:
        """Every schedule of the family with its virtual stages."""
        return self.schedules + self.more_schedules


@cache
def _families() -> tuple[Habits, ...]:
    text = (resources.files("forerun.answers.search") / "spaces.yaml").read_text(encoding="utf-8")
    return pydantic.TypeAdapter(tuple[Habits, ...]).validate_python(yaml.safe_load(text))


def habits_of(stack: str) -> Habits:
    """The habits of a stack, or of the one that it is a version of (`torchtitan-2024` of `torchtitan`).

    Raises UnknownName for a stack that does not exist, ForerunError for one that `spaces.yaml` knows nothing about.
    """
    name = load_stack(stack).name
    known = {stack: family for family in _families() for stack in family.stacks}
    found = [stack for stack in known if name == stack or name.startswith(stack + "-")]
    if found:
        return known[max(found, key=len)]
    raise ForerunError(f"stack {name} has no entry in search/spaces.yaml, so there is no space to search; use predict")
