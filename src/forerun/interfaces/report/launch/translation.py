"""Translates a plan into the files of one tool: every field of the plan has an outcome, so none is lost silently."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from forerun.common.errors import ForerunError
from forerun.describe.kernels.dispatchers import AUTO
from forerun.describe.kernels.optimizers import optimizer
from forerun.describe.plan.fields import FIELD_TYPES
from forerun.describe.plan.plan import DEFAULT_ORDER, FP8_PRECISIONS, Plan
from forerun.describe.plan.routing import BALANCED
from forerun.describe.recipe.words import words_of
from forerun.describe.stacks.catalog import load_stack
from forerun.sources.symbolic.mesh import groups_of

if TYPE_CHECKING:
    from forerun.describe.cluster.types import Cluster
    from forerun.describe.model.spec import ModelSpec


@dataclass(frozen=True)
class Launch:
    """The files that start a run with one tool, and the outcome of every field of the plan."""

    tool: str
    files: dict[str, str]
    """file name -> text, without the notes"""
    notes: tuple[str, ...]
    """differences from the plan, and tasks that are left to the user; one line each"""
    written: tuple[str, ...]
    """fields of the plan that a file holds"""
    implied: tuple[str, ...]
    """fields without a setting: the tool follows the plan anyway, or the field changes nothing in this plan"""
    noted: tuple[str, ...]
    """fields that the tool treats otherwise than planned, as a note says"""


class Translation:
    """A plan on its way into the files of a tool. The outcome of each field is written, implied, noted or refused."""

    def __init__(self, tool: str, plan: Plan, model: ModelSpec, cluster: Cluster) -> None:
        self.tool, self.plan, self.model, self.cluster = tool, plan, model, cluster
        self.own = words_of(tool)
        self.notes: list[str] = []
        self._written: dict[str, None] = {}
        self._implied: dict[str, None] = {}
        self._noted: dict[str, None] = {}

    @property
    def title(self) -> str:
        """Returns model, mesh and GPUs in a line that may stand in a comment of any file, whatever the model is
        called."""
        words = f"{self.model.name}, {self.plan.describe()}: {self.plan.world_size} GPUs of {self.cluster.name}"
        return re.sub(r"[^\w ,:.+-]", "_", words)

    def give(self, name: str) -> Any:
        """Records that a file holds field `name`, and returns its value."""
        self._written[name] = None
        return getattr(self.plan, name)

    def word(self, name: str) -> Any:
        """Records that a file holds field `name`, and returns the tool's word for its value, or refuses the value."""
        words = self.own.words[name]
        value = self.give(name)
        if value not in words:
            self.refuse(name, f"{self.own.title} has {' and '.join(words)}")
        return words[value]

    def entries(self, *names: str) -> dict[str, Any]:
        """Records that a file holds these fields, and returns setting -> value, or the tool's word for it.

        A setting in a table of a file is named without that table.
        """
        return {
            self.own.keys[name].rpartition(".")[2]: self.word(name) if name in self.own.words else self.give(name)
            for name in names
        }

    def argument(self, name: str) -> str:
        """Records that a file holds field `name`, and returns it as an argument of a command line with its value."""
        ((setting, value),) = self.entries(name).items()
        return f"--{setting}" if value is True else f"--{setting} {value}"

    def size(self, name: str, value: Any) -> str:
        """Returns a size of the model, such as hidden or moe.top_k, as an argument of a command line."""
        return f"--{self.own.sizes[name]} {value}"

    def implied(self, *names: str) -> None:
        """Records that the tool does what these fields say without a setting; fields with an outcome keep it."""
        self._implied |= dict.fromkeys(name for name in names if self.open(name))

    def note(self, name: str, text: str) -> None:
        """Notes that the tool does what `text` says in place of field `name`; it still trains the same model."""
        self._noted[name] = None
        self.notes.append(f"{name} {getattr(self.plan, name)}: {text}")

    def implied_if(self, fits: bool, name: str, text: str) -> None:
        """Records an implied field where it `fits`, else a note; a field with an outcome keeps it."""
        if fits:
            self.implied(name)
        elif self.open(name):
            self.note(name, text)

    def remark(self, text: str) -> None:
        """Adds a note that is about no field of the plan."""
        self.notes.append(text)

    def refuse(self, name: str, text: str) -> NoReturn:
        """Raises ForerunError: the tool would train something else, or nothing at all."""
        raise ForerunError(f"--launch {self.tool}: {name} {getattr(self.plan, name)}: {text}")

    def refuse_model(self, text: str) -> NoReturn:
        """Raises ForerunError: the tool has no such architecture."""
        raise ForerunError(f"--launch {self.tool}: {self.model.name}: {text}")

    def stack(self) -> None:
        """Notes a plan that was predicted for a framework that the tool does not launch."""
        own = self.tool in load_stack(self.plan.stack).launch
        self.implied_if(own, "stack", f"predicted for that framework; {self.tool} launches another, with other kernels")

    def without_effect_here(self) -> None:
        """Records the fields that change nothing in this plan, whatever the tool."""
        plan, implied = self.plan, self.implied
        if self.places_as(DEFAULT_ORDER):
            implied("mesh_order")
        if plan.tp == 1:
            implied("sequence_parallel", "loss_parallel", "async_tp")
        if plan.pp == 1:
            implied("pp_schedule", "virtual_stages", "layers_per_stage", "balance_ends")
        if plan.cp == 1:
            implied("cp_method")
        balanced = plan.cp == 1 or plan.cp_method == "ulysses" or plan.cp_load_balance == "head_tail"
        self.implied_if(balanced, "cp_load_balance", "the tool gives each rank a chunk from the head and the tail")
        if not plan.shards_parameters:
            implied("reshard_after_forward", "prefetch")
        if plan.fsdp == 1:
            implied("zero_stage")
        if plan.shards_parameters:
            implied("ddp_bucket_mib")
        if plan.dp_replicate * plan.fsdp == 1:
            implied("ddp_bucket_mib", "reduce_dtype", "overlap_grad_reduce")
        if plan.n_microbatches == 1:
            implied("accumulate_dtype")
        if plan.precision not in FP8_PRECISIONS or plan.fsdp == 1:
            implied("fp8_all_gather")
        if plan.activation_checkpointing == "none":
            implied("checkpoint_every")
        if plan.activation_checkpointing != "selective" or plan.recompute_modules:
            implied("selective_policy")
        no_modules = plan.activation_checkpointing != "selective" or not plan.recompute_modules
        self.implied_if(
            no_modules, "recompute_modules", "wrap these modules in your script; the tool has no such setting"
        )
        if self.model.moe is None:
            implied("etp", "dispatcher", "expert_overlap", "shared_expert_overlap")
        if not plan.compile:
            implied("compile_model", "compile_loss", "graph_breaks")
        if plan.graph_breaks:
            self.note("graph_breaks", "this depends on the code that the script compiles, not on a setting")
        else:
            implied("graph_breaks")
        without = not plan.shards_parameters or not plan.shard_min_mib
        self.implied_if(without, "shard_min_mib", "shards parameters of every size")
        self.implied_if(not plan.autocast, "autocast", "put torch.autocast around the model in your script")
        self.implied_if(plan.etp == 1, "etp", "the tool keeps experts whole, or splits them over all of tp")
        self.implied_if(plan.dispatcher == AUTO, "dispatcher", "replace the tool's exchange of tokens in your script")
        self.implied_if(not plan.expert_overlap, "expert_overlap", "the tool runs one pass after the other")
        own = "the tool runs shared experts before or after the routed ones"
        self.implied_if(not plan.shared_expert_overlap, "shared_expert_overlap", own)
        self.implied_if(plan.moment_dtype == "fp32", "moment_dtype", "the tool's optimizer keeps its moments in fp32")
        if optimizer(plan.optimizer).elements.unfused is None:
            implied("optimizer_impl")
        liger = "your model computes head and loss by LigerFusedLinearCrossEntropyLoss, which chooses its own chunks"
        self.implied_if(plan.loss_chunks == 1, "loss_chunks", liger)
        packing = "your data set packs documents, and hands their borders to attention"
        self.implied_if(not plan.document_lengths, "document_lengths", packing)
        if not plan.lora_rank:
            implied("lora_rank", "lora_targets", "frozen_dtype")
        if not plan.reference:
            implied("reference")
        for name, usual in (("expert_imbalance", 1), ("expert_routing", BALANCED)):
            if getattr(plan, name) == usual:
                implied(name)
            else:
                self.note(name, "a result of routing, not a setting")

    def fine_tuning(self) -> None:
        """Notes the adapters and the reference model that the user's script makes.

        Raise ForerunError for a tool that runs no script of the user's.
        """
        if self.plan.lora_rank:
            self._adapters()
        if self.plan.reference:
            if "adapters" not in self.own.constants:
                self.refuse("reference", f"{self.own.title} trains one model; use deepspeed or accelerate with trl")
            self.note("reference", "your script runs the reference model, as trl's DPOTrainer does")

    def _adapters(self) -> None:
        plan = self.plan
        if "adapters" not in self.own.constants:
            self.refuse("lora_rank", f"{self.own.title} trains all weights; use deepspeed or accelerate with peft")
        self.note("lora_rank", f"your script wraps the model: peft.LoraConfig(r={plan.lora_rank}, target_modules=...)")
        self.note("lora_targets", f"target_modules of that LoraConfig: {', '.join(plan.lora_targets)}")
        loaded = self.own.constants["adapters"][plan.frozen_dtype]
        self.note("frozen_dtype", f"your script loads the frozen model with {loaded}")

    def places_as(self, order: str) -> bool:
        """Returns whether axes in this `order` would place all groups on the same nodes as the plan does."""
        size = self.cluster.node_size
        return groups_of(replace(self.plan, mesh_order=order), size) == groups_of(self.plan, size)

    def scaled_in_blocks(self) -> None:
        """Refuses an fp8_recipe other than mx for mxfp8 and nvfp4, which always scale blocks of elements."""
        if self.plan.fp8_recipe not in ("none", "mx"):
            self.refuse("fp8_recipe", f"{self.plan.precision} scales blocks of elements; leave it out, or mx")
        self.implied("fp8_recipe")

    def open(self, name: str) -> bool:
        """Returns whether field `name` has no outcome yet."""
        return name not in self._written and name not in self._implied and name not in self._noted

    def finish(self, files: dict[str, str]) -> Launch:
        """Returns the files with the notes. Raises AssertionError for a field that the tool's module did not look
        at."""
        if self.open("mesh_order"):
            self.note("mesh_order", f"{self.tool} places ranks as {DEFAULT_ORDER}; a rank file can give nodes others")
        left = [name for name in FIELD_TYPES if self.open(name)]
        assert not left, f"{self.tool}: no outcome for {', '.join(left)}"
        return Launch(
            self.tool, files, tuple(self.notes), tuple(self._written), tuple(self._implied), tuple(self._noted)
        )
