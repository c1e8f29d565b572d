"""Answers: what an experiment's run is asked for beyond its figures. Bottlenecks, critical path, what-if, advice."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.answers.analysis.bottlenecks import Bottlenecks, bottlenecks
from forerun.answers.analysis.critical_path import CriticalPath, critical_path
from forerun.answers.analysis.what_if import WhatIf, sensitivities
from forerun.answers.experiment.advice.advise import Advice, advise
from forerun.answers.experiment.result import RunResult


@dataclass(frozen=True)
class Answers:
    """Of one run, about its undisturbed iteration."""

    bottlenecks: Bottlenecks
    path: CriticalPath
    sensitivities: tuple[WhatIf, ...]
    """most gain first"""
    advice: tuple[Advice, ...]
    """each simulated; most gain first"""


def answers_of(result: RunResult) -> Answers:
    """Analyse a run: some dozens of further simulations.

    Raises:
        ForerunError: as simulating the experiment's setup does.
    """
    request, simulation = result.request, result.simulation
    limits = request.thresholds
    return Answers(
        bottlenecks(simulation, limits.compute, limits.memory, limits.network),
        critical_path(simulation),
        sensitivities(request.setup, simulation),
        advise(request, simulation),
    )
