"""The analysis of an experiment's run: bottlenecks, critical path, what-if and advice."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.answers.analysis.bottlenecks import Bottlenecks, bottlenecks
from forerun.answers.analysis.communication import CollectiveTime, collectives_of
from forerun.answers.analysis.critical_path import CriticalPath, critical_path
from forerun.answers.analysis.what_if import WhatIf, sensitivities
from forerun.answers.experiment.advice.advise import Advice, advise
from forerun.answers.experiment.result import RunResult


@dataclass(frozen=True)
class Answers:
    """The analysis of one run, from its undisturbed iteration."""

    bottlenecks: Bottlenecks
    path: CriticalPath
    sensitivities: tuple[WhatIf, ...]
    """the largest gain first"""
    advice: tuple[Advice, ...]
    """each simulated; the largest gain first"""
    collectives: tuple[CollectiveTime, ...]
    """the parts of their times; empty if the times are not those of NCCL on sound links"""


def answers_of(result: RunResult) -> Answers:
    """Analyses a run: some dozens of further simulations.

    Raises ForerunError as simulating the experiment's setup does.
    """
    request, simulation = result.request, result.simulation
    limits = request.thresholds
    return Answers(
        bottlenecks(simulation, limits.compute, limits.memory, limits.network),
        critical_path(simulation),
        sensitivities(request.setup, simulation),
        advise(request, simulation),
        collectives_of(request.setup, simulation),
    )
