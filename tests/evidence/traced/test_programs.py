"""The programs behind measured rows, and the files of their commits."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from forerun.common.errors import ForerunError
from forerun.evidence.traced.checkout import checkout, script_of
from forerun.evidence.traced.programs import Programs, Repository, Run, programs
from forerun.evidence.validation.rows import read_measurements
from forerun.sources.trace.job import Job
from forerun.sources.trace.titan import trainer_job

_SHARED = Path(__file__).resolve().parents[4] / "shared" / "validation"
TABLES = [_SHARED / "measurements.csv", _SHARED / "measurements-2.csv"]
REPOSITORY = Repository("https://example.org/tiny", ("*.py",), ())


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def clones(tmp_path):
    """A clone with two commits of one script."""
    folder = tmp_path / "clones" / "tiny"
    folder.mkdir(parents=True)
    git(folder, "init", "-q")
    for text in ("width = 1\n", "width = 2\n"):
        (folder / "train.py").write_text(text)
        (folder / "notes.txt").write_text(text)
        git(folder, "add", ".")
        git(folder, "commit", "-qm", "step")
    return folder.parent


def run_of(commit, **changes):
    return Run("tiny", commit, {"row": ()}, "train.py", changes=changes)


def test_every_shipped_row_has_one_run_and_a_known_repository():
    known = programs()
    assert known.repositories
    rows = [row for run in known.runs for row in run.rows]
    assert len(rows) == len(set(rows))


@pytest.mark.skipif(not all(map(Path.is_file, TABLES)), reason="the measurements are not here")
def test_shipped_rows_are_open_rows_of_the_table():
    table = {row.id: row for file in TABLES for row in read_measurements(file)}
    for run in programs().runs:
        for row in run.rows:
            assert table[row].split in ("open", "open2")
            assert table[row].n_gpus


def test_a_checkout_has_the_files_of_its_commit(clones, tmp_path):
    first = git(clones / "tiny", "rev-parse", "HEAD~1")
    files = checkout(run_of(first), REPOSITORY, clones, tmp_path / "out")
    assert (files / "train.py").read_text() == "width = 1\n"
    assert not (files / "notes.txt").exists()
    assert not git(clones / "tiny", "status", "--porcelain")
    assert git(clones / "tiny", "rev-parse", "HEAD") != first


def test_changes_are_made_in_a_checkout_of_their_own(clones, tmp_path):
    plain = checkout(run_of("HEAD"), REPOSITORY, clones, tmp_path / "out")
    changed = checkout(run_of("HEAD", **{"train.py": {"= 2": "= 8"}}), REPOSITORY, clones, tmp_path / "out")
    assert (plain / "train.py").read_text() == "width = 2\n"
    assert (changed / "train.py").read_text() == "width = 8\n"
    assert checkout(run_of("HEAD"), REPOSITORY, clones, tmp_path / "out") == plain


def test_the_code_of_a_log_is_its_script(clones, tmp_path):
    line = "=" * 100 + "\n"
    (clones / "tiny" / "log.py").write_text(f"{line}width = 3\n{line}step 1\n{line}")
    git(clones / "tiny", "add", ".")
    git(clones / "tiny", "commit", "-qm", "log")
    run = Run("tiny", "HEAD", {"row": ()}, "log.py", logged=True)
    files = checkout(run, REPOSITORY, clones, tmp_path / "out")
    assert (files / script_of(run)).read_text() == "width = 3\n"
    with pytest.raises(ForerunError, match=r"train\.py: has no code between two lines of equal signs"):
        checkout(Run("tiny", "HEAD", {"row": ()}, "train.py", logged=True), REPOSITORY, clones, tmp_path / "out")


def test_tokens_that_a_repository_lacks_are_random_ones(clones, tmp_path):
    run = Run("tiny", "HEAD", {"row": ()}, "train.py", tokens={"data/some_train_000001.bin": 1000})
    file = checkout(run, REPOSITORY, clones, tmp_path / "out") / "data" / "some_train_000001.bin"
    header = np.fromfile(file, np.int32, 256)
    assert header[:3].tolist() == [20240520, 1, 1000]
    tokens = np.fromfile(file, np.uint16, offset=256 * 4)
    assert len(tokens) == 1000
    assert tokens.max() < 50257
    assert len(np.unique(tokens)) > 900


def test_a_commit_of_torchtitan_runs_its_own_trainer():
    job = trainer_job(Job(folder="", target="llama3"), ("llama3_8b", "--a.b=1"), folder="/checkout")
    assert job.arguments == ("llama3", "llama3_8b", "--a.b=1")
    assert job.is_module
    assert job.variables["PYTHONPATH"].split(":")[0] == "/checkout"


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (run_of("0123456"), r"commit 0123456 can't be read \(.*0123456.*\); run git fetch there"),
        (run_of("HEAD", **{"train.py": {"depth": ""}}), "'depth' is there 0 times"),
        (Run("absent", "HEAD", {"row": ()}, "train.py"), "git clone https://example.org/tiny"),
    ],
)
def test_what_is_missing_is_named(clones, tmp_path, run, words):
    with pytest.raises(ForerunError, match=words):
        checkout(run, REPOSITORY, clones, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*")) or not list((tmp_path / "out").glob("tiny-*"))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Programs({}, (run_of("HEAD"),)), "no such repository"),
        (Programs({"tiny": REPOSITORY}, (run_of("a"), run_of("b"))), "row has two runs"),
        (Programs({"tiny": REPOSITORY}, (Run("tiny", "a", {"row": ()}),)), "row: give this run a script or a module"),
    ],
)
def test_contradictions_are_refused(monkeypatch, found, words):
    monkeypatch.setattr("forerun.evidence.traced.programs.shipped", lambda *_: found)
    with pytest.raises(ForerunError, match=words):
        programs()
