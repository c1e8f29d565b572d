"""The options for where a command runs its many simulations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from forerun.common.workers import Workers


@dataclass(frozen=True)
class WorkOptions:
    """Says who simulates; the result doesn't depend on it."""

    jobs: Annotated[int | None, typer.Option(min=1, help="Number of worker processes (default: one for each CPU).")] = (
        None
    )
    executor: Annotated[
        str,
        typer.Option(
            metavar="local|ray", help="Simulate in processes of this machine (local) or on a Ray cluster (ray)."
        ),
    ] = "local"
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Address of the Ray cluster (default: RAY_ADDRESS, or a new one on this machine)."
        ),
    ] = None

    @property
    def workers(self) -> Workers:
        """Returns who simulates. Raises as `Workers` does."""
        return Workers(self.jobs, self.executor, self.ray_address)
