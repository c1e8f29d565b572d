"""Changes of a plan that could make a run faster or make it fit in memory. `advise.py` simulates these candidates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from forerun.answers.analysis.setup import RankKind, Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.answers.experiment.advice.change import (
    MIXED,
    Candidate,
    batch_caveat,
    change_of,
    mixed_of,
    of_plan,
    with_plan,
)
from forerun.answers.experiment.advice.machine import devices, devices_of, half, patterns
from forerun.answers.experiment.request import Request
from forerun.common.errors import ForerunError
from forerun.core.program.causes import EXPOSED, Cause
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.fields import FIELD_TYPES
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack

_BUCKETS_MIB = (25.0, 100.0, 400.0)
_SHARDING = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "FSDP"}


def candidates(request: Request, fits: bool) -> Iterator[Candidate]:
    """Returns all changes worth simulating, in order within each kind; `fits` says whether the run fits without a
    change."""
    plain = [*_batches(request, fits), *_gradients(request), *_software(request), *_states(request, fits)]
    yield from (candidate for candidate in plain if candidate is not None)
    yield from balances(request)
    yield from patterns(request)
    yield from devices(request)


def _batches(request: Request, fits: bool) -> Iterator[Candidate | None]:
    """Returns micro batches, accumulation and activation checkpointing."""
    plan = request.setup.plan
    micro, count = plan.micro_batch, plan.n_microbatches
    parts = (2, 4) if fits else (2, 4, 8, 16, 32, 64, 128)
    for part in (part for part in parts if micro % part == 0):
        yield of_plan(
            request,
            "batch",
            f"{part} times as many micro batches of {_count(micro // part, request.sample)} instead of {micro}",
            {"micro_batch": micro // part, "n_microbatches": count * part},
        )
    if not fits and micro > 1:
        yield of_plan(
            request,
            "batch",
            f"micro batches of {_count(micro // 2, request.sample)} instead of {micro}",
            {"micro_batch": micro // 2},
        )
    for times in (2, 4):
        if count % times == 0:
            yield of_plan(
                request,
                "batch",
                f"micro batches of {_count(micro * times, request.sample)} instead of {micro}, and {times} times fewer",
                {"micro_batch": micro * times, "n_microbatches": count // times},
            )
        yield of_plan(
            request,
            "batch",
            f"micro batches of {_count(micro * times, request.sample)} instead of {micro}",
            {"micro_batch": micro * times},
        )
        yield of_plan(
            request,
            "gradient accumulation",
            f"accumulate gradients of {count * times} micro batches instead of {count}",
            {"n_microbatches": count * times},
        )
    yield from _checkpointing(request)


def _checkpointing(request: Request) -> Iterator[Candidate | None]:
    """Returns less or more checkpointing; more also with two or four times the micro batch if the global batch can
    stay."""
    plan = request.setup.plan
    for level in ("none", "selective", "full"):
        what = {
            "none": "keep all activations instead of computing them again",
            "selective": "selective activation checkpointing",
            "full": "full activation checkpointing",
        }[level]
        yield of_plan(request, "activation checkpointing", what, {"activation_checkpointing": level})
        if level == plan.activation_checkpointing or level == "none":
            continue
        for times in (2, 4):
            larger = f"{what} and micro batches of {plan.micro_batch * times} instead of {plan.micro_batch}"
            fields: dict[str, Any] = {"activation_checkpointing": level, "micro_batch": plan.micro_batch * times}
            if plan.n_microbatches % times == 0:
                fields["n_microbatches"] = plan.n_microbatches // times
                yield of_plan(request, "activation checkpointing", f"{larger}, and {times} times fewer", fields)
            else:
                yield of_plan(request, "activation checkpointing", larger, fields)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _gradients(request: Request) -> Iterator[Candidate | None]:
    """Changes of how gradients are reduced."""
    plan = request.setup.plan
    if plan.dp * plan.cp == 1:
        return
    if request.setup.reduce_dtype == "fp32":
        dtype = half(*devices_of(request.setup))
        yield of_plan(
            request,
            "gradient precision",
            f"sum gradients in {dtype}",
            {"reduce_dtype": dtype},
            "sums have larger rounding errors",
        )
    yield of_plan(request, "overlap", "reduce gradients during the backward pass", {"overlap_grad_reduce": True})
    if plan.shards_parameters:
        yield of_plan(request, "overlap", "gather parameters ahead", {"prefetch": max(1, plan.prefetch)})
    if plan.dp_replicate > 1 or not plan.uses_fsdp:
        own = plan.ddp_bucket_mib or request.setup.stack.bucket_mib
        for size in (size for size in _BUCKETS_MIB if size != own):
            title = f"reduce gradients in buckets of {size:.0f} MiB instead of {own:g}"
            yield of_plan(request, "bucket size", title, {"ddp_bucket_mib": size})


def _software(request: Request) -> Iterator[Candidate | None]:
    """Changes of precision, compilation, launches and optimizer kernels."""
    setup = request.setup
    plan, gpus = setup.plan, devices_of(setup)
    rounding = "rounding differs: check that training still converges"
    steps = {"fp32": ("tf32", half(*gpus)), "tf32": (half(*gpus),)}.get(plan.precision, ())
    for precision in steps:
        yield of_plan(request, "precision", f"compute in {precision}", {"precision": precision}, rounding)
    fp8 = all("fp8" in device.peak_flops for device in gpus) and isinstance(setup.model, ModelSpec)
    if plan.precision in ("bf16", "fp16") and fp8:
        fields = {"precision": "fp8", "fp8_recipe": "tensorwise"}
        yield of_plan(request, "precision", "compute matrix products in fp8", fields, rounding)
    yield of_plan(request, "torch.compile", "compile the model with torch.compile", {"compile": True})
    yield of_plan(request, "CUDA graphs", "launch the step as CUDA graphs", {"cuda_graphs": True})
    yield of_plan(request, "optimizer", "use the fused optimizer", {"optimizer_impl": "fused"})
    if plan.tp > 1:
        yield of_plan(request, "overlap", "overlap tensor parallelism (async_tp)", {"async_tp": True})


def _states(request: Request, fits: bool) -> Iterator[Candidate | None]:
    """Changes of where parameters, gradients and optimizer state are kept."""
    setup = request.setup
    plan = setup.plan
    for stage in _zero_stages(setup):
        fields = _sharded(plan, stage)
        yield of_plan(request, "sharding", f"{_SHARDING[stage]} instead of {_SHARDING[plan.zero_stage]}", fields)
        if not fits and stage > plan.zero_stage:
            title = f"{_SHARDING[stage]} and full activation checkpointing"
            yield of_plan(request, "sharding", title, {**fields, "activation_checkpointing": "full"})
    if plan.shards_parameters:
        title = "keep unsharded parameters until the backward pass"
        yield of_plan(request, "sharding", title, {"reshard_after_forward": "never"})
    if plan.offload != "none" or plan.activation_offload:
        title = "keep everything in the GPU's memory"
        yield of_plan(request, "offload", title, {"offload": "none", "activation_offload": 0.0})
    if not fits:
        yield of_plan(request, "offload", "keep the optimizer in host memory", {"offload": "optimizer"})


def _sharded(plan: Plan, zero_stage: int) -> dict[str, Any]:
    """Returns the fields of a plan with another ZeRO stage over the same data-parallel ranks."""
    if zero_stage == 0:
        return {"zero_stage": 0, "dp_replicate": plan.dp, "dp_shard": 1}
    if plan.zero_stage == 0:
        return {"zero_stage": zero_stage, "dp_replicate": 1, "dp_shard": plan.dp}
    return {"zero_stage": zero_stage}


def savers(request: Request) -> Iterator[Candidate]:
    """Returns all changes that save memory, together."""
    yield from (candidate for candidate in _savers(request) if candidate is not None)


def _savers(request: Request) -> Iterator[Candidate | None]:
    plan = request.setup.plan
    fields: dict[str, Any] = {
        "activation_checkpointing": "full",
        "micro_batch": 1,
        "n_microbatches": plan.n_microbatches * plan.micro_batch,
    }
    title = f"full activation checkpointing, micro batches of {_count(1, request.sample)}"
    yield of_plan(request, "plan", title, fields)
    if 3 in _zero_stages(request.setup):
        fields, title = {**fields, **_sharded(plan, 3)}, f"{title}, {_SHARDING[3]}"
        yield of_plan(request, "plan", title, fields)
    yield of_plan(request, "plan", f"{title}, the optimizer in host memory", {**fields, "offload": "optimizer"})
    title = f"{title}, parameters and optimizer in host memory"
    yield of_plan(request, "plan", title, {**fields, "offload": "params"})


def _zero_stages(setup: Setup) -> tuple[int, ...]:
    """Returns other ZeRO stages that the stack offers for the data-parallel ranks of a plan."""
    plan = setup.plan
    if plan.dp == 1 or plan.ep > 1 or (plan.dp_replicate > 1 and plan.dp_shard > 1):
        return ()
    offered = load_stack(plan.stack).search
    return () if offered is None else tuple(stage for stage in offered.zero_stages if stage != plan.zero_stage)


def plan_candidate(request: Request, plan: Plan) -> Candidate:
    """Returns another plan of the same GPUs and global batch."""
    own = request.setup.plan
    fields = {name: getattr(plan, name) for name in FIELD_TYPES if getattr(plan, name) != getattr(own, name)}
    title = (
        f"another plan: {plan.describe()}, micro batches {plan.n_microbatches} x {plan.micro_batch},"
        f" activation checkpointing {plan.activation_checkpointing}"
    )
    return with_plan(request, "plan", title, plan, fields)


_NO_KERNEL = frozenset(cause.name.lower() for cause in (*EXPOSED, Cause.BUBBLE, Cause.HOST, Cause.WAITING))
_ROUNDS = 2
"""rounds of adjusting the batches to their simulated times, because a sample takes less time in a large batch"""


def balances(request: Request) -> Iterator[Candidate]:
    """Gives each kind a micro batch in proportion to its speed, and keeps the global batch as nearly as possible."""
    setup = request.setup
    if not setup.kinds:
        return
    batches = _batches_of_kinds(setup)
    for _ in range(_ROUNDS):
        try:
            batches = _balanced(setup, batches)
        except ForerunError:
            return
    if batches == _batches_of_kinds(setup):
        return
    own, *others = batches if len(batches) > len(setup.kinds) else (setup.plan.micro_batch, *batches)
    kinds = tuple(replace(kind, micro_batch=batch) for kind, batch in zip(setup.kinds, others, strict=True))
    balanced = replace(setup, plan=replace(setup.plan, micro_batch=own), kinds=kinds)
    words = ", ".join(f"{batch} on {part.name}" for part, batch in zip(balanced.parts, batches, strict=True))
    fields = {"micro_batch": own}
    change = change_of(request, fields) | {MIXED: mixed_of(request, kinds)}
    caveat = batch_caveat(setup, balanced)
    yield Candidate("batch balance", f"micro batches of {words}", balanced, change, fields, caveat)


def _batches_of_kinds(setup: Setup) -> list[int]:
    """Returns the micro batch of each part."""
    return [part.micro_batch or setup.plan.micro_batch for part in setup.parts]


def _balanced(setup: Setup, batches: list[int]) -> list[int]:
    """Divides the same samples by the speed that each part has at `batches`."""
    speeds = [batch / _kernels_s(setup, part, batch) for part, batch in zip(setup.parts, batches, strict=True)]
    gpus = [part.n_gpus for part in setup.parts]
    samples = sum(n * batch for n, batch in zip(gpus, _batches_of_kinds(setup), strict=True))
    together = sum(n * speed for n, speed in zip(gpus, speeds, strict=True))
    return [max(1, round(samples * speed / together)) for speed in speeds]


def _kernels_s(setup: Setup, part: RankKind, micro_batch: int) -> float:
    """Returns the seconds of a step in which kernels run if all GPUs are those of `part`."""
    cluster = setup.cluster if part.device is None else replace(setup.cluster, device=part.device)
    alone = replace(setup, cluster=cluster, kinds=(), plan=replace(setup.plan, micro_batch=micro_batch))
    breakdown = simulate_setup(alone, folded=True).prediction.breakdown
    return part.slowdown * sum(time_s for cause, time_s in breakdown.items() if cause not in _NO_KERNEL)
