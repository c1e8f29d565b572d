"""Copies the files of one commit from a clone, without changing the clone."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from forerun.common.errors import ForerunError
from forerun.common.files import make_folder
from forerun.evidence.traced.programs import Repository, Run

_TOKENS_OF_LLM_C = 20240520
"""magic number of karpathy/llm.c's files of tokens"""
_GPT2_WORDS = 50257


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
        if run.logged:
            (part / script_of(run)).write_text(_code_of_log(part / run.script), encoding="utf-8")
        for name, count in run.tokens.items():
            _write_tokens(part / name, count)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def script_of(run: Run) -> str:
    """Returns the path of the run's script in its checkout."""
    return f"{run.script}.py" if run.logged else run.script


def _plain(run: Run) -> dict[str, dict[str, str | int]]:
    changes: dict[str, dict[str, str | int]] = {name: dict(changes) for name, changes in run.changes.items()}
    if run.tokens:
        changes["tokens"] = dict(run.tokens)
    if run.logged:
        changes["logged"] = {run.script: 1}
    return changes


def _code_of_log(log: Path) -> str:
    """Returns the code between the first two lines of equal signs. Raises ForerunError if there are none."""
    parts = re.split(r"^={100}\n", log.read_text(encoding="utf-8"), maxsplit=2, flags=re.MULTILINE)
    if len(parts) < 3:
        raise ForerunError(f"{log}: has no code between two lines of equal signs; correct programs.yaml")
    return parts[1]


def _write_tokens(file: Path, count: int) -> None:
    """Writes tokens in llm.c's format: 256 integers (its number, the version, how many tokens), then 16 bits each."""
    header = np.zeros(256, np.int32)
    header[:3] = _TOKENS_OF_LLM_C, 1, count
    file.parent.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(0).integers(0, _GPT2_WORDS, count, dtype=np.uint16)
    file.write_bytes(header.tobytes() + tokens.tobytes())


def _extract(clone: Path, commit: str, paths: tuple[str, ...], target: Path) -> None:
    """Writes the files of `commit`. An index of its own keeps git from noting anything in the clone."""
    with tempfile.TemporaryDirectory(prefix="forerun-index-") as index:
        done = subprocess.run(
            ["git", "-C", str(clone), f"--work-tree={target.absolute()}", "checkout", "--quiet", commit, "--", *paths],
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
