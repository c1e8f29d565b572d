"""Compares a step on a real GPU with its Program: kernels and times by operation, NCCL, peak memory.

    python -m forerun.evidence.measure.compare_trace SCRIPT [--program FILE] [--cluster NAME] [--json FILE] -- ARGS

Runs SCRIPT here under torch.profiler, as torchrun would start it. For several GPUs start this under torchrun; rank 0
compares. Without --program it traces the script first. It needs a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from forerun.answers.analysis.predict_program import predict_program, read_program, stack_of
from forerun.common.errors import ForerunError
from forerun.common.files import whole_file
from forerun.common.units import GIB, MS, PS_PER_S
from forerun.core.cost.step_costs import Launching, step_costs
from forerun.core.memory.profile import profile
from forerun.core.program.counts import op_counts
from forerun.core.program.origin import Origin
from forerun.core.program.types import Collective, Program
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.types import Cluster
from forerun.describe.stacks.catalog import load_stack
from forerun.evidence.measure.kernels import Kernel, collective_key
from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits
from forerun.sources.trace.record import trace_job

_FAILED = 2


@dataclass(frozen=True, slots=True)
class Row:
    """The kernels and milliseconds of one operation, or of one kind of collective."""

    name: str
    predicted_kernels: int
    measured_kernels: int
    predicted_ms: float
    measured_ms: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One step as predicted and as measured."""

    rows: tuple[Row, ...]
    """rows, the one with the most measured time first"""
    predicted_step_ms: float
    measured_step_ms: float
    """milliseconds from the start of the first kernel to the end of the last"""
    predicted_peak_bytes: int
    measured_peak_bytes: int


def compare(
    program: Program, cluster: Cluster, kernels: Sequence[Kernel], peak_bytes: int, rank: int = 0
) -> Comparison:
    """Returns the prediction of `program` on `cluster` beside the `kernels` and the peak that `rank` measured."""
    role = _role(program, rank)
    predicted = _predicted(program, cluster, role)
    known = set(predicted)
    measured: dict[str, tuple[int, float]] = {}
    for kernel in kernels:
        key = kernel.key(known)
        count, total = measured.get(key, (0, 0.0))
        measured[key] = count + 1, total + kernel.duration_us * MS
    rows = [
        Row(name, counts[0], seen[0], counts[1], seen[1])
        for name in known | set(measured)
        for counts, seen in [(predicted.get(name, (0, 0.0)), measured.get(name, (0, 0.0)))]
    ]
    end_us = max(kernel.start_us + kernel.duration_us for kernel in kernels)
    start_us = min(kernel.start_us for kernel in kernels)
    return Comparison(
        rows=tuple(sorted(rows, key=lambda row: (-row.measured_ms, -row.predicted_ms, row.name))),
        predicted_step_ms=predict_program(program, cluster).prediction.step_time_s / MS,
        measured_step_ms=(end_us - start_us) * MS,
        predicted_peak_bytes=profile(program)[role].peak_bytes,
        measured_peak_bytes=peak_bytes,
    )


def _role(program: Program, rank: int) -> int:
    """Returns the rank class that the trace recorded of `rank`, or the first one."""
    recorded = Origin.of(program).roles or ()
    return recorded.index(rank) if rank in recorded else 0


def _predicted(program: Program, cluster: Cluster, role: int) -> dict[str, tuple[int, float]]:
    """Returns the predicted kernels and milliseconds by name of operation."""
    ops, origin = program.ops, Origin.of(program)
    launching = Launching(compiled_ops=origin.compiled_ops)
    costs = step_costs(ops, program.groups, cluster, load_stack(stack_of(program)), launching, origin.world_size)
    counts = op_counts(program)[role]
    out: dict[str, tuple[int, float]] = {}
    for op in np.flatnonzero((counts > 0) & ~ops.is_delay).tolist():
        talks = ops.is_communication[op]
        name = collective_key(Collective(ops.collective[op]).name.lower()) if talks else ops.name[op]
        launches = 1 if talks else int(ops.launches[op])
        kernels, total = out.get(name, (0, 0.0))
        time_ms = float(costs.duration_ps[op]) / PS_PER_S / MS
        out[name] = kernels + int(counts[op]) * launches, total + int(counts[op]) * time_ms
    return {name: found for name, found in out.items() if found[0]}


