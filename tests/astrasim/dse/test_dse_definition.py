"""YAML files of explorations: what they mean, and what is wrong with them."""

import json

import pytest
import yaml
from dse_files import POINTS, SMALL, changed, write

from forerun.astrasim.dse import space
from forerun.astrasim.dse.definition import read_exploration
from forerun.astrasim.dse.limits import limit_from
from forerun.astrasim.dse.space import Plan, Point, Sampling
from forerun.astrasim.dse.workload import Strategy
from forerun.common.errors import ForerunError

SECOND = {"dvocal": 512, "dmodel": 256, "dff": 1024, "head": 8, "seq": 64, "batch": 64, "num_stacks": 2}


def points(tmp_path, *changes):
    return read_exploration(write(tmp_path, changed(*changes))).points


def test_degrees_left_out_take_every_factor(tmp_path):
    strategies = {point.strategy for point in points(tmp_path)}
    assert len(strategies) == POINTS
    assert all(strategy.dp * strategy.tp * strategy.sp == 8 and strategy.pp == 1 for strategy in strategies)


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        (4, [4]),
        ([1, 2, 8], [1, 2, 8]),
        ({"from": 1, "to": 8, "times": 2}, [1, 2, 4, 8]),
        ({"from": 2, "to": 8, "step": 2}, [2, 4, 8]),
        ({"from": 1, "to": 4, "step": 1}, [1, 2, 4]),
        ({"from": 1, "to": 9_999, "step": 1}, [1, 2, 4, 8]),
        ({"from": 1, "to": 10_000, "step": 1}, [1, 2, 4, 8]),
        ("any", [1, 2, 4, 8]),
    ],
)
def test_values_of_a_degree(tmp_path, value, meant):
    assert sorted({point.strategy.dp for point in points(tmp_path, ("plan.dp", value))}) == meant


def test_divisors_or_powers_of_two():
    def degrees(factors):
        return {(s.dp, s.tp, s.sp) for s in Plan(sp=(3,), factors=factors).strategies(12)}

    assert degrees("divisors") == {(1, 4, 3), (2, 2, 3), (4, 1, 3)}
    assert {s.dp for s in Plan(factors="divisors").strategies(12)} == {1, 2, 3, 4, 6, 12}
    assert not list(Plan(factors="powers_of_two").strategies(12))


def test_paths_are_relative_to_the_file(tmp_path):
    torus = SMALL["systems"]["torus"]
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "system.json").write_text(json.dumps(torus["system"]))
    (tmp_path / "files" / "network.yml").write_text(yaml.safe_dump(torus["network"]))
    inline = read_exploration(write(tmp_path, SMALL))
    data = changed(("systems.torus.system", "files/system.json"), ("systems.torus.network", "files/network.yml"))
    assert read_exploration(write(tmp_path, data)).machines == inline.machines


def test_every_workload_meets_every_system_unless_pairs_are_listed(tmp_path):
    two = [
        ("workloads.other", {**SMALL["workloads"]["tiny"], "num_stacks": 3}),
        ("systems.again", SMALL["systems"]["torus"]),
    ]
    assert len(points(tmp_path, *two)) == 4 * POINTS
    some = points(tmp_path, *two, ("pairs", [["tiny", "torus"], ["other", "again"]]))
    assert {(point.workload, point.system) for point in some} == {("tiny", "torus"), ("other", "again")}


