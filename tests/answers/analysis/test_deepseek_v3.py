"""DeepSeek-V3 as DeepSeek trained it, against its own step table and profile.

The step: arXiv 2505.09343, table 4 (2,048 H800, 15,360 sequences of 4,096 tokens: 19.926 s, 2.06 s of them bubble). The
chunk of four layers forward and four backward: deepseek-ai/profile-data, train.json (112 to 129 ms, 96 % of the
exchanges hidden). The plan: arXiv 2412.19437, section 3. The multi-token prediction module counts as a 62nd layer.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from deepseek_run import CLUSTER, MODEL, PLAN

from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import Simulation, simulate_setup
from forerun.core.program.types import Stream
from forerun.describe.plan.plan import Plan

CHUNK = replace(PLAN, pp=1, dp_shard=64, pp_schedule="1F1B", virtual_stages=1, n_microbatches=12)
"""the profile's: 64 ranks, micro batches of which one goes forward beside another one's backward pass"""


@cache
def run(plan: Plan, n_layers: int = 62, dense: int = 3, replays: bool = False) -> Simulation:
    model = replace(MODEL, n_layers=n_layers, moe=replace(MODEL.moe, n_dense_layers=dense))
    return simulate_setup(Setup(model, plan, CLUSTER, replays=replays))


def hidden_share(simulation: Simulation, rank: int, first_s: float, last_s: float) -> float:
    """Returns the share of the exchanges of `rank` between two instants during which its compute stream is busy."""
    flat, timeline = simulation.flat, simulation.timeline
    mine = slice(int(flat.class_ptr[rank]), int(flat.class_ptr[rank + 1]))
    stream, start, end = flat.stream[mine], timeline.start_ps[mine], timeline.end_ps[mine]
    exchange = (stream == Stream.EP) & (start > first_s * 1e12) & (end < last_s * 1e12)
    kernel = (stream == Stream.COMPUTE) & (end > start)
    since, until = start[kernel], end[kernel]
    before = np.concatenate([[0], np.cumsum(until - since)])

    def busy(instant):
        number = np.searchsorted(since, instant, side="right")
        last = np.maximum(number - 1, 0)
        return before[last] + (number > 0) * np.clip(instant - since[last], 0, (until - since)[last])

    covered = busy(end[exchange]) - busy(start[exchange])
    return float(covered.sum() / (end - start)[exchange].sum())


def test_the_step_takes_as_long_as_measured():
    assert run(PLAN).prediction.step_time_s == pytest.approx(19.926, rel=0.1)


def test_the_bubble_is_as_large_as_measured():
    prediction = run(PLAN).prediction
    assert prediction.bubble_s / prediction.step_time_s == pytest.approx(2.06 / 19.926, abs=0.02)


def test_it_fits_in_the_memory_of_an_h800():
    prediction = run(PLAN, replays=True).prediction
    assert prediction.fits
    assert 50 < prediction.peak_allocated_gib < 79


def test_passes_side_by_side_hide_the_exchanges_of_tokens():
    """In the middle of the step, where every forward pass runs beside a backward pass."""
    assert min(hidden_share(run(PLAN), rank, 6.0, 12.0) for rank in range(1, 15)) >= 0.9
    serial = run(replace(PLAN, expert_overlap=False))
    assert max(hidden_share(serial, rank, 6.0, 12.0) for rank in range(16)) < 0.1
    assert serial.prediction.step_time_s > 1.1 * run(PLAN).prediction.step_time_s


def test_a_chunk_takes_as_long_as_in_the_profile():
    """Four more layers make each micro batch longer by a chunk of four layers."""
    shallow, deep = (run(CHUNK, n_layers=n, dense=0).prediction.step_time_s for n in (4, 8))
    more = (deep - shallow) / CHUNK.n_microbatches
    assert 112e-3 * 0.9 < more < 129e-3 * 1.1


def test_two_copies_of_each_stage_share_its_optimizer_state():
    def resident(plan):
        return max(int(rank.resident_bytes[2]) for rank in run(plan).program.rank_classes)

    one_way = replace(PLAN, pp_schedule="1F1B", virtual_stages=1, expert_overlap=False)
    assert resident(PLAN) < 1.6 * resident(one_way)