def print_comparison(out: Console, comparison: Comparison, limit: int = 40) -> None:
    """Prints a table of the operations that take most time, and the figures of the step."""
    table = Table(box=None, pad_edge=False)
    for heading in ("operation", "kernels", "measured", "time ms", "measured ms", "ratio"):
        table.add_column(heading, justify="left" if heading == "operation" else "right")
    for row in comparison.rows[:limit]:
        ratio = f"{row.predicted_ms / row.measured_ms:.2f}" if row.measured_ms else "-"
        table.add_row(
            row.name,
            f"{row.predicted_kernels:,}",
            f"{row.measured_kernels:,}",
            f"{row.predicted_ms:.3f}",
            f"{row.measured_ms:.3f}",
            ratio,
        )
    out.print(table)
    if len(comparison.rows) > limit:
        out.print(f"and {len(comparison.rows) - limit} operations more, in --json")
    out.print()
    peaks = comparison.predicted_peak_bytes / GIB, comparison.measured_peak_bytes / GIB
    out.print(f"step   {comparison.predicted_step_ms:10.2f} ms,  measured {comparison.measured_step_ms:10.2f} ms")
    out.print(f"peak   {peaks[0]:10.3f} GiB, measured {peaks[1]:10.3f} GiB ({peaks[0] / max(peaks[1], 1e-9) - 1:+.1%})")


# -- the command -------------------------------------------------------------------------------------------------


def _torch() -> Any:
    """Returns torch. Raises ForerunError if it is missing or has no GPU."""
    if importlib.util.find_spec("torch") is None:
        raise ForerunError("comparing needs torch with CUDA, which is not installed: pip install torch")
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise ForerunError(f"comparing needs a GPU, and torch {torch.__version__} finds none")
    return torch


def _run(options: argparse.Namespace) -> None:
    if not Path(options.script).is_file():
        raise ForerunError(f"{options.script}: no such script")
    cluster = load_cluster(options.cluster)
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    program = read_program(options.program) if options.program else None
    _torch()
    if program is None and rank == 0:
        arguments = tuple(options.arguments)
        job = Job("", options.script, arguments, world_size=world_size, steps=options.steps, device=options.device)
        program, _ = trace_job(job, Limits())
    kernels, peak_bytes = importlib.import_module("forerun.evidence.measure.profiled").profiled_step(
        options.script, options.arguments, options.steps
    )
    if program is None or rank != 0:
        return
    comparison = compare(program, cluster, kernels, peak_bytes, rank)
    if options.json:
        with whole_file(options.json) as file:
            file.write(json.dumps(asdict(comparison), indent=1).encode())
    print_comparison(Console(markup=False, highlight=False), comparison)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code, 2 where the user has to change something."""
    parser = argparse.ArgumentParser(
        prog="forerun.evidence.measure.compare_trace", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("script")
    parser.add_argument("--program", help="Program of the same script and ranks (forerun trace); else it is traced")
    parser.add_argument("--cluster", default="h100-sxm", help="cluster whose devices these are")
    parser.add_argument("--device", default=Job("").device, help="what a trace tells the script that it runs on")
    parser.add_argument("--steps", type=int, default=Job("").steps, help="optimizer steps to run; the last is profiled")
    parser.add_argument("--json", type=Path, help="file for the whole comparison")
    own = list(sys.argv[1:] if arguments is None else arguments)
    theirs = own[own.index("--") + 1 :] if "--" in own else []
    options = parser.parse_args(own[: own.index("--")] if "--" in own else own)
    options.arguments = theirs
    try:
        _run(options)
    except ForerunError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return _FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
