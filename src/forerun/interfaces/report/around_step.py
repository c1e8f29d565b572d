"""Prints the periodic work of the training loop, and the memory before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forerun.common.units import MIB
from forerun.interfaces.report.figures import seconds

if TYPE_CHECKING:
    from forerun.answers.analysis.loop_time import CheckpointTimes, LoopTime
    from forerun.sources.symbolic.training_state import InitStage

LOOP = "With the periodic work of the training loop"
LOOP_COLUMNS = ("work", "every", "stall", "beside", "of a step")
INIT = "Memory before the first step, MiB"
INIT_COLUMNS = ("model made", "after", "allocated", "most so far")
_WAYS = {"meta": "on meta", "direct": "on the device", "trace": "as traced"}


def loop_rows(loop: LoopTime) -> list[tuple[str, str, str, str, str]]:
    """Returns a row for each kind of periodic work, under `LOOP_COLUMNS`."""
    return [
        (
            stall.name,
            f"{stall.every_steps:,} steps",
            seconds(stall.stall_s),
            seconds(stall.beside_s) if stall.beside_s else "",
            f"{stall.mean_s / loop.step_time_s:.2%}",
        )
        for stall in loop.stalls
    ]


def mean_step(loop: LoopTime) -> str:
    """Returns the mean step, and its pace."""
    pace = "" if loop.tokens_per_s_per_gpu is None else f", {loop.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"
    return f"mean step {seconds(loop.mean_step_time_s)} ({loop.mean_step_time_s / loop.step_time_s - 1:+.2%}){pace}"


def checkpoint_words(saved: CheckpointTimes) -> str:
    """Returns one checkpoint: bytes, times and storage."""
    return (
        f"a checkpoint: {saved.rank_gib:.2f} GiB a rank, {saved.total_gib:.1f} GiB in all; complete after"
        f" {seconds(saved.save_s)}, loaded in {seconds(saved.load_s)}; storage: {saved.storage}"
    )


def init_rows(stages: Sequence[InitStage]) -> list[tuple[str, str, str, str]]:
    """Returns a row for each stage of initialisation, under `INIT_COLUMNS`."""
    return [
        (_WAYS[one.way], one.name, f"{one.allocated_bytes / MIB:,.0f}", f"{one.peak_bytes / MIB:,.0f}")
        for one in stages
    ]
