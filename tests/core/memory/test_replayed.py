"""Reserved memory out of a replay: what it says where memory is plenty, short, and too small."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.common.units import GIB
from forerun.core.memory.allocator_settings import AllocatorSettings
from forerun.core.memory.program_events import replay_steps
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack

MODEL = replace(load_model("llama-3.1-8b"), n_layers=4)
PLAN = Plan(seq_len=4096, dp_shard=8)
CLUSTER = load_cluster("h100-sxm")


def with_memory(gib: float) -> Cluster:
    return replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=int(gib * GIB)))


def setup(cluster: Cluster = CLUSTER, replays: bool = True) -> Setup:
    return Setup(MODEL, PLAN, cluster, replays=replays)


def test_a_prediction_that_replays_says_what_the_allocator_holds() -> None:
    simulation = simulate_setup(setup())
    settings = AllocatorSettings.parse(load_stack(PLAN.stack).allocator)
    assert settings.expandable_segments
    last = replay_steps(simulation.program, 0, settings)[-1]
    assert simulation.prediction.peak_reserved_gib == pytest.approx(last.reserved_bytes / GIB)
    assert simulation.prediction.fits
    assert simulate_setup(setup(replays=False)).prediction.peak_reserved_gib != pytest.approx(last.reserved_bytes / GIB)


def test_a_script_for_several_nodes_sets_the_allocator_in_its_own_way() -> None:
    """torchtitan's sets nothing; settings that a user gives hold on any number of nodes."""
    two = Setup(MODEL, replace(PLAN, dp_shard=16), CLUSTER, replays=True)
    own = replace(two, changed_stack=replace(load_stack(PLAN.stack), allocator="max_split_size_mb:512"))
    assert [each.stack.allocator for each in (setup(), two, own)] == [
        "expandable_segments:True",
        "",
        "max_split_size_mb:512",
    ]
    simulation = simulate_setup(two)
    last = replay_steps(simulation.program, 0, AllocatorSettings())[-1]
    assert simulation.prediction.peak_reserved_gib == pytest.approx(last.reserved_bytes / GIB)
    assert any("under default settings" in line for line in simulation.prediction.explain)


def test_what_does_not_fit_says_how_much_it_would_need() -> None:
    plenty = simulate_setup(setup()).prediction.peak_reserved_gib
    short = simulate_setup(setup(with_memory(plenty * 0.5))).prediction
    assert not short.fits
    assert short.peak_reserved_gib == pytest.approx(plenty)


def test_between_both_the_allocator_gives_back_and_asks_again() -> None:
    limits = [simulate_setup(setup(with_memory(gib / 4))).prediction for gib in range(60, 120, 2)]
    assert any(each.fits and "frees cached blocks and retries" in " ".join(each.warnings) for each in limits)
    fits = [each.fits for each in limits]
    assert fits == sorted(fits)


def test_amd_has_no_expandable_segments() -> None:
    settings = AllocatorSettings.parse("expandable_segments:True,max_split_size_mb:64")
    assert settings.on("NVIDIA") == settings
    assert settings.on("AMD") == AllocatorSettings(max_split_size_mb=64)


def test_what_a_search_refuses_is_never_shown_as_fitting() -> None:
    clusters = [with_memory(gib / 2) for gib in range(24, 54)]
    pairs = [
        (simulate_setup(setup(one)).prediction, simulate_setup(setup(one, replays=False)).prediction)
        for one in clusters
    ]
    assert {shown.fits for shown, _ in pairs} == {True, False}
    assert all(estimated.fits for shown, estimated in pairs if shown.fits)
