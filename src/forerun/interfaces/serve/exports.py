"""Writes the downloads of the page, which are the same files that the commands write."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from forerun.answers.search.result import SearchResult
from forerun.common.admission import read_bytes
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.interfaces.report.launch.tools import launch_files
from forerun.interfaces.report.records import plan_record
from forerun.interfaces.report.records_of_searches import write_csv

_MOST_CSV_BYTES = 1 << 28


@dataclass(frozen=True)
class Download:
    """A file for the user."""

    name: str
    kind: str
    """its media type"""
    content: bytes


def plan_file(plan: Plan, command: str) -> Download:
    """Returns the plan as a file for --plan-file."""
    text = yaml.safe_dump(plan_record(plan), sort_keys=False, allow_unicode=True)
    return Download("plan.yaml", "application/yaml", f"# {command}\n{text}".encode())


def launch_archive(plan: Plan, model: ModelSpec, cluster: Cluster, tool: str) -> Download:
    """Returns the files that `tool` needs to run the plan, as a ZIP archive. Raises ForerunError as `launch` does."""
    return Download(f"{tool}.zip", "application/zip", _zipped(launch_files(plan, model, cluster, tool)))


def plans_table(result: SearchResult) -> Download:
    """Returns every possible plan of a search as CSV."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plans.csv"
        write_csv(path, result)
        return Download("plans.csv", "text/csv", read_bytes(path, _MOST_CSV_BYTES))


def _zipped(files: Mapping[str, str]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name)  # without the time, so that the same plan gives the same bytes
            entry.external_attr = (0o755 if name.endswith(".sh") else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, text)
    return made.getvalue()
