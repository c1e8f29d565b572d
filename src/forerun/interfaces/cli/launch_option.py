"""The options that write a plan as the files of the tool that is to run it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.common.errors import ForerunError
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.interfaces.report.launch.tools import NOTES, TOOLS, check_tool, launch_files, write_launch

Launch = Annotated[
    str | None, typer.Option("--launch", metavar="TOOL", help=f"Write the plan for this tool: {', '.join(TOOLS)}.")
]
LaunchOut = Annotated[
    Path | None, typer.Option("--launch-out", metavar="FOLDER", help="Where --launch writes its files.")
]


def check_launch(tool: str | None, folder: Path | None) -> None:
    """Raise ForerunError for a tool that is not known, or one option without the other."""
    if tool is not None:
        check_tool(tool)
    if (tool is None) != (folder is None):
        given, missing = ("--launch", "--launch-out") if folder is None else ("--launch-out", "--launch")
        raise ForerunError(f"{given}: give {missing} too")


def write_launch_files(
    tool: str | None, folder: Path | None, plan: Plan, model: ModelSpec | LayeredModel, cluster: Cluster
) -> None:
    """Write the files where a tool is asked for, and say so on stderr. Raises ForerunError."""
    if tool is None or folder is None:
        return
    files = launch_files(plan, model, cluster, tool)
    write_launch(folder, files)
    typer.echo(f"{folder}: {', '.join(files)} ({NOTES} says what {tool} does otherwise)", err=True)
