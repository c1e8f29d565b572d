"""A pytest fixture to test the step of a training script on a machine without a GPU.

In `conftest.py`: `pytest_plugins = ["forerun.interfaces.pytest_plugin"]`. In a test:

    def test_the_step(training_step):
        step = training_step("train.py", "--layers", "16", world_size=64, cluster="h100-sxm")
        step.assert_fits("80GiB")
        step.assert_no_slower_than("main", by="2%")
"""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

import pytest

from forerun.answers.analysis.predict_program import predict_program, read_program
from forerun.answers.analysis.prediction import Prediction
from forerun.answers.analysis.reading import Simulation
from forerun.answers.diff.changes import StepDiff, diff_steps
from forerun.common.errors import ForerunError
from forerun.core.program.types import Program
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.types import Cluster
from forerun.interfaces.cli.numbers import memory_gib, share
from forerun.interfaces.report.step_diff import print_diff
from forerun.interfaces.report.terminal import printed_text
from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits
from forerun.sources.trace.record import trace_job

_SHOWN = 10
"""changes that a failed comparison lists"""
_WIDTH = 150


@dataclass(frozen=True)
class TrainingStep:
    """One traced step on a cluster."""

    job: Job
    cluster: Cluster
    program: Program

    @property
    def simulation(self) -> Simulation:
        """Returns the step with its whole timeline."""
        return predict_program(self.program, self.cluster, whole_timeline=True)

    @property
    def prediction(self) -> Prediction:
        """Returns the predicted figures."""
        return predict_program(self.program, self.cluster).prediction

    def assert_fits(self, memory: str) -> None:
        """Asserts that reserved memory stays within `memory` (`80GiB`, `80GB`) on every rank."""
        limit_gib = memory_gib(memory)
        found = self.prediction
        parts = ", ".join(f"{name} {size:.2f}" for name, size in found.memory_by_category_gib.items())
        assert found.device_gib <= limit_gib, (
            f"{self.job.target} needs {found.device_gib:.2f} GiB of {limit_gib:.2f} on {found.peak_rank_class}: "
            f"{found.peak_allocated_gib:.2f} GiB allocated ({parts}), peak at {found.peak_owner}"
        )

    def assert_no_slower_than(self, reference: str | Path, by: str = "0%") -> None:
        """Asserts that the step takes at most `by` longer than that of `reference`.

        `reference` is a saved Program, or a revision of git (`main`): the same script of that revision, traced alike.
        """
        found = self.compared_to(reference)
        assert found.slowdown <= share(by, "by"), _words(found, f"{found.slowdown:+.2%} in time, {by} allowed")

    def assert_no_larger_than(self, reference: str | Path, by: str = "0%") -> None:
        """Asserts that the peak of allocated memory is at most `by` above that of `reference`."""
        found = self.compared_to(reference)
        growth = found.growth
        assert growth is not None, f"{reference} says no memory"
        assert growth <= share(by, "by"), _words(found, f"{growth:+.2%} in memory, {by} allowed")

    def compared_to(self, reference: str | Path) -> StepDiff:
        """Returns the differences from `reference`. Raises ForerunError if it is neither a saved Program nor a
        revision."""
        path = Path(reference)
        program = read_program(path) if path.is_file() else self._at_revision(str(reference))
        return diff_steps(replace(self, program=program).simulation, self.simulation)

    def _at_revision(self, revision: str) -> Program:
        """Returns the Program of the same script at a revision of git."""
        script = Path(self.job.target).resolve()
        root = Path(_git(script.parent, "rev-parse", "--show-toplevel").decode().strip())
        with tempfile.TemporaryDirectory(prefix="forerun-revision-") as folder:
            with tarfile.open(fileobj=BytesIO(_git(root, "archive", revision))) as files:
                files.extractall(folder, filter="data")
            return trace_job(replace(self.job, target=str(Path(folder) / script.relative_to(root))), Limits())[0]


def _git(folder: Path, *arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=False)
    if done.returncode:
        why = (done.stderr.decode().strip().splitlines() or ["git failed"])[0]
        raise ForerunError(f"{' '.join(arguments)} in {folder}: {why}; name a saved program or a revision of git")
    return done.stdout


def _words(found: StepDiff, why: str) -> str:
    return f"{why}\n{printed_text(lambda out: print_diff(out, found, _SHOWN), _WIDTH)}"


@pytest.fixture(scope="session")
def training_step() -> Callable[..., TrainingStep]:
    """Traces a script once in a session for each command: `training_step("train.py", "--layers", "16", world_size=64,
    cluster="h100-sxm")`."""
    return step_tracer()


def step_tracer() -> Callable[..., TrainingStep]:
    """Returns a function that traces a script and caches the results."""
    known: dict[tuple[str, str], TrainingStep] = {}

    def traced(script: str | Path, *arguments: str, world_size: int = 1, cluster: str) -> TrainingStep:
        where = load_cluster(cluster)
        node_size, device = where.node_size, where.device.name
        job = Job("", str(script), arguments, world_size=world_size, gpus_per_node=node_size, device=device)
        key = (str(job), cluster)
        if key not in known:
            known[key] = TrainingStep(job, where, trace_job(job, Limits())[0])
        return known[key]

    return traced
