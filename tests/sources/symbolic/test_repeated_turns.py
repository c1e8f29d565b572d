"""Turns of a pipeline that are copied from an earlier turn are those that would be built."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forerun.core.program.types import Program
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.build import build
from forerun.sources.symbolic.repeated_turns import RepeatedTurns
from forerun.sources.symbolic.steps import Steps

MODEL = replace(load_model("llama-3.1-8b"), n_layers=11)
WAYS = {
    "sharded optimizer": {"zero_stage": 1, "stack": "megatron-core"},
    "gathered for every pass": {"reshard_after_forward": "always"},
    "gathered for every pass, nothing ahead": {"reshard_after_forward": "always", "prefetch": 0},
    "gathered for every pass, two ahead": {"reshard_after_forward": "always", "prefetch": 2},
    "gathered once": {"reshard_after_forward": "never"},
    "buffers of FSDP1": {"stack": "fms-fsdp", "reshard_after_forward": "always"},
}
SCHEDULES = {
    "1F1B": {"pp": 4},
    "interleaved": {"pp": 2, "pp_schedule": "Interleaved1F1B", "virtual_stages": 2},
    "zero bubble": {"pp": 2, "pp_schedule": "ZB1P"},
    "accumulation": {},
}


def made(fields: dict) -> Program:
    plan = Plan(seq_len=512, dp_shard=4, n_microbatches=12, **fields)
    return build(MODEL, plan, load_cluster("h100-sxm"))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("way", WAYS)
def test_copied_turns_are_those_that_are_built(way: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = WAYS[way] | SCHEDULES[schedule]
    copied_steps: list[int] = []
    copy = RepeatedTurns._copied

    def counted(self: RepeatedTurns, steps: Steps, number: int) -> int:
        after = copy(self, steps, number)
        copied_steps.append(after - number)
        return after

    monkeypatch.setattr(RepeatedTurns, "_copied", counted)
    short = made(fields)
    monkeypatch.setattr(RepeatedTurns, "_copied", lambda self, steps, number: number)
    long = made(fields)
    assert sum(copied_steps) >= 12, "at least a turn of each micro batch on some rank"
    assert [block.name for block in short.blocks] == [block.name for block in long.blocks]
    for one, other in zip(short.rank_classes, long.rank_classes, strict=True):
        for name in ("block", "microbatch", "layer", "resident_bytes"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
