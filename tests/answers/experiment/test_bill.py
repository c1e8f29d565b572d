"""Bills against figures worked out by hand."""

from dataclasses import replace

import pytest

from forerun.answers.analysis.predict import simulate
from forerun.answers.analysis.setup import RankKind, Setup
from forerun.answers.experiment.bill import bill_of, busy_share
from forerun.answers.experiment.request import Prices, Request
from forerun.describe.cluster.catalog import load_cluster, load_device
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan

H100 = replace(load_cluster("h100-sxm"), price_per_gpu_hour=3.0)
MODEL = load_model("gpt2-small")


def request(n_gpus=16, cluster=H100, kinds=(), **prices):
    setup = Setup(MODEL, Plan(seq_len=1024, dp_replicate=n_gpus, zero_stage=0), cluster, kinds=kinds)
    return Request("run", setup, prices=Prices(**prices))


def test_gpu_hours_and_dollars():
    bill = bill_of(request(), total_s=1800.0, samples=2_000_000, tokens=4_000_000_000)
    assert bill.gpu_hours == 8.0
    assert bill.dollars_per_hour == 48.0
    assert bill.dollars == 24.0
    assert bill.dollars_per_billion_tokens == 6.0
    assert bill.dollars_per_million_samples == 12.0
    assert bill.energy_dollars is None


def test_energy_of_gpus_and_hosts():
    # 16 x 700 W x (0.75 + 0.4 x 0.25) + 2 x 1000 W = 9520 + 2000 W, x 1.25 = 14.4 kW, for half an hour
    known = request(dollars_per_kwh=0.25, pue=1.25, host_power_w=1000.0, idle_power=0.4)
    bill = bill_of(known, 1800.0, 1, None, busy_share=0.75)
    assert H100.device.power_w == 700
    assert bill.energy_kwh == pytest.approx(7.2)
    assert bill.energy_dollars == pytest.approx(1.8)
    assert bill.dollars == pytest.approx(25.8)
    assert bill.dollars_per_hour == pytest.approx(51.6)
    assert bill.dollars_per_billion_tokens is None


def test_a_node_that_is_not_full_has_a_host_too():
    bill = bill_of(request(4, host_power_w=1000.0), 3600.0, 1, 1)
    assert bill.energy_kwh == pytest.approx(4 * 0.7 + 1.0)


def test_without_a_price_there_are_no_dollars():
    bill = bill_of(request(cluster=replace(H100, price_per_gpu_hour=None), dollars_per_kwh=0.1), 3600.0, 5, 5)
    assert bill.dollars is None
    assert bill.dollars_per_hour is None
    assert bill.dollars_per_million_samples is None
    assert bill.gpu_hours == 16.0
    assert bill.energy_dollars == pytest.approx(1.12)


def test_prices_by_name_go_before_those_for_all_and_the_clusters_own():
    def per_hour(**prices):
        return bill_of(request(1, **prices), 3600.0, 1, 1).dollars_per_hour

    assert per_hour() == 3.0
    assert per_hour(dollars_per_gpu_hour=2.0) == 2.0
    assert per_hour(dollars_per_gpu_hour=2.0, by_name={"h100-sxm-80gb": 1.5}) == 1.5
    assert per_hour(dollars_per_gpu_hour=2.0, by_name={"h100-sxm-80gb": 1.5, "h100-sxm": 1.25}) == 1.25


def test_kinds_are_priced_and_powered_by_their_own_device():
    kinds = (RankKind("old", 4, load_device("a100")), RankKind("slow", 2, slowdown=1.5))
    prices = {"dollars_per_gpu_hour": 3.0, "by_name": {"a100-sxm-80gb": 1.5}}
    bill = bill_of(request(16, kinds=kinds, **prices), 3600.0, 1, 1)
    assert bill.dollars == 12 * 3.0 + 4 * 1.5
    assert bill.energy_kwh == pytest.approx(12 * 0.7 + 4 * 0.4)
    unknown = bill_of(request(16, kinds=kinds, dollars_per_gpu_hour=3.0), 3600.0, 1, 1)
    assert unknown.dollars == 48.0


def test_list_prices_hold_for_kinds_where_no_price_is_given():
    kinds = (RankKind("old", 4, load_device("v100")), RankKind("slow", 2, slowdown=1.5))
    assert bill_of(request(16, kinds=kinds), 3600.0, 1, 1).dollars == pytest.approx(12 * 3.0 + 4 * 0.55)


def test_busy_share_is_the_kernels_part_of_the_step():
    setup = request(8).setup
    simulation = simulate(MODEL, setup.plan, setup.cluster)
    waiting = ("exposed_data_parallel", "host", "bubble")
    breakdown = simulation.prediction.breakdown
    expected = 1 - sum(breakdown.get(name, 0.0) for name in waiting) / simulation.prediction.step_time_s
    assert 0 < busy_share(simulation) < 1
    assert busy_share(simulation) == pytest.approx(expected)
