"""Runs that come with Forerun, to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.answers.goodput.read import read_run, run_of
from forerun.answers.goodput.request import RunRequest
from forerun.common.errors import UnknownName
from forerun.common.shipped import shipped_data


def example_names() -> list[str]:
    """Returns the names of the runs that come with Forerun."""
    return list(_examples())


def load_run(source: str | Path) -> RunRequest:
    """Returns the run of a file, or the one that comes with Forerun under that name.

    Raises ForerunError as `read_run` does, or if there is neither such a file nor such a name.
    """
    name = str(source)
    if name in _examples():
        return run_of(_examples()[name]["run"], name)
    if not Path(source).exists() and not Path(source).suffix:
        raise UnknownName("run", name, example_names())
    return read_run(source)


def _examples() -> Any:
    return shipped_data(__package__, "examples.yaml")
