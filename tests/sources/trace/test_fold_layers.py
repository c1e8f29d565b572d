"""Few layers tell what many do."""

import numpy as np
import pytest
from hypothesis import given, settings
from made_recordings import LAUNCH_PS, Recorder, memory_levels
from made_steps import Options, options, training_step

from forerun.common.errors import ForerunError
from forerun.core.engine.simulate import simulate
from forerun.core.memory.profile import profile
from forerun.core.program.types import Category, Collective, Phase
from forerun.core.program.unfold import unfold
from forerun.core.program.validate import check
from forerun.sources.trace.align import align
from forerun.sources.trace.fold_layers import extrapolate, fold_layers
from forerun.sources.trace.to_program import to_program


def run(program):
    check(program)
    flat = unfold(program)
    none = np.zeros(flat.n_ops)
    time = np.rint(program.ops.flops).astype(np.int64)
    return flat, simulate(flat, time, program.ops.launches.astype(np.int64) * LAUNCH_PS, none, none, none.astype(bool))


def assert_same_step(folded, whole):
    flat, timeline = run(folded)
    other_flat, other = run(whole)
    assert np.array_equal(timeline.end_ps, other.end_ps)
    for column in ("stream", "phase", "sync"):
        assert np.array_equal(getattr(flat, column), getattr(other_flat, column))
    for mine, expected in zip(profile(folded), profile(whole), strict=True):
        assert (mine.peak_bytes, mine.by_category) == (expected.peak_bytes, expected.by_category)


def shallow_steps(chosen, depths):
    return {depth: [training_step(depth, chosen)] for depth in depths}


def depths_of(chosen):
    """Every kind of layer once more at each depth, and enough of them that the middle ones have none but their kind
    around.
    """
    first = chosen.dense + 2 * chosen.kinds
    return [first + k * chosen.kinds for k in range(3)]


@settings(max_examples=40, deadline=None)
@given(options())
def test_a_deep_step_follows_from_shallow_ones(chosen):
    depths = depths_of(chosen)
    depth = depths[0] + 20 * chosen.kinds
    assert_same_step(fold_layers(shallow_steps(chosen, depths), depth), to_program([training_step(depth, chosen)]))


@settings(max_examples=15, deadline=None)
@given(options())
def test_the_traced_depths_are_reproduced(chosen):
    shallow = shallow_steps(chosen, depths_of(chosen))
    for depth, (recording,) in shallow.items():
        (again,), _ = extrapolate(shallow, depth)
        assert [again.modules[k] for k in again.module] == [recording.modules[k] for k in recording.module]
        assert memory_levels(again) == memory_levels(recording)
        assert_same_step(fold_layers(shallow, depth), to_program([recording]))


def test_126_layers_from_2_3_and_4():
    chosen = Options(kernels=20, recompute=True)
    folded = fold_layers(shallow_steps(chosen, (2, 3, 4)), 126)
    assert_same_step(folded, to_program([training_step(126, chosen)]))
    assert len(folded.blocks) < 30
    layers = folded.rank_classes[0].layer
    assert sorted(set(layers.tolist())) == list(range(-1, 126))


def test_an_optimizer_that_goes_through_parameters_one_by_one_is_folded_too():
    folded = fold_layers(shallow_steps(Options(optimizer="each"), (2, 3, 4)), 126)
    optimizer = [block for block in folded.blocks if block.name == "optimizer"]
    assert sum(len(block) for block in optimizer) < 30
    flat = unfold(folded)
    assert (flat.phase == Phase.OPTIMIZER).sum() == 3 * 128 + 3


def gathered_at_once(depth):
    """All gathers are on their way before the first one is used."""
    made = Recorder(groups=[("dp_shard", tuple(range(8)))])
    gathers = [made.collective(Collective.ALL_GATHER, 0, 64, 50, 2) for _ in range(depth)]
    for layer in range(depth):
        made.kernel("use", 20, module=f"layers.{layer}", waits=(gathers[layer],))
    return made.recording()


def test_waits_that_reach_further_back_the_deeper_the_model():
    shallow = {depth: [gathered_at_once(depth)] for depth in (2, 3, 4)}
    assert_same_step(fold_layers(shallow, 50), to_program([gathered_at_once(50)]))


def test_modules_of_deep_layers_have_their_numbers():
    chosen = Options()
    (deep,), _ = extrapolate(shallow_steps(chosen, (2, 3, 4)), 40)
    whole = training_step(40, chosen)
    assert [deep.modules[k] for k in deep.module] == [whole.modules[k] for k in whole.module]


