"""The workspaces that PyTorch keeps for cuBLAS."""

from __future__ import annotations

import numpy as np
import pytest
from saved_programs import H100, plan_of, program_of

from forerun.answers.analysis.predict_program import predict_program
from forerun.common.units import GIB, MIB
from forerun.core.memory.workspaces import workspace_count
from forerun.core.program.types import Phase
from forerun.describe.cluster.catalog import load_cluster


@pytest.mark.parametrize(("cluster", "each_mib"), [("h100-sxm", 32), ("a100-sxm", 8.125)])
def test_workspaces_are_allocated_throughout(cluster: str, each_mib: float) -> None:
    place = load_cluster(cluster)
    without, held = (
        predict_program(program_of(plan_of(dp_shard=8), H100, blas_workspaces=[count]), place).prediction
        for count in (0, 2)
    )
    more = (held.peak_allocated_gib - without.peak_allocated_gib) * GIB
    assert more == pytest.approx(2 * each_mib * MIB)
    assert held.peak_reserved_gib >= without.peak_reserved_gib


def test_each_thread_and_stream_with_products_has_its_own() -> None:
    phase = np.array([Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE, Phase.OPTIMIZER], np.int8)
    stream = np.array([0, 3, 0, 0, 0], np.int32)
    assert workspace_count(np.ones(5, bool), phase, stream) == 3
    assert workspace_count(np.array([1, 0, 0, 0, 0], bool), phase, stream) == 1
    assert workspace_count(np.zeros(5, bool), phase, stream) == 0
