"""Candidate: one change of an experiment that may help, as a Setup and as keys of the experiment's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from forerun.answers.analysis.setup import RankKind, Setup
from forerun.answers.experiment.description.training import SPELLINGS
from forerun.answers.experiment.request import Request
from forerun.common.errors import ForerunError
from forerun.core.network.patterns import CommunicationPattern
from forerun.describe.plan.plan import Plan

Kind = Literal[
    "gradient precision",
    "gradient compression",
    "gradient accumulation",
    "activation checkpointing",
    "batch",
    "batch balance",
    "torch.compile",
    "CUDA graphs",
    "optimizer",
    "overlap",
    "bucket size",
    "precision",
    "sharding",
    "offload",
    "plan",
    "communication pattern",
    "device",
    "all together",
]

PATTERN = "training.communication_pattern"
MIXED = "hardware.mixed"
_WORDS = {name: key for key, name in SPELLINGS.items()}
"""name in a Plan -> name in an experiment"""
_OF_GRADIENTS = ("gradient precision", "gradient compression")
"""kinds of changes that make gradients smaller; one of them is enough"""


@dataclass(frozen=True)
class Candidate:
    """A change that may help, not simulated yet."""

    kind: Kind
    title: str
    """the instruction: `sum gradients in bf16`"""
    setup: Setup
    change: dict[str, Any]
    """`section.key` of the experiment -> its new value, None to remove the key (`description.read.changed`)"""
    fields: dict[str, Any] = field(default_factory=dict)
    """the fields of the Plan that change"""
    caveat: str = ""
    """other effects: rounding, the global batch"""

    @property
    def touches(self) -> frozenset[str]:
        """Returns the names of the settings that the change touches. Candidates without a common setting can be
        combined.
        """
        bytes_of_gradients = {"gradients"} if self.kind in _OF_GRADIENTS else set()
        return frozenset({self.kind, *self.change, *bytes_of_gradients})

    def on(self, setup: Setup) -> Setup:
        """Adds this change to `setup`. Raises ForerunError if a plan can't have both."""
        pattern = self.setup.pattern if PATTERN in self.change else setup.pattern
        kinds = self.setup.kinds if MIXED in self.change else setup.kinds
        return replace(setup, plan=replace(setup.plan, **self.fields), pattern=pattern, kinds=kinds)


def of_plan(request: Request, kind: Kind, title: str, fields: Mapping[str, Any], caveat: str = "") -> Candidate | None:
    """Returns the candidate that changes `fields` of the plan; None if they stay the same or are impossible."""
    new = {name: value for name, value in fields.items() if getattr(request.setup.plan, name) != value}
    if not new:
        return None
    try:
        plan = replace(request.setup.plan, **new)
    except ForerunError:
        return None
    return with_plan(request, kind, title, plan, new, caveat)


def with_plan(
    request: Request, kind: Kind, title: str, plan: Plan, fields: dict[str, Any], caveat: str = ""
) -> Candidate:
    """Returns the candidate of `plan`; GPUs with another micro batch keep its proportion to the micro batch of the
    others.

    A pattern that can't exchange the plan's gradients gives way to NCCL.
    """
    own, change = request.setup, change_of(request, fields)
    ratio = plan.micro_batch / own.plan.micro_batch
    kinds = tuple(
        replace(each, micro_batch=max(1, round(each.micro_batch * ratio))) if each.micro_batch else each
        for each in own.kinds
    )
    setup = replace(own, plan=plan, kinds=kinds)
    if kinds != own.kinds:
        change[MIXED] = mixed_of(request, kinds)
    if setup.pattern is not None and not _goes_with(setup.pattern, plan):
        setup = replace(setup, pattern=None)
        change[PATTERN] = "nccl"
    return Candidate(kind, title, setup, change, fields, "; ".join(filter(None, (caveat, batch_caveat(own, setup)))))


def batch_caveat(before: Setup, after: Setup) -> str:
    """Returns the effect on the global batch, in words; "" if it stays."""
    if after.samples_per_step == before.samples_per_step:
        return ""
    return f"the global batch becomes {after.samples_per_step:,} instead of {before.samples_per_step:,}"


def mixed_of(request: Request, kinds: tuple[RankKind, ...]) -> list[dict[str, Any]]:
    """Returns `hardware.mixed` with the micro batches of `kinds`."""
    given = (request.given.get("hardware") or {}).get("mixed") or [
        {"gpu_model": kind.name, "num_gpus": kind.n_gpus, "slowdown": kind.slowdown} for kind in kinds
    ]
    return [
        entry if kind.micro_batch is None else {**entry, "batch_size_per_gpu": kind.micro_batch}
        for entry, kind in zip(given, kinds, strict=True)
    ]


def _goes_with(pattern: CommunicationPattern, plan: Plan) -> bool:
    try:
        pattern.check(plan)
    except ForerunError:
        return False
    return plan.zero_stage >= pattern.zero_stage


def change_of(request: Request, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns plan fields as keys of the section `training`, which replace other spellings of the same."""
    given = request.given.get("training") or {}
    change: dict[str, Any] = {}
    for name, value in fields.items():
        key = _WORDS.get(name, name)
        change[f"training.{key}"] = value
        if key != name and name in given:
            change[f"training.{name}"] = None
    return change
