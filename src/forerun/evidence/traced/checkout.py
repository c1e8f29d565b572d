"""Takes the files of one commit out of a clone, without touching the clone."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from forerun.common.errors import ForerunError
from forerun.common.files import make_folder
from forerun.evidence.traced.programs import Repository, Run


def checkout(run: Run, repository: Repository, clones: Path, folder: Path) -> Path:
    """Returns a folder below `folder` with the files of the run's commit, changed as the run says.

    A folder that is there already is taken as it is, as its name tells commit and changes.

    Raises:
        ForerunError: the clone is missing or lacks the commit, or a text to be changed is not there exactly once.
    """
    digest = hashlib.sha256(json.dumps(_plain(run), sort_keys=True).encode()).hexdigest()[:8]
    target = folder / f"{run.repository}-{run.commit}-{digest}"
    if target.is_dir():
        return target
    clone = clones / run.repository
    if not clone.is_dir():
        raise ForerunError(f"{clone}: no clone of {repository.url}; make one: git clone {repository.url} {clone}")
    make_folder(folder)
    part = Path(tempfile.mkdtemp(prefix=f".{run.repository}-", dir=folder))
    try:
        _extract(clone, run.commit, repository.paths, part)
        for name, changes in run.changes.items():
            _change(part / name, changes)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def _plain(run: Run) -> dict[str, dict[str, str]]:
    return {name: dict(changes) for name, changes in run.changes.items()}


def _extract(clone: Path, commit: str, paths: tuple[str, ...], target: Path) -> None:
    """Writes the files of `commit`. An index of its own keeps git from noting anything in the clone."""
    with tempfile.TemporaryDirectory(prefix="forerun-index-") as index:
        done = subprocess.run(
            ["git", "-C", str(clone), f"--work-tree={target}", "checkout", "--quiet", commit, "--", *paths],
            env=os.environ | {"GIT_INDEX_FILE": str(Path(index) / "index")},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["git failed"])[0]
        raise ForerunError(f"{clone}: commit {commit} can't be read ({why}); run git fetch there")


def _change(file: Path, changes: object) -> None:
    assert isinstance(changes, dict)
    text = file.read_text(encoding="utf-8")
    for old, new in changes.items():
        if text.count(old) != 1:
            raise ForerunError(f"{file}: {old!r} is there {text.count(old)} times, not once; correct programs.yaml")
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")
