"""What could make a run faster, cheaper or fit: changes of a plan or of the machine, in the words of an experiment.

A candidate is a question; `advice.py` simulates it and keeps what helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from forerun.analysis.setup import Setup
from forerun.cluster.catalog import cluster_table, load_cluster
from forerun.cluster.types import Cluster, Device
from forerun.errors import ForerunError
from forerun.experiment.description import changed
from forerun.experiment.description_sections import HardwareSection
from forerun.experiment.description_training import SPELLINGS
from forerun.experiment.request import Request
from forerun.model.spec import ModelSpec
from forerun.network.patterns import CommunicationPattern
from forerun.network.patterns_catalog import PATTERNS, pattern_of
from forerun.plan.fields import FIELD_TYPES
from forerun.plan.plan import Plan
from forerun.search.habits import habits_of

Kind = Literal[
    "gradient precision",
    "gradient compression",
    "gradient accumulation",
    "activation checkpointing",
    "batch",
    "torch.compile",
    "CUDA graphs",
    "optimizer",
    "overlap",
    "bucket size",
    "precision",
    "sharding",
    "offload",
    "plan",
    "communication pattern",
    "device",
    "all together",
]

DEVICE: Kind = "device"
_WORDS = {name: key for key, name in SPELLINGS.items()}
"""Plan's word -> the experiment's"""
_BUCKETS_MIB = (25.0, 100.0, 400.0)
_COMPRESSION = 4.0
"""bytes of gradients over those on the wire: fp32 in 8 bits"""
_OTHER_DEVICES = 5
"""devices that are tried for speed, and for speed per dollar"""
_OF_GRADIENTS = ("gradient precision", "gradient compression")
"""kinds that make gradients smaller: one of them is enough"""
_NO_CUDA = ("tpu",)
"""architectures on which the stacks' kernels and NCCL don't run"""
_SHARDING = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "FSDP"}


@dataclass(frozen=True)
class Candidate:
    """One change."""

    kind: Kind
    title: str
    """what to do, as an order: `sum gradients in bf16`"""
    setup: Setup
    change: dict[str, Any]
    """`section.key` of the experiment -> its new value, None to take the key away (`description.changed`)"""
    fields: dict[str, Any] = field(default_factory=dict)
    """the part of the change that is of the Plan"""
    caveat: str = ""
    """what else it changes: rounding, the global batch"""

    @property
    def touches(self) -> frozenset[str]:
        """What it changes: candidates that share none of it go together."""
        bytes_of_gradients = {"gradients"} if self.kind in _OF_GRADIENTS else set()
        return frozenset({self.kind, *self.change, *bytes_of_gradients})

    def on(self, setup: Setup) -> Setup:
        """`setup` with this change too. Raises ForerunError where a plan can't have both."""
        if "training.communication_pattern" in self.change:
            return replace(setup, pattern=self.setup.pattern)
        return replace(setup, plan=replace(setup.plan, **self.fields))


def of_plan(request: Request, kind: Kind, title: str, fields: Mapping[str, Any], caveat: str = "") -> Candidate | None:
    """The candidate that changes `fields` of the plan; None where they are as they were or can't be."""
    setup = request.setup
    new = {name: value for name, value in fields.items() if getattr(setup.plan, name) != value}
    if not new:
        return None
    try:
        plan = replace(setup.plan, **new)
    except ForerunError:
        return None
    return Candidate(kind, title, replace(setup, plan=plan), change_of(request, new), new, caveat)


