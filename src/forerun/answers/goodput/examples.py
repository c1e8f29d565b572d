"""Runs that come with Forerun, to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.answers.goodput.read import alternatives_of, run_of
from forerun.answers.goodput.request import RunRequest
from forerun.common.errors import UnknownName
from forerun.common.shipped import shipped_data
from forerun.common.yaml_files import read_yaml


def example_names() -> list[str]:
    """Returns the names of the runs that come with Forerun."""
    return list(_examples())


def load_run(source: str | Path) -> RunRequest:
    """Returns the run of a file, or the one that comes with Forerun under that name.

    Raises ForerunError, which names the file and the key, for a file that can't be read or says something wrong, or if
    there is neither such a file nor such a name.
    """
    return run_of(*described(source))


def load_alternatives(source: str | Path) -> tuple[RunRequest, ...]:
    """Returns the alternatives to the run that a file lists. Raises as `load_run` does."""
    return alternatives_of(*described(source))


def described(source: str | Path) -> tuple[dict[str, Any], str]:
    """Returns the keys of the file or example of a run, and its name for errors. Raises as `load_run` does."""
    name = str(source)
    if name in _examples():
        return _examples()[name]["run"], name
    if not Path(source).exists() and not Path(source).suffix:
        raise UnknownName("run", name, example_names())
    return read_yaml(source), name


def _examples() -> Any:
    return shipped_data(__package__, "examples.yaml")
