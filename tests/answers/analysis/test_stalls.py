"""What periodic work adds to a simulated step."""

from dataclasses import replace

import pytest

from forerun.answers.analysis.around_step import saved_state_of
from forerun.core.cost.periodic import periodic_constants
from forerun.core.program.types import Category
from forerun.describe.cluster.storage import Storage
from forerun.describe.plan.plan import Plan
from forerun.describe.plan.training_loop import KINDS, TrainingLoop
from forerun.interfaces import api
from forerun.interfaces.report.documents import prediction_document
from forerun.interfaces.report.page import Table
from forerun.interfaces.report.page_sections import loop_section
from forerun.interfaces.report.records import prediction_record

CLUSTER, MODEL = "h100-sxm", "llama-3.2-1b"
BUSY = Plan(seq_len=8192, micro_batch=2, dp_shard=8, activation_checkpointing="full")
IDLE = Plan(seq_len=128)
"""its host launches more slowly than the device computes"""


def stalls(plan, loop, **more):
    found = api.predict(MODEL, plan, CLUSTER, loop=loop, **more).loop
    return {stall.name: stall for stall in found.stalls}


def test_the_plain_step_stays_what_it_is_and_stalls_add_up():
    loop = TrainingLoop(checkpoint=500, profile=100, memory_snapshot=200, gc=50, metrics=10)
    plain, found = api.predict(MODEL, BUSY, CLUSTER), api.predict(MODEL, BUSY, CLUSTER, loop=loop)
    assert plain.loop is None
    assert found.step_time_s == plain.step_time_s
    steps = 1000  # a multiple of all intervals
    run_s = steps * plain.step_time_s + sum(steps // one.every_steps * one.stall_s for one in found.loop.stalls)
    assert found.loop.mean_step_time_s == pytest.approx(run_s / steps)
    assert found.loop.tokens_per_s_per_gpu == pytest.approx(BUSY.tokens_per_step / 8 / (run_s / steps))
    assert {stall.name.partition(",")[0] for stall in found.loop.stalls} == set(KINDS)


def test_a_busy_device_hides_what_slows_its_host():
    loop = TrainingLoop(profile=100, memory_snapshot=100)
    busy, idle = stalls(BUSY, loop), stalls(IDLE, loop)
    assert busy["memory_snapshot, recording"].stall_s < idle["memory_snapshot, recording"].stall_s
    profiler = periodic_constants().profile
    recorded = {plan: found["profile"].stall_s for plan, found in ((BUSY, busy), (IDLE, idle))}
    launches = recorded[BUSY] / (profiler.events_per_launch * profiler.export_us_per_event * 1e-6)
    assert recorded[IDLE] > profiler.recording_s(launches / 2)


def test_a_trace_of_more_steps_takes_as_much_longer():
    one, three = (stalls(IDLE, TrainingLoop(profile=10, profiler_active=n))["profile"].stall_s for n in (1, 3))
    assert three == pytest.approx(3 * one)


def test_cuda_graphs_leave_the_profiler_less_to_record():
    compiled = replace(IDLE, compile=True)
    graphs = replace(compiled, cuda_graphs=True)
    loop = TrainingLoop(profile=10)
    assert stalls(graphs, loop)["profile"].stall_s < stalls(compiled, loop)["profile"].stall_s / 2


def test_garbage_grows_with_the_steps_since_the_last_collection_and_with_recomputation():
    often, seldom = (stalls(BUSY, TrainingLoop(gc=n))["gc"].stall_s for n in (10, 1000))
    fixed = periodic_constants().gc.collection_s(0)
    assert (seldom - fixed) / (often - fixed) == pytest.approx(100)
    without = replace(BUSY, activation_checkpointing="none")
    assert stalls(without, TrainingLoop(gc=1000))["gc"].stall_s == pytest.approx(fixed)


def test_a_loss_is_reduced_where_there_is_somebody_to_reduce_it_with():
    alone = stalls(replace(BUSY, dp_shard=1), TrainingLoop(metrics=10))["metrics"].stall_s
    node = stalls(BUSY, TrainingLoop(metrics=10))["metrics"].stall_s
    nodes = stalls(replace(BUSY, dp_shard=256), TrainingLoop(metrics=10))["metrics"].stall_s
    assert alone == pytest.approx(periodic_constants().metrics.log_s(0.0))
    assert alone < node < nodes


def test_modes_of_a_checkpoint_stall_less_and_less():
    modes = ("disabled", "async", "async_with_pinned_mem")
    loops = [TrainingLoop(checkpoint=500, checkpoint_mode=mode) for mode in modes]
    times = [stalls(BUSY, loop, storage=Storage(1e9))["checkpoint"] for loop in loops]
    assert times[0].stall_s > times[1].stall_s > times[2].stall_s > 0
    assert times[0].beside_s == 0 < times[1].beside_s <= times[2].beside_s


def test_a_checkpoint_collects_garbage_where_the_loop_does():
    """Torchtitan collects before every save, and with the mode async a second time."""
    once = periodic_constants().gc.collection_s(0)
    for mode, collections in (("disabled", 1), ("async", 2), ("async_with_pinned_mem", 1)):
        loop = TrainingLoop(checkpoint=500, checkpoint_mode=mode)
        without, found = (stalls(BUSY, each)["checkpoint"].stall_s for each in (loop, replace(loop, gc=50)))
        assert found - without == pytest.approx(collections * once)


def test_checkpoints_that_come_too_often_wait_for_the_storage():
    loop = TrainingLoop(checkpoint=1, checkpoint_mode="async")
    found = api.predict(MODEL, BUSY, CLUSTER, loop=loop, storage=Storage(1e7)).loop
    assert found.mean_step_time_s >= found.checkpoint.rank_gib * 2**30 / 1e7


def test_a_program_says_what_its_loop_does():
    program = api.simulate(MODEL, BUSY, CLUSTER).program
    program = replace(program, meta={"name": "it", "loop": TrainingLoop(checkpoint=500, gc=50).settings()})
    found = api.predict_program(program, CLUSTER).prediction
    assert [stall.name for stall in found.loop.stalls] == ["checkpoint", "gc"]
    assert api.predict_program(program, CLUSTER, loop=TrainingLoop()).prediction.loop is None
    assert any(line.startswith("loop, storage: assumed") for line in found.explain)


def test_a_program_and_its_plan_save_the_same():
    plan = replace(BUSY, dp_replicate=2)
    simulation = api.simulate(MODEL, plan, CLUSTER)
    groups = {group.axis: number for number, group in enumerate(simulation.program.groups)}
    meta = {"data_parallel": [groups["dp_shard"], groups["dp_replicate"]], "sharded": [groups["dp_shard"]]}
    saved = saved_state_of(replace(simulation.program, meta=meta))
    held = simulation.program.rank_classes[0].resident_bytes
    assert saved.held_bytes == held[Category.PARAMETER] + held[Category.OPTIMIZER]
    assert saved.total_bytes == 8 * saved.held_bytes == saved.held_total_bytes / 2
    loop = TrainingLoop(checkpoint=500)
    assert api.predict(MODEL, plan, CLUSTER, loop=loop).loop.checkpoint.total_gib == pytest.approx(
        saved.total_bytes / 2**30
    )


def test_records_hold_the_mean_step_and_every_stall():
    found = prediction_record(api.predict(MODEL, BUSY, CLUSTER, loop=TrainingLoop(gc=50, metrics=10)))
    assert found["loop"]["checkpoint"] is None
    assert [stall["name"] for stall in found["loop"]["stalls"]] == ["gc", "metrics"]
    share = sum(stall["share_of_step"] for stall in found["loop"]["stalls"])
    assert found["loop"]["mean_step_time_s"] == pytest.approx(found["step_time_s"] * (1 + share))
    assert "loop" not in prediction_record(api.predict(MODEL, BUSY, CLUSTER))


def test_the_page_of_a_prediction_lists_every_stall():
    loop = TrainingLoop(checkpoint=500, gc=50)
    simulation = api.simulate(MODEL, BUSY, CLUSTER, loop=loop)
    parts = loop_section(simulation.prediction)
    table = next(part for part in parts if isinstance(part, Table))
    assert [row[:2] for row in table.rows] == [("checkpoint", "500 steps"), ("gc", "50 steps")]
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert loop_section(api.predict(MODEL, BUSY, CLUSTER)) == []
    page = prediction_document(simulation, (), "").parts
    assert all(part in page for part in parts)
