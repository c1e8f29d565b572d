"""Documents: the contents of the pages of a prediction and of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun.answers.analysis.bottlenecks import bottlenecks
from forerun.answers.analysis.critical_path import critical_path
from forerun.interfaces.report.page import Document, Part
from forerun.interfaces.report.page_sections import (
    bottleneck_sections,
    communication_section,
    explain_section,
    figures,
    loop_section,
    memory_sections,
    network_section,
    reproduce_section,
    sensitivity_sections,
    time_sections,
    warnings,
)
from forerun.interfaces.report.records import plan_record
from forerun.interfaces.report.wording import plan_words

if TYPE_CHECKING:
    from forerun.answers.analysis.communication import CollectiveTime
    from forerun.answers.analysis.prediction import Prediction
    from forerun.answers.analysis.reading import Simulation
    from forerun.answers.analysis.what_if import WhatIf

MAPS = 4
"""heat maps on the page of a search by default"""
_REASONS = 8
"""rules and near misses that the page of a search lists"""


@dataclass(frozen=True)
class InDetail:
    """The best plan of a search, simulated whole."""

    simulation: Simulation
    sensitivities: Sequence[WhatIf]
    collectives: Sequence[CollectiveTime]


def prediction_document(
    simulation: Simulation,
    sensitivities: Sequence[WhatIf],
    command: str,
    communication: Sequence[CollectiveTime] = (),
) -> Document:
    """Returns the page of one prediction, of an unfolded `simulation`; `communication` are the parts of its
    collectives, where they run on the links of a cluster."""
    prediction = simulation.prediction
    return Document(
        f"{prediction.model} on {prediction.n_gpus:,} x {prediction.cluster}",
        plan_line(prediction),
        (
            figures(prediction),
            *warnings(prediction),
            *bottleneck_sections(bottlenecks(simulation)),
            *time_sections(simulation, critical_path(simulation)),
            *communication_section(communication),
            *sensitivity_sections(sensitivities),
            *network_section(simulation.prediction),
            *loop_section(prediction),
            *memory_sections(simulation),
            *_plan(prediction, command),
            *explain_section(prediction),
        ),
    )


def best_sections(found: InDetail | None, command: str, again: str) -> list[Part]:
    """Returns the sections on the best plan and the commands that reproduce it; `found` is None if nothing fits."""
    if found is None:
        return reproduce_section(command, {}, "")
    best = found.simulation
    return [
        *bottleneck_sections(bottlenecks(best)),
        *time_sections(best, critical_path(best)),
        *communication_section(found.collectives),
        *sensitivity_sections(found.sensitivities),
        *network_section(best.prediction),
        *memory_sections(best),
        *_plan(best.prediction, command, again),
        *explain_section(best.prediction),
    ]


def plan_line(prediction: Prediction) -> str:
    """Returns the plan of a prediction, with its batch and stack."""
    plan = prediction.plan
    if plan is None:
        return "a saved program"
    if prediction.sample is not None:
        batch = f"global batch {plan.global_batch:,} {prediction.sample}s"
    else:
        batch = f"sequences of {plan.seq_len:,} tokens, global batch {plan.global_batch:,}"
    return f"{plan_words(plan)}, {batch}, stack {plan.stack}"


def _plan(prediction: Prediction, command: str, again: str = "") -> list[Part]:
    """Returns the plan and the commands that reproduce a prediction."""
    record = {} if prediction.plan is None else plan_record(prediction.plan)
    commands = command + (f"\n\n# the best plan alone\n{again}" if again else "")
    return reproduce_section(commands, record, "The plan, as a plan file (--plan-file)")
