"""How Forerun understood the units of an experiment: one line for each key that people confuse."""

from __future__ import annotations

from forerun.answers.analysis.setup import Setup
from forerun.answers.experiment.description.training import peak_dtype
from forerun.common.units import GIB, GIGA, TERA
from forerun.describe.cluster.schema import BITS_PER_BYTE, US_PER_S


def echo_of(setup: Setup, own_memory_bytes: int, sample: str) -> tuple[str, ...]:
    """The lines; `own_memory_bytes` is the device's memory as the catalogue has it."""
    dtype = peak_dtype(setup.plan.precision)
    cluster, device = setup.cluster, setup.cluster.device
    intra, inter = cluster.links[0], cluster.links[1] if len(cluster.links) > 1 else None
    lines = [
        f"compute_tflops {device.peak(dtype) / TERA:.5g}: 10**12 FLOP/s, the dense {dtype} peak of a GPU",
        _memory_line(device.memory_bytes, own_memory_bytes),
        f"memory_bandwidth_gb_s {device.memory_bytes_per_s / GIGA:.6g}: 10**9 bytes a second of a GPU's memory",
        f"intra_node_bandwidth_gbps {_rates(intra.bytes_per_s)} for each GPU and direction in a node of {intra.size}",
    ]
    if inter is not None:
        lines.append(f"network_bandwidth_gbps {_rates(inter.bytes_per_s)} for each GPU and direction between nodes")
        lines.append(f"base_latency_us {inter.latency_s * US_PER_S:.4g}: microseconds of a hop between nodes")
    lines.append(f"mixed_precision {setup.plan.precision}: what matrix products run in")
    lines.append(f"bucket_size_mb {setup.plan.ddp_bucket_mib:g}: MiB (2**20 bytes), as DDP's bucket_cap_mb")
    lines.append(_batch_line(setup, sample))
    return tuple(lines)


def _rates(bytes_per_s: float) -> str:
    gbit_s = bytes_per_s * BITS_PER_BYTE / GIGA
    return f"{gbit_s:.6g}: {gbit_s:.6g} Gb/s = {bytes_per_s / GIGA:.6g} GB/s"


def _memory_line(memory_bytes: int, own_bytes: int) -> str:
    gib = f"{memory_bytes / GIB:.4g}"
    if memory_bytes == own_bytes:
        return f"memory_gb {gib}: GiB (2**30 bytes), all that programs can use of the GPU"
    return f"memory_gb {gib}: GiB (2**30 bytes), in place of the GPU's {own_bytes / GIB:.4g}"


def _batch_line(setup: Setup, sample: str) -> str:
    """The micro batch of a GPU, and how the batch of a step follows from it."""
    plan = setup.plan
    own = [f", {kind.micro_batch} on {kind.name}" for kind in setup.kinds if kind.micro_batch is not None]
    accumulated = f" x {plan.n_microbatches} micro batches" if plan.n_microbatches > 1 else ""
    ranks = f" x {plan.dp} data-parallel rank{'s' if plan.dp > 1 else ''}"
    return (
        f"batch_size_per_gpu {plan.micro_batch}: {sample}s of a micro batch{''.join(own)};{accumulated}{ranks}"
        f" = {setup.samples_per_step:,} {sample}s an optimizer step"
    )
