"""Every key of a run's file in its unit: the request that a file with known numbers becomes."""

from __future__ import annotations

from math import inf

import pytest

from forerun.answers.goodput.description import LevelEntry, RunEntry
from forerun.answers.goodput.formulas import daly_interval_s
from forerun.answers.goodput.read import _Reader, alternatives_of, run_of, usual_interval_s
from forerun.answers.goodput.request import (
    CheckpointLevel,
    Elastic,
    FailureKind,
    Lemons,
    Maintenance,
    Phase,
    Recovery,
    RunRequest,
    Slowdown,
    Spares,
)
from forerun.answers.goodput.study import study_run
from forerun.common.errors import ForerunError
from forerun.common.yaml_files import check

HOUR_S, DAY_S = 3600.0, 86_400.0
LEAST = {
    "gpus": 20,
    "step": {"seconds": 10, "tokens": "4M"},
    "days": 2,
    "failures": {},
    "checkpoint": {"blocking_s": 30, "load_s": 40},
    "recovery": {"crash_detect_s": 1, "hang_detect_s": 2, "restart_s": 3, "communicators_s": 4, "warmup_s": 5},
}
FULL = {
    **LEAST,
    "name": "full",
    "gpus_per_node": 4,
    "tokens": "0.04B",
    "failures": {
        "kinds": {
            "a": {"mtbf_hours": 100, "of": "gpu", "shape": 0.5, "scope": "process", "nodes": 0, "repair_hours": 3},
            "b": {"per_1000_days": 2, "of": "node", "scope": "domain", "nodes": 2, "hang_share": 0.25},
            "c": {"per_1000_days": 5, "of": "job", "repair_hours": 1, "found_after_hours": 0.5},
        },
        "lemons": {"share": 0.4, "times": 8},
    },
    "slow": {"nic": {"per_1000_node_days": 6, "factor": 1.25, "hours": 2}},
    "checkpoint": {
        "every_minutes": 30,
        "blocking_s": 30,
        "persist_s": 50,
        "load_s": 40,
        "survives": "node",
        "drag": 0.1,
        "levels": [{"name": "remote", "every": 4, "blocking_s": 1, "load_s": 2}],
    },
    "spares": {"nodes": 3, "swap_s": 9, "replace_hours": 2},
    "elastic": {"replicas": 3, "resize_s": 7, "step_factors": [3, 1.5, 1]},
    "maintenance": {"every_days": 7, "hours": 4},
    "dollars_per_gpu_hour": 2.5,
    "gpu_power_w": 700,
}


def test_a_file_with_every_key():
    found = run_of(FULL, "x")
    node_s = 5 * 2 / (1000 * DAY_S)
    gpu_s, job_s = 20 / (100 * HOUR_S), 5 / (1000 * DAY_S)
    assert found == RunRequest(
        name="full",
        gpus=20,
        nodes=5,
        phases=(Phase(10, 10.0, 4e6),),
        save_every_s=1800.0,
        levels=(
            CheckpointLevel("checkpoint", 1, 30.0, 50.0, 40.0, "node", 0.1),
            CheckpointLevel("remote", 4, 1.0, 0.0, 2.0, "domain", 0.0),
        ),
        recovery=Recovery(1.0, 2.0, 3.0, 4.0, 5.0, 7.0),
        failures=(
            FailureKind("a", pytest.approx(gpu_s), 20, 0.5, "process", 0, 3 * HOUR_S, 0.0, 0.0),
            FailureKind("b", pytest.approx(node_s), 5, 1.0, "domain", 2, found.failures[1].repair_s, 0.25, 0.0),
            FailureKind("c", pytest.approx(job_s), 1, 1.0, "node", 1, HOUR_S, 0.0, 1800.0),
        ),
        lemons=Lemons(pytest.approx(2.0), pytest.approx(8 * (node_s + job_s) / 5), 2),
        slowdowns=(Slowdown("nic", pytest.approx(6 * 5 / (1000 * DAY_S)), 1.25, 2 * HOUR_S),),
        spares=Spares(3, 9.0, 2 * HOUR_S),
        elastic=Elastic(3, 1, 7.0, (3.0, 1.5, 1.0)),
        maintenance=Maintenance(7 * DAY_S, 4 * HOUR_S),
        searches_interval=False,
        wall_s=2 * DAY_S,
        by_the_clock=False,
        dollars_per_gpu_hour=2.5,
        gpu_power_w=700.0,
    )


