"""Files that describe whole runs: what they mean, what is refused, and what published runs come out as."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from typing import Any

import pytest

from forerun.answers.analysis.setup import RankKind, Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.answers.goodput.best_plans import about_slower_plans
from forerun.answers.goodput.examples import example_names, load_run
from forerun.answers.goodput.formulas import poisson_efficiency
from forerun.answers.goodput.outcome import Spent
from forerun.answers.goodput.read import alternatives_of, failure_presets, run_of
from forerun.answers.goodput.request import Recovery
from forerun.answers.goodput.study import by_time_to_train, study_run
from forerun.answers.goodput.walk import walk
from forerun.common.errors import ForerunError
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.complete import complete_plan
from forerun.interfaces.cli.main import run as run_command

KNOWN = {
    "gpus": 1024,
    "gpus_per_node": 8,
    "days": 20,
    "step": {"seconds": 10, "tokens": "4M"},
    "failures": {"kinds": {"node": {"per_1000_days": 6.5}}},
    "checkpoint": {"every_minutes": 60, "blocking_s": 300, "load_s": 0},
}


@pytest.mark.parametrize("name", example_names())
def test_examples_can_be_read(name):
    run = load_run(name)
    assert run.steps > 0
    assert run.failures_per_s > 0


def test_the_failures_of_llama_3_are_those_of_its_table():
    run = load_run("llama-3-405b")
    assert run.failures_per_s * 54 * 86_400 == pytest.approx(419)
    half = run_of({**KNOWN, "gpus": 8_192, "failures": {"preset": "llama-3"}}, "x")
    assert half.failures_per_s * 54 * 86_400 == pytest.approx(419 / 2)
    assert set(failure_presets()) >= {"llama-3", "rsc-1", "rsc-2"}


def test_rates_count_components():
    by_gpu = {"kinds": {"gpu": {"mtbf_hours": 50_000, "of": "gpu"}}}
    assert run_of({**KNOWN, "failures": by_gpu}, "x").failures_per_s == pytest.approx(1024 / (50_000 * 3_600))
    assert run_of(KNOWN, "x").failures_per_s == pytest.approx(128 * 6.5 / 86_400_000)
    twice = run_of({**KNOWN, "failures": {"preset": "rsc-1", "rate": 2}}, "x")
    assert twice.failures_per_s == pytest.approx(2 * run_of(KNOWN, "x").failures_per_s)


def test_components_may_be_of_any_number():
    kinds = {"switch": {"number": 64, "mtbf_hours": 10_000}, "node": {"mtbf_hours": 10_000, "of": "node"}}
    switch, node = run_of({**KNOWN, "failures": {"kinds": kinds}}, "x").failures
    assert switch.components == 64
    assert switch.rate_per_s == pytest.approx(64 / 3.6e7)
    assert node.rate_per_s == pytest.approx(KNOWN["gpus"] / 8 / 3.6e7)
    with pytest.raises(ForerunError, match="failures: switch: give either of or number"):
        run_of({**KNOWN, "failures": {"kinds": {"switch": {**kinds["switch"], "of": "gpu"}}}}, "x")


@pytest.mark.parametrize(("gpus", "seconds"), [(8, 5), (2048, 5), (6024, 17.5), (10_000, 30), (100_000, 30)])
def test_communicators_of_more_gpus_take_longer_to_set_up(gpus, seconds):
    assert run_of({**KNOWN, "gpus": gpus}, "x").recovery.communicators_s == pytest.approx(seconds)


def test_numbers_may_have_letters():
    steps = [run_of({**KNOWN, "tokens": tokens}, "x").steps for tokens in ("2T", "2000B", "2e12", 2_000_000_000_000)]
    assert steps == [500_000] * 4


def test_phases_have_steps_of_their_own():
    schedule = [
        {"share": 0.75},
        {"share": 0.25, "step": {"seconds": 25, "tokens": 8_000_000}},
    ]
    run = run_of({**KNOWN, "tokens": "400B", "schedule": schedule}, "x")
    assert [(phase.steps, phase.step_s) for phase in run.phases] == [(75_000, 10.0), (12_500, 25.0)]


def test_a_plan_tells_the_step_and_what_a_checkpoint_costs():
    plan = {"model": "llama-3.1-8b", "cluster": "h100-sxm", "fields": {"seq_len": 8192}}
    run = run_of({"gpus": 64, "tokens": "100B", "plan": plan}, "x")
    assert run.nodes == 8
    assert 0.5 < run.phases[0].step_s < 10
    assert run.phases[0].tokens_per_step == 64 * 8192
    assert run.levels[0].persist_s > run.levels[0].blocking_s > 0
    assert run.levels[0].load_s > 0
    assert run.dollars_per_gpu_hour
    assert any("GiB" in note for note in run.notes)
    longer = {**plan, "fields": {"seq_len": 8192, "activation_checkpointing": "full"}}
    phases = [{"share": 0.9}, {"share": 0.1, "seq_len": 16_384}]
    both = run_of({"gpus": 64, "tokens": "100B", "plan": longer, "schedule": phases}, "x").phases
    assert both[1].tokens_per_step == 2 * both[0].tokens_per_step
    assert both[1].step_s > 2 * both[0].step_s


def planned(**fields):
    return {
        "step": None,
        "plan": {"model": "llama-3.1-8b", "cluster": "h100-sxm", "fields": {"seq_len": 8192, **fields}},
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": None}, "either step (seconds and tokens) or plan"),
        ({"days": None}, "tokens to train on, days of wall time, or both"),
        ({"gpus": 0}, "gpus: input should be greater than or equal to 1"),
        ({"gpuz": 8}, "unknown key 'gpuz'; did you mean gpus?"),
        ({"tokens": "many"}, "tokens: input should be a valid number, got 'many'"),
        ({"tokens": -5}, "tokens: input should be greater than 0"),
        ({"tokens": "1e30"}, "2.5e+23 steps are more than"),
        ({"tokens": 1e300, "step": {"seconds": 1, "tokens": 1e-300}}, "inf steps are more than"),
        ({"days": 1e300}, "steps are more than"),
        (
            {"failures": {"kinds": {"gpu": {"mtbf_hours": 9, "nodes": 129}}}},
            "129 nodes leave, and the run has 128",
        ),
        ({"failures": {"kinds": {"gpu": {"mtbf_hours": 9, "shape": 0.01}}}}, "shape: input should be greater than"),
        (
            {"checkpoint": {"state": {"parameters": "1B"}, "storage": "2,0"}},
            "yaml: checkpoint.storage: expected GB/s",
        ),
        (
            {"checkpoint": {"state": {"parameters": "1B", "weights": "int3"}}},
            "checkpoint.state: no dtype int3",
        ),
        ({"checkpoint": {"every_minutes": 5}}, "checkpoint: give blocking_s, load_s and persist_s"),
        ({"failures": {"kinds": {"gpu": {}}}}, "gpu: give either mtbf_hours or per_1000_days"),
        ({"failures": {"preset": "llama-4"}}, "run.yaml: unknown preset of failures 'llama-4'; did you mean llama-3"),
        ({"schedule": [{"share": 0.5}]}, "sum to 0.5, not to 1"),
        ({"schedule": [{"share": 1, "seq_len": 9}]}, "needs a plan"),
        ({"elastic": {"replicas": 4, "least_replicas": 5, "resize_s": 1}}, "least_replicas 5 is more than replicas 4"),
        ({"elastic": {"replicas": 4, "resize_s": 1, "step_factors": [1.0]}}, "needs 4 values, got 1"),
        (planned(seq_length=8), "run.yaml: unknown plan field 'seq_length'; did you mean seq_len"),
        (planned(tp="two"), "run.yaml: plan: tp must be a whole number of at least 1, got 'two'"),
    ],
)
def test_mistakes_are_one_line(change, words):
    data = {key: value for key, value in {**KNOWN, **change}.items() if value is not None}
    with pytest.raises(ForerunError) as error:
        run_of(data, "run.yaml")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_too_many_failures_are_refused():
    run = run_of({**KNOWN, "failures": {"kinds": {"gpu": {"mtbf_hours": 0.001, "of": "gpu"}}}}, "x")
    with pytest.raises(ForerunError, match="too many to simulate"):
        study_run(run, 10)


PUBLISHED = (
    ("hourly on 1,024 A100", 1_024, 6.5, 60, 300, 5, 0, 0.904, 0.01),
    ("every 33 min on 16,384 A100", 16_384, 6.5, 32.9, 300, 5, 0, 0.696, 0.01),
    ("every 6 min on 16,384 A100", 16_384, 6.5, 6.0, 10, 5, 0, 0.901, 0.01),
    ("every 5 min, not blocking", 16_384, 6.5, 5.0, 0, 5, 0, 0.93, 0.01),
    ("every 2 min on 100,000 A100", 100_000, 2.34, 2.0, 0, 2, 0, 0.939, 0.01),
)
"""(what, GPUs, failures of 1,000 nodes a day, minutes between saves, seconds of a save, minutes of a restart, of
detection, published or from the paper's formula, tolerance): arXiv 2410.21680"""


@pytest.mark.parametrize(
    ("what", "gpus", "rate", "every_min", "save_s", "restart_min", "detect_min", "published", "off"), PUBLISHED
)
def test_published_ratios_follow_from_their_inputs(
    what, gpus, rate, every_min, save_s, restart_min, detect_min, published, off
):
    data = {
        "name": what,
        "gpus": gpus,
        "gpus_per_node": 8,
        "days": 30,
        "step": {"seconds": 10, "tokens": "16M"},
        "failures": {"kinds": {"node": {"per_1000_days": rate}}},
        "checkpoint": {"every_minutes": every_min, "blocking_s": save_s, "load_s": 0},
        "recovery": {
            "crash_detect_s": 60 * detect_min,
            "restart_s": 60 * restart_min,
            "communicators_s": 0,
            "warmup_s": 0,
            "start_s": 0,
        },
    }
    assert study_run(run_of(data, what), 24, 1, workers=1, gains=False).ettr.mean == pytest.approx(published, abs=off)


def test_replicas_that_go_on_lift_goodput_at_100_000_gpus_as_published():
    """arXiv 2602.00277: 44 % with a stall of 10 minutes for each failure, 80 % with one of 3 minutes."""
    elastic = load_run("fault-tolerant-100k")
    whole = replace(elastic, elastic=None, recovery=Recovery(0.0, 0.0, 600.0, 0.0, 0.0), wall_s=3 * 86_400.0)
    seconds_lost = replace(
        whole, save_every_s=20.0, levels=(replace(whole.levels[0], blocking_s=0, persist_s=0, load_s=0),)
    )
    assert study_run(elastic, 8, workers=1, gains=False).ettr.mean == pytest.approx(0.80, abs=0.035)
    exact = poisson_efficiency(20.0, 0.0, 600.0, 1_080.0)  # the source's 1 - 10 / 18 leaves out failures in a stall
    assert study_run(seconds_lost, 8, workers=1, gains=False).ettr.mean == pytest.approx(exact, abs=0.03)


def test_llama_3_keeps_nine_tenths_of_its_time():
    """arXiv 2407.21783: more than 90 % effective training time; the interval between checkpoints isn't published."""
    study = study_run(load_run("llama-3-405b"), 16, workers=1, gains=False)
    assert study.ettr.mean == pytest.approx(0.90, abs=0.015)


RIVALS = {
    "slower steps, few failures": {"step": {"seconds": 10.5, "tokens": "16M"}, "failures": {"rate": 0.05}},
    "fewer GPUs": {"gpus": 512, "step": {"seconds": 20, "tokens": "16M"}},
    "saves seldom": {"checkpoint": {"every_minutes": 600}},
}


def rivals() -> dict[str, Any]:
    return {
        "name": "fast steps",
        "gpus": 16384,
        "tokens": "1T",
        "step": {"seconds": 10, "tokens": "16M"},
        "failures": {"preset": "rsc-1"},
        "checkpoint": {"every_minutes": 60, "blocking_s": 60, "load_s": 60},
        "alternatives": RIVALS,
    }


def test_the_best_alternative_is_that_which_trains_soonest_and_not_that_of_the_fastest_step():
    own, others = run_of(rivals(), "x"), alternatives_of(rivals(), "x")
    assert [each.name for each in others] == list(RIVALS)
    assert [each.gpus for each in others] == [16384, 512, 16384]
    assert others[2].save_every_s == 36_000.0
    assert others[2].levels == own.levels
    ranked = by_time_to_train([study_run(each, 12, workers=1, gains=False) for each in (own, *others)])
    assert [study.request.name for study in ranked] == [
        "slower steps, few failures",
        "fast steps",
        "fewer GPUs",
        "saves seldom",
    ]


def test_an_alternative_may_predict_a_plan_where_the_run_states_a_step():
    plan = {"model": "llama-3.1-8b", "cluster": "h100-sxm", "global_batch": 64, "fields": {"seq_len": 4096}}
    (other,) = alternatives_of({**rivals(), "alternatives": {"predicted": {"plan": plan, "gpus": 64}}}, "x")
    assert other.phases[0].tokens_per_step == 64 * 4096
    assert other.gpus == 64


def test_what_is_wrong_in_an_alternative_names_it():
    with pytest.raises(ForerunError, match="x: alternatives: odd: unknown key 'gpu'"):
        alternatives_of({**rivals(), "alternatives": {"odd": {"gpu": 3}}}, "x")


def test_the_command_ranks_alternatives(tmp_path, capsys):
    file, page = tmp_path / "run.yaml", tmp_path / "run.html"
    file.write_text(json.dumps(rivals()))
    assert run_command(["run", str(file), "--runs", "4", "--no-gains", "--json", "--report", str(page)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["alternatives"][0]["name"] == "slower steps, few failures"
    assert "Alternatives, by time to train" in page.read_text()
    assert run_command(["run", str(file), "--runs", "4", "--no-gains"]) == 0
    assert "Alternatives, by time to train" in capsys.readouterr().out


def test_a_study_that_was_broken_off_goes_on_to_the_same_result(tmp_path, monkeypatch):
    run = run_of({**KNOWN, "checkpoint": {"blocking_s": 300, "load_s": 0}}, "x")
    whole = study_run(run, 6, 1, workers=1)
    store, walked = tmp_path / "runs.sqlite", 0

    def broken_off(*arguments):
        nonlocal walked
        walked += 1
        if walked == 100:
            raise KeyboardInterrupt
        return walk(*arguments)

    monkeypatch.setattr("forerun.answers.goodput.walks.walk", broken_off)
    with pytest.raises(KeyboardInterrupt):
        study_run(run, 6, 1, workers=1, store=store)
    assert study_run(run, 6, 1, workers=1, store=store) == whole
    simulated = walked
    assert study_run(run, 6, 1, workers=1, store=store) == whole
    assert walked == simulated
    study_run(run, 7, 1, workers=1, store=store, gains=False)
    assert simulated < walked < simulated + 200


def test_a_damaged_store_is_refused(tmp_path):
    store = tmp_path / "runs.sqlite"
    study_run(run_of(KNOWN, "x"), 1, workers=1, gains=False, store=store)
    with sqlite3.connect(store) as base:
        base.execute("UPDATE run SET record = '{}'")
    with pytest.raises(ForerunError, match=r"runs.sqlite: can't be used \(a damaged record"):
        study_run(run_of(KNOWN, "x"), 1, workers=1, gains=False, store=store)


STATE = {"state": {"parameters": "405B"}, "storage": "10,1000", "mode": "disabled"}


@pytest.mark.parametrize(
    ("state", "bytes_each"),
    [({}, 14), ({"weights": "fp32"}, 12), ({"moments": "bf16"}, 10), ({"optimizer": "sgd", "weights": "fp32"}, 8)],
)
def test_parameters_tell_what_a_checkpoint_costs(state, bytes_each):
    """Mixed precision with Adam takes 14 bytes for each parameter, 12 where the weights are the fp32 ones."""
    checkpoint = {**STATE, "state": {**STATE["state"], **state}}
    run = run_of({**KNOWN, "gpus": 16_384, "checkpoint": checkpoint}, "x")
    assert run.levels[0].blocking_s == pytest.approx(405e9 * bytes_each / 1e12, rel=1e-3)
    assert any(f"{bytes_each} bytes for each of 405,000,000,000 parameters" in note for note in run.notes)


PLANNED = {
    "gpus": 32,
    "tokens": "10B",
    "plan": {
        "model": "llama-3.1-8b",
        "cluster": "h100-sxm",
        "global_batch": 64,
        "fields": {"seq_len": 8192, "dp_replicate": 2, "dp_shard": 16, "activation_checkpointing": "full"},
    },
}


def test_a_slow_node_slows_the_steps_of_the_plan():
    slow = {
        "gpu": {"per_1000_node_days": 1, "hours": 1, "kernel_slowdown": 1.5},
        "link": {"per_1000_node_days": 1, "hours": 1, "link_slowdown": 4},
    }
    gpu, link = run_of({**PLANNED, "slow": slow}, "x").slowdowns
    assert 1.3 < gpu.factor <= 1.51
    assert 1.0 < link.factor <= 4.0


def test_a_slow_gpu_of_a_pipeline_slows_its_stage():
    """Other stages wait for the slow one, but are not slow themselves: less is lost than by a whole slow replica."""
    fields = {"seq_len": 4096, "pp": 4, "dp_replicate": 8}
    plan = {**PLANNED["plan"], "global_batch": 128, "fields": fields}
    slow = {"gpu": {"per_1000_node_days": 1, "hours": 1, "kernel_slowdown": 1.5}}
    (staged,) = run_of({**PLANNED, "plan": plan, "slow": slow}, "x").slowdowns
    setup = Setup(load_model("llama-3.1-8b"), complete_plan(fields, 32, 128), load_cluster("h100-sxm"))
    usual_s, slow_s = (
        simulate_setup(replace(setup, kinds=kinds), folded=True).prediction.step_time_s
        for kinds in ((), (RankKind("slow", 4, slowdown=1.5),))
    )
    whole = slow_s / usual_s
    assert 1.1 < staged.factor < whole - 0.1
    slow["gpu"]["link_slowdown"] = 4
    (both,) = run_of({**PLANNED, "plan": plan, "slow": slow}, "x").slowdowns
    assert both.factor > staged.factor


def test_a_save_over_the_network_of_training_drags_its_steps():
    checkpoint = {"storage": "20", "network": "shared", "every_minutes": 10}
    own, shared = (
        run_of({**PLANNED, "checkpoint": {**checkpoint, "network": network}}, "x").levels[0].drag
        for network in ("own", "shared")
    )
    assert own == 0.0
    assert 0.0 < shared < 3.0


def test_the_replicas_of_a_plan_and_their_steps_follow_from_it():
    elastic = run_of({**PLANNED, "elastic": {"resize_s": 10}}, "x").elastic
    assert elastic.replicas == 2
    assert 1.5 < elastic.factor(1) < 2.5
    assert elastic.factor(2) == 1.0


def test_under_fsdp_whole_nodes_leave_and_take_their_part_of_the_state():
    fields = {"seq_len": 8192, "dp_shard": 32, "activation_checkpointing": "full"}
    plan = {**PLANNED["plan"], "fields": fields}
    found = run_of({**PLANNED, "plan": plan, "elastic": {"resize_s": 10, "least_replicas": 2}}, "x")
    elastic = found.elastic
    assert (elastic.replicas, elastic.least_replicas, elastic.shards) == (4, 2, True)
    assert 1.0 == elastic.factor(4) < elastic.factor(3) <= elastic.factor(2) < 2.3
    assert "Each of 4 replicas holds a part of the state; 2 or more of them go on." in found.notes
    model = {**plan, "model": "llama-3.1-70b"}
    large = run_of({**PLANNED, "plan": model, "elastic": {"resize_s": 10}}, "x").elastic
    assert large.least_replicas > 1, "its state does not fit on one node"
    whole = {**PLANNED, "plan": plan, "elastic": {"resize_s": 10, "state": "whole"}}
    with pytest.raises(ForerunError, match="elastic: give replicas, or a plan with dp_replicate"):
        run_of(whole, "x")


def test_replicas_that_agree_in_outer_steps_take_the_mean_step_and_go_on_alone():
    plan = {**PLANNED["plan"], "outer_steps": "diloco:every=50,link_gb_s=0.5"}
    synchronous = run_of(PLANNED, "x")
    apart = run_of({**PLANNED, "plan": plan, "elastic": {"resize_s": 10}}, "x")
    (phase,) = apart.phases
    assert phase.tokens_per_step == synchronous.phases[0].tokens_per_step
    rare = run_of({**PLANNED, "plan": {**plan, "outer_steps": "diloco:every=1000000"}}, "x").phases[0].step_s
    assert phase.step_s > rare
    replicas = len(apart.elastic.step_factors)
    assert apart.elastic.step_factors == tuple(replicas / fewer for fewer in range(1, replicas + 1))


def test_the_plans_of_a_search_are_ranked_by_time_to_train(tmp_path, capsys):
    path = tmp_path / "run.json"
    fields = {"seq_len": 2048, "tp": 1, "pp": 1, "compile": True, "stack": "torchtitan"}
    plan = {"model": "llama-3.2-1b", "cluster": "h100-sxm", "global_batch": 64, "fields": fields}
    path.write_text(json.dumps({"gpus": 8, "tokens": "1B", "plan": plan}))
    command = ["run", str(path), "--runs", "3", "--plans", "2", "--no-gains", "--json", "--pictures", str(tmp_path)]
    assert run_command(command) == 0
    record = json.loads(capsys.readouterr().out)
    found = record["alternatives"]
    assert len(found) == 3
    assert record["notes"][-1].startswith(
        ("A plan with a slower step, of up to ", "No plan with a slower step finishes")
    )
    assert [each["wall_s"]["p50"] for each in found] == sorted(each["wall_s"]["p50"] for each in found)
    assert (tmp_path / "goodput.png").read_bytes().startswith(b"\x89PNG")


def test_slower_plans_are_left_out_where_their_steps_alone_take_too_long():
    """The best run takes 10.8 % longer than its steps, which have the same tokens as those of slower plans."""
    of_step = {
        seconds: run_of({**KNOWN, "step": {"seconds": seconds, "tokens": "4M"}}, "x") for seconds in (10, 11, 12)
    }
    best, near, far = (study_run(of_step[seconds], 4, workers=1, gains=False) for seconds in (10, 11, 12))
    longest_s = 4e6 * best.wall_s.p50 / best.tokens.p50
    assert 11 < longest_s < 12
    words = f"A plan with a slower step, of up to {longest_s:.4g} s, may finish sooner"
    assert about_slower_plans([best, near], best, 2).startswith(words)
    assert about_slower_plans([best, near, far], best, 3).startswith("No plan with a slower step finishes sooner")
    assert about_slower_plans([best], best, 2) == "These are all plans that fit."


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slow": {"a": {"per_1000_node_days": 1, "hours": 1}}}, "slow: a: give either factor"),
        ({"slow": {"a": {"per_1000_node_days": 1, "hours": 1, "kernel_slowdown": 2}}}, "need a plan"),
        ({"checkpoint": {"network": "shared", "blocking_s": 1, "load_s": 1}}, "network shared needs a plan"),
        ({"checkpoint": STATE | {"state": {"parameters": "7B", "weights": "int3"}}}, "no dtype int3"),
        ({"checkpoint": STATE | {"state": {"parameters": "7B", "optimizer": "adamx"}}}, "adamx"),
        ({"elastic": {"resize_s": 1}}, "elastic: give replicas"),
    ],
)
def test_mistakes_in_what_a_plan_tells_are_one_line(change, words):
    with pytest.raises(ForerunError, match=words) as error:
        run_of({**KNOWN, **change}, "x")
    assert "\n" not in str(error.value)


def test_ray_is_refused_in_one_line_where_it_is_not_used(capsys):
    assert run_command(["run", "bloom-176b", "--runs", "1", "--ray-address", "auto"]) == 2
    assert "needs executor ray" in capsys.readouterr().err
    assert run_command(["run", "bloom-176b", "--runs", "1", "--executor", "mars"]) == 2
    assert "executor must be local or ray" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "state", "storage", "published_s", "tolerance"),
    [
        (4480, {"parameters": "530B", "weights": "fp32"}, "100,2.5", 2520, 0.02),
        (384, {"parameters": "176B", "host_link_of": "a100-80gb-sxm"}, "2,57.5", 40, 0.08),
    ],
)
def test_published_saves_follow_from_parameters_and_bandwidth(gpus, state, storage, published_s, tolerance):
    """MT-NLG over 20 Gb/s (GEMINI, SOSP'23), and BLOOM, which keeps 13 bytes a parameter."""
    checkpoint = {"state": state, "storage": storage, "mode": "disabled"}
    save_s = run_of({**KNOWN, "gpus": gpus, "checkpoint": checkpoint}, "x").levels[0].blocking_s
    assert save_s == pytest.approx(published_s, rel=tolerance)


