"""Kinds of memory-bound kernels reach their own share of HBM's bandwidth."""

from pathlib import Path

import pytest
import yaml

from forerun.common.errors import UnknownName
from forerun.core.cost.kernel_constants import kernel_constants
from forerun.core.cost.op_costs import durations_ps
from forerun.core.program.builder import OpTableBuilder
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.types import KernelRates

SHARES = kernel_constants().memory_bound
SIZE = 4e9
SOURCE = Path(__file__).parents[3] / "src" / "forerun" / "sources"


def seconds(kernel: str) -> float:
    ops = OpTableBuilder()
    ops.memory("kernel", SIZE / 2, SIZE / 2, kernel=kernel)
    time_ps, _ = durations_ps(ops.build(), (), load_cluster("h100-sxm"), KernelRates())
    return float(time_ps[0]) / 1e12


@pytest.mark.parametrize("kernel", SHARES.kernels)
def test_a_kind_takes_as_much_longer_as_its_share_is_smaller(kernel: str) -> None:
    assert seconds(kernel) / seconds("") == pytest.approx(SHARES.streaming / SHARES.kernels[kernel], rel=1e-3)


def test_a_kind_that_is_misspelt_is_refused() -> None:
    with pytest.raises(UnknownName, match="norm_backwards"):
        seconds("norm_backwards")


def test_every_kind_that_is_named_has_a_share() -> None:
    patterns = yaml.safe_load((SOURCE / "symbolic" / "elementwise.yaml").read_text(encoding="utf-8"))
    rules = yaml.safe_load((SOURCE / "trace" / "inside" / "kernels" / "rules.yaml").read_text(encoding="utf-8"))
    named = {
        kind
        for entry in patterns.values()
        for side in ("forward_kernel", "backward_kernel")
        for kind in entry.get(side, {}).values()
    }
    named |= {entry["kernel"] for entry in rules["traits"].values() if "kernel" in entry}
    assert named == set(SHARES.kernels)
