"""Heat maps of a search: what is said of a cell holds of all its plans."""

from functools import lru_cache

import numpy as np
import pytest
from kept_search import small_search

from forerun.answers.search.heat import MOST_VALUES, HeatMap, Known, heat_map, telling_maps
from forerun.answers.search.result import SearchResult
from forerun.answers.search.search import search
from forerun.common.errors import ForerunError
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model

PAIRS = [("pp", "micro_batch"), ("activation_checkpointing", "dp"), ("zero_stage", "tp")]


@lru_cache(maxsize=2)
def found(exhaustive: bool) -> SearchResult:
    return small_search(None, exhaustive=exhaustive, memory_limit_gib=1.2425, keep=2)


def cells(shown: HeatMap) -> dict[tuple[str, str], tuple[Known, float]]:
    return {
        (x, y): (Known(int(shown.known[j, i])), float(shown.value[j, i]))
        for i, x in enumerate(shown.x_values)
        for j, y in enumerate(shown.y_values)
    }


def value_of(plan, axis: str) -> str:
    return str(plan.dp if axis == "dp" else getattr(plan, axis))


@pytest.mark.parametrize(("x", "y"), PAIRS)
def test_a_cell_of_what_was_all_simulated_is_its_best_plan(x, y):
    result = found(exhaustive=True)
    best: dict[tuple[str, str], float] = {}
    needs: dict[tuple[str, str], float] = {}
    for each in result.ranked:
        key = (value_of(each.own_plan(), x), value_of(each.own_plan(), y))
        best[key] = min(best.get(key, np.inf), each.step_time_s)
    for large in result.too_large:
        key = (value_of(large.plan, x), value_of(large.plan, y))
        needs[key] = min(needs.get(key, np.inf), large.needs_gib)
    shown = heat_map(result, x, y)
    for key, (known, value) in cells(shown).items():
        if key in best:
            assert (known, value) == (Known.BEST, best[key])
        elif key in needs:
            assert (known, value) == (Known.TOO_LARGE, needs[key])
        else:
            assert known == Known.NOTHING
            assert np.isnan(value)
    assert shown.plans.sum() == len(result.ranked) + len(result.too_large)


@pytest.mark.parametrize(("x", "y"), PAIRS)
def test_what_was_not_simulated_gives_a_bound(x, y):
    short, whole = found(False), found(True)
    truth = cells(heat_map(whole, x, y))
    for key, (known, value) in cells(heat_map(short, x, y)).items():
        true_kind, true_value = truth[key]
        if known == Known.BOUND:
            assert true_kind != Known.NOTHING
            assert true_kind == Known.TOO_LARGE or value <= true_value
        elif known == Known.BEST:
            assert (true_kind, true_value) == (known, value)
        else:
            assert known == true_kind


def test_all_that_may_be_known_of_a_cell_is_there():
    maps = [heat_map(found(False), *pair) for pair in (*PAIRS, ("dp", "micro_batch"))]
    assert {Known(int(known)) for shown in maps for known in shown.known.ravel()} == set(Known)


@pytest.mark.parametrize(("x", "y"), PAIRS)
def test_each_degree_of_knowledge_has_its_own_value(x, y):
    """A cell is as good as its best plan, unless one that was skipped may be better or none fits."""
    result = found(exhaustive=False)
    plans = [(each.own_plan(), Known.BEST, each.step_time_s) for each in result.ranked]
    plans += [(each.plan, Known.BOUND, each.at_least) for each in result.skipped]
    plans += [(each.plan, Known.TOO_LARGE, each.needs_gib) for each in result.too_large]
    least: dict[tuple[str, str], dict[Known, float]] = {}
    for plan, kind, value in plans:
        of_cell = least.setdefault((value_of(plan, x), value_of(plan, y)), {})
        of_cell[kind] = min(of_cell.get(kind, np.inf), value)
    shown = {key: cell for key, cell in cells(heat_map(result, x, y)).items() if cell[0] != Known.NOTHING}
    assert shown.keys() == least.keys()
    for key, (known, value) in shown.items():
        fits, may, needs = (least[key].get(kind, np.inf) for kind in (Known.BEST, Known.BOUND, Known.TOO_LARGE))
        if fits <= may and fits < np.inf:
            assert (known, value) == (Known.BEST, fits)
        elif may < np.inf:
            assert (known, value) == (Known.BOUND, may)
        else:
            assert (known, value) == (Known.TOO_LARGE, needs)