def test_megascale_keeps_nine_tenths_of_its_time_at_the_failure_rate_of_llama_3():
    """arXiv 2402.15627: above 90 %, and what a failure costs is regained within 15 minutes."""
    recovery = {"crash_detect_s": 30, "restart_s": 570, "communicators_s": 0, "warmup_s": 0, "start_s": 0}
    checkpoint = {"every_minutes": 10, "blocking_s": 5, "persist_s": 60, "load_s": 0}
    changed = {"gpus": 12_288, "failures": {"preset": "llama-3"}, "recovery": recovery, "checkpoint": checkpoint}
    study = study_run(run_of({**KNOWN, **changed}, "x"), 6, workers=1, gains=False)
    assert 0.90 < study.ettr.mean < 0.93


@pytest.mark.parametrize(("replace_hours", "ettr"), [(1, 0.886), (6, 0.648)])
def test_opt_175b_loses_what_new_nodes_take(replace_hours, ettr):
    """90 restarts in some 60 days; its chronicles say that a new node took hours, and not how many."""
    run = run_of(
        {
            "gpus": 992,
            "days": 60,
            "step": {"seconds": 40, "tokens": "2M"},
            "failures": {"kinds": {"machine": {"of": "job", "mtbf_hours": 16, "repair_hours": 1000}}},
            "checkpoint": {"blocking_s": 60, "load_s": 300},
            "spares": {"nodes": 0, "replace_hours": replace_hours},
        },
        "x",
    )
    study = study_run(run, 50, gains=False, workers=1)
    assert study.interruptions.mean == pytest.approx(90, rel=0.05)
    assert study.ettr.mean == pytest.approx(ettr, abs=0.01)


@pytest.mark.parametrize(("iterations", "most_hours", "ettr"), [(100, 3.0, 0.987), (300, 8.8, 0.973)])
def test_bloom_loses_at_most_what_it_did_since_its_last_save(iterations, most_hours, ettr):
    """A failure a week, saves of 40 s, iterations of 105 s; the chronicles say some 3 h with 100 iterations."""
    run = run_of(
        {
            "gpus": 384,
            "tokens": "366B",
            "step": {"seconds": 105, "tokens": 4_194_304},
            "failures": {"kinds": {"gpu": {"of": "job", "mtbf_hours": 168}}},
            "checkpoint": {"blocking_s": 40, "load_s": 40, "every_minutes": iterations * 105 / 60},
            "spares": {"nodes": 4},
        },
        "x",
    )
    study = study_run(run, 50, gains=False, workers=1)
    longest_s = iterations * 105.0 + 40.0
    assert longest_s / 3600 == pytest.approx(most_hours, rel=0.03)
    assert study.ettr.mean == pytest.approx(ettr, abs=0.003)
    for one in study.outcomes:
        assert one.spent_s.get(Spent.WASTED, 0.0) <= one.interruptions * longest_s
