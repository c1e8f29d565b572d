"""The pytest plugin: what its assertions accept, and what they say where they fail."""

import subprocess
from pathlib import Path

import pytest
from saved_programs import H100, plan_of, program_of

from forerun.common.errors import ForerunError
from forerun.core.program.storage import save
from forerun.interfaces import pytest_plugin
from forerun.interfaces.pytest_plugin import TrainingStep
from forerun.sources.trace.job import Job

PLAIN = program_of(plan_of(dp_shard=8))
SLOWER = program_of(plan_of(dp_shard=8, activation_checkpointing="full"))


def step_of(program, target="train.py"):
    return TrainingStep(Job("", str(target)), H100, program)


@pytest.fixture
def saved(tmp_path):
    save(PLAIN, tmp_path / "main.program")
    return tmp_path / "main.program"


def test_a_step_fits_what_it_needs():
    step = step_of(PLAIN)
    step.assert_fits(f"{step.prediction.device_gib + 0.01:.3f}GiB")
    with pytest.raises(AssertionError, match=r"train\.py needs .* GiB of 1\.00 .* allocated \(.*parameter.*peak at"):
        step.assert_fits("1GiB")
    with pytest.raises(ForerunError):
        step.assert_fits("much")


def test_a_slower_step_says_why(saved):
    step_of(PLAIN).assert_no_slower_than(saved)
    step_of(SLOWER).assert_no_slower_than(saved, by="90%")
    with pytest.raises(AssertionError, match=r"(?s)in time, 2% allowed.*came .*recompute"):
        step_of(SLOWER).assert_no_slower_than(saved, by="2%")


def test_a_larger_step_says_why(saved, tmp_path):
    save(SLOWER, tmp_path / "small.program")
    step_of(SLOWER).assert_no_larger_than(saved)
    with pytest.raises(AssertionError, match=r"(?s)in memory, 1% allowed.*activation"):
        step_of(PLAIN).assert_no_larger_than(tmp_path / "small.program", by="1%")


def test_a_revision_is_the_script_of_that_revision(tmp_path, monkeypatch):
    """The script of the last commit is traced with the same job, not the changed one."""
    script = tmp_path / "deep" / "train.py"
    script.parent.mkdir()
    script.write_text("old")
    for arguments in (
        ("init", "-q"),
        ("add", "."),
        ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "old"),
    ):
        subprocess.run(["git", "-C", tmp_path, *arguments], check=True)
    script.write_text("new")
    texts = []

    def trace_job(job, limits):
        texts.append(Path(job.target).read_text())
        assert Path(job.target).parts[-2:] == ("deep", "train.py")
        return PLAIN, 0.0

    monkeypatch.setattr(pytest_plugin, "trace_job", trace_job)
    step_of(PLAIN, script).assert_no_slower_than("HEAD")
    assert texts == ["old"]
    with pytest.raises(ForerunError, match="name a saved program or a revision of git"):
        step_of(PLAIN, script).assert_no_slower_than("no-such-branch")


def test_a_session_traces_each_command_once(monkeypatch):
    calls = []
    monkeypatch.setattr(pytest_plugin, "trace_job", lambda job, limits: (calls.append(job), (PLAIN, 0.0))[1])
    traced = pytest_plugin.step_tracer()
    first = traced("train.py", "--layers", "2", world_size=8, cluster="h100-sxm")
    assert traced("train.py", "--layers", "2", world_size=8, cluster="h100-sxm") is first
    traced("train.py", "--layers", "3", world_size=8, cluster="h100-sxm")
    assert [job.arguments for job in calls] == [("--layers", "2"), ("--layers", "3")]
    assert calls[0].world_size == 8
    assert calls[0].device == H100.device.name
