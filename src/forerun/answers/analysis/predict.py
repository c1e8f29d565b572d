"""predict: builds the Program of a plan, simulates it and returns the Prediction."""

from __future__ import annotations

from forerun.answers.analysis.prediction import DoesNotFit, Prediction
from forerun.answers.analysis.reading import Simulation
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import prepare, simulate_setup
from forerun.common.units import GIB
from forerun.core.cost.measured import Measured
from forerun.core.network.network_file import Network
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan

_FEW_PASSES = 4
"""with fewer passes of the model than this, looking for repeated blocks takes longer than running them all"""


def predict(
    model: ModelSpec | LayeredModel,
    plan: Plan,
    cluster: Cluster,
    network: Network | None = None,
    measured: Measured | None = None,
) -> Prediction:
    """Predicts one optimizer step of `model` under `plan` on `cluster`.

    With `network` the GPUs communicate over it, rank r as its NPU r, in place of the links of the cluster. `measured`
    holds the user's own times of kernels and collectives, which replace the shipped ones. A replay of PyTorch's caching
    allocator finds the reserved memory.

    Raises:
        ImpossiblePlan: the plan cannot run; the message says why.
        ForerunError: an unknown stack, kernel or dtype; a network with fewer NPUs than the plan has GPUs.
    """
    return predict_setup(Setup(model, plan, cluster, network, measured, replays=True))


def predict_setup(setup: Setup) -> Prediction:
    """Predicts one optimizer step of a Setup, like `predict`; the Setup may have a changed stack."""
    return simulate_setup(setup, folded=is_worth_folding(setup.plan)).prediction


def predict_if_it_fits(setup: Setup) -> Prediction | DoesNotFit:
    """Predicts like `predict_setup` where the plan fits in memory; else returns the memory that it needs.

    A step takes much longer to run than its memory takes to find out.
    """
    prepared = prepare(setup)
    memory = prepared.memory()
    if memory.held.fits:
        return prepared.run(is_worth_folding(setup.plan), memory).prediction
    return DoesNotFit(
        plan=setup.plan,
        peak_allocated_gib=memory.fullest.peak_bytes / GIB,
        peak_reserved_gib=memory.held.peak_bytes / GIB,
        memory_limit_gib=memory.limit_bytes / GIB,
        memory_by_category_gib={name: size / GIB for name, size in memory.fullest.by_category.items()},
        peak_rank_class=memory.fullest.rank_class,
    )


def is_worth_folding(plan: Plan) -> bool:
    """Returns whether a step has so many passes that finding repeated blocks is faster than running them all."""
    return plan.pp * plan.n_microbatches > _FEW_PASSES


def simulate(
    model: ModelSpec | LayeredModel,
    plan: Plan,
    cluster: Cluster,
    folded: bool = False,
    network: Network | None = None,
    measured: Measured | None = None,
) -> Simulation:
    """Predicts like `predict`, and returns the Program, its Timeline and its memory too.

    With `folded` each run of closed blocks is a single node of the Timeline; the figures are the same.
    """
    return simulate_setup(Setup(model, plan, cluster, network, measured, replays=True), folded=folded)
