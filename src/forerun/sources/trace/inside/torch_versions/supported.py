"""Decides which versions of torch can be traced. This module imports nothing of torch but its version."""

from __future__ import annotations

from torch import __version__ as installed

from forerun.common.errors import ForerunError

FIRST, LAST = (2, 10), (2, 15)
"""The first and the last minor release that tracing accepts."""
TESTED = (2, 14)
"""The last minor release that the tests of all versions ran on."""


def minor_release(version: str = installed) -> tuple[int, int]:
    """Returns the first two numbers of a version, such as (2, 13) of 2.13.0+cpu.

    Raises:
        ForerunError: the version does not begin with two numbers.
    """
    major, _, rest = str(version).partition(".")
    minor = rest.partition(".")[0]
    if not (major.isdigit() and minor.isdigit()):
        raise ForerunError(f"torch {version} can't be traced: its version is not of the form 2.13.0; {_range()}")
    return int(major), int(minor)


def check_version(version: str = installed) -> None:
    """Refuses a version of torch whose internals are not known.

    Raises:
        ForerunError: the version is not supported.
    """
    if not FIRST <= minor_release(version) <= LAST:
        raise ForerunError(f"torch {version} can't be traced; {_range()}")


def untested(version: str = installed) -> str:
    """Returns a note for the Program where a version is newer than those that were tested; else an empty text."""
    if minor_release(version) <= TESTED:
        return ""
    return f"torch {version} is newer than torch {_name(TESTED)}, the last that tracing was tested with"


def _range() -> str:
    return f"supported: torch {_name(FIRST)} to {_name(LAST)} (pip install 'torch>={_name(FIRST)}')"


def _name(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
