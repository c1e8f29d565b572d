"""The stages of a step of GRPO or PPO, as a table and as plain data."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from forerun.answers.analysis.post_training import PostTrainingStep
from forerun.interfaces.report.console import make_table, print_title
from forerun.interfaces.report.figures import percent, seconds


def print_post_training(out: Console, step: PostTrainingStep) -> None:
    """Prints time and memory of each stage, and the step that they make."""
    out.print()
    print_title(out, "The step with its generation")
    rows = [
        (each.name, seconds(each.time_s), percent(each.time_s / step.step_time_s), _gib(each.device_gib))
        for each in step.stages
    ]
    verdict = "fits" if step.fits else f"does not fit in {step.memory_limit_gib:.1f} GiB"
    rows.append((f"whole step ({verdict})", seconds(step.step_time_s), "", _gib(step.device_gib)))
    out.print(make_table("lrrr", ("stage", "time", "share", "GiB"), rows, gap=2))


def post_training_record(step: PostTrainingStep) -> dict[str, Any]:
    """Returns the stages as plain data; `device_gib` is null for scoring passes."""
    return {
        "stages": [{"name": e.name, "time_s": e.time_s, "device_gib": e.device_gib} for e in step.stages],
        "step_time_s": step.step_time_s,
        "device_gib": step.device_gib,
        "fits": step.fits,
        "generated_tokens": step.generated_tokens,
    }


def _gib(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
