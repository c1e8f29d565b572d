"""predict: build, run, read."""

from __future__ import annotations

from forerun.analysis.prediction import Prediction
from forerun.analysis.reading import Simulation, Subject, simulate_program
from forerun.cluster.types import Cluster
from forerun.cost.measured import Measured
from forerun.cost.step_costs import Launching
from forerun.model.parameters import model_flops_per_token
from forerun.model.spec import ModelSpec
from forerun.network.network_file import Network
from forerun.network.on_topology import check_size
from forerun.plan.constraints import check_plan
from forerun.plan.plan import Plan
from forerun.plan.stack import load_stack
from forerun.symbolic.build import build

_FEW_PASSES = 4
"""passes of the model below which looking for what repeats takes longer than running it"""


def predict(
    model: ModelSpec,
    plan: Plan,
    cluster: Cluster,
    network: Network | None = None,
    measured: Measured | None = None,
) -> Prediction:
    """What one optimizer step of `model` under `plan` does on `cluster`.

    With `network` the GPUs communicate over it, rank r as its NPU r, in place of the links of the cluster. `measured`
    are the user's own times of kernels and collectives, which go over the shipped ones.

    Raises:
        ImpossiblePlan: the plan cannot run; the message says why.
        ForerunError: an unknown stack, kernel or dtype; a network with fewer NPUs than the plan has GPUs.
    """
    folded = plan.pp * plan.n_microbatches > _FEW_PASSES
    return simulate(model, plan, cluster, folded=folded, network=network, measured=measured).prediction


def simulate(
    model: ModelSpec,
    plan: Plan,
    cluster: Cluster,
    folded: bool = False,
    network: Network | None = None,
    measured: Measured | None = None,
) -> Simulation:
    """As `predict`, with the Program, its Timeline and its memory.

    With `folded` the Timeline is of a Program whose equal runs of blocks are single nodes; the figures are the same.
    """
    check_plan(model, plan, cluster)
    if network is not None:
        check_size(network, plan.world_size)
    program = build(model, plan, cluster)
    tokens_per_gpu = plan.tokens_per_step / plan.world_size
    subject = Subject(
        name=model.name,
        n_gpus=plan.world_size,
        stack=load_stack(plan.stack),
        launching=Launching.of_plan(plan),
        precision=plan.precision,
        tokens_per_step=plan.tokens_per_step,
        model_flops=model_flops_per_token(model, plan.seq_len) * tokens_per_gpu,
        model_flops_how="6 N + 12 L h s FLOPs per token",
        plan=plan,
    )
    return simulate_program(program, subject, cluster, folded=folded, network=network, measured=measured)
