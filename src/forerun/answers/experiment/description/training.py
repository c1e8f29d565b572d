"""The plan of an experiment, and how its iterations differ."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from forerun.answers.analysis.setup import Setup
from forerun.answers.experiment.description.sections import HardwareSection, TrainingSection
from forerun.answers.experiment.request import Disturbance
from forerun.common.errors import ForerunError, ImpossiblePlan, at
from forerun.describe.cluster.types import Device
from forerun.describe.plan.complete import REST, complete_plan
from forerun.describe.plan.fields import choices
from forerun.describe.plan.plan import Plan

SPELLINGS = {
    "batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "n_microbatches",
    "bucket_size_mb": "ddp_bucket_mib",
    "overlap": "overlap_grad_reduce",
    "mixed_precision": "precision",
}
"""key of `training` -> field of the Plan"""
DEFAULT_BUCKET_MIB = 25.0
"""bucket_cap_mb of torch.nn.parallel.DistributedDataParallel"""
DEFAULT_ITERATIONS = 100
DEFAULTS_BY_KIND = {
    "images": {"optimizer": "sgd", "stack": "pytorch-vision"},
    "tokens": {"optimizer": "adamw", "stack": "pytorch"},
}
"""keys of a Plan whose defaults depend on the model: convolutional networks, others"""
DEFAULT_WARMUP_SLOWDOWN = 2.0
MOST_OF_ANY_KEY = 10**8
MOST_OF_A_PLAN = {"seq_len": 10**7, "micro_batch": 10**6, "n_microbatches": 10_000}
"""limits of the numbers, for both spellings of a key"""
MOST_ITERATIONS = 10**9


def peak_dtype(precision: str) -> str:
    """Returns the dtype whose peak a precision runs at."""
    return "fp8" if precision == "mxfp8" else precision


def precision_of(given: bool | str, devices: tuple[Device, ...], convolutional: bool, place: str) -> str:
    """Returns the precision that mixed_precision means on `devices`. All of the devices have it.

    true is bf16, or fp16 where a device has no bf16; false is fp32, or tf32 for convolutions if all devices have it.
    The reason is that by default torch.backends.cudnn.allow_tf32 is on and torch.backends.cuda.matmul.allow_tf32 is
    off.
    """

    def all_have(dtype: str) -> bool:
        return all(dtype in device.peak_flops for device in devices)

    if isinstance(given, bool):
        order = ("bf16", "fp16") if given else ("tf32", "fp32") if convolutional else ("fp32",)
        found = next((dtype for dtype in order if all_have(dtype)), None)
        if found is None:
            names = " and ".join(device.name for device in devices)
            raise ForerunError(
                f"{place}: mixed_precision: {names} can compute in none of {', '.join(order)}; name another precision"
            )
        return found
    if given not in choices("precision"):
        known = ", ".join(map(str, choices("precision")))
        raise ForerunError(f"{place}: mixed_precision: expected true, false or one of {known}, got {given!r}")
    lacking = next((device for device in devices if peak_dtype(given) not in device.peak_flops), None)
    if lacking:
        raise ForerunError(
            f"{place}: mixed_precision: {lacking.name} has no {given}; choose one of {', '.join(lacking.peak_flops)}"
        )
    return given


def agreed(section: TrainingSection, plan_keys: dict[str, Any], seq_len: int | None, place: str) -> dict[str, Any]:
    """Returns plan keys, including those that `section` spells in its own way.

    `seq_len` is the model's sequence_length where it is given. Raises ForerunError if two words contradict.
    """
    fields = dict(plan_keys)
    for key, field in SPELLINGS.items():
        own = getattr(section, key)
        if own is None or (key == "mixed_precision" and (isinstance(own, bool) or key not in section.model_fields_set)):
            continue
        if field in fields and fields[field] != own:
            raise ForerunError(f"{place}: {key} {own} and {field} {fields[field]} contradict; keep one of them")
        fields[field] = own
    if seq_len is not None:
        if fields.get("seq_len", seq_len) != seq_len:
            raise ForerunError(
                f"{place}: seq_len {fields['seq_len']} and model.sequence_length {seq_len} contradict; keep one of them"
            )
        fields["seq_len"] = seq_len
    if "micro_batch" not in fields:
        raise ForerunError(
            f"{place}: key 'batch_size_per_gpu' is missing; give the samples that a GPU works on at a time"
        )
    return fields


def bounded(plan_keys: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns `plan_keys` if their numbers are such as a run can have; ForerunError names the first that is not."""
    for key, value in plan_keys.items():
        for number in value if isinstance(value, tuple) else (value,):
            most = MOST_OF_A_PLAN.get(key, MOST_OF_ANY_KEY)
            if isinstance(number, (int, float)) and not abs(number) <= most:
                raise ForerunError(f"{place}: {key}: expected a number of at most {most:,}")
    return plan_keys


