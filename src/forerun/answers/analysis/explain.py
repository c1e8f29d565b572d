"""Lists the source of every figure of a prediction, one line for each figure."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from forerun.answers.analysis.coverage import Coverage
from forerun.answers.analysis.memory_need import MemoryNeed
from forerun.answers.analysis.network_use import AxisUse, NetworkUse
from forerun.common.units import GIB
from forerun.core.cost.clock import clock
from forerun.core.memory.reserved import reserve_model
from forerun.core.program.types import Program
from forerun.describe.cluster.types import Cluster, Device, KernelRates
from forerun.describe.kernels.attention import fused_kernel
from forerun.describe.stacks.stack import Stack


def explain(
    program: Program,
    cluster: Cluster,
    stack: Stack,
    memory: MemoryNeed,
    mfu: str,
    coverage: Coverage,
    band: str,
    network: NetworkUse | None,
    notes: tuple[str, ...] = (),
) -> tuple[str, ...]:
    """Returns the lines that name the inputs, the models and the fitted constants behind each figure of a Prediction.

    `mfu` describes the FLOPs and the peak of MFU, and `band` the source of the band of the time. `network` is the
    network that collectives ran on in place of the cluster's links. `notes` come last.
    """
    device, model = cluster.device, reserve_model()
    outside_gib = memory.outside_bytes / GIB
    rules = "as replayed" if memory.replayed else f"with {model.least_slack:.0%} fragmentation"
    estimate = f"allocated plus {model.slack:.0%} of the memory that is freed within the step (fitted)"
    steps = sum(len(cls.block) for cls in program.rank_classes)
    links = ", ".join(
        f"{link.kind} {link.bytes_per_s / 1e9:.0f} GB/s per GPU{'' if link.peer_to_peer else ' without peer access'}"
        for link in cluster.links
    )
    if network is not None:
        links = f"NCCL's algorithms on {network.topology}; all groups of an axis communicate at the same time"
    where = ", ".join(f"{group.axis} {group.nodes}x{group.ranks_per_node}" for group in memory.groups) or "none"
    fitted = "; ".join(f"{name} {getattr(stack, name)} ({how})" for name, how in stack.fitted.items())
    lines = [
        f"step_time_s: end of a simulated step of {steps:,} block instances ({len(program.ops)} distinct kernels and"
        f" collectives) on {len(program.rank_classes)} distinct rank(s)",
        f"step_time_low_s, step_time_high_s: {band}",
        f"kernels: cost profile {device.cost_profile!r}{_clock(device)}",
        f"calibrated shapes: {coverage.share:.0%} of kernel time{_by_kind(coverage)}",
        *_outside(coverage),
        *_stand_ins(program, device),
        f"software: stack {stack.name!r}, {stack.description} ({stack.source})",
        *([f"software, fitted: {fitted}"] if fitted else []),
        *_shown_by_steps(cluster.rates),
        f"collectives: {links}; groups as nodes x ranks per node: {where}",
        *([] if network is None else [f"network: {_hottest(axis)}" for axis in network.axes]),
        "exposed_comm_s: gaps of the compute stream that end with a collective or transfer on another stream",
        "bubble_s: gaps that end with another pipeline stage, mean over ranks",
        f"mfu: {mfu}",
        "hfu: the FLOPs of mfu and those of recomputation, counted in the same way, over the same peak",
        "peak_allocated_gib: tensors from allocation to last use in host issue order; the peak is on"
        f" {memory.fullest.rank_class}",
        f"peak_reserved_gib: {_how_reserved(stack) if memory.replayed else estimate}",
        "peak_reserved_low_gib, peak_reserved_high_gib: from the errors of published reserved peaks",
        f"device_gib: reserved, and {outside_gib:.2f} GiB of context and NCCL buffers (outside.yaml)",
        f"fits: {rules}, and {outside_gib:.2f} GiB of context and NCCL"
        f" buffers within {memory.limit_bytes / GIB:.1f} GiB",
    ]
    if cluster.price_per_gpu_hour is not None:
        lines.append(f"dollars_per_billion_tokens: {cluster.price_per_gpu_hour} dollars per GPU-hour, a list price")
    return (*lines, *notes)


def _clock(device: Device) -> str:
    """Says at which clock products run, and why."""
    found = clock(device, "bf16")
    if found is None:
        return f" at {device.sustained:.2f} of its clock; what {device.architecture} GPUs draw is not known"
    host = "" if device.sustained == 1.0 else f", times {device.sustained:.2f} on this host"
    return f" at {found:.2f} of its clock in bf16 products, as {device.power_w:g} W allow{host}"


def _shown_by_steps(rates: KernelRates) -> list[str]:
    factors = [f"{one.name} x {getattr(rates, one.name):.3f}" for one in fields(rates) if getattr(rates, one.name) != 1]
    return [f"rates, by measured steps: {', '.join(factors)}"] if factors else []


def _how_reserved(stack: Stack) -> str:
    settings = stack.allocator or "default settings"
    return f"what PyTorch's caching allocator holds in a replay of three steps, under {settings}"


def _by_kind(coverage: Coverage) -> str:
    kinds = [f"{name} {kind.inside:.0%} of {kind.share:.0%}" for name, kind in coverage.by_kind.items()]
    return f" ({', '.join(kinds)})" if kinds else ""


def _outside(coverage: Coverage) -> list[str]:
    if not coverage.outside:
        return []
    most = "; ".join(f"{what}, {share:.1%}" for what, share in coverage.outside)
    return [f"outside the calibrated shapes, longest first: {most}"]


def _stand_ins(program: Program, device: Device) -> list[str]:
    """Returns a line for each attention kernel of the program whose own rates on the device are not known."""
    ops = program.ops
    kernels = sorted({ops.kernel[row] for row in np.flatnonzero(ops.is_attention).tolist()})
    rates = {kernel: fused_kernel(kernel).rate_on(device.architecture).stands_in for kernel in kernels}
    return [
        f"attention {kernel}: its rates on {device.architecture} are not known, so Forerun uses {other}"
        for kernel, other in rates.items()
        if other
    ]


def _hottest(axis: AxisUse) -> str:
    busy = f"busy {axis.utilisation:.1%} of the step, {axis.busy_s * 1e3:.1f} ms"
    return f"{axis.axis} ({axis.ranks} ranks, {axis.apart} apart) is limited by link {axis.busiest_link}: {busy}"
