"""simulate_setup: the one way from a Setup to a Simulation."""

from __future__ import annotations

from forerun.analysis.reading import Simulation, Subject, simulate_costed
from forerun.analysis.setup import Setup
from forerun.cost.step_costs import Launching, step_costs
from forerun.model.parameters import model_flops_per_token
from forerun.network.on_topology import check_size
from forerun.plan.constraints import check_plan
from forerun.symbolic.build import build


def simulate_setup(setup: Setup, folded: bool = False) -> Simulation:
    """One iteration of `setup`: its Program, Timeline, memory and Prediction.

    With `folded` the Timeline is of a Program whose equal runs of blocks are single nodes; the figures are the same.

    Raises:
        ImpossiblePlan: the plan cannot run; the message says why.
        ForerunError: an unknown stack, kernel or dtype; a network with fewer NPUs than the plan has GPUs.
    """
    check_plan(setup.model, setup.plan, setup.cluster)
    if setup.network is not None:
        check_size(setup.network, setup.n_gpus)
    stack = setup.stack
    program = build(setup.model, setup.plan, setup.cluster, stack)
    subject = _subject(setup)
    costs = step_costs(
        program.ops,
        program.groups,
        setup.cluster,
        stack,
        subject.launching,
        setup.n_gpus,
        setup.network,
        setup.measured,
    )
    return simulate_costed(
        program,
        costs,
        subject,
        setup.cluster,
        folded=folded,
        network=setup.network,
        is_measured=setup.measured is not None,
    )


def _subject(setup: Setup) -> Subject:
    """What the Program of `setup` is of."""
    plan = setup.plan
    tokens = setup.samples_per_step * plan.seq_len
    return Subject(
        name=setup.model.name,
        n_gpus=setup.n_gpus,
        stack=setup.stack,
        launching=Launching.of_plan(plan),
        precision=plan.precision,
        tokens_per_step=tokens,
        model_flops=model_flops_per_token(setup.model, plan.seq_len) * (tokens / setup.n_gpus),
        model_flops_how="6 N + 12 L h s FLOPs per token",
        plan=plan,
    )
