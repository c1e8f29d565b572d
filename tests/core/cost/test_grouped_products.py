"""Grouped products of TransformerEngine on B200, against measurements of MooreThreads/SimuMax."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forerun.core.cost.clock import gemm_in_steps
from forerun.core.cost.gemm import gemm_s
from forerun.describe.cluster.catalog import load_device

TABLE = Path(__file__).parents[4] / "shared" / "calibration-2" / "grouped_gemm.csv"
ROLES = {"fwd": 0, "dgrad": 1, "wgrad": 2}
THROTTLED = 0.81
"""clock of the host of these benchmarks over that of other B200s (evidence/validation/hosts.yaml)"""
LAUNCH_S = 9.3e-6
"""least time of one group, which TransformerEngine launches by itself"""


@pytest.mark.skipif(not TABLE.exists(), reason=f"{TABLE} is absent")
@pytest.mark.parametrize("role", ROLES)
def test_products_of_few_rows_an_expert_take_as_long_as_measured(role: str) -> None:
    rates, clock = gemm_in_steps(replace(load_device("b200"), sustained=THROTTLED), "bf16")
    errors = []
    for row in csv.DictReader(TABLE.open(encoding="utf-8")):
        groups, m, n, k = (int(row[name]) for name in ("groups", "m_per_group", "n", "k"))
        if "B200" not in row["gpu"] or row["direction"] != role or m > 1024:
            continue
        shape = {"fwd": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[role]
        added = 0 if "accumulate=False" in row["note"] else 4 if "fp32" in row["note"] else 2
        time_s = gemm_s(*map(np.float64, shape), rates, groups, ROLES[role], added, clock, groups)
        errors.append(max(float(time_s), groups * LAUNCH_S) / (float(row["time_us"]) * 1e-6) - 1)
    assert len(errors) > 10
    assert np.abs(errors).mean() < 0.12
