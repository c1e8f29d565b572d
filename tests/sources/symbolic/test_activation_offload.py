"""Offloaded activations on their way: what is on the device while copies run."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from forerun.core.program.types import Category, Program
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.sources.symbolic.activation_offload import ActivationOffload, Place
from forerun.sources.symbolic.build import build
from forerun.sources.symbolic.schedule import rank_actions

from .cases import CLUSTER, DENSE, plan


def activation_offload(pp: int, rank: int, n_microbatches: int, n_units: int, whole_passes: bool) -> ActivationOffload:
    plan = Plan(seq_len=1, pp=pp, n_microbatches=n_microbatches)
    return ActivationOffload(rank_actions(plan, rank), [n_units] * pp, whole_passes)


def test_a_layer_leaves_beside_the_next_and_returns_beside_the_one_behind() -> None:
    found = activation_offload(pp=1, rank=0, n_microbatches=1, n_units=4, whole_passes=False)
    # forward passes are runs 0 to 3, backward passes 4 to 7; the last two layers would come back at once
    assert dict(found.leaving) == {1: [Place(0, 0, 0)], 2: [Place(0, 1, 0)]}
    assert dict(found.returning) == {5: [Place(0, 1, 0)], 6: [Place(0, 0, 0)]}


@pytest.mark.parametrize("rank", [0, 1])
def test_two_stages_have_no_time_for_whole_passes(rank: int) -> None:
    """Kwai's code asks for at least three (megatron/arguments.py)."""
    found = activation_offload(pp=2, rank=rank, n_microbatches=8, n_units=3, whole_passes=True)
    assert not found.leaving
    assert not found.returning


@pytest.mark.parametrize("whole_passes", [False, True])
@pytest.mark.parametrize("schedule", [("1F1B", 1), ("Interleaved1F1B", 2), ("GPipe", 1), ("ZB1P", 1), ("ZBV", 2)])
def test_what_leaves_returns_before_it_is_needed(schedule: tuple[str, int], whole_passes: bool) -> None:
    plan = Plan(seq_len=1, pp=4, pp_schedule=schedule[0], virtual_stages=schedule[1], n_microbatches=8)  # type: ignore[arg-type]
    for rank in range(4):
        order = rank_actions(plan, rank)
        found = ActivationOffload(order, [2] * plan.n_stages, whole_passes)
        left = {place: run for run, places in found.leaving.items() for place in places}
        back = {place: run for run, places in found.returning.items() for place in places}
        assert left.keys() == back.keys()
        passes = [action for action in order if action.kind != "W"]
        for place in left:
            made = 2 * passes.index(("F", place.stage, place.microbatch)) + place.unit
            used = 2 * passes.index(("B", place.stage, place.microbatch)) + 1 - place.unit
            assert made < left[place] < used
            assert back[place] < used
    assert left or rank  # the last rank alone may have no time


@pytest.mark.parametrize(("turn", "passes"), [("layer", 2), ("pass", 4)])
def test_of_eight_passes_in_flight_few_are_on_the_device(turn: Literal["layer", "pass"], passes: int) -> None:
    """What was made and what goes; of whole passes also what is used and what comes. The embedding is a turn too."""
    stack = replace(load_stack("megatron-core"), offload_turn=turn)
    model = replace(DENSE, vocab=512)
    kept, away = (
        activations(
            build(model, plan(pp=8, n_microbatches=16, micro_batch=8, activation_offload=share), CLUSTER, stack)
        )
        for share in (0.0, 1.0)
    )
    assert away == pytest.approx(kept * passes / 8, rel=0.05)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_copy_moves_what_leaves(share: float) -> None:
    program = build(DENSE, plan(micro_batch=2, activation_offload=share, stack="megatron-core"), CLUSTER)
    by_name = {block.name: block for block in program.blocks}
    gone, back = by_name["layer.leaving"], by_name["layer.returning"]
    assert sum(gone.tensor_bytes) == sum(back.tensor_bytes) > 0
    copied = program.ops.bytes_comm[program.ops.is_host_copy]
    assert copied.tolist() == [pytest.approx(sum(gone.tensor_bytes), abs=len(gone.tensor_bytes))]


def activations(program: Program) -> int:
    """Most bytes of activations that are kept on the first rank between two steps."""
    cls = program.rank_classes[0]
    change = [
        sum(
            int(size) * (int(born >= 0) - int(gone >= 0))
            for size, category, born, gone in zip(
                block.tensor_bytes, block.tensor_category, block.tensor_alloc, block.tensor_free, strict=True
            )
            if category == Category.ACTIVATION
        )
        for block in program.blocks
    ]
    return int(np.cumsum([change[number] for number in cls.block]).max())
