"""predict: build, run, read."""

from __future__ import annotations

from forerun.answers.analysis.prediction import Prediction
from forerun.answers.analysis.reading import Simulation
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.core.cost.measured import Measured
from forerun.core.network.network_file import Network
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan

_FEW_PASSES = 4
"""passes of the model below which looking for what repeats takes longer than running it"""


def predict(
    model: ModelSpec | LayeredModel,
    plan: Plan,
    cluster: Cluster,
    network: Network | None = None,
    measured: Measured | None = None,
) -> Prediction:
    """What one optimizer step of `model` under `plan` does on `cluster`.

    With `network` the GPUs communicate over it, rank r as its NPU r, in place of the links of the cluster. `measured`
    are the user's own times of kernels and collectives, which go over the shipped ones. Reserved memory is what the
    caching allocator holds in a replay.

    Raises:
        ImpossiblePlan: the plan cannot run; the message says why.
        ForerunError: an unknown stack, kernel or dtype; a network with fewer NPUs than the plan has GPUs.
    """
    return predict_setup(Setup(model, plan, cluster, network, measured, replays=True))


def predict_setup(setup: Setup) -> Prediction:
    """As `predict`, for a Setup, whose stack may differ from what its file says."""
    return simulate_setup(setup, folded=is_worth_folding(setup.plan)).prediction


def is_worth_folding(plan: Plan) -> bool:
    """Whether a step has so many passes that looking for what repeats is faster than running all."""
    return plan.pp * plan.n_microbatches > _FEW_PASSES


def simulate(
    model: ModelSpec | LayeredModel,
    plan: Plan,
    cluster: Cluster,
    folded: bool = False,
    network: Network | None = None,
    measured: Measured | None = None,
) -> Simulation:
    """As `predict`, with the Program, its Timeline and its memory.

    With `folded` the Timeline is of a Program whose equal runs of blocks are single nodes; the figures are the same.
    """
    return simulate_setup(Setup(model, plan, cluster, network, measured, replays=True), folded=folded)