def open_axes(fields: Mapping[str, Any], least_zero_stage: int) -> dict[str, Any]:
    """Returns `fields` of a Plan with zero_stage. The data-parallel axis that takes the remaining GPUs is -1.

    Without dp_shard and dp_replicate, data parallelism is DDP over the GPUs that other axes leave: replicas with
    zero_stage 0, which is the default, shards with a higher one. A dp_shard without zero_stage is FSDP (3), as in any
    Plan. `least_zero_stage` is the lowest ZeRO stage that the communication pattern implies.
    """
    values = dict(fields)
    sharded = values.get("dp_shard", 1) != 1
    values["zero_stage"] = max(values.get("zero_stage", 3 if sharded else 0), least_zero_stage)
    shards = values["zero_stage"] or values.get("ep", 1) > 1
    if "dp_shard" not in values and ("dp_replicate" not in values or (shards and values["dp_replicate"] != REST)):
        values["dp_shard" if shards else "dp_replicate"] = REST
    values.setdefault("ddp_bucket_mib", DEFAULT_BUCKET_MIB)
    return values


def plan_of(values: Mapping[str, Any], n_gpus: int, place: str) -> Plan:
    """Returns the Plan of `values` on all GPUs. Raises ImpossiblePlan and ForerunError, which start with `place`."""
    with at(place):
        try:
            return complete_plan(values, n_gpus)
        except ImpossiblePlan as error:
            if REST in (values.get("dp_replicate"), values.get("dp_shard")):
                raise
            raise ImpossiblePlan(f"{error}; leave dp_replicate or dp_shard out, or make one of them -1") from None


@contextmanager
def in_spelling() -> Iterator[None]:
    """Names fields of a plan in the messages of errors as an experiment's `training` spells them."""
    try:
        yield
    except ImpossiblePlan as error:
        message = str(error)
        for key, field in SPELLINGS.items():
            message = re.sub(rf"\b{field}\b", key, message)
        raise ImpossiblePlan(message) from None


def disturbance_of(training: TrainingSection, hardware: HardwareSection, place: str) -> Disturbance:
    """Returns the ways in which iterations differ."""
    slowdown = training.warmup_slowdown
    if slowdown is not None and not training.warmup_iterations:
        raise ForerunError(f"{place}: warmup_slowdown has no effect without warmup_iterations; give both or neither")
    if slowdown is None:
        slowdown = DEFAULT_WARMUP_SLOWDOWN if training.warmup_iterations else 1.0
    stragglers = training.stragglers
    return Disturbance(
        seed=training.seed,
        compute_jitter=training.jitter.compute,
        network_jitter=training.jitter.network,
        straggler_probability=stragglers.probability if stragglers else 0.0,
        straggler_slowdown=stragglers.slowdown if stragglers else 1.0,
        straggler_tail=stragglers.tail if stragglers else 0.0,
        slow_ranks=dict(sorted(hardware.slow_gpus.items())),
        warmup_iterations=training.warmup_iterations,
        warmup_slowdown=slowdown,
    )


