"""Files that a user drops on the page: a program, a profile, traces, an experiment, a run, jobs of a cluster.

The server writes the bytes to its own folder, where the readers of the command line read them. Meanwhile it opens no
other file (`sealed`), and it refuses a file that names Python code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from forerun.answers.analysis.communication import collective_times
from forerun.answers.analysis.predict_program import predict_program, read_program
from forerun.answers.analysis.what_if import sensitivities_of_program
from forerun.answers.experiment.answers import answers_of
from forerun.answers.experiment.description.read import preset_names, read_experiment
from forerun.answers.experiment.run import run
from forerun.answers.goodput.examples import example_names, load_alternatives, load_run
from forerun.answers.goodput.study import by_time_to_train, study_run
from forerun.answers.goodput.walk import walk
from forerun.answers.jobs.comparison import compare
from forerun.answers.jobs.description import of_trace, read_cluster
from forerun.answers.jobs.placement import Shape
from forerun.answers.profile.analyze import analyze
from forerun.answers.profile.facts import facts_of
from forerun.common.admission import parse_json, read_bytes, read_text
from forerun.common.errors import ForerunError, UnknownName
from forerun.common.files import whole_file
from forerun.common.own_code import before_own_code
from forerun.common.workers import Workers
from forerun.common.yaml_files import parse_yaml
from forerun.core.program.origin import Origin
from forerun.describe.cluster.catalog import cluster_names, load_cluster
from forerun.interfaces.report.document_of_whole_run import whole_run_document
from forerun.interfaces.report.documents import prediction_document
from forerun.interfaces.report.experiment_files import document_of
from forerun.interfaces.report.job_schedules import schedules_document
from forerun.interfaces.report.page import Code, Document, Heading
from forerun.interfaces.report.profile_tables import print_analysis, print_facts
from forerun.interfaces.report.terminal import printed_text
from forerun.interfaces.serve.dropped_traces import case_document, is_trace, traces_document
from forerun.interfaces.serve.sealed import sealed
from forerun.sources.profile.read import read_profiles

MOST_FILES = 256
_GPUS_OF_A_NODE = 8
_RUNS = 20
"""runs of a whole run that the page simulates"""
_WIDTH = 160
"""columns of text, as of the commands that print it"""
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_OF_JOBS, _OF_RUNS = ("nodes", "gpu_kinds"), ("gpus",)
"""keys of a file of jobs and of a file of a run"""


def preset_document(kind: str, name: str) -> Document:
    """Returns the page of an experiment or of a whole run that comes with Forerun. Raises UnknownName."""
    if kind == "experiment":
        if name not in preset_names():
            raise UnknownName("experiment", name, list(preset_names()))
        return _experiment(name, f"forerun experiment run {name}")
    if name not in example_names():
        raise UnknownName("run", name, example_names())
    return _whole_run(name, f"forerun run {name}")


@dataclass(frozen=True)
class Where:
    """Names the cluster and the GPUs for dropped files that do not name them."""

    cluster: str
    """the preset on which a program runs"""
    nodes: int
    """nodes of 8 GPUs for a trace of jobs"""


def dropped_document(files: Mapping[str, bytes], where: Where) -> Document:
    """Returns the document that the command line would show for the dropped files. The names of the files determine
    their kinds.

    Raises ForerunError in one line, which names the file.
    """
    if not 0 < len(files) <= MOST_FILES:
        raise ForerunError(f"{len(files)} files; drop at least one and at most {MOST_FILES}")
    with TemporaryDirectory(prefix="forerun-serve-") as folder:
        paths = _written(Path(folder), files)
        try:
            with sealed(Path(folder)):
                return _document(paths, where)
        except ForerunError as error:
            raise ForerunError(str(error).replace(f"{folder}{os.sep}", "")) from None


def _written(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Writes the files under harmless names of their own."""
    paths = []
    for name, content in files.items():
        safe = _UNSAFE.sub("-", name.replace("\\", "/").rpartition("/")[2]).strip(".-")[-100:] or "file"
        path = folder / safe
        if path.exists():
            raise ForerunError(f"{safe}: dropped twice")
        with whole_file(path) as file:
            file.write(content)
        paths.append(path)
    return paths


