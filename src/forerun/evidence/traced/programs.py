"""The public program behind each measured row: repository, commit, command, and the author's changes for the row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from forerun.common.errors import ForerunError
from forerun.common.shipped import shipped

_PACKAGE = "forerun.evidence.traced"
_FILE = "programs.yaml"


@dataclass(frozen=True)
class Repository:
    """A public repository. A clone of it lies in the user's folder of clones, under its name."""

    url: str
    paths: tuple[str, ...]
    """files that the program needs, as patterns of git"""
    packages: tuple[str, ...]
    """packages that the program imports, beside torch"""


@dataclass(frozen=True)
class Run:
    """One program as its author started it, for one row or several."""

    repository: str
    commit: str
    rows: Mapping[str, tuple[str | int | float, ...]]
    """id of a measured row -> arguments of the script"""
    script: str = ""
    """path within the repository"""
    torchtitan: str = ""
    """in place of a script: a module of torchtitan's, whose trainer runs; arguments begin with a configuration"""
    logged: bool = False
    """whether the script is a log that begins with the code of its run, between two lines of equal signs"""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """file of tokens that the script reads and the repository lacks -> number of random ones that stand in for it"""
    allow_fallback: bool = False
    """whether code of the run ran uncompiled, as its author's did (`forerun trace --allow-fallback`)"""
    changes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """file -> text -> text in its place: changes of the script that the source of the row states"""
    dynamo: str = ""
    """release of torch whose Dynamo the run had (`forerun trace --dynamo`); empty for the one that is installed"""
    stack: str = ""
    """stack of the prediction; empty for the one that the program's imports tell"""
    variables: Mapping[str, str] = field(default_factory=dict)
    """environment variables"""


@dataclass(frozen=True)
class Programs:
    """The contents of programs.yaml."""

    repositories: Mapping[str, Repository]
    runs: tuple[Run, ...]


def programs() -> Programs:
    """Returns the shipped programs. Raises ForerunError for a row that is given twice, or an unknown repository."""
    found = shipped(Programs, _PACKAGE, _FILE)
    seen: set[str] = set()
    for run in found.runs:
        if bool(run.script) == bool(run.torchtitan):
            raise ForerunError(f"{_FILE}: {min(run.rows)}: give this run a script or a module of torchtitan")
        if run.repository not in found.repositories:
            raise ForerunError(f"{_FILE}: {run.repository}: no such repository; add it to `repositories`")
        twice = seen & run.rows.keys()
        if twice:
            raise ForerunError(f"{_FILE}: {min(twice)}: this row has two runs; leave one")
        seen |= run.rows.keys()
    return found
