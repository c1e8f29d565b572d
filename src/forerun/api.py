"""The Python interface: models and clusters by name, path or object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.analysis import predict as _predict
from forerun.analysis.predict import Simulation
from forerun.analysis.prediction import Prediction
from forerun.cluster.catalog import load_cluster
from forerun.cluster.types import Cluster
from forerun.model.catalog import load_model
from forerun.model.spec import ModelSpec
from forerun.plan.plan import Plan
from forerun.search.result import SearchResult
from forerun.search.search import search as _search

__all__ = ["load_cluster", "load_model", "predict", "search", "simulate"]


def _model(model: ModelSpec | str | Path) -> ModelSpec:
    return model if isinstance(model, ModelSpec) else load_model(model)


def _cluster(cluster: Cluster | str | Path) -> Cluster:
    return cluster if isinstance(cluster, Cluster) else load_cluster(cluster)


def predict(model: ModelSpec | str | Path, plan: Plan, cluster: Cluster | str | Path) -> Prediction:
    """What one optimizer step of `model` under `plan` does on `cluster`.

    `model` is a ModelSpec, a preset's name or a config.json; `cluster` a Cluster, a preset's name or a YAML file.

    Raises:
        ImpossiblePlan: the plan cannot run; the message says why.
        ForerunError: an unknown name, or a file that cannot be read.
    """
    return _predict.predict(_model(model), plan, _cluster(cluster))


def simulate(model: ModelSpec | str | Path, plan: Plan, cluster: Cluster | str | Path) -> Simulation:
    """As `predict`, with the Program, its Timeline and its memory."""
    return _predict.simulate(_model(model), plan, _cluster(cluster))


def search(
    model: ModelSpec | str | Path,
    cluster: Cluster | str | Path,
    n_gpus: int,
    seq_len: int,
    global_batch: int,
    **options: Any,
) -> SearchResult:
    """The best plans for `n_gpus` of `cluster`; `options` are those of `forerun.search.search.search`."""
    return _search(_model(model), _cluster(cluster), n_gpus, seq_len, global_batch, **options)
