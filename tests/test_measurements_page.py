"""docs/measurements.md names every column of a table of measurements, and its command runs on the example."""

import re
import shlex
from dataclasses import MISSING, fields
from pathlib import Path

from command_here import run_here

from forerun.evidence.validation.rows import Measurement, read_measurements

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "measurements.md").read_text(encoding="utf-8")
COLUMNS = {each.name: each.default is MISSING for each in fields(Measurement) if each.name != "line"}


def named(part):
    """The columns in the first cells of the tables of a part of the page."""
    cells = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall("`(.*?)`", cell)}


def test_the_page_names_every_column_as_required_or_not():
    required, others = PAGE.split("These columns may be left out")
    assert named(required) == {name for name, is_required in COLUMNS.items() if is_required}
    assert named(others) | {"step_time_s_derived"} == {name for name, is_required in COLUMNS.items() if not is_required}


def test_the_command_of_the_page_judges_the_example():
    (block,) = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    done = run_here(ROOT, *shlex.split(block.replace("\\\n", " "))[1:])
    assert done.returncode == 0, done.stderr
    assert "predicted 3, tier A 3 of 3" in done.stdout
    assert "foreseen: 1 of 1" in done.stdout
    assert "what selective checkpointing keeps is not stated" in done.stdout


def test_the_example_states_what_tier_a_needs():
    rows = read_measurements(ROOT / "examples" / "measurements" / "rows.csv")
    assert [row.tier for row in rows] == ["A"] * 3
    assert all(row.n_gpus == (row.dp_shard or 1) * (row.tp or 1) for row in rows)
