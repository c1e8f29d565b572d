"""Reads the periodic work of torchtitan's loop from its settings. A trace leaves this work out."""

from __future__ import annotations

from typing import Any

from forerun.describe.plan.training_loop import CHECKPOINT_MODES, TrainingLoop


def loop_of(config: Any, profiler: str) -> TrainingLoop:
    """Returns the loop of `config`, whose section about profiling is called `profiler`. A missing setting means
    never."""

    def number(path: str, switch: str = "") -> int:
        return int(_value(config, path) or 0) if not switch or _value(config, switch) else 0

    every, active = f"{profiler}.profile_freq", number(f"{profiler}.profiler_active")
    snapshot = f"{profiler}.memory_snapshot_freq"
    mode = str(
        getattr(_value(config, "checkpoint.async_mode"), "value", _value(config, "checkpoint.async_mode"))
    ).lower()
    return TrainingLoop(
        checkpoint=number("checkpoint.interval", "checkpoint.enable"),
        profile=number(every, f"{profiler}.enable_profiling"),
        memory_snapshot=number(snapshot if _value(config, snapshot) else every, f"{profiler}.enable_memory_snapshot"),
        gc=number("training.gc_freq"),
        metrics=number("metrics.log_freq"),
        checkpoint_mode=next((known for known in CHECKPOINT_MODES if known == mode), "disabled"),
        profiler_active=max(1, active),
    )


def _value(config: Any, path: str) -> Any:
    """Returns the setting at `section.key`, None if there is none."""
    for name in path.split("."):
        config = getattr(config, name, None)
    return config
