"""Advice is simulated before it is given, and none makes a run worse."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.answers.analysis.bottlenecks import bottlenecks
from forerun.answers.analysis.setup import RankKind, Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.answers.experiment.advice.advise import LEAST_GAIN, advise
from forerun.answers.experiment.advice.candidates import _gradients as gradient_candidates
from forerun.answers.experiment.advice.candidates import _states as state_candidates
from forerun.answers.experiment.advice.candidates import _zero_stages as other_zero_stages
from forerun.answers.experiment.advice.machine import devices as other_devices
from forerun.answers.experiment.description.read import changed, read_experiment
from forerun.answers.experiment.request import Prices, Request, Thresholds
from forerun.common.errors import ForerunError
from forerun.core.network.patterns_catalog import pattern_of
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_any
from forerun.describe.plan.plan import Plan

A100, H100, V100 = (load_cluster(name) for name in ("a100", "h100", "v100"))
V100S = {"gpu_model": "V100", "num_nodes": 1, "batch_size_per_gpu": 512}
MODELS = ("gpt2-small", "bert-large", "llama-3.2-1b", "llama-3-8b", "mixtral-8x7b", "resnet50")
FILE = {
    "hardware": {"gpu_model": "V100", "network_bandwidth_gbps": 25},
    "model": {"model_type": "gpt2", "num_layers": 12, "sequence_length": 1024},
    "training": {"micro_batch": 4, "num_nodes": 4, "communication_pattern": "ring_allreduce", "mixed_precision": False},
    "prices": {"dollars_per_gpu_hour": {"v100-dgx1": 0.5}},
}


@pytest.fixture(scope="module")
def of_file():
    """What FILE describes, and the advice on it."""
    request = read_experiment(FILE)
    return request, advise(request)


def request_of(model, cluster, **plan):
    return Request("run", Setup(load_any(model), Plan(**plan), cluster))


def by_kind(request, **options):
    return {each.kind: each for each in advise(request, **options)}


def check(request, advice):
    """Every advice again by a whole simulation of its own."""
    base = simulate_setup(request.setup).prediction
    samples = request.setup.samples_per_step / base.step_time_s
    for each in advice:
        again = simulate_setup(each.setup).prediction
        gain = each.setup.samples_per_step / again.step_time_s / samples - 1
        assert again.fits, each.title
        assert each.gain == pytest.approx(gain, abs=1e-9), each.title
        assert each.after.peak_reserved_gib == again.peak_reserved_gib
        assert each.text.startswith(each.title)
        if not base.fits:
            assert each.aim == "memory"
        elif each.aim == "speed":
            assert gain > LEAST_GAIN, each.title
        elif each.aim == "memory":
            assert gain >= 0
            assert base.peak_reserved_gib > request.thresholds.memory * base.memory_limit_gib
            assert again.peak_reserved_gib < base.peak_reserved_gib - 0.1 * base.memory_limit_gib
        else:
            assert each.after.dollars_per_million_samples < (1 - LEAST_GAIN) * each.before.dollars_per_million_samples


@st.composite
def requests(draw):
    """Runs of several models, meshes, precisions and clusters, also such as do not fit."""
    cluster = draw(st.sampled_from([A100, H100, V100]))
    model = draw(
        st.sampled_from(["gpt2-small", "bert-large", "llama-3.2-1b", "llama-3-8b", "mixtral-8x7b", "resnet50"])
    )
    transformer = model != "resnet50"
    tp, pp = (draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))) if transformer else (1, 1)
    data, zero_stage = draw(st.sampled_from([4, 8, 16])), draw(st.sampled_from([0, 3]))
    plan = Plan(
        seq_len=512 if transformer else 1,
        micro_batch=draw(st.sampled_from([1, 4, 32])),
        n_microbatches=draw(st.sampled_from([1, 2, 4])),
        dp_replicate=data if zero_stage == 0 else 1,
        dp_shard=1 if zero_stage == 0 else data,
        zero_stage=zero_stage,
        tp=tp,
        pp=pp,
        precision=draw(st.sampled_from(["fp32", "fp16" if cluster is V100 else "bf16"])),
        activation_checkpointing=draw(st.sampled_from(["none", "full"])) if transformer else "none",
        overlap_grad_reduce=draw(st.booleans()),
        stack="pytorch",
        ddp_bucket_mib=25.0,
    )
    pattern = draw(st.sampled_from([None, "tree_allreduce", "parameter_server"])) if zero_stage == 0 else None
    slow = RankKind("slow", tp * pp, slowdown=1.2, micro_batch=draw(st.sampled_from([None, 2])))
    kinds = (slow,) if draw(st.booleans()) else ()
    setup = Setup(load_any(model), plan, cluster, pattern=pattern_of(pattern), kinds=kinds)
    return Request("run", setup, prices=Prices(dollars_per_gpu_hour=draw(st.sampled_from([None, 2.0]))))


def holds_of(request):
    try:
        base = simulate_setup(request.setup)
    except ForerunError:
        return
    advice = advise(request, base, plans=6)
    check(request, advice)
    assert [each.text for each in advice] == [each.text for each in advise(request, plans=6)]


@settings(max_examples=3, deadline=None)
@given(requests())
def test_every_advice_brings_what_it_says(request):
    holds_of(request)


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(requests())
def test_every_advice_of_many_runs_brings_what_it_says(request):
    holds_of(request)


def test_the_change_makes_the_advised_setup_from_the_file(of_file):
    request, advice = of_file
    check(request, advice)
    assert {"precision", "torch.compile", "gradient precision", "gradient compression", "device"} <= {
        each.kind for each in advice
    }
    for each in advice:
        assert changed(request, each.change).setup == each.setup, each.title


def test_uneven_batches_keep_their_proportion():
    request = read_experiment("mixed-a100-v100")
    advice = advise(changed(request, {"training.batch_size_per_gpu": 2048, "hardware.mixed": [V100S]}))
    smaller = next(each for each in advice if each.kind == "batch")
    assert smaller.setup.kinds[0].micro_batch * 4 == smaller.setup.plan.micro_batch
    assert smaller.after.samples_per_step == smaller.setup.samples_per_step
    for each in advise(request):
        assert changed(request, each.change).setup == each.setup, each.title


def test_gains_come_first_then_devices_and_what_is_only_cheaper(of_file):
    _, advice = of_file
    own = [each.gain for each in advice if each.kind != "device" and each.aim == "speed"]
    assert own == sorted(own, reverse=True)
    order = [(each.kind == "device", each.aim == "cost") for each in advice]
    assert order == sorted(order)


def test_what_makes_a_run_fit_leads():
    request = request_of("llama-3-8b", A100, seq_len=8192, micro_batch=2, dp_shard=16, stack="pytorch")
    base = simulate_setup(request.setup).prediction
    assert not base.fits
    advice = advise(request)
    check(request, advice)
    assert advice[0].kind != "device"
    assert "fits in memory" in advice[0].text
    found = {each.kind for each in advice}
    assert {"batch", "activation checkpointing", "plan"} & found
    assert next(each for each in advice if each.kind == "batch").after.samples_per_step == 32


def test_what_needs_every_saver_is_told_all_of_them():
    request = request_of(
        "llama-3-8b", A100, seq_len=4096, micro_batch=16, dp_replicate=4, zero_stage=0, stack="pytorch"
    )
    slow = replace(request.setup, kinds=(RankKind("slow", 1, slowdown=1.1),))  # other plans are not searched for
    advice = advise(replace(request, setup=slow))
    check(replace(request, setup=slow), advice)
    assert "full activation checkpointing" in advice[0].title
    assert "FSDP" in advice[0].title


def test_compression_where_the_network_is_slow():
    slow = replace(A100, links=(A100.links[0], replace(A100.links[1], bytes_per_s=1e9)))
    found = by_kind(request_of("bert-large", slow, seq_len=128, dp_replicate=32, zero_stage=0, stack="pytorch"))
    assert found["gradient compression"].gain > found["gradient precision"].gain > 0.3
    assert found["gradient precision"].change == {"training.reduce_dtype": "bf16"}
    assert "global batch" in found["gradient accumulation"].caveat
    assert found["gradient accumulation"].after.samples_per_step == 128


def test_overlap_that_was_turned_off():
    plan = dict(seq_len=512, micro_batch=8, dp_replicate=16, zero_stage=0, stack="pytorch", overlap_grad_reduce=False)
    assert by_kind(request_of("bert-large", A100, **plan))["overlap"].change == {"training.overlap": True}


def test_all_together_is_more_than_any_alone_and_keeps_the_batch(of_file):
    request, advice = of_file
    found = {each.kind: each for each in advice}
    together = found.pop("all together")
    assert together.after.samples_per_step == request.setup.samples_per_step
    assert all(
        together.gain > each.gain
        for each in found.values()
        if each.kind != "device" and each.after.samples_per_step == together.after.samples_per_step
    )
    assert len(together.change) >= 2


def test_unlike_gpus_get_batches_that_take_as_long():
    hardware = {"gpu_model": "A100", "network_bandwidth_gbps": 100, "mixed": [{"gpu_model": "V100", "num_nodes": 1}]}
    training = {"batch_size_per_gpu": 64, "num_nodes": 2, "mixed_precision": True}
    request = read_experiment({"hardware": hardware, "model": {"model_type": "resnet50"}, "training": training})
    advice = advise(request)
    check(request, advice)
    balance = next(each for each in advice if each.kind == "batch balance")
    (kind,) = balance.setup.kinds
    assert balance.setup.plan.micro_batch + kind.micro_batch == 128
    assert kind.micro_batch < 48
    assert balance.gain > 0.3
    for each in advice:
        assert changed(request, each.change).setup == each.setup, each.title
    waiting = [bottlenecks(simulate_setup(each.setup))["waiting"].value for each in (request, balance)]
    assert waiting[0] > 0.2
    assert waiting[1] < 0.03


@pytest.mark.parametrize(
    ("plan", "stages"),
    [
        ({"dp_shard": 8, "zero_stage": 3}, {0, 1, 2}),
        ({"dp_replicate": 8, "zero_stage": 0}, {1, 2, 3}),
        ({"tp": 8}, set()),
        ({"dp_replicate": 2, "dp_shard": 4}, set()),
        ({"dp_shard": 8, "ep": 2}, set()),
    ],
)
def test_other_zero_stages_are_for_one_axis_of_data_parallel_ranks(plan, stages):
    setup = request_of("mixtral-8x7b", H100, seq_len=512, stack="deepspeed", **plan).setup
    assert set(other_zero_stages(setup)) == stages


def test_a_run_is_told_how_to_free_memory_from_its_threshold_of_memory_on():
    plan = dict(seq_len=16384, micro_batch=2, dp_replicate=4, zero_stage=0, compile=True, stack="pytorch")
    request = request_of("llama-3.2-1b", H100, **plan)
    base = simulate_setup(request.setup)
    share = base.prediction.peak_reserved_gib / base.prediction.memory_limit_gib
    freeing = [
        {each.kind for each in advise(replace(request, thresholds=Thresholds(memory=at)), base, plans=0)
         if each.aim == "memory"}
        for at in (0.99 * share, 1.01 * share)
    ]  # fmt: skip
    assert freeing == [{"sharding"}, set()]


def test_the_fastest_devices_are_tried_whatever_they_cost_and_good_value_however_slow():
    request = request_of("llama-3.2-1b", A100, seq_len=2048, micro_batch=4, dp_shard=8)
    priced = replace(request, prices=Prices(by_name={"b200-sxm-180gb": 1000.0, "rtx-4090": 0.001}))
    tried = [each.setup.cluster.device.name for each in other_devices(priced)]
    assert {"b200-sxm-180gb", "rtx-4090"} <= set(tried)
    assert tried.index("b200-sxm-180gb") < tried.index("rtx-4090")
    assert A100.device.name not in tried


def test_what_costs_speed_for_memory_is_tried_where_a_run_does_not_fit():
    request = request_of("llama-3-8b", A100, seq_len=8192, dp_replicate=8, zero_stage=0, stack="pytorch")
    fitting, short = ({one.title for one in state_candidates(request, fits) if one} for fits in (True, False))
    assert fitting < short
    assert "keep the optimizer in host memory" in short - fitting
    assert all("checkpointing" in title or "host memory" in title for title in short - fitting)


def test_a_run_that_waits_for_parameters_is_told_to_gather_one_unit_ahead():
    request = request_of("llama-3-8b", A100, seq_len=8192, dp_shard=8, prefetch=0, stack="pytorch")
    (ahead,) = [one for one in gradient_candidates(request) if one and one.title == "gather parameters ahead"]
    assert ahead.setup.plan == replace(request.setup.plan, prefetch=1)


@pytest.mark.parametrize(("replicas", "has_buckets"), [(1, False), (2, True), (4, True)])
def test_buckets_are_for_gradients_that_replicas_sum(replicas, has_buckets):
    request = request_of("llama-3-8b", A100, seq_len=4096, dp_replicate=replicas, dp_shard=4, stack="pytorch")
    assert any(one and one.kind == "bucket size" for one in gradient_candidates(request)) == has_buckets


def test_a_run_on_one_gpu_is_told_nothing_of_networks():
    found = by_kind(request_of("gpt2-small", H100, seq_len=1024, micro_batch=8, stack="pytorch"))
    assert not found.keys() & {"gradient precision", "gradient compression", "bucket size", "communication pattern"}
    assert "torch.compile" in found


def test_a_layered_model_gets_advice_without_meshes():
    request = request_of("resnet50", V100, seq_len=1, micro_batch=32, dp_replicate=8, zero_stage=0, precision="fp32")
    advice = advise(request)
    check(request, advice)
    assert "precision" in {each.kind for each in advice}
    assert all(each.setup.plan.tp == each.setup.plan.pp == 1 for each in advice)


def test_cheaper_devices_say_what_a_sample_costs():
    dear = replace(H100, price_per_gpu_hour=50.0)
    request = request_of("llama-3.2-1b", dear, seq_len=2048, micro_batch=4, dp_shard=8)
    cheaper = [each for each in advise(request) if each.aim == "cost"]
    assert len(cheaper) == 1
    assert "for a million sequences" in cheaper[0].text
    own_price = replace(request, prices=Prices(by_name=dict.fromkeys(("a100-80gb-sxm", "h800-sxm", "l40s"), 1000.0)))
    other = [each for each in advise(own_price) if each.aim == "cost"]
    assert other[0].title != cheaper[0].title or other[0].after != cheaper[0].after


def test_the_number_of_simulations_is_bounded():
    request = read_experiment(FILE)
    assert not advise(request, most=0, plans=0)
    assert len(advise(request, most=1, plans=0)) <= 1