def test_a_file_with_the_fewest_keys():
    found = run_of(LEAST, "x")
    assert found == RunRequest(
        name="run",
        gpus=20,
        nodes=3,
        phases=(Phase(17_280, 10.0, 4e6),),
        save_every_s=inf,
        levels=(CheckpointLevel("checkpoint", 1, 30.0, 0.0, 40.0, "domain", 0.0),),
        recovery=Recovery(1.0, 2.0, 3.0, 4.0, 5.0, 7.0),
        wall_s=2 * DAY_S,
        by_the_clock=True,
    )
    assert found.notes == ()


def test_what_is_left_out_of_a_recovery_is_assumed_and_said():
    found = run_of({**LEAST, "recovery": {"restart_s": 3, "start_s": 0}}, "x")
    assert found.recovery.restart_s == 3
    assert found.recovery.start_s == 0
    (note,) = found.notes
    assert note.startswith(f"Assumed: crash_detect_s {found.recovery.crash_detect_s:g}, hang_detect_s ")
    assert "restart_s 3" not in note
    assert "communicators_s" in note


def test_the_best_interval_starts_at_dalys_and_is_no_shorter_than_a_save():
    level = CheckpointLevel("checkpoint", 1, 30.0, 50.0, 40.0, "node")
    assert usual_interval_s((level,), 0.0) == inf
    assert usual_interval_s((level,), 1e-4) == daly_interval_s(30.0, 1e4)
    slow = CheckpointLevel("checkpoint", 1, 30.0, 5000.0, 40.0, "node")
    assert usual_interval_s((slow,), 1e-4) == 5000.0
    quick = CheckpointLevel("checkpoint", 1, 0.0, 0.0, 40.0, "node")
    assert usual_interval_s((quick,), 1e-4) == daly_interval_s(1.0, 1e4)
    assert usual_interval_s((quick,), 10.0) == 1.0
    kinds = {"kinds": {"a": {"mtbf_hours": 100}}}
    found = run_of({**LEAST, "failures": kinds}, "x")
    assert found.searches_interval
    assert found.save_every_s == daly_interval_s(30.0, 100 * HOUR_S / 3)


@pytest.mark.parametrize("failing", [{"kinds": {"a": {"per_1000_days": 0}}}, {"preset": "llama-3", "rate": 0}])
def test_what_fails_at_a_rate_of_nothing_never_fails(failing):
    found = run_of({**LEAST, "failures": {**failing, "lemons": {"share": 0.5, "times": 5}}}, "x")
    assert (found.failures_per_s, found.searches_interval, found.save_every_s) == (0.0, False, inf)
    assert found.failures
    study = study_run(found, 2, workers=1)
    assert {(one.wall_s, one.interruptions) for one in study.outcomes} == {(2 * DAY_S, 0)}


@pytest.mark.parametrize(("cluster", "nodes"), [("h100-sxm", 3), ("gb200-nvl72", 3), ("gb200-nvl4", 5)])
def test_a_node_has_eight_gpus_or_those_of_a_smaller_node_of_the_cluster(cluster, nodes):
    plan = {"model": "gpt2-small", "cluster": cluster, "fields": {"seq_len": 128}}
    entry = check(RunEntry, {**{key: value for key, value in LEAST.items() if key != "step"}, "plan": plan}, "x")
    assert _Reader(entry, "x").nodes == nodes


@pytest.mark.parametrize(("gpus", "per_node", "nodes"), [(8, None, 1), (9, None, 2), (9, 3, 3), (1, None, 1)])
def test_nodes_are_filled(gpus, per_node, nodes):
    given = {} if per_node is None else {"gpus_per_node": per_node}
    assert run_of({**LEAST, "gpus": gpus, **given}, "x").nodes == nodes


