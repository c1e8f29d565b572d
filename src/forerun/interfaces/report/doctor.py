"""Examines this installation: versions, extras, compiled functions, caches and disk space."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from rich.console import Console

from forerun.common.native.library import library
from forerun.common.units import GIB
from forerun.common.version import __version__
from forerun.describe.model.hub import hub_folder
from forerun.interfaces.report.console import make_table, print_title

_NEEDED = re.compile(r"^([A-Za-z0-9_.-]+)[^;]*; *extra *== *[\"']([\w-]+)[\"']")
_FOR = {
    "data": "tables (to_dataframe), Parquet",
    "plot": "pictures and pages",
    "trace": "tracing PyTorch scripts",
    "serve": "the planner in the browser",
    "measure": "refits to measurements",
    "ray": "searches on Ray",
}
"""extras that users need, and their purposes"""
_INSTALLS_TORCH = "pip install 'forerun[trace]'"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    found: str
    good: bool = True
    fix: str = ""
    """the command that installs or repairs it"""


def examine() -> list[Finding]:
    """Returns the findings about this installation, in the order in which they are printed."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    known = [Finding("forerun", __version__), Finding("python", python)]
    requirements = metadata.requires("forerun") or []
    return [*known, _compiled(), *_extras(requirements), _torch(requirements), *_folders()]


def doctor_record(findings: Iterable[Finding]) -> dict[str, Any]:
    """Returns the findings as plain data."""
    return {"findings": [asdict(each) for each in findings]}


def print_doctor(out: Console, findings: Iterable[Finding]) -> None:
    """Prints a row for each finding, and the commands that install missing parts."""
    every = list(findings)
    print_title(out, "What this installation has")
    rows = [("" if each.good else "!", each.what, each.found) for each in every]
    out.print(make_table("lll", ("", "what", "found"), rows, gap=2))
    missing = [each for each in every if each.fix]
    if missing:
        out.print()
        print_title(out, "What is missing, and the command that installs it")
        for each in missing:
            out.print(f"{each.what}: {each.fix}", markup=False, soft_wrap=True)


def needed_by_extras(requirements: Iterable[str]) -> dict[str, list[str]]:
    """Returns the packages of each extra, from the requirements in the metadata of a package."""
    found: dict[str, list[str]] = {}
    for line in requirements:
        if match := _NEEDED.match(line):
            found.setdefault(match[2], []).append(match[1])
    return found


def supports(release: str, requirements: Iterable[str]) -> bool:
    """Returns whether a release of torch (2.13.0+cpu) is one that the extra `trace` allows."""
    first, end = _torch_range(requirements)
    parts = re.match(r"(\d+)\.(\d+)", release)
    return parts is not None and first <= (int(parts[1]), int(parts[2])) < end


def _torch_range(requirements: Iterable[str]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the first release of torch that is supported, and the first after it that is not."""
    (line,) = [each for each in requirements if re.match(r"torch\b[^;]*;[^;]*\btrace\b", each)]
    ends = {sign: (int(major), int(minor)) for sign, major, minor in re.findall(r"(>=|<)(\d+)\.(\d+)", line)}
    return ends[">="], ends["<"]


def _compiled() -> Finding:
    if library() is not None:
        return Finding("compiled functions", "came with the package")
    slow = "none, so numba compiles at first use, which takes up to a minute"
    return Finding("compiled functions", slow, False, "python -m forerun.common.build_ahead")


def _extras(requirements: Iterable[str]) -> list[Finding]:
    return [_extra(name, packages) for name, packages in needed_by_extras(requirements).items() if name in _FOR]


def _extra(name: str, packages: list[str]) -> Finding:
    versions = {package: _version(package) for package in packages}
    lacking = [package for package, version in versions.items() if version is None]
    if lacking:
        fix = f"pip install 'forerun[{name}]'"
        return Finding(f"extra {name}", f"{_FOR[name]}: no {', '.join(lacking)}", False, fix)
    return Finding(f"extra {name}", f"{_FOR[name]}: " + ", ".join(f"{p} {v}" for p, v in versions.items()))


def _torch(requirements: Iterable[str]) -> Finding:
    first, end = (".".join(map(str, each)) for each in _torch_range(requirements))
    release = _version("torch")
    if release is None:
        return Finding("tracing", f"no torch; from {first} to before {end} is supported", False, _INSTALLS_TORCH)
    good = supports(release, requirements)
    words = f"torch {release} is {'' if good else 'not '}supported (from {first} to before {end})"
    return Finding("tracing", words, good, "" if good else _INSTALLS_TORCH)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _folders() -> list[Finding]:
    own = Path(__file__).resolve().parents[2]
    compiled = os.environ.get("NUMBA_CACHE_DIR")
    hub = hub_folder()
    here, temporary = (shutil.disk_usage(each).free for each in (Path.cwd(), gettempdir()))
    kernels = f"{_size(Path(compiled)) if compiled else _size(own, '*.nb?')} in {compiled or own}"
    return [
        Finding("cache of compiled functions", kernels),
        Finding("cache of model configs", f"{_size(hub, 'config.json') if hub.is_dir() else 'none'} in {hub}"),
        Finding("room on the disk", f"{here / GIB:,.1f} GiB here, {temporary / GIB:,.1f} GiB for temporary files"),
    ]


def _size(folder: Path, pattern: str = "*") -> str:
    total = sum(path.stat().st_size for path in folder.rglob(pattern) if path.is_file())
    return f"{total / 2**20:,.1f} MiB"
