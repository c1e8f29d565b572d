"""Translation: what becomes of each field of a plan in the files of one tool, so that none is dropped silently."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from forerun.common.errors import ForerunError
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.fields import FIELD_TYPES
from forerun.describe.plan.plan import DEFAULT_ORDER, FP8_PRECISIONS, Plan
from forerun.sources.symbolic.mesh import groups_of


@dataclass(frozen=True)
class Launch:
    """The files that start a run with one tool, and what they can't say."""

    tool: str
    files: dict[str, str]
    """file name -> text, without the notes"""
    notes: tuple[str, ...]
    """what differs from the plan, or is left to the user; one line each"""
    written: tuple[str, ...]
    """fields of the plan that stand in a file"""
    habits: tuple[str, ...]
    """fields that the tool has no setting for and does as the plan says, or that change nothing in this plan"""
    noted: tuple[str, ...]
    """fields that a note is about"""


class Translation:
    """A plan that is being written for a tool. Every field ends as written, a habit of the tool, noted or refused."""

    def __init__(self, tool: str, plan: Plan, model: ModelSpec, cluster: Cluster) -> None:
        self.tool, self.plan, self.model, self.cluster = tool, plan, model, cluster
        self.notes: list[str] = []
        self._written: dict[str, None] = {}
        self._habits: dict[str, None] = {}
        self._noted: dict[str, None] = {}

    @property
    def title(self) -> str:
        """Model, mesh and GPUs in a line that may stand in a comment of any file, whatever the model is called."""
        words = f"{self.model.name}, {self.plan.describe()}: {self.plan.world_size} GPUs of {self.cluster.name}"
        return re.sub(r"[^\w ,:.+-]", "_", words)

    def give(self, name: str) -> Any:
        """The value of field `name`, which goes into a file."""
        self._written[name] = None
        return getattr(self.plan, name)

    def habit(self, *names: str) -> None:
        """The tool does what these fields say without being told; nothing for those that have an outcome already."""
        self._habits |= dict.fromkeys(name for name in names if self.open(name))

    def note(self, name: str, text: str) -> None:
        """The tool can't do what field `name` says, and does what `text` says; what is trained is the same."""
        self._noted[name] = None
        self.notes.append(f"{name} {getattr(self.plan, name)}: {text}")

    def habit_unless(self, fits: bool, name: str, text: str) -> None:
        """A habit of the tool where it `fits`, else a note."""
        if fits:
            self.habit(name)
        else:
            self.note(name, text)

    def remark(self, text: str) -> None:
        """A note on what is no field of the plan."""
        self.notes.append(text)

    def refuse(self, name: str, text: str) -> NoReturn:
        """Raise ForerunError: the tool would train something else, or nothing at all."""
        raise ForerunError(f"--launch {self.tool}: {name} {getattr(self.plan, name)}: {text}")

    def refuse_model(self, text: str) -> NoReturn:
        """Raise ForerunError: the tool has no such architecture."""
        raise ForerunError(f"--launch {self.tool}: {self.model.name}: {text}")

    def stack(self, *own: str) -> None:
        """Note a plan that was predicted with the habits of another framework than the tool's `own` stacks."""
        self.habit_unless(
            self.plan.stack in own,
            "stack",
            f"predicted with the habits of that framework; {self.tool} runs kernels of its own (stack {own[0]})",
        )

    def without_effect_here(self) -> None:
        """Mark the fields that say nothing in this plan, whatever the tool."""
        plan, habit = self.plan, self.habit
        if self.places_as(DEFAULT_ORDER):
            habit("mesh_order")
        if plan.tp == 1:
            habit("sequence_parallel", "loss_parallel", "async_tp")
        if plan.pp == 1:
            habit("pp_schedule", "virtual_stages", "layers_per_stage", "balance_ends")
        if plan.cp == 1:
            habit("cp_method")
        balanced = plan.cp == 1 or plan.cp_method == "ulysses" or plan.cp_load_balance == "head_tail"
        self.habit_unless(balanced, "cp_load_balance", "the tool gives each rank a chunk from the head and the tail")
        if not plan.shards_parameters:
            habit("reshard_after_forward", "prefetch")
        if plan.fsdp == 1:
            habit("zero_stage")
        if plan.shards_parameters:
            habit("ddp_bucket_mib")
        if plan.dp_replicate * plan.fsdp == 1:
            habit("ddp_bucket_mib", "reduce_dtype", "overlap_grad_reduce")
        if plan.n_microbatches == 1:
            habit("accumulate_dtype")
        if plan.precision not in FP8_PRECISIONS or plan.fsdp == 1:
            habit("fp8_all_gather")
        if plan.activation_checkpointing == "none":
            habit("checkpoint_every")
        if plan.activation_checkpointing != "selective":
            habit("selective_policy")
        if not plan.compile:
            habit("compile_loss", "graph_breaks")
        if plan.graph_breaks:
            self.note("graph_breaks", "what the script does inside of what it compiles, not a setting")
        else:
            habit("graph_breaks")
        without = not plan.shards_parameters or not plan.shard_min_mib
        self.habit_unless(without, "shard_min_mib", "shards parameters of every size")
        self.habit_unless(not plan.autocast, "autocast", "put torch.autocast around the model in your script")
        if plan.expert_imbalance == 1:
            habit("expert_imbalance")
        else:
            self.note("expert_imbalance", "what routing came to be, not a setting")

    def places_as(self, order: str) -> bool:
        """Whether the plan has all groups on the same nodes as one with its axes in `order`."""
        size = self.cluster.node_size
        return groups_of(replace(self.plan, mesh_order=order), size) == groups_of(self.plan, size)

    def scaled_in_blocks(self) -> None:
        """mxfp8 and nvfp4 scale blocks, whatever the tool: another fp8_recipe is refused."""
        if self.plan.fp8_recipe not in ("none", "mx"):
            self.refuse("fp8_recipe", f"{self.plan.precision} scales blocks of elements; leave it out, or mx")
        self.habit("fp8_recipe")

    def open(self, name: str) -> bool:
        """Whether field `name` still needs an outcome."""
        return name not in self._written and name not in self._habits and name not in self._noted

    def finish(self, files: dict[str, str]) -> Launch:
        """The files with the notes. Raises AssertionError for a field that the tool's module did not look at."""
        if self.open("mesh_order"):
            self.note("mesh_order", f"{self.tool} places ranks as {DEFAULT_ORDER}; a rank file can give nodes others")
        left = [name for name in FIELD_TYPES if self.open(name)]
        assert not left, f"{self.tool}: no outcome for {', '.join(left)}"
        return Launch(
            self.tool, files, tuple(self.notes), tuple(self._written), tuple(self._habits), tuple(self._noted)
        )
