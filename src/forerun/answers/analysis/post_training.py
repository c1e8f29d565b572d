"""A step of GRPO or PPO: sequences are generated and scored before the weights are updated.

Forerun predicts the updates and the scoring passes. The user states how fast the inference engine generates, and how
much memory it needs meanwhile. All models share the GPUs, and the stages follow each other, as in verl and TRL with a
colocated engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from forerun.answers.analysis.reading import Simulation
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.common.errors import ForerunError
from forerun.common.units import GIB
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.constraints import check_plan


@dataclass(frozen=True, slots=True)
class PostTraining:
    """Describes the work around the update of the trained model in one step."""

    generated_tokens_per_s: float
    """tokens that the inference engine generates each second on one GPU, in the mean over a step"""
    generated_share: float = 1.0
    """share of the trained tokens that are generated; the others are prompts"""
    generation_gib: float = 0.0
    """GiB of a GPU that the engine takes while it generates (weights and keys and values), and frees afterwards"""
    old_scores: bool = True
    """whether the model scores its generated sequences before its update, for the ratio of new and old probabilities"""
    critic: ModelSpec | None = None
    """the model that PPO trains to predict rewards; GRPO has none"""

    def __post_init__(self) -> None:
        if not 0 < self.generated_tokens_per_s < float("inf"):
            raise ForerunError(f"generated tokens per second must be above 0, got {self.generated_tokens_per_s:g}")
        if not 0 < self.generated_share <= 1:
            raise ForerunError(f"the generated share must be above 0 and at most 1, got {self.generated_share:g}")
        if not 0 <= self.generation_gib < float("inf"):
            raise ForerunError(f"the GiB of the generating engine must be at least 0, got {self.generation_gib:g}")


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a step."""

    name: str
    time_s: float
    device_gib: float | None = None
    """memory of the fullest GPU; None for scoring passes, which keep less than the updates that follow"""


@dataclass(frozen=True, slots=True)
class PostTrainingStep:
    """The stages of a step, in their order."""

    stages: tuple[Stage, ...]
    memory_limit_gib: float
    generated_tokens: float
    """tokens that are generated for a step, on all GPUs"""

    @property
    def step_time_s(self) -> float:
        return sum(stage.time_s for stage in self.stages)

    @property
    def device_gib(self) -> float:
        """Returns the memory of the fullest GPU in the stage that needs most."""
        return max(stage.device_gib or 0.0 for stage in self.stages)

    @property
    def fits(self) -> bool:
        return self.device_gib <= self.memory_limit_gib


def post_training_step(setup: Setup, update: Simulation, around: PostTraining) -> PostTrainingStep:
    """Returns the step around `update`, the simulation of `setup`.

    A critic is trained under the same plan, without adapters or a reference model. It is taken with the head of a
    language model, so that its time is an upper limit. Raises ForerunError for a critic that the plan does not fit, and
    ImpossiblePlan if a scoring pass can't run under the plan.
    """
    plan, first = setup.plan, update.prediction
    generated = plan.tokens_per_step * around.generated_share
    generation_s = generated / (around.generated_tokens_per_s * plan.world_size)
    critic = None if around.critic is None else _critic(setup, around.critic)
    of_actor, of_critic = _resident_gib(update), 0.0 if critic is None else _resident_gib(critic[1])
    outside = first.device_gib - first.peak_reserved_gib
    stages = [Stage("generation", generation_s, of_actor + of_critic + outside + around.generation_gib)]
    if around.old_scores:
        stages.append(Stage("scores of the trained model", scoring_time_s(setup)))
    if critic is not None:
        stages.append(Stage("values of the critic", scoring_time_s(critic[0])))
    name = "update, with scores of the reference model" if plan.reference else "update"
    stages.append(Stage(name, first.step_time_s, first.device_gib + of_critic))
    if critic is not None:
        second = critic[1].prediction
        stages.append(Stage("update of the critic", second.step_time_s, second.device_gib + of_actor))
    return PostTrainingStep(tuple(stages), first.memory_limit_gib, generated)


def scoring_time_s(setup: Setup) -> float:
    """Returns the time of forward passes over all sequences of a step. A reference model adds this time to the step."""
    plain = replace(setup, plan=replace(setup.plan, reference=False), replays=False)
    scoring = replace(plain, plan=replace(plain.plan, reference=True))
    check_plan(scoring.model, scoring.plan, scoring.cluster)
    times = [simulate_setup(each).prediction.step_time_s for each in (plain, scoring)]
    return times[1] - times[0]


def _critic(setup: Setup, model: ModelSpec) -> tuple[Setup, Simulation]:
    plan = replace(setup.plan, reference=False, lora_rank=0)
    check_plan(model, plan, setup.cluster)
    own = replace(setup, model=model, plan=plan)
    return own, simulate_setup(own)


def _resident_gib(simulation: Simulation) -> float:
    """Returns the GiB that the fullest GPU holds between steps: weights, optimizer states, and other resident
    tensors.
    """
    return max(int(cls.resident_bytes.sum()) for cls in simulation.program.rank_classes) / GIB
