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
from forerun.network.network_file import Network
from forerun.network.on_topology import load_network, network_of
from forerun.plan.plan import Plan
from forerun.search.result import SearchResult
from forerun.search.search import search as _search

__all__ = ["load_cluster", "load_model", "load_network", "predict", "search", "simulate"]


def _model(model: ModelSpec | str | Path) -> ModelSpec:
    return model if isinstance(model, ModelSpec) else load_model(model)


def _cluster(cluster: Cluster | str | Path) -> Cluster:
    return cluster if isinstance(cluster, Cluster) else load_cluster(cluster)


def predict(
    model: ModelSpec | str | Path,
    plan: Plan,
    cluster: Cluster | str | Path,
    network: Network | str | Path | None = None,
) -> Prediction:
    """What one optimizer step of `model` under `plan` does on `cluster`.

    `model` is a ModelSpec, a preset's name or a config.json; `cluster` a Cluster, a preset's name or a YAML file.
    `network` is what the GPUs communicate over in place of the links of the cluster: a Network, a network file or a
    line of text such as `switch:8@450/300ns,fat-tree:16@50/700ns`.

    Raises:
        ImpossiblePlan: the plan cannot run; the message says why.
        ForerunError: an unknown name, a file that cannot be read, or a network with fewer NPUs than the plan has GPUs.
    """
    where = _cluster(cluster)
    return _predict.predict(_model(model), plan, where, network_of(where, network))


def simulate(
    model: ModelSpec | str | Path,
    plan: Plan,
    cluster: Cluster | str | Path,
    network: Network | str | Path | None = None,
) -> Simulation:
    """As `predict`, with the Program, its Timeline and its memory."""
    where = _cluster(cluster)
    return _predict.simulate(_model(model), plan, where, network=network_of(where, network))


def search(
    model: ModelSpec | str | Path,
    cluster: Cluster | str | Path,
    n_gpus: int,
    seq_len: int,
    global_batch: int,
    *,
    network: Network | str | Path | None = None,
    **options: Any,
) -> SearchResult:
    """The best plans for `n_gpus` of `cluster`, on `network` as in `predict`.

    `options` are those of `forerun.search.search.search`.
    """
    where = _cluster(cluster)
    chosen = network_of(where, network)
    return _search(_model(model), where, n_gpus, seq_len, global_batch, network=chosen, **options)