def _document(paths: Sequence[Path], where: Where) -> Document:
    first = paths[0]
    if any(map(is_trace, paths)):
        return traces_document(paths) if all(map(is_trace, paths)) else case_document(paths)
    if any(path.name.endswith((".json", ".json.gz")) for path in paths) and not _is_mapping_of_ours(paths):
        return _profile(paths)
    if len(paths) > 1:
        raise ForerunError(f"{len(paths)} files; several go together only as traces or profiles of several ranks")
    if first.suffix == ".program":
        return _program(first, where.cluster)
    if first.suffix == ".csv":
        request = of_trace(first, Shape(1, where.nodes, _GPUS_OF_A_NODE))
        return schedules_document(
            request, compare(request, Workers(1)), f"forerun cluster {first.name} --nodes {where.nodes}"
        )
    if first.suffix in (".yaml", ".yml", ".json"):
        return _described(first)
    raise ForerunError(
        f"{first.name}: expected a .program, a profile (.json), Chakra traces (.et), a trace of jobs (.csv), or a YAML"
        " file of an experiment, a run or a cluster's jobs"
    )


def _is_mapping_of_ours(paths: Sequence[Path]) -> bool:
    """Returns whether one JSON file describes an experiment, a run or jobs rather than a profile."""
    if len(paths) != 1 or paths[0].suffix != ".json":
        return False
    start = read_bytes(paths[0])
    return b"traceEvents" not in start and b"schemaVersion" not in start


def _described(path: Path) -> Document:
    text = read_text(path)
    data = parse_json(text, path.name) if path.suffix == ".json" else parse_yaml(text, path.name)
    if any(key in data for key in _OF_JOBS):
        request = read_cluster(path)
        return schedules_document(request, compare(request, Workers(1)), f"forerun cluster {path.name}")
    if any(key in data for key in _OF_RUNS):
        return _whole_run(path, f"forerun run {path.name}")
    return _experiment(path, f"forerun experiment run {path.name}")


def _refuse_code(what: str) -> None:
    raise ForerunError(f"{what}, which the page does not run; use the command line")


def _experiment(source: str | Path, command: str) -> Document:
    with before_own_code(_refuse_code):
        result = run(read_experiment(source))
    return document_of(result, answers_of(result), command)


def _whole_run(source: str | Path, command: str) -> Document:
    others = load_alternatives(source)
    study = study_run(load_run(source), _RUNS, workers=1)
    rivals = [study_run(other, _RUNS, workers=1, gains=False) for other in others]
    ranked = by_time_to_train([study, *rivals]) if rivals else []
    return whole_run_document(study, walk(study.request, 0, record=True), f"{command} --runs {_RUNS}", ranked)


def _program(path: Path, cluster: str) -> Document:
    if cluster not in cluster_names():
        raise UnknownName("cluster", cluster, cluster_names())
    program, where = read_program(path), load_cluster(cluster)
    simulation = predict_program(program, where, whole_timeline=True, loop=Origin.of(program).loop)
    gains = sensitivities_of_program(program, where, simulation)
    command = f"forerun predict --program {path.name} --cluster {cluster}"
    return prediction_document(simulation, gains, command, collective_times(simulation, where))


def _profile(paths: Sequence[Path]) -> Document:
    profiles = read_profiles(paths)
    names = " ".join(path.name for path in paths)
    facts = [replace(facts_of(one), path=Path(one.path).name) for one in profiles]
    found = analyze(profiles)
    parts = (
        Heading("What the profile holds"),
        Code(printed_text(lambda out: print_facts(out, facts), _WIDTH), f"forerun profile info {names}"),
        Heading("Where the time goes"),
        Code(printed_text(lambda out: print_analysis(out, found, 15), _WIDTH), f"forerun profile analyze {names}"),
    )
    return Document(f"Profile of {len(profiles)} rank{'s' if len(profiles) > 1 else ''}", names, parts)
