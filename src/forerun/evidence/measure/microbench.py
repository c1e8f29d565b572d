"""Benchmarks kernels and collectives of this machine into files for `forerun calibrate` and `--kernel-profile`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.common.errors import ForerunError
from forerun.common.files import whole_file
from forerun.common.units import US
from forerun.core.program.types import Collective
from forerun.evidence.measure.bench_kernels import Case, Sizes, kernel_cases, tiny_kernel
from forerun.evidence.measure.nccl_tests import Key, network_csv
from forerun.evidence.measure.timers import CudaTimer, Run, Timer

_COLUMNS = (
    *("kind", "dtype", "m", "n", "k", "layout", "batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim"),
    *("causal", "backward", "kernel", "bytes", "op", "time_us"),
)
_MESSAGES = tuple(2**power for power in range(10, 31))
"""sizes of collectives in bytes of the full buffer"""


@dataclass(frozen=True)
class Measurements:
    """The times of kernels on one device."""

    rows: tuple[dict[str, str | int], ...]
    """one mapping from column to cell for each kernel"""
    issue_us: float
    """host time to issue one eager kernel"""
    failed: tuple[str, ...]
    """kinds of kernels that don't run on this device, with torch's reason"""

    def csv(self, machine: str) -> str:
        """Returns the text of a file for `--kernel-profile`."""
        lines = [f"# {machine}", f"# host: {self.issue_us:.2f} us to issue an eager kernel", ",".join(_COLUMNS)]
        lines += [",".join(str(row.get(column, "")) for column in _COLUMNS) for row in self.rows]
        return "\n".join(lines) + "\n"


def import_torch() -> Any:
    """Returns the torch module. Raises ForerunError if it is not installed."""
    try:
        import torch
        import torch.distributed
        import torch.nn.attention
    except ImportError:
        raise ForerunError("measuring needs PyTorch: pip install torch") from None
    return torch


def gpu_timer(torch: Any) -> CudaTimer:
    """Returns a timer of this process's GPU. Raises ForerunError if there is none."""
    if not torch.cuda.is_available():
        raise ForerunError("no GPU: torch.cuda.is_available() is false here; run this on the machine to be measured")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return CudaTimer(torch)


def machine_words(torch: Any, timer: Timer) -> str:
    """Returns device and versions, for the head of a file."""
    name = torch.cuda.get_device_name() if timer.device == "cuda" else timer.device
    return f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def measure_kernels(
    timer: Timer, torch: Any, sizes: Sizes, progress: Callable[[int], None] = lambda done: None
) -> Measurements:
    """Times kernels on one device and lists those that don't run there; `progress` gets the number of cases done."""
    rows: list[dict[str, str | int]] = []
    failed: dict[str, str] = {}
    for done, case in enumerate(kernel_cases(sizes, torch, timer.device), 1):
        try:
            time_s = timer.kernel_s(case.prepare()) / case.kernels
        except (RuntimeError, NotImplementedError) as error:  # The device lacks the kernel, or has too little memory.
            failed.setdefault(_kind(case), next(iter(str(error).strip().splitlines()), repr(error)))
        else:
            rows.append({**case.cells, "time_us": f"{time_s / US:.5g}"})
        progress(done)
    issue_us = timer.issue_s(tiny_kernel(torch, timer.device)) / US
    return Measurements(tuple(rows), issue_us, tuple(f"{kind}: {why}" for kind, why in failed.items()))


def _kind(case: Case) -> str:
    cells = case.cells
    return " ".join(str(cells[key]) for key in ("kind", "dtype", "kernel") if cells.get(key))


# -- collectives -------------------------------------------------------------------------------------------------


def is_distributed() -> bool:
    """Returns whether this process is one of several that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def measure_collectives(timer: Timer, torch: Any, sizes: Iterable[int] = _MESSAGES) -> dict[Key, float]:
    """Returns the seconds of collectives among the first 2, 4, 8, ... ranks of a node, on every rank of the job.

    Ranks outside a group wait, so that nothing else runs meanwhile.

    Raises:
        ForerunError: The job spans several nodes.
    """
    distributed = torch.distributed
    world, rank = distributed.get_world_size(), distributed.get_rank()
    if world != int(os.environ.get("LOCAL_WORLD_SIZE", world)):
        raise ForerunError("collectives are measured inside one node: start torchrun with --nnodes 1")
    messages = tuple(sizes)
    found: dict[Key, float] = {}
    for ranks in _group_sizes(world):
        group = distributed.new_group(list(range(ranks)))
        for kind, size, prepare in _collective_runs(torch, timer.device, group, ranks, messages):
            if rank < ranks:
                found[kind, ranks, 1, float(size)] = timer.together_s(prepare())
        distributed.barrier()
    return found


def _group_sizes(world: int) -> list[int]:
    """Returns the powers of two from 2 up to the number of ranks, and that number."""
    powers = [2**power for power in range(1, world.bit_length()) if 2**power <= world]
    return sorted({*powers, world})


def _collective_runs(
    torch: Any, device: str, group: Any, ranks: int, sizes: Iterable[int]
) -> Iterator[tuple[Collective, int, Callable[[], Run]]]:
    """Yields kind, bytes of the full buffer, and a function that makes the run."""
    distributed = torch.distributed
    # Newer versions of torch have these names and warn of the older ones.
    all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    reduce_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor

    def gather(whole: Any, share: Any) -> Run:
        return lambda: all_gather(whole, share, group=group)

    def scatter(whole: Any, share: Any) -> Run:
        return lambda: reduce_scatter(share, whole, group=group)

    def reduce(whole: Any, share: Any) -> Run:
        return lambda: distributed.all_reduce(whole, group=group)

    def exchange(whole: Any, share: Any) -> Run:
        received = torch.empty_like(whole)
        return lambda: distributed.all_to_all_single(received, whole, group=group)

    makers = {
        Collective.ALL_REDUCE: reduce,
        Collective.ALL_GATHER: gather,
        Collective.REDUCE_SCATTER: scatter,
        Collective.ALL_TO_ALL: exchange,
    }
    for kind, maker in makers.items():
        for size in sizes:
            share = max(1, size // 2 // ranks)

            def prepare(maker: Callable[[Any, Any], Run] = maker, share: int = share) -> Run:
                whole = torch.zeros(share * ranks, device=device, dtype=torch.bfloat16)
                return maker(whole, torch.zeros(share, device=device, dtype=torch.bfloat16))

            yield kind, share * ranks * 2, prepare


# -- files -------------------------------------------------------------------------------------------------------


def write_kernels(folder: Path, found: Measurements, machine: str) -> Path:
    """Writes kernels.csv into `folder`. Raises ForerunError if it can't."""
    return _write(folder / "kernels.csv", found.csv(machine))


def write_network(folder: Path, found: dict[Key, float], machine: str) -> Path:
    """Writes network.csv into `folder`. Raises ForerunError if it can't."""
    return _write(folder / "network.csv", f"# {machine}\n{network_csv(found)}")


def _write(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ForerunError(f"{path.parent}: can't make the folder: {error.strerror or error}") from None
    with whole_file(path) as file:
        file.write(text.encode())
    return path