def test_the_best_plan_is_in_every_map():
    result = found(False)
    best = result.ranked[0].step_time_s
    for shown in telling_maps(result, 4):
        assert best == min(value for known, value in cells(shown).values() if known == Known.BEST)


def test_maps_are_chosen_once_and_no_axis_is_in_many():
    maps = telling_maps(found(False), 4)
    pairs = [frozenset((shown.x, shown.y)) for shown in maps]
    assert 2 <= len(pairs) == len(set(pairs))
    axes = [axis for pair in pairs for axis in pair]
    assert max(axes.count(axis) for axis in axes) <= 2
    assert all(len(shown.x_values) <= len(shown.y_values) for shown in maps)
    assert telling_maps(found(False), 1)[0].x == maps[0].x


def test_values_that_a_field_lists_stand_in_its_order():
    assert heat_map(found(False), "pp_schedule", "tp").x_values[:2] == ("1F1B", "Interleaved1F1B")
    assert heat_map(found(False), "micro_batch", "dp").y_values == ("1", "2", "4", "8")


def test_of_many_values_the_best_are_shown():
    fixed = {"checkpoint_every": list(range(1, 21)), "activation_checkpointing": "full", "micro_batch": [1, 2]}
    question = (load_model("gpt2-small"), load_cluster("h100-sxm"), 1, 1024, 4)
    result = search(*question, fixed=fixed, keep=1, workers=1)
    shown = heat_map(result, "checkpoint_every", "micro_batch")
    assert (len(shown.x_values), shown.x_left_out) == (MOST_VALUES, 4)
    assert str(result.ranked[0].own_plan().checkpoint_every) in shown.x_values
    assert [int(value) for value in shown.x_values] == sorted(int(value) for value in shown.x_values)
    with pytest.raises(ForerunError, match="no heat map of 'dp': the plans differ in"):  # one GPU has one degree
        heat_map(result, "dp", "micro_batch")


def test_of_many_values_those_that_fit_are_shown():
    """With so little memory few ways to checkpoint leave room."""
    fixed = {
        "checkpoint_every": list(range(1, 21)),
        "activation_checkpointing": "full",
        "micro_batch": [1, 2],
        "compile": False,
    }
    question = (load_model("gpt2-small"), load_cluster("h100-sxm"), 1, 1024, 4)
    result = search(*question, fixed=fixed, keep=1, workers=1, exhaustive=True, memory_limit_gib=3.4)
    fit = {str(each.own_plan().checkpoint_every) for each in result.ranked}
    assert 0 < len(fit) < MOST_VALUES
    assert fit <= set(heat_map(result, "checkpoint_every", "micro_batch").x_values)


def test_axes_that_do_not_differ_are_refused():
    result = found(False)
    with pytest.raises(ForerunError, match="no heat map of 'cp': the plans differ in dp, micro_batch"):
        heat_map(result, "tp", "cp")
    with pytest.raises(ForerunError, match="two axes, got 'tp' twice"):
        heat_map(result, "tp", "tp")


def test_long_values_stand_under_each_other():
    fixed = {"mesh_order": ["tp-cp-dp_shard-dp_replicate-pp", "pp-tp-cp-dp_shard-dp_replicate"], "micro_batch": [1, 2]}
    question = (load_model("gpt2-small"), load_cluster("h100-sxm"), 16, 1024, 32)
    result = search(*question, fixed={**fixed, "tp": 2, "pp": 2, "zero_stage": 3}, keep=1, workers=1)
    for pair in (("mesh_order", "micro_batch"), ("micro_batch", "mesh_order")):
        shown = heat_map(result, *pair)
        assert (shown.x, shown.y) == ("micro_batch", "mesh_order")
        assert len(shown.y_values) == 2
