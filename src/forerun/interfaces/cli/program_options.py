"""Options of the commands that read a saved Program, and what they share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from forerun.answers.analysis.predict_program import predict_program, read_program
from forerun.answers.analysis.reading import Simulation
from forerun.answers.search.search import limited
from forerun.common.errors import ForerunError
from forerun.core.cost.measured_files import read_measured
from forerun.core.network.on_topology import network_of
from forerun.core.program.origin import Origin
from forerun.describe.cluster.catalog import load_cluster
from forerun.interfaces.cli.loop_options import loop_of, storage_of
from forerun.interfaces.cli.numbers import memory_gib

KernelProfile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="CSV file of your own kernel times; they go over the shipped model.")
]
NetworkProfile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="CSV file of your own collective times; they go over the shipped model."),
]
TokensPerStep = Annotated[
    int | None, typer.Option(metavar="N", help="Tokens of a step over all GPUs, where the program does not say.")
]
Network = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Network file (or text as switch:8@450,fat-tree:16@50) to communicate over."),
]
MemoryLimit = Annotated[
    float | None,
    typer.Option(
        parser=memory_gib, metavar="GIB|SIZE", help="Memory of a GPU to use at most: 70 (GiB), 74.5GiB or 80GB."
    ),
]


def simulate_file(
    program: Path,
    cluster: str,
    *,
    gpus: int | None,
    memory_limit: float | None,
    network: str | None,
    kernel_profile: Path | None,
    network_profile: Path | None,
    tokens_per_step: int | None,
    whole_timeline: bool,
    every: str | None = None,
    checkpoint_mode: str | None = None,
    storage: str | None = None,
) -> Simulation:
    """Run a saved Program as options ask for. Raises ForerunError."""
    where = limited(load_cluster(cluster), memory_limit)
    read = read_program(program)
    loop = loop_of(Origin.of(read).loop, every, checkpoint_mode)
    return predict_program(
        read,
        where,
        n_gpus=gpus,
        network=network_of(where, network),
        measured=read_measured(kernel_profile, network_profile),
        tokens_per_step=tokens_per_step,
        whole_timeline=whole_timeline,
        loop=loop,
        storage=storage_of(storage, loop),
    )


def refuse(given: Mapping[str, object], because: str) -> None:
    """Raise ForerunError for options that don't go with another; `given` is name -> value, None or False: not given."""
    names = [name for name, value in given.items() if value is not None and value is not False]
    if names:
        options = ", ".join("--" + name.replace("_", "-") for name in names)
        raise ForerunError(f"{options}: {because}")
