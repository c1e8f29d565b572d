"""Adds the memory before the first step and the periodic work of the training loop to the prediction of a step."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from forerun.answers.analysis.reading import Simulation
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.stalls import loop_time
from forerun.core.cost.checkpoint import SavedState
from forerun.core.cost.periodic import periodic_constants
from forerun.core.program.origin import Origin
from forerun.core.program.types import Category, Program
from forerun.describe.cluster.storage import Storage, usual_storage
from forerun.describe.cluster.types import Cluster
from forerun.describe.plan.training_loop import KINDS, TrainingLoop
from forerun.sources.symbolic.training_state import InitStage, training_state

_STATE = (Category.PARAMETER, Category.OPTIMIZER)


def around_plan(
    simulation: Simulation, setup: Setup, loop: TrainingLoop | None = None, storage: Storage | None = None
) -> Simulation:
    """Returns `simulation` with a prediction that also has the work around the step of `setup`.

    With a `loop`, `simulation` must be unfolded.
    """
    state = training_state(setup.model, setup.plan, setup.cluster, setup.stack)
    found = replace(simulation, prediction=replace(simulation.prediction, init=state.init))
    return _with_loop(found, simulation.program, setup.cluster, loop, state.saved, storage) if loop else found


def around_program(
    simulation: Simulation, program: Program, cluster: Cluster, loop: TrainingLoop, storage: Storage | None = None
) -> Simulation:
    """Returns `simulation` of `program` with a prediction that also has the cost of `loop` and the notes of the
    trace.
    """
    stages = (InitStage("trace", one.name, one.allocated_bytes, one.peak_bytes) for one in Origin.of(program).stages)
    simulation = replace(simulation, prediction=replace(simulation.prediction, init=tuple(stages)))
    if not loop:
        return simulation
    return _with_loop(simulation, program, cluster, loop, saved_state_of(program), storage)


def _with_loop(
    simulation: Simulation,
    program: Program,
    cluster: Cluster,
    loop: TrainingLoop,
    saved: SavedState,
    storage: Storage | None,
) -> Simulation:
    prediction, constants = simulation.prediction, periodic_constants()
    time = loop_time(simulation, program, cluster, loop, saved, storage)
    lines = [
        f"loop, {kind}: {' '.join(getattr(constants, kind).source.split())}" for kind in KINDS if getattr(loop, kind)
    ]
    if loop.checkpoint and storage is None:
        lines.append(f"loop, storage: assumed; {' '.join(usual_storage().source.split())}")
    return replace(simulation, prediction=replace(prediction, loop=time, explain=(*prediction.explain, *lines)))


def saved_state_of(program: Program) -> SavedState:
    """Returns the bytes that a checkpoint of the run of `program` saves. They are the state before the step, counted
    once.

    Data-parallel ranks hold the same bytes unless the state is sharded over them.
    """
    origin = Origin.of(program)
    parallel = origin.data_parallel or ()
    copies = prod(program.groups[i].size for i in parallel if i not in origin.sharded)
    held = [int(sum(cls.resident_bytes[category] for category in _STATE)) for cls in program.rank_classes]
    ranks = [cls.n_ranks for cls in program.rank_classes]
    held_total = float(sum(size * n for size, n in zip(held, ranks, strict=True)))
    return SavedState(max(held) / copies, held_total / copies, max(held), held_total, origin.state_tensors)
