"""simulate_setup: simulates a Setup. Every prediction of a plan goes through this function."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forerun.answers.analysis.doubts import doubts_of_input
from forerun.answers.analysis.kinds import check_kinds, joined_costs, with_network_of
from forerun.answers.analysis.memory_need import MemoryNeed
from forerun.answers.analysis.reading import Simulation, Subject, memory_of, simulate_costed
from forerun.answers.analysis.setup import RankKind, Setup
from forerun.answers.analysis.slowing import slowed
from forerun.core.cost.step_costs import Launching, StepCosts, step_costs
from forerun.core.network.on_topology import check_size
from forerun.core.program.join import Part, joined
from forerun.core.program.types import Program
from forerun.describe.cluster.types import Cluster, Device
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.parameters import compute_parameter_count, model_flops_per_token
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.constraints import check_plan
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.stack import Stack
from forerun.sources.symbolic.build import build


@dataclass(frozen=True)
class Prepared:
    """A Setup with its Program and the costs of its ops, ready to run."""

    setup: Setup
    program: Program
    costs: StepCosts
    subject: Subject
    devices: tuple[Device, ...] = ()
    """the device of each rank class; empty if all are the cluster's"""

    def memory(self) -> MemoryNeed:
        """Returns the memory that the Program needs."""
        return memory_of(self.program, self.subject, self.setup.cluster, self.devices, self.setup.replays)

    def run(self, folded: bool = False, memory: MemoryNeed | None = None) -> Simulation:
        """Runs the Program and reads the outcome. `memory` is the memory that it needs, if the caller knows it
        already.
        """
        setup = self.setup
        return simulate_costed(
            self.program,
            self.costs,
            self.subject,
            setup.cluster,
            folded=folded,
            network=setup.network,
            is_measured=setup.measured is not None,
            devices=self.devices,
            replays=setup.replays,
            memory=memory,
        )

    def under(self, stack: Stack) -> Prepared:
        """Returns the same Program under `stack`, which differs in rates and host times only; for GPUs of one kind."""
        setup, subject = replace(self.setup, changed_stack=stack), replace(self.subject, stack=stack)
        return replace(self, setup=setup, subject=subject, costs=_costs(setup, self.program, subject, setup.cluster))


def simulate_setup(setup: Setup, folded: bool = False) -> Simulation:
    """Simulates one iteration of `setup`: its Program, Timeline, memory and Prediction.

    With `folded` each run of closed blocks is a single node of the Timeline; the figures are the same.

    Raises:
        ImpossiblePlan: the plan cannot run; the message says why.
        ForerunError: an unknown stack, kernel or dtype; a network with fewer NPUs than the plan has GPUs; a pattern
            that the plan has no use for; kinds of GPUs that don't fit the plan.
    """
    return prepare(setup).run(folded)


def prepare(setup: Setup) -> Prepared:
    """Builds the Program of `setup` and the costs of its ops. Raises the errors of `simulate_setup`."""
    check_kinds(setup)
    if setup.network is not None:
        check_size(setup.network, setup.n_gpus)
    if setup.pattern is not None:
        setup.pattern.check(setup.plan)
    subject = _subject(setup)
    parts = setup.parts
    programs, costs = zip(*(_part(setup, part, subject) for part in parts), strict=True)
    if len(parts) == 1:
        return Prepared(setup, programs[0], costs[0], subject, _devices(setup, programs[0]))
    members = [Part(part.name, one, part.n_gpus) for part, one in zip(parts, programs, strict=True)]
    program = joined(members)
    return Prepared(setup, program, joined_costs(costs), subject, _devices(setup, program))


def _part(setup: Setup, part: RankKind, subject: Subject) -> tuple[Program, StepCosts]:
    """Returns the Program of the GPUs of one kind and its costs: kernels as on their device, collectives as on all."""
    plan = setup.plan if part.micro_batch is None else replace(setup.plan, micro_batch=part.micro_batch)
    cluster = setup.cluster if part.device is None else replace(setup.cluster, device=part.device)
    check_plan(setup.model, plan, cluster)
    program = build(setup.model, plan, cluster, setup.stack)
    costs = _costs(setup, program, subject, cluster)
    if cluster.device != setup.cluster.device:
        costs = with_network_of(costs, _costs(setup, program, subject, setup.cluster), program.ops)
    return program, slowed(costs, program.ops, compute=part.slowdown, network=setup.slow_links)


