"""`forerun traffic`: when the messages of a pattern arrive."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from forerun.astrasim.messages.traffic import read_cases, run_cases
from forerun.core.network.network_file import read_network


class Model(str, Enum):
    """Holds the ways in which messages share links."""

    links = "links"
    flows = "flows"


def traffic(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.json", help="JSON file with a case, a list of cases, or cases by name.")
    ],
    model: Annotated[
        Model,
        typer.Option(
            help="How messages share links: links serves them first come, first served; flows gives max-min fair"
            " shares."
        ),
    ] = Model.links,
    hottest: Annotated[int, typer.Option(min=0, help="Number of busiest links to list as well.")] = 0,
    network: Annotated[
        Path | None, typer.Option(help="Network file to use instead of the topologies in the cases.")
    ] = None,
) -> None:
    """Simulate patterns of messages on a network, and print a JSON line for each case.

    A case has messages (start_ns, src, dst, bytes), a topology such as ["Mesh2D", 4, 4], bandwidth_GBps and latency_ns.
    The unit of bandwidth_GBps is 2**30 bytes/s, as in ASTRA-sim, unless bandwidth_unit is GB/s. The line of a case has
    finish_ns and arrival_ns, in the order of the messages, or error.
    """
    cases = read_cases(file)
    chosen = None if network is None else read_network(network)
    for record in run_cases(cases, model.value, hottest, chosen):
        print(json.dumps(record, allow_nan=False))
