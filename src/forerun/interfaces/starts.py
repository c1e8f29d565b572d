"""First files: makes a YAML file from four answers, and names the command that reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from forerun.common.errors import ForerunError, UnknownName
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model


@dataclass(frozen=True)
class Question:
    """Holds a user's question."""

    model: str
    cluster: str
    gpus: int
    goal: str


@dataclass(frozen=True)
class Start:
    """A file, and the command that takes it; `FILE` stands for its name."""

    text: str
    command: str


GOALS: dict[str, str] = {
    "plan": "the fastest plan that fits",
    "predict": "time, memory and cost of one plan",
    "study": "bottlenecks and what would improve the run",
    "scale": "how far the run scales",
    "weeks": "failures, checkpoints and goodput of a run of weeks",
}
"""goal -> the question that it answers"""
_SEQ_LEN = 4096
_WEEKS_DAYS = 30


def start_of(question: Question) -> Start:
    """Returns the file for a question.

    Raises UnknownName for a model, cluster or goal that is not known, and ForerunError if the GPUs do not fill whole
    nodes.
    """
    if question.goal not in GOALS:
        raise UnknownName("goal", question.goal, list(GOALS))
    load_model(question.model)
    node = load_cluster(question.cluster).node_size
    if question.gpus < 1 or (question.gpus > node and question.gpus % node):
        raise ForerunError(f"--gpus {question.gpus}: expected at most {node} GPUs, or a multiple of them (whole nodes)")
    made: dict[str, Callable[[Question, int], tuple[str, dict[str, Any], str]]] = {
        "plan": _plan,
        "predict": _predict,
        "weeks": _weeks,
        "study": _study,
        "scale": _scale,
    }
    says, keys, command = made[question.goal](question, node)
    body = yaml.safe_dump(keys, sort_keys=False, allow_unicode=True, width=100)
    return Start(f"# {GOALS[question.goal].capitalize()}. {says}\n{body}", command)


def _asked(question: Question) -> str:
    return f"{question.model} --cluster {question.cluster} --gpus {question.gpus}"


def _plan(question: Question, node: int) -> tuple[str, dict[str, Any], str]:
    says = "A search keeps these fields and varies all others: forerun plan --help lists them."
    command = f"forerun plan {_asked(question)} --seq-len {_SEQ_LEN} --global-batch {4 * question.gpus}"
    return says, {"stack": "torchtitan", "activation_checkpointing": "selective"}, f"{command} --plan-file FILE"


def _predict(question: Question, node: int) -> tuple[str, dict[str, Any], str]:
    keys = {"seq_len": _SEQ_LEN, "micro_batch": 1, "dp_shard": question.gpus, "activation_checkpointing": "selective"}
    says = "The fields of a plan: forerun predict --help lists them."
    return says, keys, f"forerun predict {question.model} --cluster {question.cluster} --plan-file FILE"


def _weeks(question: Question, node: int) -> tuple[str, dict[str, Any], str]:
    plan = {"model": question.model, "cluster": question.cluster, "fields": {"seq_len": _SEQ_LEN, "compile": True}}
    keys = {
        "name": question.model,
        "gpus": question.gpus,
        "gpus_per_node": min(node, question.gpus),
        "days": _WEEKS_DAYS,
        "plan": plan,
        "failures": {"preset": "llama-3"},
    }
    return "docs/goodput.md explains every key.", keys, "forerun run FILE"


def _experiment(question: Question, node: int) -> dict[str, Any]:
    return {
        "name": question.model,
        "hardware": {"cluster": question.cluster},
        "model": {"preset": question.model, "sequence_length": _SEQ_LEN},
        "training": {"batch_size_per_gpu": 1, "num_nodes": max(1, question.gpus // node), "num_iterations": 100},
    }


def _study(question: Question, node: int) -> tuple[str, dict[str, Any], str]:
    says = "Every key with its unit: forerun experiment keys."
    return says, _experiment(question, node), "forerun experiment run FILE"


def _scale(question: Question, node: int) -> tuple[str, dict[str, Any], str]:
    nodes = max(1, question.gpus // node)
    scales = sorted({max(1, nodes // part) for part in (1, 2, 4, 8)})
    says = "Every key with its unit: forerun experiment keys."
    command = f"forerun experiment scale FILE --nodes {' '.join(map(str, scales))} --weak"
    return says, _experiment(question, node), command
