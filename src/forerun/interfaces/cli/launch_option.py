"""The options that write a plan as the files of the tool that is to run it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forerun.common.errors import ForerunError
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.interfaces.report.launch.schedulers import SCHEDULERS
from forerun.interfaces.report.launch.tools import NOTES, TOOLS, check_tool, launch_files, write_launch


@dataclass(frozen=True)
class LaunchOptions:
    """Names the tool that is to run the plan, the scheduler that starts it, and the folder for their files."""

    launch: Annotated[
        str | None,
        typer.Option(
            metavar="TOOL",
            help=f"Write the configuration files with which this tool runs the plan: {', '.join(TOOLS)}.",
        ),
    ] = None
    launch_out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder for the files of --launch.")] = None
    scheduler: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Also write a job file for this scheduler: {', '.join(SCHEDULERS)}."),
    ] = None

    def check(self) -> None:
        """Raises ForerunError for a tool or scheduler that is not known, or for one option without the other."""
        if self.launch is not None:
            check_tool(self.launch, self.scheduler)
        elif self.scheduler is not None:
            raise ForerunError("--scheduler: give --launch too")
        if (self.launch is None) != (self.launch_out is None):
            both = ("--launch", "--launch-out")
            given, missing = both if self.launch_out is None else both[::-1]
            raise ForerunError(f"{given}: give {missing} too")

    def write(self, plan: Plan, model: ModelSpec | LayeredModel, cluster: Cluster) -> None:
        """Writes the files where the user names a tool, and says so on stderr. Raises ForerunError."""
        if self.launch is None or self.launch_out is None:
            return
        files = launch_files(plan, model, cluster, self.launch, self.scheduler)
        write_launch(self.launch_out, files)
        names = ", ".join(files)
        typer.echo(f"{self.launch_out}: {names} ({NOTES} says what {self.launch} does otherwise)", err=True)
