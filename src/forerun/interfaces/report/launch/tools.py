"""Launch configurations: a plan as the files of the tool that is to run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.common.errors import ForerunError, UnknownName
from forerun.common.files import make_folder, whole_files
from forerun.describe.model.layered import LayeredModel
from forerun.describe.plan.constraints import check_plan
from forerun.interfaces.report.launch.accelerate import accelerate_deepspeed, accelerate_fsdp
from forerun.interfaces.report.launch.deepspeed import deepspeed
from forerun.interfaces.report.launch.megatron import megatron
from forerun.interfaces.report.launch.schedulers import SCHEDULERS, write_job
from forerun.interfaces.report.launch.torchtitan_registry import torchtitan_registry
from forerun.interfaces.report.launch.torchtitan_toml import torchtitan_toml
from forerun.interfaces.report.launch.translation import Launch, Translation

if TYPE_CHECKING:
    from forerun.describe.cluster.types import Cluster
    from forerun.describe.model.spec import ModelSpec
    from forerun.describe.plan.plan import Plan

NOTES = "notes.txt"
_WRITERS: dict[str, Callable[[Translation], Launch]] = {
    "torchtitan-0.2": torchtitan_toml,
    "torchtitan": torchtitan_registry,
    "megatron-lm": megatron,
    "deepspeed": deepspeed,
    "accelerate": accelerate_fsdp,
    "accelerate-deepspeed": accelerate_deepspeed,
}
TOOLS = tuple(_WRITERS)


def launch(
    plan: Plan, model: ModelSpec | LayeredModel, cluster: Cluster, tool: str, scheduler: str | None = None
) -> Launch:
    """Returns `plan` for `tool`, with notes on the differences of the tool, and a job file for `scheduler`.

    Raises:
        UnknownName: there is no such tool or scheduler.
        ImpossiblePlan: the plan can't run.
        ForerunError: the tool can't run the plan or the model, or would train something else.
    """
    check_tool(tool, scheduler)
    if isinstance(model, LayeredModel):
        raise ForerunError(f"--launch {tool}: {model.name} is given layer by layer; choose a transformer")
    check_plan(model, plan, cluster)
    translation = Translation(tool, plan, model, cluster)
    translation.without_effect_here()
    translation.fine_tuning()
    made = _WRITERS[tool](translation)
    if scheduler is None:
        return made
    name, text = write_job(translation, scheduler)
    return replace(made, files={**made.files, name: text}, notes=tuple(translation.notes))


def check_tool(tool: str, scheduler: str | None = None) -> None:
    """Raises UnknownName for a tool or a scheduler that nothing is written for."""
    if tool not in TOOLS:
        raise UnknownName("tool", tool, list(TOOLS))
    if scheduler is not None and scheduler not in SCHEDULERS:
        raise UnknownName("scheduler", scheduler, list(SCHEDULERS))


def launch_files(
    plan: Plan, model: ModelSpec | LayeredModel, cluster: Cluster, tool: str, scheduler: str | None = None
) -> dict[str, str]:
    """Returns file name -> text of everything that `tool` and `scheduler` need to run `plan`, and notes.txt.

    Raises as `launch` does.
    """
    made = launch(plan, model, cluster, tool, scheduler)
    return {**made.files, NOTES: _notes_text(made, plan, model)}


def write_launch(folder: Path, files: dict[str, str]) -> None:
    """Writes `files` into `folder`, which is made where it isn't there; scripts are executable. Raises ForerunError."""
    make_folder(folder)
    with whole_files() as made:
        for name, text in files.items():
            with made.open(folder / name, executable=name.endswith(".sh")) as file:
                file.write(text.encode())


def _notes_text(made: Launch, plan: Plan, model: ModelSpec | LayeredModel) -> str:
    lines = [f"{model.name}, {plan.describe()}, {plan.world_size} GPUs, for {made.tool}.", ""]
    lines += ["What differs from the plan, or is left to you:"] if made.notes else ["Everything is as planned."]
    return "\n".join([*lines, *(f"* {note}" for note in made.notes)]) + "\n"
