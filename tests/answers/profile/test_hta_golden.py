"""The tables are those of HolisticTraceAnalysis 0.5.0 on public profiles, to a thousandth and mostly exactly.

`FORERUN_PUBLIC_PROFILES` names a folder with checkouts of the public repositories (`owner+name` each).
"""

import csv
import json
from pathlib import Path

import pytest
from profile_files import GOLDEN, PUBLIC

from forerun.answers.profile.analyze import Analysis, analyze
from forerun.answers.profile.critical_path import critical_path, path_summary
from forerun.sources.profile.read import read_profiles

SETS = sorted(path.parent for path in GOLDEN.glob("*/status.json"))
pytestmark = pytest.mark.skipif(
    not SETS or not PUBLIC.is_dir(),
    reason="HTA's tables (../shared/golden_kineto) or the public profiles (FORERUN_PUBLIC_PROFILES) are not here",
)
INDEXED = {"idle_time_breakdown.1": 3, "queue_length_summary": 2, "memory_bw_summary": 2}
"""tables whose files lack their first columns, which pandas has as an index"""
HEADINGS = {"queue_length_summary": 2, "memory_bw_summary": 2}


def _analysis(folder: Path) -> Analysis:
    files = json.loads((folder / "status.json").read_text())["files"].values()
    paths = [PUBLIC / name for name in files]
    if not all(path.exists() for path in paths):
        pytest.skip(f"{folder.name}: its profile is not under {PUBLIC}")
    return analyze(read_profiles(paths), "")


def _number(cell: str) -> object:
    try:
        return float(cell or "nan")
    except ValueError:
        return cell


@pytest.mark.parametrize("folder", SETS, ids=lambda path: path.name)
def test_every_table_is_htas(folder):
    analysis = _analysis(folder)
    compared = 0
    for table in analysis.tables:
        path = folder / f"{table.name}.csv"
        if table.name.startswith("critical_path") or not path.exists():
            continue
        lines = list(csv.reader(path.open(encoding="utf-8")))[HEADINGS.get(table.name, 1) :]
        expected = [tuple(map(_number, line)) for line in lines]
        found = [row[INDEXED.get(table.name, 0) :] for row in table.rows]
        if table.name == "idle_time_breakdown.1":
            found = [(*row[:2], *row[3:]) for row in table.rows]
        if table.name == "gpu_kernel_breakdown.0":  # combinations of no time depend on how equal times are sorted
            expected = [row for row in expected if row[1]]
            found = [row for row in found if row[1]]
        assert len(found) == len(expected), table.name
        for ours, theirs in zip(found, expected, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert one == (other if isinstance(one, str) else pytest.approx(other, rel=1e-3, nan_ok=True)), (
                    table.name
                )
        compared += len(found)
    assert compared > 10


@pytest.mark.parametrize("folder", SETS, ids=lambda path: path.name)
def test_critical_paths_are_htas_node_by_node(folder):
    views = {one.rank: one for one in _analysis(folder).windows}
    rows = list(csv.DictReader((folder / "critical_path_summary.csv").open(encoding="utf-8")))
    for row in rows:
        if row["ok"] != "True":
            continue
        path = critical_path(views[int(row["rank"])], row["annotation"], int(row["instance"]))
        found = dict(zip(path_summary([path]).columns, path_summary([path]).rows[0], strict=True))
        for name in ("nodes", "edges", "cp_nodes", "cp_weight_us", "n_cp_events"):
            assert found[name] == float(row[name]), name
        assert json.loads(str(found["bound_by"])) == json.loads(row["bound_by"])