def test_tokens_of_days_follow_from_the_mean_pace_of_phases():
    """Half of the tokens take 10 s for 4M, half 40 s for 8M: 1M in 3.75 s on average."""
    schedule = [{"share": 0.5}, {"share": 0.5, "step": {"seconds": 40, "tokens": "8M"}}]
    found = run_of({**LEAST, "schedule": schedule}, "x")
    tokens = 2 * DAY_S / 3.75 * 1e6
    assert [(phase.steps, phase.step_s, phase.tokens_per_step) for phase in found.phases] == [
        (-(-0.5 * tokens // 4e6), 10, 4e6),
        (-(-0.5 * tokens // 8e6), 40, 8e6),
    ]
    assert found.ideal_s == pytest.approx(2 * DAY_S, rel=1e-3)


def test_presets_count_what_was_observed():
    """llama-3 counts events of a job of 16,384 GPUs over 54 days."""
    whole = run_of({**LEAST, "gpus": 16_384, "failures": {"preset": "llama-3", "rate": 0.5}}, "x")
    twice = run_of({**LEAST, "gpus": 32_768, "failures": {"preset": "llama-3"}}, "x")
    assert twice.failures_per_s == pytest.approx(4 * whole.failures_per_s)
    assert {kind.name for kind in whole.failures} == {kind.name for kind in twice.failures}
    for one, other in zip(whole.failures, twice.failures, strict=True):
        assert other.rate_per_s == pytest.approx(4 * one.rate_per_s)
    assert whole.notes[0].startswith("Failures are those of llama-3: ")


def test_alternatives_change_single_keys():
    data = {**FULL, "alternatives": {"more": {"gpus": 40, "spares": {"nodes": 5}}, "plain": {"slow": {}}}}
    more, plain = alternatives_of(data, "x")
    assert (more.name, more.gpus, more.spares) == ("more", 40, Spares(5, 9.0, 2 * HOUR_S))
    assert (plain.name, plain.gpus, len(plain.slowdowns)) == ("plain", 20, 1)
    assert alternatives_of(FULL, "x") == ()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"slow": {"nic": {"per_1000_node_days": 6, "hours": 2}}}, "give either factor, or kernel_slowdown"),
        (
            {"slow": {"nic": {"per_1000_node_days": 6, "hours": 2, "factor": 2, "link_slowdown": 2}}},
            "give either factor, or kernel_slowdown",
        ),
        ({"slow": {"nic": {"per_1000_node_days": 6, "hours": 2, "link_slowdown": 2}}}, "need a plan; give factor"),
        ({"elastic": {"resize_s": 1}}, "give replicas, or a plan with dp_replicate or dp_shard on several nodes"),
        ({"checkpoint": {"blocking_s": 1}}, "give blocking_s, load_s and persist_s"),
        ({"checkpoint": {"load_s": 1}}, "give blocking_s, load_s and persist_s"),
        ({"checkpoint": {"blocking_s": 1, "load_s": 1, "network": "shared"}}, "network shared needs a plan"),
        ({"failures": {"kinds": {"a": {"mtbf_hours": 1, "per_1000_days": 1}}}}, "give either mtbf_hours or"),
        ({"schedule": [{"share": 0.5}, {"share": 0.49}]}, "sum to 0.99, not to 1"),
        ({"tokens": 4.1e15}, "are more than 1,000,000,000"),
    ],
)
def test_what_does_not_go_together_is_one_line(changes, problem):
    with pytest.raises(ForerunError, match=problem):
        run_of({**LEAST, **changes}, "x")


def test_bounds_are_inclusive():
    assert run_of({**LEAST, "tokens": 4e15}, "x").steps == 10**9
    assert run_of({**LEAST, "elastic": {"replicas": 2, "least_replicas": 2, "resize_s": 0}}, "x").elastic == Elastic(
        2, 2, 0.0
    )
    shared = {"blocking_s": 1, "load_s": 1, "network": "shared", "drag": 0.5}
    assert run_of({**LEAST, "checkpoint": shared}, "x").levels[0].drag == 0.5


def test_a_further_level_is_written_at_every_save_unless_told_otherwise():
    found = LevelEntry(name="disk", blocking_s=1.0, load_s=2.0)
    assert (found.every, found.persist_s, found.survives, found.drag) == (1, 0.0, "domain", 0.0)