def test_experts_are_for_the_second_generation(tmp_path):
    found = points(tmp_path, ("workloads.second", {**SECOND, "model_type": "moe"}), ("plan.ep", [1, 2]))
    assert {point.strategy.ep for point in found if point.workload == "tiny"} == {1}
    assert {point.strategy.ep for point in found if point.workload == "second"} == {1, 2}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([("workloads", None)], "key 'workloads' is missing"),
        ([("workloads", {})], "workloads: give at least one"),
        ([("colour", "red")], "unknown key 'colour'; known:"),
        ([("workloads.tiny.dmodel", None)], "workloads.tiny: key 'dmodel' is missing"),
        ([("workloads.tiny.dmodle", 3)], "unknown key in"),
        ([("workloads.tiny.dmodel", "wide")], "workloads.tiny.dmodel: expected a whole number, got 'wide'"),
        ([("workloads.tiny.dmodel", 0)], "workloads.tiny: dmodel 0: give a whole number of at least 1"),
        ([("workloads.tiny.tp", 2)], "workloads.tiny.tp: belongs under plan"),
        ([("workloads.tiny.kvhead", 2)], "din is of STAGE's first generation"),
        ([("workloads.tiny", {"dmodel": 3})], "workloads.tiny: give din and dout"),
        ([("workloads.tiny", 7)], "workloads.tiny: expected sizes"),
        ([("systems.torus.network", None)], "systems.torus: key 'network' is missing"),
        ([("systems.torus", "x")], "systems.torus: expected keys system and network"),
        ([("systems.torus.system", "none.json")], "none.json"),
        ([("systems.torus.system", [1])], "systems.torus.system: expected a path or the keys"),
        ([("systems.torus.system.roofline-enabled", 0)], "systems.torus.system: roofline-enabled is 0"),
        ([("systems.torus.system.peak-perf", "fast")], "systems.torus.system: peak-perf"),
        ([("systems.torus.network.npus_count", [4])], "systems.torus.network: npus_count lists 1 values"),
        ([("systems.torus.network", 5)], "systems.torus.network: expected a path or the keys"),
        ([("plan.npus", 64)], "plan.npus: 64, but system 'torus' has 8 NPUs"),
        ([("plan.weight_shared", 1)], "did you mean weight_sharded?"),
        ([("plan.dp", 0)], "plan.dp: expected whole numbers of at least 1"),
        ([("plan.dp", [])], "plan.dp: expected whole numbers of at least 1"),
        ([("plan.dp", True)], "plan.dp: expected whole numbers of at least 1"),
        ([("plan.dp", {"from": 1, "to": 8})], "plan.dp: a range has from, to and either step"),
        ([("plan.dp", {"from": 0, "to": 8, "step": 1})], "plan.dp: a range has from, to and either step"),
        ([("plan.dp", {"from": 1, "to": 8, "step": 0})], "plan.dp: a range has from, to and either step"),
        ([("plan.dp", {"from": 1, "to": 8, "times": 1})], "plan.dp: a range has from, to and either step"),
        ([("plan.dp", {"from": 1, "to": 8, "step": 1, "times": 2})], "plan.dp: a range has from, to and either step"),
        ([("plan.dp", {"from": 1, "until": 8, "step": 1})], "plan.dp: a range has from, to and either step"),
        ([("plan.dp", {"from": 1, "to": 10_001, "step": 1})], "plan.dp: more than 10,000 values"),
        ([("sampling", {"method": "grid", "points": -1})], "sampling.points: give at least 1"),
        ([("plan.dp", {"from": 1, "to": 10**9, "step": 1})], "plan.dp: more than 10,000 values"),
        ([("plan.dp", 3)], "plan: no dp x tp x sp x pp x ep of these values makes the 8 NPUs of system 'torus'"),
        ([("plan.factors", "odd")], "plan.factors: 'odd' is neither divisors nor powers_of_two"),
        ([("plan.weight_sharded", "maybe")], "plan.weight_sharded: expected true, false or [false, true]"),
        ([("pairs", [["tiny", "mesh"]])], "unknown system in"),
        ([("pairs", ["tiny"])], "pairs: expected [workload, system], got 'tiny'"),
        ([("pairs", [])], "pairs: give at least one"),
        ([("sampling", "some")], "sampling: expected all or"),
        ([("sampling", {"method": "random"})], "sampling: key 'points' is missing"),
        ([("sampling", {"method": "magic", "points": 3})], "sampling: method:"),
        ([("sampling", {"method": "grid", "points": 0})], "sampling.points: give at least 1"),
        ([("memory_limit_gib", -1)], "memory_limit_gib: give a number above 0"),
        ([("systems.torus.memory_limit_gib", 0.0)], "systems.torus.memory_limit_gib: give a number above 0"),
        ([("bytes_per_element", 0)], "bytes_per_element: give a number above 0"),
        ([("issue_order", "random")], "issue_order:"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, changes, said):
    with pytest.raises(ForerunError) as caught:
        points(tmp_path, *changes)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def many(n):
    return [
        Point("w", "s", Strategy(dp=2**i, tp=2**j, weight_sharded=bool(k)))
        for i in range(n)
        for j in range(n)
        for k in (0, 1)
    ]


