"""The Python interface. Its functions take models and clusters as a preset's name, a path or an object."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forerun.answers.analysis import predict as _predict
from forerun.answers.analysis.around_step import around_plan
from forerun.answers.analysis.predict_program import predict_program as _predict_program
from forerun.answers.analysis.predict_program import read_program as load_program
from forerun.answers.analysis.prediction import Prediction
from forerun.answers.analysis.reading import Simulation
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.answers.search.choices import with_open_stacks
from forerun.answers.search.result import SearchResult
from forerun.answers.search.search import search as _search
from forerun.answers.search.sweep import Sweep
from forerun.answers.search.sweep import sweep as _sweep
from forerun.core.cost.measured import Measured
from forerun.core.cost.measured_files import read_measured
from forerun.core.network.network_file import Network
from forerun.core.network.on_topology import load_network, network_of
from forerun.core.program.types import Program
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.storage import Storage
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.catalog import load_any, load_model
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.describe.plan.training_loop import TrainingLoop
from forerun.interfaces.notebook import show_in_notebooks
from forerun.sources.trace.module import trace_module
from forerun.sources.trace.record import trace_call as trace

__all__ = [
    "load_cluster",
    "load_measured",
    "load_model",
    "load_network",
    "load_program",
    "predict",
    "predict_program",
    "search",
    "simulate",
    "sweep",
    "trace",
    "trace_module",
]

show_in_notebooks()


def _model(model: ModelSpec | str | Path) -> ModelSpec:
    return model if isinstance(model, ModelSpec) else load_model(model)


def _any_model(model: ModelSpec | LayeredModel | str | Path) -> ModelSpec | LayeredModel:
    return load_any(model) if isinstance(model, str | Path) else model


def _cluster(cluster: Cluster | str | Path) -> Cluster:
    return cluster if isinstance(cluster, Cluster) else load_cluster(cluster)


def predict(
    model: ModelSpec | LayeredModel | str | Path,
    plan: Plan,
    cluster: Cluster | str | Path,
    network: Network | str | Path | None = None,
    measured: Measured | None = None,
    loop: TrainingLoop | None = None,
    storage: Storage | None = None,
) -> Prediction:
    """Predicts one optimizer step of `model` under `plan` on `cluster`.

    `model` is a ModelSpec, a LayeredModel (whose plan has a seq_len of 1), the name of a preset or a file. `cluster` is
    a Cluster, the name of a preset or a YAML file. `network` replaces the links of the cluster: a Network, a network
    file or a line of text such as `switch:8@450/300ns,fat-tree:16@50/700ns`. `measured` has your own times of kernels
    and collectives (`load_measured`). `loop` describes the periodic work of the training loop
    (`TrainingLoop(checkpoint=500, gc=50, metrics=10)`), whose cost is in `Prediction.loop`. `storage` is the file
    system for its checkpoints.

    Raises:
        ImpossiblePlan: the plan cannot run; the message says why.
        ForerunError: an unknown name, a file that cannot be read, or a network with fewer NPUs than the plan has GPUs.
    """
    where = _cluster(cluster)
    setup = Setup(_any_model(model), plan, where, network_of(where, network), measured, replays=True)
    folded = not loop and _predict.is_worth_folding(plan)
    return around_plan(simulate_setup(setup, folded), setup, loop, storage).prediction


def simulate(
    model: ModelSpec | LayeredModel | str | Path,
    plan: Plan,
    cluster: Cluster | str | Path,
    network: Network | str | Path | None = None,
    measured: Measured | None = None,
    loop: TrainingLoop | None = None,
    storage: Storage | None = None,
) -> Simulation:
    """Predicts one optimizer step like `predict`, and also returns the Program, its Timeline and its memory."""
    where = _cluster(cluster)
    setup = Setup(_any_model(model), plan, where, network_of(where, network), measured, replays=True)
    return around_plan(simulate_setup(setup), setup, loop, storage)


def load_measured(
    kernel_profile: str | Path | None = None, network_profile: str | Path | None = None
) -> Measured | None:
    """Reads your measured times of kernels and collectives from CSV files (docs/cli.md); None without files.

    Raises ForerunError if a file can't be read or has a wrong value; the message names the line and the column.
    """
    return read_measured(kernel_profile, network_profile)


def predict_program(
    program: Program | str | Path,
    cluster: Cluster | str | Path,
    *,
    n_gpus: int | None = None,
    network: Network | str | Path | None = None,
    measured: Measured | None = None,
    tokens_per_step: int | None = None,
    stack: str | None = None,
    whole_timeline: bool = False,
    loop: TrainingLoop | None = None,
    storage: Storage | None = None,
) -> Simulation:
    """Predicts one step of a saved Program, or of its file, on `cluster`.

    `n_gpus` is another number of ranks; only data parallelism changes. See
    `forerun.answers.analysis.predict_program.predict_program` for the other arguments and the errors.
    """
    where = _cluster(cluster)
    return _predict_program(
        program if isinstance(program, Program) else load_program(program),
        where,
        n_gpus=n_gpus,
        network=network_of(where, network),
        measured=measured,
        tokens_per_step=tokens_per_step,
        stack=stack,
        whole_timeline=whole_timeline,
        loop=loop,
        storage=storage,
    )


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
    """Returns the best plans for `n_gpus` of `cluster`, on `network` as in `predict`.

    `options` are those of `forerun.answers.search.search.search`. If `fixed` names no stack, the search tries the
    default stacks (docs/cli.md).
    """
    where = _cluster(cluster)
    options["fixed"] = with_open_stacks(options.get("fixed"))
    chosen = network_of(where, network)
    return _search(_model(model), where, n_gpus, seq_len, global_batch, network=chosen, **options)


def sweep(
    model: ModelSpec | str | Path,
    cluster: Cluster | str | Path,
    gpus: Sequence[int],
    seq_len: int,
    global_batches: Sequence[int],
    *,
    network: Network | str | Path | None = None,
    **options: Any,
) -> Sweep:
    """Returns a search for each number of GPUs and each global batch, and the best of them all.

    `options` are those of `forerun.answers.search.sweep.sweep`. Stacks are chosen as in `search`.
    """
    where = _cluster(cluster)
    options["fixed"] = with_open_stacks(options.get("fixed"))
    chosen = network_of(where, network)
    return _sweep(_model(model), where, gpus, seq_len, global_batches, network=chosen, **options)
