"""Predicted times of collectives beside published ones, by fabric, size and shape."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from collective_tables import DGX, IN_NODE, NODES, Row, between_nodes, in_nodes, on_dgx

from forerun.common.units import KIB, MIB
from forerun.core.program.types import Collective

pytestmark = pytest.mark.skipif(not NODES.exists(), reason="the measured collectives are not beside this checkout")


def mean_error(rows: list[Row]) -> float:
    """Returns the mean absolute logarithm of predicted over measured times in percent."""
    assert rows
    return 100 * float(np.mean([abs(row.error) for row in rows]))


def several_nodes(kind: Collective) -> list[Row]:
    """Rows over several nodes; those below 256 KiB of one table are its warm-up."""
    return [
        row
        for row in between_nodes()
        if row.nodes > 1 and row.kind == kind and (row.size_bytes >= 256 * KIB or "B200" not in row.fabric)
    ]


def test_collectives_between_nodes() -> None:
    reduces, exchanges = several_nodes(Collective.ALL_REDUCE), several_nodes(Collective.ALL_TO_ALL)
    assert mean_error(reduces) < 12
    assert mean_error(exchanges) < 10


@pytest.mark.parametrize(
    ("fabric", "most"), [("efa", 10), ("infiniband GB200 NVL72", 12), ("roce H100", 12), ("infiniband unstated", 13)]
)
def test_each_fabric_between_nodes(fabric: str, most: float) -> None:
    rows = [row for row in several_nodes(Collective.ALL_REDUCE) if row.fabric.startswith(fabric)]
    assert mean_error(rows) < most


@pytest.mark.parametrize(("device", "most"), [("H100", 4), ("H200", 4), ("B200", 8)])
def test_switches_that_add_on_eight_gpus(device: str, most: float) -> None:
    rows = [
        row
        for row in between_nodes()
        if row.nodes == 1 and row.fabric.startswith(f"node {device}") and row.kind == Collective.ALL_REDUCE
    ]
    assert mean_error([row for row in rows if row.size_bytes >= 16 * MIB]) < most


def test_gpus_that_reach_each_other_over_pci_express() -> None:
    assert mean_error([row for row in between_nodes() if "RTX" in row.fabric]) < 6


@pytest.mark.parametrize(
    ("devices", "rows_class", "most"),
    [
        (("A100", "H100", "H200"), lambda row: row.size_bytes < MIB, 5),
        (("A100", "H100", "H200"), lambda row: MIB <= row.size_bytes < 16 * MIB, 10),
        (("A100", "H100", "H200"), lambda row: row.size_bytes >= 16 * MIB, 5),
        (("B200", "B300", "GB200", "GB300"), lambda row: row.size_bytes < MIB, 5),
        (("B200", "B300", "GB200", "GB300"), lambda row: MIB <= row.size_bytes < 16 * MIB, 11),
        (("B200", "B300", "GB200", "GB300"), lambda row: row.size_bytes >= 16 * MIB, 7),
        (("RTX PRO",), lambda row: row.size_bytes >= MIB, 8),
    ],
)
def test_collectives_inside_nodes(devices: tuple[str, ...], rows_class: Callable[[Row], bool], most: float) -> None:
    pytest.importorskip("pandas")
    if not IN_NODE.exists():
        pytest.skip("the table of nodes is not there")
    found = [row for row in in_nodes() if any(f"node {device}" in row.fabric for device in devices)]
    assert mean_error([row for row in found if rows_class(row)]) < most


def test_all_reduces_of_dgx_nodes() -> None:
    pytest.importorskip("pandas")
    if not DGX.exists():
        pytest.skip("the table of DGX nodes is not there")
    rows = [row for row in on_dgx() if row.kind == Collective.ALL_REDUCE and row.size_bytes >= MIB]
    assert mean_error(rows) < 13