@pytest.mark.parametrize("method", ["random", "grid", "latin"])
def test_samples_are_parts_of_the_list_in_its_order(method):
    every = many(8)
    sample = Sampling(method, 20, seed=3).sample(every)
    assert len(set(sample)) == 20
    assert [point for point in every if point in set(sample)] == sample
    assert Sampling(method, 20, seed=3).sample(every) == sample
    assert Sampling(method, 1000).sample(every) == every


def test_seeds_tell_samples_apart():
    assert Sampling("random", 20, seed=1).sample(many(8)) != Sampling("random", 20, seed=2).sample(many(8))


@pytest.mark.parametrize("seed", range(4))
def test_a_latin_sample_is_balanced_on_every_axis(seed):
    sample = Sampling("latin", 16, seed).sample(many(8))
    for axis in ("dp", "tp", "weight_sharded"):
        values = [getattr(point.strategy, axis) for point in sample]
        counts = [values.count(value) for value in set(values)]
        assert max(counts) - min(counts) <= 2
        assert len(counts) == (2 if axis == "weight_sharded" else 8)


def test_one_point_is_a_sample(tmp_path):
    for method in ("random", "grid", "latin"):
        assert len(points(tmp_path, ("sampling", {"method": method, "points": 1}))) == 1
    assert len(points(tmp_path, ("sample", {"n": 1}))) == 1


def test_a_grid_takes_points_at_even_distances():
    every = many(8)
    assert Sampling("grid", 4).sample(every) == [every[0], every[32], every[64], every[96]]
    assert Sampling("grid", 3).sample(every) == [every[0], every[42], every[85]]
    assert Sampling("grid", len(every)).sample(every) == Sampling("all").sample(every) == every


def test_what_a_file_leaves_out(tmp_path):
    found = read_exploration(write(tmp_path, SMALL))
    assert (found.bytes_per_element, found.issue_order, dict(found.memory_limits)) == (1, "ascending", {})
    assert found.machines["torus"].system.track_local_mem
    seeds = [points(tmp_path, ("sampling", {"method": "random", "points": 9, **seed})) for seed in ({}, {"seed": 0})]
    assert seeds[0] == seeds[1]
    drawn = [points(tmp_path, ("sample", {"n": 9, **seed})) for seed in ({}, {"seed": 0}, {"seed": 1})]
    assert drawn[0] == drawn[1] != drawn[2]
    assert {(s.pp, s.ep, s.weight_sharded, s.activation_recompute) for s in Plan().strategies(4)} == {
        (1, 1, False, False)
    }


def test_more_points_than_the_most_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(space, "MOST_POINTS", POINTS)
    assert len(points(tmp_path)) == POINTS
    monkeypatch.setattr(space, "MOST_POINTS", POINTS - 1)
    with pytest.raises(ForerunError, match="plan: more than 39 points; list fewer values"):
        points(tmp_path)


@pytest.mark.parametrize(
    ("text", "gib", "expected", "in_gib"),
    [
        ("80 GB", None, "80 GB", 80e9 / 2**30),
        (" 64.5GiB ", None, "64.5 GiB", 64.5),
        (None, 0.25, "0.25 GiB", 0.25),
    ],
)
def test_a_memory_limit_has_its_unit(text, gib, expected, in_gib):
    found = limit_from(text, gib, "")
    assert (str(found), found.gib) == (expected, pytest.approx(in_gib))
    assert limit_from(None, None, "") is None