def _costs(setup: Setup, program: Program, subject: Subject, cluster: Cluster) -> StepCosts:
    measured = setup.measured
    if measured is not None and cluster.device != setup.cluster.device:
        measured = replace(measured, kernels=None)  # they were measured on the cluster's own device
    return step_costs(
        program.ops,
        program.groups,
        cluster,
        subject.stack,
        subject.launching,
        setup.n_gpus,
        setup.network,
        measured,
        setup.pattern,
    )


def _devices(setup: Setup, program: Program) -> tuple[Device, ...]:
    """Returns the device of each rank class; none where all are the cluster's."""
    devices = [part.device or setup.cluster.device for part in setup.parts]
    if all(device == setup.cluster.device for device in devices):
        return ()
    per_part = len(program.rank_classes) // len(devices)
    return tuple(device for device in devices for _ in range(per_part))


def _subject(setup: Setup) -> Subject:
    """Returns the Subject of the Program of `setup`."""
    plan, model = setup.plan, setup.model
    tokens: int | None
    sample: str | None = None
    if isinstance(model, LayeredModel):
        sample = model.sample
        tokens, flops = None, model.flops_per_sample * (setup.samples_per_step / setup.n_gpus)
        how = f"FLOPs of all layers, forward and backward, of each {model.sample}"
    else:
        tokens = setup.samples_per_step * plan.seq_len
        per_token, how = _flops_per_token(model, plan)
        flops = per_token * (tokens / setup.n_gpus)
    return Subject(
        name=model.name,
        n_gpus=setup.n_gpus,
        stack=setup.stack,
        launching=Launching.of_plan(setup.model, plan, setup.stack),
        precision=plan.precision,
        tokens_per_step=tokens,
        model_flops=flops,
        model_flops_how=how,
        plan=plan,
        experts=not isinstance(model, LayeredModel) and model.moe is not None,
        pattern=setup.pattern,
        sample=sample,
        samples_per_step=None if sample is None else setup.samples_per_step,
        notes=_notes(setup),
        warnings=(*model.notes, *doubts_of_input(model, plan)),
    )


def _flops_per_token(model: ModelSpec, plan: Plan) -> tuple[float, str]:
    """Returns the model FLOPs of a token, and a phrase that names what they count."""
    mean = round(sum(length * length for length in plan.documents) / plan.seq_len)
    flops, how = model_flops_per_token(model, mean), "6 N + 12 L h s FLOPs per token"
    if plan.document_lengths:
        how += f", s the mean document of {mean} tokens, over tokens"
    reference = flops / 3.0 if plan.reference else 0.0
    if plan.lora_rank:
        flops -= 2.0 * compute_parameter_count(model)
        how = "4 N + 12 L h s FLOPs per token, as frozen weights have no gradients, without the adapters'"
    return flops + reference, how + ", and 2 N + 4 L h s of the reference" * plan.reference


def _notes(setup: Setup) -> tuple[str, ...]:
    """Returns the lines of `explain` about the exchange of gradients and about GPUs that differ."""
    pattern = setup.pattern
    exchange = () if pattern is None else (f"gradients: exchanged as {pattern.name} does, not as NCCL would choose",)
    if not setup.kinds:
        return exchange
    parts = [
        f"{part.n_gpus} x {part.name} ({(part.device or setup.cluster.device).name}, kernels in {part.slowdown:.4g} of"
        f" its time, micro batch {part.micro_batch or setup.plan.micro_batch})"
        for part in setup.parts
    ]
    return (
        *exchange,
        f"GPUs: {'; '.join(parts)}; each takes part in every collective that it shares with others, which waits for"
        " the last of them; MFU divides by the mean of their peaks",
    )
