"""`forerun measure`: measures the kernels and collectives of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.common.errors import ForerunError
from forerun.evidence.measure.bench_kernels import Sizes, kernel_cases
from forerun.evidence.measure.microbench import (
    gpu_timer,
    import_torch,
    is_distributed,
    machine_words,
    measure_collectives,
    measure_kernels,
    write_kernels,
    write_network,
)
from forerun.interfaces.cli.measure_step import step
from forerun.interfaces.report.progress import progress_bar

measure = typer.Typer(invoke_without_command=True)
measure.command("step", short_help="Measure a script's step beside its prediction.")(step)


@measure.callback()
def kernels(
    context: typer.Context,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write kernels.csv, or under torchrun network.csv, into.")
    ] = None,
) -> None:
    """Measure the times of kernels on this machine's GPU, or of collectives inside a node under torchrun.

    The command writes files for --kernel-profile, --network-profile and forerun calibrate. To measure collectives, run:
    torchrun --nproc-per-node 8 --no-python forerun measure --out FOLDER
    """
    if context.invoked_subcommand is not None:
        return
    if out is None:
        raise ForerunError(
            "measure: give the folder for the files with --out, or a script: forerun measure step SCRIPT"
        )
    torch = import_torch()
    timer = gpu_timer(torch)
    if is_distributed():
        torch.distributed.init_process_group("nccl")
        found = measure_collectives(timer, torch)
        if torch.distributed.get_rank() == 0:
            print(f"wrote {write_network(out, found, machine_words(torch, timer))}")
        torch.distributed.destroy_process_group()
        return
    sizes = Sizes()
    total = sum(1 for _ in kernel_cases(sizes, torch, timer.device))
    with progress_bar("measuring", refresh_every=1) as advance:
        kernels = measure_kernels(timer, torch, sizes, lambda done: advance(done, total))
    print(f"wrote {write_kernels(out, kernels, machine_words(torch, timer))}: {len(kernels.rows):,} kernels")
    print(f"the host takes {kernels.issue_us:.2f} us to issue an eager kernel (issue_us of a software stack)")
    for line in kernels.failed:
        print(f"not measured: {line}")
    print(f"next: forerun calibrate DEVICE --kernels {out / 'kernels.csv'} --profile-out PROFILE.yaml")