@dataclass(frozen=True)
class Schedules:
    """The values that change over a run: (iteration from which it holds, value)."""

    batch: tuple[tuple[int, int], ...]
    seq_len: tuple[tuple[int, int], ...]

    def segments(self, setup: Setup) -> Iterator[tuple[int, Setup]]:
        """Yields (first iteration, Setup from there on), in order, from iteration 0."""
        starts = sorted({0, *(start for start, _ in (*self.batch, *self.seq_len))})
        for start in starts:
            yield start, self.at(setup, start)

    def at(self, setup: Setup, iteration: int) -> Setup:
        """Returns the Setup of an iteration."""
        micro_batch = _at(self.batch, iteration, setup.plan.micro_batch)
        seq_len = _at(self.seq_len, iteration, setup.plan.seq_len)
        return replace(setup, plan=replace(setup.plan, micro_batch=micro_batch, seq_len=seq_len))


def schedules_of(section: TrainingSection, has_sequences: bool, place: str) -> Schedules:
    """Returns the schedules. Raises ForerunError if iterations are not in order."""
    for key, most in (
        ("batch_schedule", MOST_OF_A_PLAN["micro_batch"]),
        ("sequence_length_schedule", MOST_OF_A_PLAN["seq_len"]),
    ):
        starts = [start for start, _ in getattr(section, key)]
        if any(late <= early for early, late in pairwise(starts)):
            raise ForerunError(
                f"{place}: {key}: iterations must rise from entry to entry, got {', '.join(map(str, starts[:10]))}"
            )
        if any(not 1 <= value <= most for _, value in getattr(section, key)):
            raise ForerunError(f"{place}: {key}: values must be at least 1 and at most {most:,}")
    if section.sequence_length_schedule and not has_sequences:
        raise ForerunError(f"{place}: sequence_length_schedule: samples of this model are not sequences; leave it out")
    return Schedules(
        tuple((start, value) for start, value in section.batch_schedule),
        tuple((start, value) for start, value in section.sequence_length_schedule),
    )


def iterations_of(section: TrainingSection, setup: Setup, schedules: Schedules, has_tokens: bool, place: str) -> int:
    """Returns the number of iterations: as given, or enough for the tokens or samples."""
    goals = [key for key in ("num_iterations", "total_tokens", "total_samples") if getattr(section, key) is not None]
    if not goals:
        return DEFAULT_ITERATIONS
    if section.total_tokens is not None and not has_tokens:
        raise ForerunError(f"{place}: total_tokens: samples of this model have no tokens; give total_samples")
    counts = {key: _needed(key, getattr(section, key), setup, schedules) for key in goals}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{key} {getattr(section, key)} (iterations: {counts[key]})" for key in goals)
        raise ForerunError(f"{place}: {' and '.join(goals)} contradict: {told}; keep one of them")
    key, count = next(iter(counts.items()))
    if count > MOST_ITERATIONS:
        raise ForerunError(f"{place}: {key} takes {count:,} iterations; choose at most {MOST_ITERATIONS:,}")
    return count


def _needed(key: str, goal: int, setup: Setup, schedules: Schedules) -> int:
    if key == "num_iterations":
        return goal
    segments = [*schedules.segments(setup)]
    left = goal
    for number, (start, each) in enumerate(segments):
        per_step = each.samples_per_step * (each.plan.seq_len if key == "total_tokens" else 1)
        steps = -(-left // per_step)
        last = number + 1 == len(segments)
        if last or start + steps <= segments[number + 1][0]:
            return start + steps
        left -= (segments[number + 1][0] - start) * per_step
    raise AssertionError("the last segment has no end")


def _at(schedule: tuple[tuple[int, int], ...], iteration: int, otherwise: int) -> int:
    return next((value for start, value in reversed(schedule) if start <= iteration), otherwise)
