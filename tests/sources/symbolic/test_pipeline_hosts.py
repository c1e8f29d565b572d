"""Where the host waits for the device between pipeline stages, a step whose host sets the pace has the bubble."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import forerun
from forerun.describe.model.spec import ModelSpec
from forerun.describe.stacks.catalog import load_stack

MODEL = ModelSpec("small", n_layers=24, hidden=256, n_heads=4, n_kv_heads=4, head_dim=64, ffn_hidden=1024, vocab=512)
SLOW_HOST = (
    "extends: megatron-core\ndescription: a slow host\nmodule_us: 20000\nreads_loss: false\np2p_syncs: {syncs}\n"
)
READER = "extends: megatron-core\ndescription: a fast host\nmodule_us: 300\nreads_loss: {reads}\n"
CLUSTER = forerun.load_cluster("h100-sxm")


@pytest.fixture
def step_ms(tmp_path: Path) -> Callable[..., float]:
    def predicted(syncs: str, pp: int, n_microbatches: int, **fields: Any) -> float:
        stack = tmp_path / f"{syncs}.yaml"
        stack.write_text(SLOW_HOST.format(syncs=syncs))
        plan = forerun.Plan(
            pp=pp, micro_batch=1, n_microbatches=n_microbatches, seq_len=128, stack=str(stack), zero_stage=0, **fields
        )
        return forerun.predict(MODEL, plan, CLUSTER).step_time_s * 1e3

    return predicted


@pytest.mark.parametrize("pp", [2, 4])
def test_a_host_that_waits_after_each_exchange_adds_the_bubble(step_ms: Callable[..., float], pp: int) -> None:
    """Without waiting, the hosts of all stages run ahead of their devices at once; with it, one after the other."""
    of_a_microbatch = step_ms("never", pp, 9) - step_ms("never", pp, 8)
    assert of_a_microbatch > 24 / pp * 2 * 20
    assert step_ms("always", pp, 9) - step_ms("always", pp, 8) == pytest.approx(of_a_microbatch, rel=0.01)
    bubble = step_ms("always", pp, 8) - step_ms("never", pp, 8)
    assert bubble == pytest.approx((pp - 1) * of_a_microbatch, rel=0.1)


def test_interleaved_stages_overlap_their_exchanges_and_wait_for_nothing(step_ms: Callable[..., float]) -> None:
    interleaved = {"pp_schedule": "Interleaved1F1B", "virtual_stages": 2}
    never, uninterleaved, always = (
        step_ms(syncs, 4, 8, **interleaved) for syncs in ("never", "uninterleaved", "always")
    )
    assert never == uninterleaved < always
    assert step_ms("uninterleaved", 4, 8) == step_ms("always", 4, 8)


def test_a_host_that_reads_each_loss_launches_the_backward_pass_late(tmp_path: Path) -> None:
    """The device is idle for about one eager operation of a micro batch: until the first of its backward pass."""
    model = replace(MODEL, hidden=4096, n_heads=32, n_kv_heads=32, head_dim=128, ffn_hidden=16384, vocab=64000)

    def step_s(reads: bool, n_microbatches: int) -> float:
        stack = tmp_path / f"{reads}.yaml"
        stack.write_text(READER.format(reads=str(reads).lower()))
        plan = forerun.Plan(n_microbatches=n_microbatches, micro_batch=2, seq_len=4096, stack=str(stack), zero_stage=0)
        return forerun.predict(model, plan, CLUSTER).step_time_s

    late_s = [step_s(True, n) - step_s(False, n) for n in (2, 6)]
    assert 300e-6 < (late_s[1] - late_s[0]) / 4 < 3 * 305e-6


def test_frameworks_wait_where_their_code_does() -> None:
    waits = {name: load_stack(name).p2p_syncs for name in ("megatron-core", "nemo", "megatron-lm", "torchtitan")}
    assert waits == {
        "megatron-core": "uninterleaved",
        "nemo": "uninterleaved",
        "megatron-lm": "always",
        "torchtitan": "never",
    }
    assert load_stack("megatron-core").reads_loss
    assert not load_stack("nemo").reads_loss
