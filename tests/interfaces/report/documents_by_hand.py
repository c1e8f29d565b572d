"""A document of each kind, for tests of pages."""

from __future__ import annotations

from functools import lru_cache

import results_by_hand as by_hand

from forerun.answers.analysis.bottlenecks import bottlenecks
from forerun.answers.analysis.communication import CollectiveTime, collectives_of
from forerun.answers.analysis.critical_path import critical_path
from forerun.answers.analysis.what_if import WhatIf, sensitivities
from forerun.answers.experiment.advice.advise import advise
from forerun.answers.experiment.answers import Answers
from forerun.answers.search.result import SearchResult
from forerun.answers.search.search import search
from forerun.answers.search.sweep import Sweep, sweep
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.interfaces.report.documents import InDetail, prediction_document
from forerun.interfaces.report.documents_of_runs import run_document
from forerun.interfaces.report.documents_of_searches import search_document
from forerun.interfaces.report.documents_of_studies import comparison_document, scaling_document, straggler_document
from forerun.interfaces.report.page import Document
from forerun.interfaces.report.sweep_document import sweep_document

KINDS = (
    "run",
    "folded run",
    "prediction",
    "scaling",
    "weak",
    "comparison",
    "stragglers",
    "search",
    "search in vain",
    "range",
)


@lru_cache(maxsize=1)
def gains() -> tuple[WhatIf, ...]:
    return sensitivities(by_hand.request().setup, by_hand.simulated())


@lru_cache(maxsize=1)
def answers() -> Answers:
    simulation = by_hand.simulated()
    advice = advise(by_hand.request(), simulation, most=3, plans=0)
    return Answers(bottlenecks(simulation), critical_path(simulation), gains(), advice, collectives())


def collectives() -> tuple[CollectiveTime, ...]:
    return collectives_of(by_hand.request().setup, by_hand.simulated())


@lru_cache(maxsize=1)
def found() -> SearchResult:
    fixed = {"pp": 1, "cp": 1}
    return search(
        load_model("gpt2-small"),
        load_cluster("h100-sxm"),
        8,
        1024,
        64,
        fixed=fixed,
        memory_limit_gib=8,
        workers=1,
        pareto=100,
    )


@lru_cache(maxsize=1)
def found_range() -> Sweep:
    fixed = {"pp": 1, "cp": 1, "tp": 1, "zero_stage": 3, "micro_batch": [1, 4]}
    question = (load_model("gpt2-small"), load_cluster("h100-sxm"), (1, 8, 16), 1024, (64, 128))
    return sweep(*question, fixed=fixed, memory_limit_gib=6, workers=1, pareto=100)


def documents(name: str) -> dict[str, Document]:
    """Kind of page -> a document in which `name` stands for everything that a user may call something."""
    simulation = by_hand.simulated()
    made = (
        run_document(by_hand.run_result(name), answers(), f"forerun experiment run {name}"),
        run_document(by_hand.run_result(name, differing=False), None),
        prediction_document(simulation, gains(), f"forerun predict {name}"),
        scaling_document(by_hand.scaling_study(name), name),
        scaling_document(by_hand.scaling_study(name, strong=False)),
        comparison_document(by_hand.comparison(name), name),
        straggler_document(by_hand.straggler_study(name), name),
        search_document(found(), 10, InDetail(simulation, gains(), collectives()), name, name),
        search_document(found(), 10, None, name, ""),
        sweep_document(found_range(), InDetail(simulation, gains(), collectives()), name, name),
    )
    return dict(zip(KINDS, made, strict=True))
