"""Options that predict, plan and simulate share, and how a saved Program runs under them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forerun.answers.analysis.predict_program import predict_program, read_program
from forerun.answers.analysis.reading import Simulation
from forerun.common.errors import ForerunError
from forerun.core.cost.measured import Measured
from forerun.core.cost.measured_files import read_measured
from forerun.core.network.network_file import Network
from forerun.core.network.on_topology import network_of
from forerun.core.program.origin import Origin
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.memory_limit import limited
from forerun.describe.cluster.types import Cluster
from forerun.evidence.fitting.anchor_file import with_stated_rates
from forerun.interfaces.cli import completion
from forerun.interfaces.cli.loop_options import LoopOptions
from forerun.interfaces.cli.numbers import memory_gib

ClusterOption = Annotated[
    str,
    typer.Option(
        help="Cluster: a preset (forerun clusters lists them) or a YAML file.", autocompletion=completion.clusters
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@dataclass(frozen=True)
class Conditions:
    """Says under which conditions a step runs, beside model, plan and cluster."""

    memory_limit: Annotated[
        float | None,
        typer.Option(
            parser=memory_gib, metavar="GIB|SIZE", help="GPU memory that a run may use: 70 (GiB), 74.5GiB or 80GB."
        ),
    ] = None
    network: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help=(
                "Simulate messages on this network: a file, or text such as switch:8@450/300ns,fat-tree:16@50/700ns."
            ),
        ),
    ] = None
    kernel_profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="CSV file of kernel times that you measured. They replace the predicted times."
        ),
    ] = None
    network_profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="CSV file of collective times that you measured. They replace the predicted times."
        ),
    ] = None
    tokens_per_step: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of tokens in a step, over all GPUs, if the program does not record it."),
    ] = None

    def cluster(self, name: str) -> Cluster:
        """Returns the cluster of this name or file, with no more memory than the limit. Raises ForerunError."""
        return limited(load_cluster(name), self.memory_limit)

    def topology(self, where: Cluster) -> Network | None:
        """Returns the network in place of the links of the cluster, if any. Raises ForerunError."""
        return network_of(where, self.network)

    def measured(self) -> Measured | None:
        """Returns the user's own measurements, if any. Raises ForerunError."""
        return read_measured(self.kernel_profile, self.network_profile)


def simulate_file(
    program: Path,
    cluster: str,
    gpus: int | None,
    under: Conditions,
    loop: LoopOptions,
    *,
    whole_timeline: bool,
    stack: str = "",
    anchor: Path | None = None,
) -> Simulation:
    """Runs a saved Program under these conditions, at the rates of `stack` (its own) times those that `anchor` states.

    Raises ForerunError.
    """
    where, read = under.cluster(cluster), read_program(program)
    if anchor is not None:
        where = with_stated_rates(anchor, where)
    return predict_program(
        read,
        where,
        n_gpus=gpus,
        network=under.topology(where),
        measured=under.measured(),
        tokens_per_step=under.tokens_per_step,
        stack=stack or None,
        whole_timeline=whole_timeline,
        loop=loop.loop(Origin.of(read).loop),
        storage=loop.where(),
    )


def refuse(given: Mapping[str, object], because: str) -> None:
    """Raises ForerunError for options that don't go with another; `given` is name -> value, None or False: not
    given."""
    names = [name for name, value in given.items() if value is not None and value is not False]
    if names:
        options = ", ".join("--" + name.replace("_", "-") for name in names)
        raise ForerunError(f"{options}: {because}")
