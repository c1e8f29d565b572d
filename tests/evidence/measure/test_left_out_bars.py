"""Errors on measured kernels that the fits did not see, a device at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forerun.common.units import GIGA
from forerun.core.cost.profile import load_profile
from forerun.core.program.types import F64
from forerun.describe.cluster.catalog import load_cluster
from forerun.evidence.measure.calibrate import folds
from forerun.evidence.measure.new_profile import LINKS, at_device
from forerun.evidence.measure.parts import Part, parts_of, rows_of
from forerun.evidence.measure.samples import read_tables

TABLES = Path(__file__).resolve().parents[3].parent / "shared" / "calibration"
DEVICES = {
    "a100": "a100_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "gb200-nvl72": "gb200",
    "l40s": "l40s",
}
USUAL = ("h100", "l40s")
"""devices of every run of the tests, one with NVLink and one without; the rest are of the long tests"""
MOST_ROWS = 700
"""of a fit, about: every so many of the rest are taken, to save a minute"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TABLES.exists(), reason="the measured kernels are not beside this checkout"),
]


def parts(cluster_name: str) -> dict[str, Part]:
    cluster = load_cluster(cluster_name)
    link_gb_s = cluster.links[0].bytes_per_s / GIGA if cluster.links[0].kind in LINKS else 0.0
    old = at_device(load_profile(cluster.device.cost_profile), cluster)
    samples = read_tables(TABLES, DEVICES[cluster_name])
    return {part.section: part for part in parts_of(samples, old, cluster.device, link_gb_s, 1.0)}


def left_out(part: Part, rows_class: str) -> F64:
    """Errors in percent of rows of a class, each under constants that were fitted without its fold."""
    fold, judged = folds(part.together, part.folds), part.classes[rows_class]
    errors = np.empty(len(part))
    for number in np.unique(fold[judged]).tolist():
        seen = np.flatnonzero(fold != number)
        mask = np.zeros(len(part), np.bool_)
        mask[seen[:: max(1, len(seen) // MOST_ROWS)]] = True
        unseen = (fold == number) & judged
        predicted_s = part.fit(rows_of(part.table, mask)).time_s(rows_of(part.table, unseen))
        errors[unseen] = np.abs(predicted_s / (part.table["latency_us"][unseen] * 1e-6) - 1)
    return 100 * errors[judged]


def devices(*but: str) -> list[object]:
    """The devices as parameters."""
    return [
        name if name in USUAL else pytest.param(name, marks=pytest.mark.long) for name in DEVICES if name not in but
    ]


@pytest.mark.parametrize("device", devices())
def test_products_and_attention(device):
    found = parts(device)
    bar = 7 if device in ("a100", "l40s") else 5
    assert left_out(found["gemm.bf16"], "m 2048+, n, k 1024+").mean() < bar
    if "gemm.fp8" in found:
        assert left_out(found["gemm.fp8"], "m 2048+, n, k 1024+").mean() < 8
    for head_dim in (64, 128):
        part = found.get(f"attention.head_dim.{head_dim}")
        assert part is None or left_out(part, "seq >= 2048").mean() < 6


@pytest.mark.parametrize("device", devices("l40s"))
def test_collectives_of_a_node(device):
    found = [part for section, part in parts(device).items() if section.startswith("collectives.")]
    small, large = (
        np.concatenate([left_out(part, name) for part in found]) for name in ("below 1 MiB", "1 MiB and more")
    )
    assert small.mean() < 6
    assert large.mean() < 8
