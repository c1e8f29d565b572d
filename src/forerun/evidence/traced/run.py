"""Traces the program of each measured row, and predicts the row from the trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forerun.answers.analysis.predict_program import predict_program, read_program
from forerun.answers.analysis.prediction import Prediction
from forerun.common.errors import ForerunError
from forerun.describe.cluster.types import Cluster
from forerun.evidence.traced.checkout import checkout, script_of
from forerun.evidence.traced.programs import Programs, Run
from forerun.evidence.validation.hardware import Hardware
from forerun.evidence.validation.mapping import cluster_of
from forerun.evidence.validation.rows import Measurement
from forerun.evidence.validation.run import RowResult
from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits
from forerun.sources.trace.many import SUFFIX, Configuration, trace_all
from forerun.sources.trace.titan import trainer_job

_CHECKOUTS = "checkouts"


@dataclass(frozen=True, slots=True)
class TracedResult:
    """One row with the prediction of its traced program, and the prediction of its model and plan beside it."""

    row: Measurement
    run: Run
    traced: Prediction | None
    reason: str
    """why there is no traced prediction; empty if there is one"""
    symbolic: RowResult
    cluster: Cluster | None = None
    """the cluster that the row ran on"""


@dataclass(frozen=True, slots=True)
class Folders:
    """The folders of a run over traced programs."""

    clones: Path
    """the user's clones, each under the name of its repository in programs.yaml"""
    traces: Path
    """saved Programs, and the files of each commit; existing ones are not made again"""


def run_of_row(known: Programs) -> dict[str, Run]:
    """Returns the run of each row, by the row's id."""
    return {row: run for run in known.runs for row in run.rows}


def trace_rows(
    results: Sequence[RowResult],
    known: Programs,
    hardware: Hardware,
    folders: Folders,
    limits: Limits,
    workers: int = 1,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> list[TracedResult]:
    """Traces and predicts every row of `results` that has a program, in order. A row that fails has the reason."""
    runs = run_of_row(known)
    wanted = [(result, runs[result.row.id]) for result in results if result.row.id in runs]
    places = {result.row.id: _place(result.row, hardware) for result, _ in wanted}
    reasons = {name: place for name, place in places.items() if isinstance(place, str)}
    jobs: list[Configuration] = []
    for result, run in wanted:
        where = places[result.row.id]
        if isinstance(where, str):
            continue
        try:
            jobs.append(_configuration(result.row, run, known, where, folders))
        except ForerunError as error:
            reasons[result.row.id] = str(error)
    reasons |= dict(trace_all(jobs, folders.traces, limits, workers, advance))
    return [_predicted(result, run, places[result.row.id], reasons, folders) for result, run in wanted]


def _place(row: Measurement, hardware: Hardware) -> Cluster | str:
    """Returns the cluster of a row, or the reason why there is none."""
    try:
        return cluster_of(row, hardware, [])
    except ForerunError as error:
        return str(error)


def _configuration(row: Measurement, run: Run, known: Programs, where: Cluster, folders: Folders) -> Configuration:
    """Returns the job that traces the program of a row. Raises ForerunError."""
    files = checkout(run, known.repositories[run.repository], folders.clones, folders.traces / _CHECKOUTS)
    arguments = tuple(str(value).replace("{checkout}", str(files)) for value in run.rows[row.id])
    variables = {name: value.replace("{checkout}", str(files)) for name, value in run.variables.items()}
    job = Job(
        folder="",
        target=str(files / script_of(run)),
        arguments=arguments,
        working_folder=str(files) if run.tokens else "",
        allow_fallback=run.allow_fallback,
        world_size=row.n_gpus or 1,
        gpus_per_node=where.node_size,
        device=where.device.name,
        dynamo=run.dynamo,
        variables=variables,
        title=f"{run.repository}/{run.script}",
    )
    if run.torchtitan:
        job = trainer_job(replace(job, target=run.torchtitan), arguments, folder=str(files))
    return Configuration(row.id, job)


def _predicted(
    result: RowResult, run: Run, where: Cluster | str, reasons: Mapping[str, str], folders: Folders
) -> TracedResult:
    row = result.row
    if isinstance(where, str) or row.id in reasons:
        return TracedResult(row, run, None, reasons[row.id], result, None if isinstance(where, str) else where)
    try:
        program = read_program(folders.traces / f"{row.id}{SUFFIX}")
        tokens = None if not row.global_batch_seqs or not row.seq_len else row.global_batch_seqs * row.seq_len
        found = predict_program(program, where, tokens_per_step=tokens, stack=run.stack or None).prediction
    except ForerunError as error:
        return TracedResult(row, run, None, str(error), result, where)
    return TracedResult(row, run, found, "", result, where)
