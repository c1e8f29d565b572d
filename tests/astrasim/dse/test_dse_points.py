"""Points that are listed one by one, and samples as scripts draw them."""

import json
import random
from dataclasses import dataclass
from itertools import product

import pytest
from dse_files import changed, write

from forerun.astrasim.dse.definition import read_exploration
from forerun.astrasim.dse.explore import evaluator_of, keys_of
from forerun.astrasim.dse.points import key_of, listed_points
from forerun.astrasim.dse.space import Draw, Plan, Point
from forerun.astrasim.dse.workload import Strategy
from forerun.common.errors import ForerunError

TWO = [("workloads.other", {**changed()["workloads"]["tiny"], "num_stacks": 3}), ("plan", None)]


def keys(exploration, workload="tiny"):
    return [key_of(point.strategy) for point in exploration.points if point.workload == workload]


def exploration(tmp_path, *changes, **options):
    return read_exploration(write(tmp_path, changed(*changes)), **options)


def test_a_list_of_keys_is_explored_in_its_order(tmp_path):
    (tmp_path / "space.yaml").write_text(
        (write(tmp_path, changed(("plan", None))).read_text())
        + "points:\n- 8_1_1_1_0\n- 2_2_2_1_1\n- {dp: 1, tp: 8, weight_sharded: true}\n- 8_1_1_1_0\n"
    )
    found = read_exploration(tmp_path / "space.yaml")
    assert keys(found) == ["8_1_1_1_0", "2_2_2_1_1", "1_8_1_1_0_sharded"]
    assert found.points[1].strategy == Strategy(2, 2, 2, activation_recompute=True)


def test_each_workload_may_have_points_of_its_own(tmp_path):
    found = exploration(tmp_path, *TWO, ("points", {"tiny": ["8_1_1_1_0"], "other": ["1_8_1_1_0", "1_1_8_1_1"]}))
    assert keys(found) == ["8_1_1_1_0"]
    assert keys(found, "other") == ["1_8_1_1_0", "1_1_8_1_1"]
    both = exploration(tmp_path, *TWO, ("points", ["8_1_1_1_0"]))
    assert keys(both) == keys(both, "other") == ["8_1_1_1_0"]


@pytest.mark.parametrize(
    "content",
    [
        "8_1_1_1_0\n2_2_2_1_1\n",
        "8_1_1_1_0 2_2_2_1_1",
        "- 8_1_1_1_0\n- 2_2_2_1_1\n",
        json.dumps(["8_1_1_1_0", "2_2_2_1_1"]),
        json.dumps({"8_1_1_1_0": {"wall_time": 3}, "2_2_2_1_1": {"wall_time": 4}}),
        "tiny: 8_1_1_1_0 2_2_2_1_1",
    ],
)
def test_a_file_of_points_takes_the_place_of_the_plan(tmp_path, content):
    path = tmp_path / "points"
    path.write_text(content)
    found = exploration(tmp_path, ("sample", {"n": 1}), points=path)
    assert keys(found) == ["8_1_1_1_0", "2_2_2_1_1"]


