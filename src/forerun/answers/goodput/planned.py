"""Predicts from the plan of a run: its step, slowdowns, the cost of a checkpoint, and steps with fewer replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, lcm
from typing import Any

import numpy as np

from forerun.answers.analysis.around_step import around_plan
from forerun.answers.analysis.compression import of_text, under_compression
from forerun.answers.analysis.outer_steps import OuterEffect, OuterSteps, outer_effect, replica_of
from forerun.answers.analysis.prediction import Prediction
from forerun.answers.analysis.setup import RankKind, Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.answers.analysis.stepper import Stepper
from forerun.common.errors import ForerunError
from forerun.core.cost.checkpoint import SaveCost, SavedState, load_s, save_cost
from forerun.core.cost.memory_bound import memory_rates
from forerun.describe.cluster.storage import Storage, usual_storage
from forerun.describe.cluster.types import Cluster
from forerun.describe.kernels.optimizers import optimizer
from forerun.describe.model.catalog import load_model
from forerun.describe.plan import rules
from forerun.describe.plan.complete import complete_plan
from forerun.describe.plan.training_loop import CheckpointMode, TrainingLoop

_RARELY = 10**9
"""steps between two checkpoints where only their cost is asked for"""
_MOST_REPLICAS = 64
_MOST_STAGES = 8
"""stages of a pipeline that are slowed in turn, evenly spread over it"""
_FULL = 0.99
"""largest share of a link that the traffic of a save may take"""


@dataclass(frozen=True)
class PlannedStep:
    """The step of a plan, predicted."""

    setup: Setup
    """of all GPUs, or of one replica alone where replicas agree in outer steps"""
    prediction: Prediction
    outer: OuterEffect | None = None
    """the mean step under outer steps"""

    @staticmethod
    def of(
        model: str,
        fields: Mapping[str, Any],
        cluster: Cluster,
        gpus: int,
        batch: int | None,
        mode: CheckpointMode,
        storage: Storage | None,
        compression: str | None = None,
        outer_steps: str | None = None,
    ) -> PlannedStep:
        """Returns the step of a plan with the cost of its checkpoints. Raises ForerunError if it can't run."""
        setup = Setup(load_model(model), complete_plan(fields, gpus, batch), cluster)
        if compression is not None and (how := of_text(compression)) is not None:
            setup = under_compression(setup, how)
        loop = TrainingLoop(checkpoint=_RARELY, checkpoint_mode=mode)
        steps = None if outer_steps is None else OuterSteps.of_text(outer_steps)
        whole, setup = setup, setup if steps is None else replica_of(setup, steps)
        found = around_plan(simulate_setup(setup), setup, loop, storage).prediction
        return PlannedStep(setup, found, None if steps is None else outer_effect(whole, steps, found))

    @property
    def replicas(self) -> int:
        """Returns the number of whole copies of the training state."""
        return self.setup.plan.dp_replicate if self.outer is None else self.outer.replicas

    @property
    def step_s(self) -> float:
        """Returns the seconds of a step, with its share of outer steps."""
        return self.prediction.step_time_s if self.outer is None else self.outer.mean_step_s

    @property
    def fits(self) -> bool:
        """Returns whether the plan fits in memory."""
        return self.prediction.fits and (self.outer is None or self.outer.fits)

    @property
    def tokens(self) -> float:
        """Returns the tokens of a step of all GPUs."""
        alone = 1 if self.outer is None else self.outer.replicas
        return float(alone * self.setup.plan.global_batch * self.setup.plan.seq_len)

    def _over(self, changed: Setup) -> float:
        """Returns the step of a changed setup over the own one, at least 1."""
        return max(1.0, simulate_setup(changed, folded=True).prediction.step_time_s / self.prediction.step_time_s)

    def slow_factor(self, kernels: float, links: float) -> float:
        """Returns how much longer a step takes where one GPU's kernels and all links take so much longer.

        In a pipeline that is the mean over its stages of the step with this stage slow; else a slow GPU holds up its
        whole replica.
        """
        if kernels > 1.0 and self.setup.plan.pp > 1:
            stepper = Stepper(replace(self.setup, slow_links=self.setup.slow_links * links))
            stages = range(stepper.n_classes)
            tried = sorted(
                set(np.linspace(0, len(stages) - 1, min(len(stages), _MOST_STAGES)).round().astype(int).tolist())
            )
            slow_s = [stepper.step([kernels if i == slow else 1.0 for i in stages]).time_s for slow in tried]
            return max(1.0, float(np.mean(slow_s)) / self.prediction.step_time_s)
        replica = self.setup.n_gpus // self.setup.plan.dp
        kinds = (RankKind("slow", replica, slowdown=kernels),) if kernels > 1.0 else ()
        return self._over(replace(self.setup, kinds=kinds, slow_links=self.setup.slow_links * links))

    def drag(self, persist_s: float) -> float:
        """Returns the share by which steps take longer while a save goes over the network that training uses.

        The bytes of the rank that saves most, evenly over `persist_s`, are missing from its outermost link.
        """
        loop = self.prediction.loop
        if loop is None or loop.checkpoint is None or not persist_s:
            return 0.0
        cluster = self.setup.cluster
        taken = min(_FULL, loop.checkpoint.rank_gib * 2**30 / persist_s / cluster.links[-1].bytes_per_s)
        return self._over(replace(self.setup, cluster=cluster.with_outermost_link(1.0 - taken))) - 1.0

    @property
    def parts(self) -> int:
        """Returns the number of sets of whole nodes that hold equal parts of the state; 1 if there are none."""
        plan, node_size = self.setup.plan, self.setup.cluster.node_size or self.setup.n_gpus
        unit = lcm(node_size, plan.tp * plan.cp * plan.pp)
        even = plan.dp_replicate == 1 and plan.dp_shard > 1 and self.setup.n_gpus % unit == 0
        return self.setup.n_gpus // unit if even and self.outer is None else 1

    def part_factors(self, parts: int, least: int) -> tuple[int, tuple[float, ...]]:
        """Returns the smallest number of parts, of `parts` and at least `least`, on which the plan can run and fits in
        memory. Also returns the time of a step of the same batch on 1, 2 ... parts over the time on all parts. Entries
        below the smallest number have no meaning.

        Raises ForerunError if too many steps would have to be predicted.
        """
        plan, found = self.setup.plan, [1.0]
        if parts - least > _MOST_REPLICAS:
            raise ForerunError(f"{parts - least:,} numbers of replicas are too many to predict; raise least_replicas")
        for fewer in range(parts - 1, least - 1, -1):
            rounds = ceil(plan.n_microbatches * parts / fewer)
            small = replace(plan, dp_shard=plan.dp_shard * fewer // parts, n_microbatches=rounds)
            try:
                step = simulate_setup(replace(self.setup, plan=small), folded=True).prediction
            except ForerunError:
                break
            if not step.fits:
                break
            found.append(max(1.0, step.step_time_s / self.prediction.step_time_s))
        return parts - len(found) + 1, (*[1.0] * (parts - len(found)), *reversed(found))

    def replica_factors(self, replicas: int) -> tuple[float, ...]:
        """Returns the steps of the same batch on 1, 2 ... replicas over that on all; empty if none is predicted.

        That is where the plan has as many whole copies (dp_replicate), and not too many of them.
        """
        plan = self.setup.plan
        if self.replicas != replicas or replicas > _MOST_REPLICAS:
            return ()
        if self.outer is not None:  # replicas are independent, so the others take over the share of one that fails
            return tuple(replicas / fewer for fewer in range(1, replicas + 1))
        found = []
        for fewer in range(1, replicas):
            rounds = ceil(plan.n_microbatches * replicas / fewer)
            small = replace(plan, dp_replicate=fewer, n_microbatches=rounds)
            found.append(self._over(replace(self.setup, plan=small)))
        return (*found, 1.0)


@dataclass(frozen=True)
class StatedState:
    """A checkpoint whose bytes follow from the number of parameters, their dtype and the optimizer."""

    parameters: float
    weights: str
    optimizer: str
    moments: str

    @property
    def parameter_bytes(self) -> float:
        """Returns the bytes of a parameter: fp32 weights that the optimizer updates, a copy in fewer bits, states."""
        for name in (self.weights, self.moments):
            if name not in rules.DTYPE_BYTES:
                raise ForerunError(f"no dtype {name}; known: {', '.join(rules.DTYPE_BYTES)}")
        own = int(rules.element_bytes(self.weights))
        states = optimizer(self.optimizer).least_state_bytes(int(rules.element_bytes(self.moments)))
        return (own if own < _FP32 else 0) + _FP32 + states

    def cost(self, gpus: int, like: Cluster, storage: Storage | None, mode: CheckpointMode) -> tuple[SaveCost, float]:
        """Returns the seconds of a save and of a load in equal shares of `gpus` GPUs with the host link of `like`."""
        total = self.parameters * self.parameter_bytes
        state = SavedState(total / gpus, total, total / gpus, total, 0)
        link = memory_rates(like.device).host_fraction * like.host_bytes_per_s
        place = storage or usual_storage()
        return save_cost(state, place, link, mode), load_s(state, place, link)


_FP32 = 4
