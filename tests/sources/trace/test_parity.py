"""A traced program takes the time and the memory that the symbolic path predicts for the same plan."""

import pytest

pytest.importorskip("torch", reason="tracing needs torch")

from parity import PROGRAMS, both

TIME_TOLERANCE = 0.045
"""backward kernels of norms: a trace takes ATen's at the rate that benchmarks measured and Inductor's at that of
streaming kernels, the symbolic path fused ones and Inductor's at theirs"""
MEMORY_TOLERANCE = {"eager": 0.02, "compiled": 0.05}
"""compiled: a min-cut keeps other tensors of a layer than the symbolic path does"""


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_time_and_memory_are_those_of_the_symbolic_path(name):
    traced, modelled = both(name)
    memory = MEMORY_TOLERANCE[name.rpartition(", ")[2]]
    assert traced.step_time_s == pytest.approx(modelled.step_time_s, rel=TIME_TOLERANCE)
    assert traced.peak_allocated_gib == pytest.approx(modelled.peak_allocated_gib, rel=memory)
    assert traced.mfu <= traced.hfu
    assert modelled.mfu <= modelled.hfu