@pytest.mark.parametrize("strategy", [Strategy(2, 4), Strategy(2, 2, 2, 2, 4, True, True), Strategy(ep=2)])
def test_keys_are_read_back(tmp_path, strategy):
    npus = {"s": strategy.n_ranks}
    assert listed_points([key_of(strategy)], [("w", "s")], npus, "here") == [Point("w", "s", strategy)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([("points", ["8_1_1_1_0"])], "points and plan both say what is explored"),
        ([("plan", None), ("points", ["8_1_1"])], "points: a point is dp_tp_sp_pp_ar, as 8_1_8_1_1"),
        ([("plan", None), ("points", ["8_1_1_1_2"])], "points: a point is dp_tp_sp_pp_ar"),
        ([("plan", None), ("points", ["4_1_1_1_0"])], "points: 4_1_1_1_0 has 4 ranks, but system 'torus' has 8 NPUs"),
        ([("plan", None), ("points", ["0_1_1_1_0"])], "degrees are whole numbers of at least 1"),
        ([("plan", None), ("points", [])], "there is no point of workload 'tiny'"),
        ([("plan", None), ("points", 7)], "points: expected a list of points"),
        ([("plan", None), ("points", {"tinny": []})], "unknown workload in"),
        ([("plan", None), ("points", [{"dpp": 8}])], "unknown axis in"),
        ([("plan", None), ("points", [{"dp": "8"}])], "points: dp: expected a whole number of at least 1"),
        ([("plan", None), ("points", [{"weight_sharded": 1}])], "points: weight_sharded: expected true or false"),
        ([("sample", {"n": 3}), ("sampling", "all")], "sampling and sample both choose points"),
        ([("sample", {"n": 0})], "sample.n: give at least 1"),
        ([("sample", {"n": 3, "points": 3})], "sample: unknown key 'points'"),
        ([("release", "2024-01")], "known: 2025-03, 2025-04"),
        ([("memory_limit", 80)], "memory_limit: give a size above 0 with its unit, as 80 GB"),
        ([("memory_limit", "80 Gb")], "memory_limit: give a size above 0 with its unit"),
        ([("memory_limit", "0 GB")], "memory_limit: give a size above 0 with its unit"),
        ([("memory_limit", "80 GB"), ("memory_limit_gib", 3.0)], "give either it or memory_limit_gib, not both"),
        ([("systems.torus.memory_limit", "much")], "systems.torus.memory_limit: give a size above 0"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_it(tmp_path, changes, said):
    with pytest.raises(ForerunError) as caught:
        exploration(tmp_path, *changes)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@dataclass(frozen=True, order=True)
class Drawn:
    """A point of a script that sorts its design space before it draws from it."""

    name: str
    dp: int
    tp: int
    pp: int
    sp: int
    recompute: bool


def drawn_by_a_script(seed, n, names):
    """Two design spaces of 64 ranks, drawn one after the other after one seed."""
    values = [1, 2, 4, 8, 16, 32, 64]
    random.seed(seed)
    drawn = []
    for name in names:
        space = [
            Drawn(f"{name}_{dp}_{tp}_1_{sp}_False_{again}", dp, tp, 1, sp, again)
            for dp, tp, sp, again in product(values, values, values, [True, False])
            if dp * tp * sp == 64
        ]
        drawn.append({f"{one.dp}_{one.tp}_{one.sp}_1_{int(one.recompute)}" for one in random.sample(sorted(space), n)})
    return drawn


@pytest.mark.parametrize(("seed", "n"), [(0, 20), (3, 7), (1, 56)])
def test_a_sample_is_the_one_that_a_script_draws(seed, n):
    plan = Plan(activation_recompute=(False, True))
    points = [Point(name, "torus", strategy) for name in ("llama70b", "gpt175b") for strategy in plan.strategies(64)]
    sample = Draw(n, seed).sample(points)
    mine = [{key_of(point.strategy) for point in sample if point.workload == name} for name in ("llama70b", "gpt175b")]
    assert mine == drawn_by_a_script(seed, n, ("llama70b", "gpt175b"))
    assert sample == [point for point in points if point in set(sample)]
    assert Draw(1000).sample(points) == points


def test_the_issue_order_is_that_of_the_release_unless_it_is_given(tmp_path):
    def order(*changes, **options):
        return exploration(tmp_path, *changes, **options).issue_order

    assert order() == "ascending"
    assert order(("release", "2025-03")) == "march-2025"
    assert order(("release", "2025-03"), ("issue_order", "ascending")) == "ascending"
    assert order(("issue_order", "march-2025"), release="2025-04") == "ascending"
    assert order(release="2025-03") == "march-2025"
    assert order(release="2025-03", issue_order="ascending") == "ascending"


def test_limits_are_in_the_unit_in_which_they_are_given(tmp_path):
    found = exploration(tmp_path, ("memory_limit", "80 GB")).memory_limits["torus"]
    assert (str(found), found.gib) == ("80 GB", pytest.approx(80e9 / 2**30))
    assert exploration(tmp_path, ("memory_limit", "1.5 GiB")).memory_limits["torus"].gib == 1.5
    own = exploration(tmp_path, ("memory_limit_gib", 3.0), ("systems.torus.memory_limit", "2 GB"))
    assert str(own.memory_limits["torus"]) == "2 GB"
    assert str(exploration(tmp_path, ("memory_limit_gib", 64.0)).memory_limits["torus"]) == "64 GiB"


def test_groups_run_what_the_release_lets_them_run(tmp_path):
    """Since master, groups of a system with one dimension run its algorithm; before, the ring."""
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
    changes = [(f"systems.torus.system.{kind}-implementation", ["direct"]) for kind in kinds]
    network = {"topology": ["Switch"], "npus_count": [8], "bandwidth": 50.0, "latency": 500.0}
    times, keys = [], []
    for release in ("2025-04", "master"):
        found = exploration(tmp_path, *changes, ("systems.torus.network", network), ("release", release))
        point = next(one for one in found.points if one.strategy.tp == 4 and one.strategy.dp == 2)
        times.append(evaluator_of(found).outcome(point).time_ns)
        keys.append(keys_of(found)[0])
    assert times[1] < times[0]
    assert keys[0] != keys[1]
