"""A fit to whole steps that is written by hand: figures of its errors, tables and lines of CSV."""

from __future__ import annotations

from math import isnan, log
from types import SimpleNamespace as Hand

import numpy as np
import pytest
from printed_lines import joined, words

from forerun.describe.model.catalog import load_model
from forerun.evidence.fitting.left_out import AnchoredErrors
from forerun.interfaces.report import step_fit_table
from forerun.interfaces.report.step_fit_table import Anchored, print_step_fit, step_fit_csv, step_fit_record

NONE = np.zeros(0)
LONGER, SHORTER = log(1.2), log(0.8)


def step(name, source, family, stack, model="gpt2-small", measured_s=2.0, informs=True):
    setup = Hand(stack=Hand(name=stack), cluster=Hand(device=Hand(name="h100")), model=load_model(model))
    return Hand(name=name, source=source, family=family, setup=setup, measured_s=measured_s, informs=informs)


STEPS = (
    step("a", "paper", "torch", "torchtitan"),
    step("b", "paper", "torch", "torchtitan-2024", "llama-3.1-8b"),
    step("c", "blog", "nvidia", "megatron-core", "llama-3.1-8b", 4.0),
    step("d", "blog", "nvidia", "megatron-core", measured_s=1.0, informs=False),
)


def constant(name, kind, **figures):
    usual = {"prior": 0.5, "value": 1234.6, "sigma": 0.12345, "rows": 3}
    of = Hand(name=name, of=("h100",), kind=kind, shipped=0.123456, source="here")
    return Hand(constant=of, **{**usual, **figures})


FIT = Hand(
    steps=STEPS,
    kinds=(Hand(name="clock", prior=0.9, value=0.8, sigma=0.05, kind=Hand(source="there")),),
    constants=(constant("sustained", "clock"), constant("memory_rate", None, value=0.5)),
    shipped_s=np.array([2.4, 2.0, 4.0, 9.0]),
    fitted_s=np.array([2.0, 2.0, 3.2, 9.0]),
)


def errors(*each):
    """Errors without an anchor; steps a and b are anchors of each other, and c has two."""
    same = (np.array([LONGER]), np.array([SHORTER]), np.array([0.0, LONGER]), NONE)
    return AnchoredErrors(np.array(each), same, (NONE,) * 4, (np.array([SHORTER]), NONE, NONE, NONE))


ANCHORED = Anchored(errors(LONGER, 0.0, 0.0, 0.0), errors(LONGER, SHORTER, 0.0, 0.0))
BY_SOURCE = np.array([LONGER, LONGER, SHORTER, 0.0])


def test_figures_of_errors():
    found = step_fit_table._figures(np.log([1.2, 0.8, 1.0, 1.4]))
    assert found == {
        "rows": 4, "MAPE": pytest.approx(0.2), "median": pytest.approx(0.2), "p90": pytest.approx(0.34),
        "signed": pytest.approx(0.1),
    }  # fmt: skip
    nothing = step_fit_table._figures(NONE)
    assert (nothing["rows"], all(isnan(nothing[name]) for name in ("MAPE", "median", "p90", "signed"))) == (0, True)
    weighted = step_fit_table._figures(np.log([1.4, 1.1]), np.array([1.0, 3.0]))
    assert (weighted["MAPE"], weighted["signed"]) == (pytest.approx(0.175), pytest.approx(0.175))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_quantiles_of_equal_weights_are_those_of_numpy(share):
    values = np.random.default_rng(1).random(17)
    for weight in (1.0, 0.25):
        found = step_fit_table._quantile(values, np.full(17, weight), share)
        assert found == pytest.approx(np.quantile(values, share))
    assert step_fit_table._quantile(np.array([3.0]), np.array([2.0]), share) == 3.0


