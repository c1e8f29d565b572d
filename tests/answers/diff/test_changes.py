"""Two simulated steps: what differs adds up to the difference, and nothing differs between equal ones."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from saved_programs import H100, MODEL, plan_of, program_of

from forerun.answers.analysis.predict_program import predict_program
from forerun.answers.diff.changes import diff_steps
from forerun.core.memory.peak_tensors import peak_tensors
from forerun.core.memory.profile import profile
from forerun.core.program.kinds import OpKind
from forerun.core.program.types import Category, Phase


def step_of(model=MODEL, **fields):
    return predict_program(program_of(plan_of(**fields), model=model), H100, whole_timeline=True)


@pytest.fixture(scope="module")
def plain():
    return step_of(dp_shard=8)


def device_time(simulation):
    first, last = simulation.flat.class_ptr[simulation.slowest : simulation.slowest + 2]
    spent = simulation.timeline.end_ps[first:last] - simulation.timeline.start_ps[first:last]
    return float(spent.sum()) * 1e-12


def test_a_step_differs_from_itself_in_nothing(plain):
    found = diff_steps(plain, plain)
    assert found.work == found.tensors == ()
    assert found.slowdown == found.growth == 0
    assert all(before == after for before, after in found.causes.values())


PLANS = (
    {"dp_shard": 8, "activation_checkpointing": "full"},
    {"dp_shard": 4, "tp": 2},
    {"dp_shard": 8, "micro_batch": 2},
    {"dp_shard": 2, "pp": 2, "n_microbatches": 4},
    {"dp_replicate": 8, "dp_shard": 1},
)


@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_changes_add_up(plain, fields):
    other = step_of(**fields)
    found = diff_steps(plain, other)
    assert sum(one.lost_s for one in found.work) == pytest.approx(device_time(other) - device_time(plain), abs=1e-9)
    lost = other.prediction.step_time_s - plain.prediction.step_time_s
    assert sum(after - before for before, after in found.causes.values()) == pytest.approx(lost, abs=1e-9)
    grown = max(one.peak_bytes for one in other.memory) - max(one.peak_bytes for one in plain.memory)
    assert sum(one.grown_bytes for one in found.tensors) == grown
    assert [one.lost_s for one in found.work] == sorted((one.lost_s for one in found.work), reverse=True)
    assert [one.grown_bytes for one in found.tensors] == sorted(
        (one.grown_bytes for one in found.tensors), reverse=True
    )
    more = [after - before for before, after in found.causes.values()]
    assert more == sorted(more, reverse=True)


WORDS = {OpKind.COLLECTIVE: "collective", OpKind.P2P: "collective", OpKind.HOST_COPY: "copy", OpKind.DELAY: "delay"}


def work_node_by_node(simulation):
    """(what, name, module, phase) -> [runs, ps, flops, bytes] of the class that sets the pace."""
    flat, timeline, program, found = simulation.flat, simulation.timeline, simulation.program, {}
    ops = program.ops
    for node in range(*flat.class_ptr[simulation.slowest : simulation.slowest + 2].tolist()):
        row, module = flat.op[node], flat.module[node]
        path = program.modules[module].split(".") if module >= 0 else [""]
        what = WORDS.get(ops.kind[row], "kernel")
        starred = ".".join("*" if part.isdigit() else part for part in path)
        sums = found.setdefault((what, ops.name[row], starred, Phase(flat.phase[node]).name.lower()), [0, 0, 0.0, 0.0])
        sums[0] += 1
        sums[1] += int(timeline.end_ps[node] - timeline.start_ps[node])
        sums[2] += float(ops.flops[row])
        sums[3] += float(ops.bytes_comm[row] if what == "collective" else ops.bytes_read[row] + ops.bytes_written[row])
    return found


@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_work_is_what_all_nodes_do_together(plain, fields):
    other = step_of(**fields)
    before, after = work_node_by_node(plain), work_node_by_node(other)
    changes = {(one.what, one.name, one.module, one.phase): one for one in diff_steps(plain, other).work}
    assert changes.keys() <= before.keys() | after.keys()
    for key in before.keys() | after.keys():
        old, new = (sums.get(key, [0, 0, 0.0, 0.0]) for sums in (before, after))
        if key not in changes:
            assert old[0] == new[0]
            assert old[1:] == pytest.approx(new[1:], rel=1e-6)
            continue
        for work, sums in ((changes[key].before, old), (changes[key].after, new)):
            assert work.count == sums[0]
            assert (work.flops, work.moved_bytes) == pytest.approx(tuple(sums[2:]), rel=1e-12)
            assert work.time_s == pytest.approx(sums[1] * 1e-12, rel=1e-9)


def tensors_one_by_one(simulation):
    """(category, operation, module) -> [number, bytes] at the peak of the fullest class."""
    peaks = [one.peak_bytes for one in simulation.memory]
    fullest, found = peaks.index(max(peaks)), {}
    for one in peak_tensors(simulation.program, fullest, simulation.memory[fullest]):
        starred = ".".join("*" if part.isdigit() else part for part in one.maker.module.split("."))
        sums = found.setdefault((one.category.name.lower(), one.maker.op, starred), [0, 0])
        sums[0] += one.count
        sums[1] += one.total_bytes
    return found


@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_tensors_are_those_of_the_fullest_class(plain, fields):
    other = step_of(**fields)
    before, after = tensors_one_by_one(plain), tensors_one_by_one(other)
    expected = {
        (*key, *before.get(key, [0, 0]), *after.get(key, [0, 0]))
        for key in before.keys() | after.keys()
        if before.get(key) != after.get(key)
    }
    changes = diff_steps(plain, other).tensors
    assert {
        (one.category, one.name, one.module, one.before_count, one.before_bytes, one.after_count, one.after_bytes)
        for one in changes
    } == expected


@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_the_way_back_is_the_same_with_other_signs(plain, fields):
    other = step_of(**fields)
    there, back = diff_steps(plain, other), diff_steps(other, plain)
    words = {"came": "went", "went": "came", "grew": "shrank", "shrank": "grew"}
    of_there = {(one.what, one.name, one.module, one.phase): (one.how, one.lost_s) for one in there.work if one.lost_s}
    of_back = {(one.what, one.name, one.module, one.phase): (one.how, one.lost_s) for one in back.work if one.lost_s}
    assert of_back == {key: (words[how], -lost) for key, (how, lost) in of_there.items()}


def test_checkpointing_brings_recomputation_and_takes_activations(plain):
    found = diff_steps(plain, step_of(dp_shard=8, activation_checkpointing="full"))
    came = [one for one in found.work if one.how == "came"]
    assert came
    assert {one.phase for one in came} == {"recompute"}
    assert found.work[0].phase == "recompute"
    assert sum(one.grown_bytes for one in found.tensors if one.category == "activation") < 0


def test_more_layers_are_more_runs_of_the_same_work():
    shallow, deep = step_of(dp_shard=8), step_of(model=replace(MODEL, n_layers=3), dp_shard=8)
    found = diff_steps(shallow, deep)
    assert not [one for one in found.work if one.how in ("came", "went") and one.what == "kernel"]


def test_a_collective_that_goes_is_named(plain):
    found = diff_steps(plain, step_of(dp_replicate=8, dp_shard=1))
    kinds = {(one.what, one.how) for one in found.work}
    assert ("collective", "went") in kinds
    assert ("collective", "came") in kinds


def test_depth_joins_modules(plain):
    other = step_of(dp_shard=8, micro_batch=2)
    whole, joined = diff_steps(plain, other), diff_steps(plain, other, depth=1)
    assert len(joined.work) <= len(whole.work)
    assert sum(one.lost_s for one in joined.work) == pytest.approx(sum(one.lost_s for one in whole.work))
    assert all("." not in one.module for one in joined.work)


@given(
    st.sampled_from(["none", "selective", "full"]),
    st.sampled_from([(8, 1, 1), (4, 2, 1), (2, 2, 2), (1, 1, 4)]),
    st.integers(1, 4),
)
def test_tensors_at_the_peak_sum_to_the_peak(checkpointing, mesh, micro_batches):
    dp, tp, pp = mesh
    plan = plan_of(dp_shard=dp, tp=tp, pp=pp, n_microbatches=micro_batches * pp, activation_checkpointing=checkpointing)
    program = program_of(plan, model=replace(MODEL, n_layers=4))
    for number, memory in enumerate(profile(program)):
        found = peak_tensors(program, number, memory)
        assert sum(one.total_bytes for one in found) == memory.peak_bytes
        for category in Category:
            held = sum(one.total_bytes for one in found if one.category is category)
            assert held == memory.by_category.get(category.name.lower(), 0)