def change_of(request: Request, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Plan fields as keys of the section `training`, in place of whatever it called them."""
    given = request.given.get("training") or {}
    change: dict[str, Any] = {}
    for name, value in fields.items():
        key = _WORDS.get(name, name)
        change[f"training.{key}"] = value
        if key != name and name in given:
            change[f"training.{name}"] = None
    return change


def candidates(request: Request, fits: bool) -> Iterator[Candidate]:
    """All changes worth simulating, each kind's in order; `fits` says whether the run does as it is."""
    plain = [*_batches(request, fits), *_gradients(request), *_software(request), *_states(request, fits)]
    yield from (candidate for candidate in plain if candidate is not None)
    yield from _patterns(request)
    yield from _devices(request)


# -- the plan ------------------------------------------------------------------------------------------------------


def _batches(request: Request, fits: bool) -> Iterator[Candidate | None]:
    """Micro batches, accumulation and activation checkpointing."""
    plan = request.setup.plan
    micro, count = plan.micro_batch, plan.n_microbatches
    word = f"{request.sample}s"
    parts = (2, 4) if fits else (2, 4, 8, 16, 32, 64, 128)
    for part in (part for part in parts if micro % part == 0):
        yield of_plan(
            request,
            "batch",
            f"{part} times as many micro batches of {micro // part} {word} instead of {micro}",
            {"micro_batch": micro // part, "n_microbatches": count * part},
        )
    if not fits and micro > 1:
        yield of_plan(
            request,
            "batch",
            f"micro batches of {micro // 2} {word} instead of {micro}",
            {"micro_batch": micro // 2},
            _global_batch(plan, micro // 2, count),
        )
    for times in (2, 4):
        if count % times == 0:
            yield of_plan(
                request,
                "batch",
                f"micro batches of {micro * times} {word} instead of {micro}, and as many fewer",
                {"micro_batch": micro * times, "n_microbatches": count // times},
            )
        yield of_plan(
            request,
            "batch",
            f"micro batches of {micro * times} {word} instead of {micro}",
            {"micro_batch": micro * times},
            _global_batch(plan, micro * times, count),
        )
        yield of_plan(
            request,
            "gradient accumulation",
            f"accumulate gradients of {count * times} micro batches instead of {count}",
            {"n_microbatches": count * times},
            _global_batch(plan, micro, count * times),
        )
    yield from _checkpointing(request)


def _checkpointing(request: Request) -> Iterator[Candidate | None]:
    """Less or more of it; more also with twice or four times the micro batch, where the batch can stay as it is."""
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
                yield of_plan(request, "activation checkpointing", f"{larger}, and as many fewer", fields)
            else:
                caveat = _global_batch(plan, plan.micro_batch * times, plan.n_microbatches)
                yield of_plan(request, "activation checkpointing", larger, fields, caveat)


def _global_batch(plan: Plan, micro_batch: int, n_microbatches: int) -> str:
    after = micro_batch * n_microbatches * plan.dp
    return f"the global batch becomes {after:,} instead of {plan.global_batch:,}"


def _gradients(request: Request) -> Iterator[Candidate | None]:
    """How gradients are reduced."""
    plan, device = request.setup.plan, request.setup.cluster.device
    if plan.dp * plan.cp == 1:
        return
    if _reduce_dtype(request.setup) == "fp32":
        dtype = _half(device)
        yield of_plan(
            request, "gradient precision", f"sum gradients in {dtype}", {"reduce_dtype": dtype}, "sums are rounded more"
        )
    yield of_plan(request, "overlap", "reduce gradients during the backward pass", {"overlap_grad_reduce": True})
    if plan.zero_stage == 3 and plan.fsdp > 1:
        yield of_plan(request, "overlap", "gather parameters ahead", {"prefetch": max(1, plan.prefetch)})
    if plan.dp_replicate > 1 or plan.zero_stage < 3:
        own = plan.ddp_bucket_mib or request.setup.stack.bucket_mib
        for size in (size for size in _BUCKETS_MIB if size != own):
            title = f"reduce gradients in buckets of {size:.0f} MiB instead of {own:g}"
            yield of_plan(request, "bucket size", title, {"ddp_bucket_mib": size})


def _reduce_dtype(setup: Setup) -> str:
    """Dtype in which gradients are reduced."""
    plan, stack = setup.plan, setup.stack
    dtype = stack.reduce_dtype if plan.reduce_dtype == "auto" else plan.reduce_dtype
    if dtype != "param":
        return dtype
    return "fp32" if plan.precision in ("fp32", "tf32") else "bf16"


def _half(device: Device) -> str:
    return "bf16" if "bf16" in device.peak_flops else "fp16"


def _software(request: Request) -> Iterator[Candidate | None]:
    """Precision, compilation, launches, optimizer kernels."""
    setup = request.setup
    plan, device = setup.plan, setup.cluster.device
    rounding = "rounding differs: check that training still converges"
    steps = {"fp32": ("tf32", _half(device)), "tf32": (_half(device),)}.get(plan.precision, ())
    for precision in steps:
        yield of_plan(request, "precision", f"compute in {precision}", {"precision": precision}, rounding)
    if plan.precision in ("bf16", "fp16") and "fp8" in device.peak_flops and isinstance(setup.model, ModelSpec):
        fields = {"precision": "fp8", "fp8_recipe": "tensorwise"}
        yield of_plan(request, "precision", "compute matrix products in fp8", fields, rounding)
    yield of_plan(request, "torch.compile", "compile the model with torch.compile", {"compile": True})
    yield of_plan(request, "CUDA graphs", "launch the step as CUDA graphs", {"cuda_graphs": True})
    yield of_plan(request, "optimizer", "use the fused optimizer", {"optimizer_impl": "fused"})
    if plan.tp > 1:
        yield of_plan(request, "overlap", "overlap tensor parallelism (async_tp)", {"async_tp": True})


def _states(request: Request, fits: bool) -> Iterator[Candidate | None]:
    """Where parameters, gradients and optimizer state live."""
    setup = request.setup
    plan = setup.plan
    for stage in _zero_stages(setup):
        fields: dict[str, Any] = {"zero_stage": stage}
        if plan.zero_stage == 0 or stage == 0:
            fields |= (
                {"dp_replicate": plan.dp, "dp_shard": 1} if stage == 0 else {"dp_replicate": 1, "dp_shard": plan.dp}
            )
        yield of_plan(request, "sharding", f"{_SHARDING[stage]} instead of {_SHARDING[plan.zero_stage]}", fields)
        if not fits and stage > plan.zero_stage:
            fields["activation_checkpointing"] = "full"
            title = f"{_SHARDING[stage]} and full activation checkpointing"
            yield of_plan(request, "sharding", title, fields)
    if plan.zero_stage == 3 and plan.fsdp > 1:
        title = "keep gathered parameters until the backward pass"
        yield of_plan(request, "sharding", title, {"reshard_after_forward": "never"})
    if plan.offload != "none" or plan.activation_offload:
        title = "keep everything in the GPU's memory"
        yield of_plan(request, "offload", title, {"offload": "none", "activation_offload": 0.0})
    if not fits:
        yield of_plan(request, "offload", "keep the optimizer in host memory", {"offload": "optimizer"})


def _zero_stages(setup: Setup) -> tuple[int, ...]:
    """Other ZeRO stages that the stack offers for the data-parallel ranks of a plan."""
    plan = setup.plan
    if plan.dp == 1 or plan.ep > 1 or (plan.dp_replicate > 1 and plan.dp_shard > 1):
        return ()
    try:
        offered = habits_of(plan.stack).zero_stages
    except ForerunError:
        return ()
    return tuple(stage for stage in offered if stage != plan.zero_stage)


def plan_candidate(request: Request, plan: Plan) -> Candidate:
    """Another plan of the same GPUs and global batch."""
    own = request.setup.plan
    fields = {name: getattr(plan, name) for name in FIELD_TYPES if getattr(plan, name) != getattr(own, name)}
    sharding = _SHARDING[plan.zero_stage] if plan.dp * plan.cp > 1 else "no data parallelism"
    title = (
        f"another plan: {plan.describe()} ({sharding}), micro batches {plan.n_microbatches} x {plan.micro_batch},"
        f" activation checkpointing {plan.activation_checkpointing}"
    )
    return Candidate("plan", title, replace(request.setup, plan=plan), change_of(request, fields), fields)


# -- the machine ---------------------------------------------------------------------------------------------------


def _patterns(request: Request) -> Iterator[Candidate]:
    """How gradients are exchanged, where a pattern decides it."""
    setup = request.setup
    if setup.plan.dp == 1 or setup.plan.zero_stage or (setup.pattern is not None and setup.pattern.everything):
        return
    for name, made in PATTERNS.items():
        if made.everything or made.zero_stage:
            continue
        title = "let NCCL choose how gradients are exchanged" if name == "nccl" else f"exchange gradients by {name}"
        yield from _with_pattern(request, "communication pattern", title, name, pattern_of(name), "")
    own = setup.pattern.name if setup.pattern is not None and setup.pattern.name in PATTERNS else "nccl"
    if setup.pattern is None or setup.pattern == pattern_of(own):
        given = {"name": own, "compression": _COMPRESSION}
        title = f"compress gradients to {1 / _COMPRESSION:.0%} of their bytes"
        caveat = "compression loses bits: check that training still converges"
        yield from _with_pattern(request, "gradient compression", title, given, pattern_of(given), caveat)


def _with_pattern(
    request: Request, kind: Kind, title: str, given: object, pattern: CommunicationPattern | None, caveat: str
) -> Iterator[Candidate]:
    if pattern == request.setup.pattern:
        return
    change = {"training.communication_pattern": given}
    yield Candidate(kind, title, replace(request.setup, pattern=pattern), change, {}, caveat)


def _devices(request: Request) -> Iterator[Candidate]:
    """The same number of GPUs of other devices of the catalogue that have a price, with their vendors' links."""
    setup = request.setup
    if setup.kinds:
        return
    for cluster in _other_clusters(request):
        change: dict[str, Any] = {
            f"hardware.{key}": None
            for key in (request.given.get("hardware") or {})
            if key in HardwareSection.model_fields and key not in ("preset", "mixed", "slow_gpus", "slow_links")
        }
        change |= {"hardware.gpu_model": cluster.name, "hardware.num_gpus_per_node": setup.cluster.node_size}
        plan = setup.plan
        if plan.precision not in cluster.device.peak_flops:
            change["training.mixed_precision"] = _half(cluster.device)
            plan = replace(plan, precision=_half(cluster.device))
        try:
            other = changed(request, change).setup if request.given else replace(setup, cluster=cluster, plan=plan)
        except ForerunError:
            continue
        title = f"{cluster.device.name} (as {cluster.name}) instead of {setup.cluster.device.name}"
        yield Candidate(DEVICE, title, other, change)


def _other_clusters(request: Request) -> list[Cluster]:
    """Clusters of the catalogue, the cheapest of each device: those with the best rates, and the best for a dollar."""
    setup = request.setup
    size, own = setup.cluster.node_size, setup.cluster.device
    cheapest: dict[str, tuple[float, Cluster]] = {}
    for row in cluster_table():
        price = request.prices.by_name.get(row.name, request.prices.by_name.get(row.device, row.price_per_gpu_hour))
        if price is None or row.device == own.name or row.gpus_per_node < min(size, setup.n_gpus):
            continue
        cluster = load_cluster(row.name)
        if cluster.device.architecture in _NO_CUDA or _precision_on(cluster.device, setup.plan) is None:
            continue
        if row.device not in cheapest or price < cheapest[row.device][0]:
            links = (replace(cluster.links[0], size=size), *cluster.links[1:])
            cheapest[row.device] = price, replace(cluster, links=links)
    fastest = sorted(cheapest.values(), key=lambda each: -_speed(each[1].device, setup.plan))[:_OTHER_DEVICES]
    best_value = sorted(cheapest.values(), key=lambda each: -_speed(each[1].device, setup.plan) / each[0])
    chosen = [*fastest, *best_value[:_OTHER_DEVICES]]
    return list({cluster.name: cluster for _, cluster in chosen}.values())


def _precision_on(device: Device, plan: Plan) -> str | None:
    """The plan's precision on `device`: itself, or the other 16-bit one."""
    if plan.precision in device.peak_flops:
        return plan.precision
    return _half(device) if plan.precision in ("bf16", "fp16") and _half(device) in device.peak_flops else None


def _speed(device: Device, plan: Plan) -> float:
    """Which devices to try first: the mean, as a ratio, of arithmetic and memory bandwidth."""
    peak = device.peak_flops[_precision_on(device, plan) or plan.precision]
    return float((peak * device.memory_bytes_per_s) ** 0.5)