def test_quantiles_go_by_weight():
    """From the first value 1 to the last one 5 there is a weight of 4; 3 stands at a half and 2 at a quarter of it."""
    values, weights = np.array([5.0, 1.0, 3.0, 2.0]), np.array([2.0, 9.0, 1.0, 1.0])
    for share, value in ((0.25, 2.0), (0.5, 3.0), (0.75, 4.0), (0.125, 1.5)):
        assert step_fit_table._quantile(values, weights, share) == pytest.approx(value)


def test_a_fit_as_a_record():
    record = step_fit_record(FIT, ANCHORED, BY_SOURCE)
    assert record["kinds"] == [{"name": "clock", "prior": 0.9, "value": 0.8, "sigma": 0.05, "source": "there"}]
    assert record["constants"][0] == {
        "name": "sustained", "of": ["h100"], "kind": "clock", "prior": 0.5, "shipped": 0.123456, "value": 1234.6,
        "sigma": 0.12345, "rows": 3, "source": "here",
    }  # fmt: skip
    # steps that inform: 2.4 and 2.0 for 2.0 s, 4.0 for 4.0 s; fitted 2.0, 2.0 and 3.2
    assert (record["shipped"]["rows"], record["shipped"]["MAPE"]) == (3, pytest.approx(0.2 / 3))
    assert (record["shipped"]["signed"], record["fitted"]["signed"]) == (
        pytest.approx(0.2 / 3), pytest.approx(-0.2 / 3),
    )  # fmt: skip
    left_out = record["left_out"]
    assert {name: one["rows"] for name, one in left_out.items()} == {"torch": 2, "nvidia": 2, "all": 4}
    assert [left_out[name]["MAPE"] for name in left_out] == [pytest.approx(0.2), 0.0, pytest.approx(0.1)]
    near = record["anchored"]["same_cluster"]["fitted"]
    # of step c the anchors count half each: 0 and 20 %
    assert (near["torch"]["MAPE"], near["nvidia"]["MAPE"]) == (pytest.approx(0.2), pytest.approx(0.1))
    assert (near["nvidia"]["rows"], near["all"]["rows"]) == (1, 3)
    assert near["all"]["MAPE"] == pytest.approx(0.5 / 3)
    best = record["anchored"]["best"]["left_out"]
    assert (best["torch"]["signed"], best["nvidia"]["rows"]) == (pytest.approx(-0.2), 0)
    assert record["anchored"]["same_run"]["fitted"]["all"]["rows"] == 0
    plain = step_fit_record(FIT, None)
    assert (plain["left_out"], plain["anchored"], plain["left_out_sources"]) == ({}, {}, {})


def test_sources_that_are_left_out_count_once_each():
    found = step_fit_record(FIT, None, BY_SOURCE)["left_out_sources"]
    assert list(found["sources"]) == ["blog", "paper"]
    assert [found["sources"][name]["MAPE"] for name in ("blog", "paper")] == [pytest.approx(0.1), pytest.approx(0.2)]
    assert {name: (one["rows"], one["sources"]) for name, one in found["stacks"].items()} == {
        "megatron-core": (2, 1), "torchtitan": (1, 1), "torchtitan-2024": (1, 1),
    }  # fmt: skip
    assert (found["mean_over_sources"]["rows"], found["mean_over_sources"]["MAPE"]) == (2, pytest.approx(0.15))
    assert found["mean_over_sources"]["signed"] == pytest.approx((0.2 - 0.1) / 2)
    # of models from a billion parameters on there are b and c
    large = found["mean_over_sources_of_large_models"]
    assert (large["rows"], large["MAPE"], large["signed"]) == (2, pytest.approx(0.2), pytest.approx(0.0, abs=1e-12))
    assert (found["all_rows"]["rows"], found["all_rows"]["MAPE"]) == (4, pytest.approx(0.15))
    none = step_fit_table._by_source(Hand(steps=(STEPS[0], STEPS[3])), BY_SOURCE[:2])
    assert none["mean_over_sources_of_large_models"]["rows"] == 0


def test_a_layered_model_counts_as_large():
    assert step_fit_table._parameters(Hand(setup=Hand(model="layers"))) == step_fit_table.LARGE_PARAMETERS


