"""The curve of memory over a step meets the peak that is reported, however few points it keeps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from random_programs import N_OPS, random_programs

from forerun.answers.analysis.predict import simulate
from forerun.core.engine.simulate import simulate as run_engine
from forerun.core.memory.over_time import memory_over_time
from forerun.core.memory.profile import profile
from forerun.core.program.types import Category, Program
from forerun.core.program.unfold import unfold
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan

NONE = np.zeros(N_OPS)


def run(what: Program):
    flat = unfold(what)
    return flat, run_engine(flat, np.arange(N_OPS) * 1000, np.full(N_OPS, 7), NONE, NONE, np.zeros(N_OPS, bool))


@given(random_programs(), st.integers(2, 40))
def test_its_highest_point_is_the_peak(what: Program, points: int) -> None:
    assume(all(len(cls.block) for cls in what.rank_classes))
    flat, timeline = run(what)
    for rank, expected in enumerate(profile(what)):
        curve = memory_over_time(what, flat, timeline, rank, points)
        assert curve.total.max() == expected.peak_bytes
        assert (np.diff(curve.time_ps) >= 0).all()
        assert len(curve.time_ps) <= 2 * points + 2
        whole = memory_over_time(what, flat, timeline, rank, 10**9)
        assert (whole.by_category[0] == what.rank_classes[rank].resident_bytes).all()
        assert (whole.by_category[-1] == curve.by_category[-1]).all()


@pytest.mark.parametrize("points", [50, 10**9])
@pytest.mark.parametrize("plan", [Plan(1024, dp_shard=8), Plan(1024, pp=2, dp_shard=4, n_microbatches=4)])
def test_a_models_categories_at_the_peak_are_those_of_the_prediction(plan: Plan, points: int) -> None:
    done = simulate(load_model("gpt2-small"), plan, load_cluster("h100-sxm"))
    for rank, expected in enumerate(done.memory):
        curve = memory_over_time(done.program, done.flat, done.timeline, rank, points)
        assert curve.total[curve.peak] == expected.peak_bytes
        at_peak = {Category(i).name.lower(): int(n) for i, n in enumerate(curve.by_category[curve.peak]) if n}
        assert at_peak == expected.by_category
        assert curve.time_ps[-1] <= done.timeline.end_of_step_ps
