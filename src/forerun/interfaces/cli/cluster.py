"""`forerun cluster`: many jobs on one cluster under scheduling policies, side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from forerun.answers.jobs.comparison import compare
from forerun.answers.jobs.description import JobsRequest, check_names, of_trace, read_cluster
from forerun.answers.jobs.elastic import ELASTIC, ELASTIC_OF_KINDS
from forerun.answers.jobs.placement import Shape
from forerun.answers.jobs.placers import PLACERS
from forerun.answers.jobs.policies import POLICIES
from forerun.answers.jobs.share_policies import SHARES
from forerun.answers.jobs.unlike_description import UnlikeRequest, check_policies
from forerun.common.errors import ForerunError
from forerun.interfaces.cli.option_groups import given, grouped
from forerun.interfaces.cli.output_option import output_option
from forerun.interfaces.cli.program_options import AsJson
from forerun.interfaces.cli.report_option import Report, typed
from forerun.interfaces.cli.work_options import WorkOptions
from forerun.interfaces.report.drawing import drawing_is_possible
from forerun.interfaces.report.job_schedules import (
    job_rows,
    print_schedules,
    schedules_document,
    schedules_pictures,
    schedules_record,
)
from forerun.interfaces.report.page import write_page
from forerun.interfaces.report.pictures import write_pictures
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.written import to_json, write_rows

_USUAL_GPUS = 8


@dataclass(frozen=True)
class Nodes:
    """Holds the options that set the cluster of a trace in CSV, or change the cluster of a YAML file."""

    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes under each switch.")] = None
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="Number of GPUs in a node.")] = None
    switches: Annotated[
        int | None, typer.Option(min=1, help="Number of switches, each of which connects an equal group of nodes.")
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help=(
                f"Scheduling policies to compare: {', '.join(POLICIES)}; for elastic jobs"
                f" {', '.join(ELASTIC)}; on unlike GPUs {', '.join([*SHARES, *ELASTIC_OF_KINDS])}."
            ),
        ),
    ] = None
    placement: Annotated[
        str | None, typer.Option(metavar="|".join(PLACERS), help="Rule for which GPUs a job may use.")
    ] = None

    def of_trace(self, path: Path) -> JobsRequest:
        """Returns the jobs of a CSV file on the cluster of these options. Raises ForerunError without nodes."""
        if self.nodes is None:
            raise ForerunError(f"{path}: a trace has no cluster; give --nodes, and --gpus-per-node where it is not 8")
        return of_trace(path, Shape(1, self.nodes, _USUAL_GPUS))

    def changed(self, request: JobsRequest | UnlikeRequest) -> JobsRequest | UnlikeRequest:
        """Returns the request with the changes of the options.

        Raises UnknownName for a policy or placement, and ForerunError for nodes of a cluster of unlike GPUs.
        """
        if isinstance(request, UnlikeRequest):
            return self._changed_unlike(request)
        shape = Shape(
            self.switches or request.shape.switches,
            self.nodes or request.shape.nodes,
            self.gpus_per_node or request.shape.gpus,
            request.shape.domain,
        )
        policies = request.policies if self.policy is None else tuple(dict.fromkeys(self.policy.split(",")))
        placement = self.placement or request.placement
        check_names(policies, placement)
        return replace(request, shape=shape, policies=policies, placement=placement)

    def _changed_unlike(self, request: UnlikeRequest) -> UnlikeRequest:
        for name in given(self, "policy"):
            option = f"--{name.replace('_', '-')}"
            raise ForerunError(f"{option}: the cluster has several kinds of GPUs; set their numbers in gpu_kinds")
        if self.policy is None:
            return request
        policies = tuple(dict.fromkeys(self.policy.split(",")))
        check_policies(policies)
        return replace(request, policies=policies)


@grouped
def cluster(
    context: typer.Context,
    source: Annotated[
        Path, typer.Argument(metavar="FILE", help="YAML file of a cluster and its jobs, or a CSV trace of jobs.")
    ],
    nodes: Nodes,
    work: WorkOptions,
    store: Annotated[
        Path | None, output_option(help="Keep schedules in this file; the same command later continues from it.")
    ] = None,
    csv: Annotated[Path | None, output_option(help="Write a row for each job and policy to this CSV file.")] = None,
    report: Report = None,
    pictures: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the plots of the page to this folder as PNG files.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate many jobs on one cluster: completion times, waiting times and GPU utilization under each policy."""
    if pictures is not None and not drawing_is_possible():
        raise ForerunError("--pictures needs matplotlib: pip install 'forerun[plot]'")
    asked = nodes.of_trace(source) if source.suffix == ".csv" else read_cluster(source)
    request = nodes.changed(asked)
    outcomes = compare(request, work.workers, store)
    if csv is not None:
        write_rows(csv, job_rows(outcomes))
    if report is not None:
        write_page(report, schedules_document(request, outcomes, typed(context)))
    if pictures is not None:
        write_pictures(pictures, schedules_pictures(request, outcomes))
    if as_json:
        print(to_json(schedules_record(request, outcomes)))
    else:
        print_schedules(console(), request, outcomes)