def test_lines_of_csv():
    head = "id,source,family,stack,device,measured_s,shipped_s,fitted_s,left_out_s,anchored_mape"
    assert step_fit_csv(FIT, ANCHORED).splitlines()[:5] == [
        head,
        "a,paper,torch,torchtitan,h100,2,2.4,2,2.4,0.2",
        "b,paper,torch,torchtitan-2024,h100,2,2,2,1.6,0.2",
        "c,blog,nvidia,megatron-core,h100,4,4,3.2,4,0.1",
        "d,blog,nvidia,megatron-core,h100,1,9,9,1,",
    ]
    assert step_fit_csv(FIT, None, BY_SOURCE).splitlines()[3] == "c,blog,nvidia,megatron-core,h100,4,4,3.2,3.2,"
    assert step_fit_csv(FIT, None).splitlines()[3] == "c,blog,nvidia,megatron-core,h100,4,4,3.2,,"


def test_a_fit_in_tables():
    plain = words(print_step_fit, FIT, None, None)
    assert plain == joined([
        ["Kinds of constants"], ["kind", "prior", "fitted", "sigma"], ["clock", "0.9", "0.8", "0.050"],
        ["Constants (rows: steps that inform it; sigma: of its logarithm)"],
        ["constant", "kind", "prior", "shipped", "fitted", "sigma", "rows"],
        ["sustained", "clock", "0.5", "0.123", "1235", "0.123", "3"],
        ["memory_rate", "0.5", "0.123", "0.5", "0.123", "3"],
        ["Step time, %"], ["constants", "rows", "MAPE", "median", "p90", "signed"],
        ["shipped", "3", "6.67", "0.00", "16.00", "+6.67"], ["fitted", "3", "6.67", "0.00", "16.00", "-6.67"],
        ["Not written; --write puts the constants into Forerun's files."],
    ])  # fmt: skip
    whole = words(print_step_fit, FIT, ANCHORED, ["a.yaml", "b.yaml"], BY_SOURCE)
    assert whole[11:16] == joined([
        ["Step time with a family of stacks left out of the fit, %"],
        ["family", "rows", "MAPE", "median", "p90", "signed"], ["torch", "2", "20.00", "20.00", "20.00", "+0.00"],
        ["nvidia", "2", "0.00", "0.00", "0.00", "+0.00"], ["all", "4", "10.00", "10.00", "20.00", "+0.00"],
    ])  # fmt: skip
    titles = [line for line in whole if line.startswith(("The same with", "Fitted to all"))]
    assert len(titles) == 6
    at = whole.index("Step time with a source left out of the fit, %")
    assert whole[at:] == joined([
        ["Step time with a source left out of the fit, %"], ["source", "rows", "MAPE", "median", "p90", "signed"],
        ["blog", "2", "10.00", "10.00", "18.00", "-10.00"], ["paper", "2", "20.00", "20.00", "20.00", "+20.00"],
        ["mean over sources", "2", "15.00", "15.00", "19.00", "+5.00"],
        ["mean over sources, models from 1B", "2", "20.00", "20.00", "20.00", "+0.00"],
        ["all rows", "4", "15.00", "20.00", "20.00", "+5.00"],
        ["The same by stack, %"], ["stack", "sources", "rows", "MAPE", "median", "p90", "signed"],
        ["megatron-core", "1", "2", "10.00", "10.00", "18.00", "-10.00"],
        ["torchtitan", "1", "1", "20.00", "20.00", "20.00", "+20.00"],
        ["torchtitan-2024", "1", "1", "20.00", "20.00", "20.00", "+20.00"],
        ["Written: a.yaml, b.yaml"],
    ])  # fmt: skip
    assert words(print_step_fit, FIT, None, [])[-1] == "Written: nothing changed"
    assert step_fit_table._percents(step_fit_table._figures(NONE)) == ["0", "-", "-", "-", "-"]