@pytest.mark.slow
def test_many_nodes_a_layer_at_126_layers():
    chosen = Options(kernels=200, recompute=True)
    shallow = shallow_steps(chosen, (2, 3, 4))
    assert_same_step(fold_layers(shallow, 126), to_program([training_step(126, chosen)]))


def test_layers_that_are_not_equal_are_refused_with_the_first_difference():
    steps = shallow_steps(Options(), (2, 3))
    odd = Recorder(0, [("dp_shard", tuple(range(8)))])
    odd.kernel("something else", 1, module="model.layers.3.part0")
    with pytest.raises(ForerunError, match=r"rank 0 .* node 0 \(something else in model.layers.3.part0\)"):
        fold_layers({**steps, 4: [odd.recording()]}, 8)


def test_alternating_layers_taken_for_equal_ones_are_refused():
    with pytest.raises(ForerunError, match="trace the whole model"):
        fold_layers(shallow_steps(Options(kinds=2), (2, 3, 4)), 8)


def test_the_difference_is_told_where_it_is_not_where_layers_begin():
    steps = {}
    for depth in (2, 3, 4):
        made = Recorder()
        for layer in range(depth):
            made.kernel("work", 5, module=f"layers.{layer}")
        made.kernel("head", 5, module="head")
        for _ in range(depth * depth):
            made.kernel("gather up", 5, phase=Phase.OPTIMIZER)
        steps[depth] = [made.recording()]
    with pytest.raises(ForerunError, match=r"node 9 \(gather up\)"):
        fold_layers(steps, 8)


def uneven(sizes):
    """A fused kernel whose size does not grow with the depth as it should."""
    steps = {}
    for depth, size in sizes.items():
        made = Recorder()
        for layer in range(depth):
            made.kernel("work", 5, module=f"layers.{layer}")
        made.node(made.ops.memory("fused", size, 0.0), phase=Phase.OPTIMIZER)
        steps[depth] = [made.recording()]
    return steps


def test_amounts_outside_of_layers_grow_evenly_or_are_refused():
    folded = fold_layers(uneven({2: 20.0, 3: 30.0, 4: 40.0}), 10)
    assert folded.ops.bytes_read[folded.ops.name.index("fused")] == 100.0
    with pytest.raises(ForerunError, match=r"the size of fused at node 4 \(fused\)"):
        fold_layers(uneven({2: 20.0, 3: 30.0, 4: 50.0}), 10)


def test_memory_that_is_there_before_must_grow_evenly():
    steps = uneven({2: 20.0, 3: 30.0, 4: 40.0})
    made = Recorder()
    for layer in range(4):
        made.kernel("work", 5, module=f"layers.{layer}")
    made.node(made.ops.memory("fused", 40.0, 0.0), phase=Phase.OPTIMIZER)
    made.tensor(512, Category.PARAMETER, -1, -1)
    with pytest.raises(ForerunError, match="bytes that are there before the step"):
        fold_layers({**steps, 4: [made.recording()]}, 8)


@pytest.mark.parametrize(
    ("depths", "depth", "message"),
    [
        ((2, 3), 8, "needs recordings at 3 depths, got 2, 3"),
        ((2, 3, 5), 8, "evenly spaced, got 2, 3, 5"),
        ((2, 4, 6), 9, "9 layers can't be reached from 2, 4, 6 in whole periods"),
        ((4, 5, 6), 3, "3 layers can't be reached"),
    ],
)
def test_depths_that_do_not_fit_are_refused(depths, depth, message):
    with pytest.raises(ForerunError, match=message):
        fold_layers(shallow_steps(Options(), depths), depth)


def text(letters):
    return np.array([ord(letter) for letter in letters], np.int64)


@pytest.mark.parametrize(
    ("x", "y", "z", "added"),
    [
        ("a12b", "a1212b", "a121212b", [2]),
        ("ab", "a1b", "a11b", [1]),
        ("xaby", "xa1b2y", "xa11b22y", [1, 1]),
        ("", "12", "1212", [2]),
        ("aab", "aaaab", "aaaaaab", [2]),
        ("same", "same", "same", [0]),
    ],
)
def test_what_is_added_is_found(x, y, z, added):
    runs = align(text(x), text(y), text(z))
    assert [run.added for run in runs if run.added or len(runs) == 1] == added
    assert sum(run.common for run in runs) == len(x)
