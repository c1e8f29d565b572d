"""Makes the table of the plans that a search considers, every combination of the axes; counts the impossible by rule.

The default space has the plans that frameworks offer (`search` of a stack's file):

* tp: divisors of the GPUs up to the node size; cp: up to one rank for 4,096 tokens; pp: up to one layer a stage;
  ep: divisors of the experts;
* data parallelism over the remaining ranks: replicated, sharded (ZeRO stages of the stack), and sharded in the node and
  replicated across nodes (HSDP) at ZeRO-3;
* mesh axes in the usual order, micro batches of powers of two that divide the batch of a data-parallel rank;
* schedules of the stack; activation checkpointing none, selective, full; FSDP's reshard policy;
* torch.compile on and off where the framework offers it;
* with experts: the dispatchers of the stack, passes side by side, and recomputation of parts of a layer.

The whole space has all plans that the stack's code could run:

* tp: divisors up to the attention heads; cp: up to one rank for 1,024 tokens; data parallelism also sharded over any
  part of the ranks and replicated over the others;
* every order of the mesh axes on the nodes; orders that place all groups alike count once;
* with experts: whole ones, or split over all of tp where the stack can;
* any micro batch that divides; every schedule of the stack with up to 8 virtual stages; sequence parallelism on or off;
  what the stack can offload to host memory.

Every field of Plan can be fixed to a value or to a list of values, which then replaces the default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import isqrt
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from forerun.answers.search.names import Renamed, without_other_names
from forerun.answers.search.orders import Orders, Placed, all_orders
from forerun.answers.search.space_table import MESH_FIELDS, SpaceTable, Variants, combined
from forerun.common.errors import ForerunError
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.constraints import RULES
from forerun.describe.plan.fields import FIELD_TYPES, checked, is_list
from forerun.describe.plan.plan import DEFAULT_ORDER, Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.describe.stacks.stack import SearchSpace, Stack

Extent = Literal["default", "whole"]
TOKENS_PER_CP_RANK = {"default": 4096, "whole": 1024}
"""shortest part of a sequence, in tokens, that context parallelism leaves a rank in each space"""
BATCH_RULE = "batch does not split over data parallelism"
NETWORK_RULE = "order of mesh axes that a network can't place"
_COUNTED = ("seq_len", "n_microbatches")
"""plan fields that follow from the question of the search"""
_DATA_AXES = ("dp_replicate", "dp_shard")
_PASSES = ("activation_checkpointing", "recompute_modules", "pp_schedule", "virtual_stages", "expert_overlap")
"""plan fields whose values depend on each other"""
_PLAIN = Plan(seq_len=1)
CHUNK = 1 << 16
"""plans that are processed together, so that their columns stay in the CPU's cache"""


@dataclass
class Tally:
    """The numbers of combinations in a space. A mesh that the batch does not fit counts once."""

    considered: int = 0
    same: int = 0
    """combinations whose order of axes places all groups like another order, which represents them"""
    impossible: Counter[str] = field(default_factory=Counter)
    """rule -> number of combinations that break it"""
    examples: dict[str, str] = field(default_factory=dict)
    """rule -> the first reason in words"""
    renamed: Renamed | None = None
    """possible plans that execute the same step as another plan, which represents them"""

    def refuse(self, rule: str, reason: str, count: int = 1) -> None:
        """Counts `count` combinations that break `rule`."""
        if count:
            self.impossible[rule] += count
            self.examples.setdefault(rule, reason)


@dataclass(frozen=True)
class Limits:
    """Upper limits of the axes that are not fixed; None for the default."""

    max_tp: int | None = None
    max_cp: int | None = None
    max_pp: int | None = None
    max_ep: int | None = None
    max_micro_batch: int | None = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ForerunError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True)
class Space:
    """All combinations for one question. `fixed` maps Plan fields to the values they may take."""

    model: ModelSpec
    cluster: Cluster
    n_gpus: int
    seq_len: int
    global_batch: int
    fixed: Mapping[str, tuple[Any, ...]]
    limits: Limits
    framework: Stack
    offered: SearchSpace
    """the axes that the framework offers"""
    extent: Extent = "default"
    on_network: bool = False
    """whether the GPUs communicate over a network, where not every order of axes can be placed"""

    @property
    def stack(self) -> str:
        """Returns the software stack of all plans."""
        return str(self.fixed.get("stack", (_PLAIN.stack,))[0])

    def plans(self, tally: Tally) -> Iterator[Plan]:
        """Yields every possible plan under one of its names, in a fixed order, and counts them in `tally`."""
        table = self.table(tally)
        return (table.plan(row) for row in range(len(table)))

    def table(self, tally: Tally) -> SpaceTable:
        """Returns every possible plan under one of its names, in a fixed order, and counts them in `tally`."""
        every = self._combinations(tally)
        broken = np.empty(len(every), np.uint8)
        for first in range(0, len(every), CHUNK):
            rows = slice(first, min(first + CHUNK, len(every)))
            broken[rows] = self._broken(every, rows)
        counts = np.bincount(broken, minlength=len(RULES) + 2)
        for number, count in enumerate(counts[: len(RULES) + 1].tolist()):
            if count:
                plan = every.plan(int(np.argmax(broken == number)))
                rule, reason = self._reason(number, plan)
                tally.refuse(rule, reason, count)
        possible = every.take(np.flatnonzero(broken == len(RULES) + 1))
        table, tally.renamed = without_other_names(self.model, possible)
        return table

    def reason_of(self, plan: Plan) -> tuple[str, str] | None:
        """Returns the rule (or `same placement`) and the reason for which `plan` is not a row of the table.

        Returns None if it is a row, or not a plan of this space.
        """
        local, rest = divmod(self.global_batch, plan.dp)
        if rest or local % plan.micro_batch:
            return BATCH_RULE, self._batch_reason(plan.dp, local, rest, plan.micro_batch)
        for number, rule in enumerate(RULES):
            if rule.broken(self.model, plan, self.cluster):
                return self._reason(number, plan)
        orders = self._orders()
        if self._unplaced(orders.placed(plan)):
            return self._reason(len(RULES), plan)
        preferred = orders.preferred(plan)
        if preferred != plan.mesh_order:
            return "same placement as another order", f"places all groups on the same nodes as mesh_order {preferred}"
        return None

    def _reason(self, number: int, plan: Plan) -> tuple[str, str]:
        if number < len(RULES):
            return RULES[number].name, RULES[number].reason(self.model, plan, self.cluster)
        return NETWORK_RULE, (
            f"mesh_order {plan.mesh_order}: a network takes groups of evenly spaced ranks, and stages of a pipeline"
            " around everything else"
        )

    def _unplaced(self, placed: Placed) -> bool:
        if not self.on_network or placed.groups is None:
            return False
        return any(group.runs for group in placed.groups.values() if group.size > 1)

    def _broken(self, every: SpaceTable, rows: slice) -> npt.NDArray[np.uint8]:
        """Returns the number of the first rule that each of `rows` breaks, (rows,).

        With n rules, n is the rule of the network, and n + 1 means that no rule is broken.
        """
        table = every.rows(rows)
        out = np.full(len(table), len(RULES) + 1, np.uint8)
        if self.on_network:
            out[every.unplaced[every.mesh[rows]]] = len(RULES)
        for number in reversed(range(len(RULES))):
            broken = RULES[number].broken(self.model, table, self.cluster)
            if isinstance(broken, np.ndarray):
                out[broken] = number
            elif broken:
                out[:] = number
        return out

    # -- combinations ----------------------------------------------------------------------------------------

    def _orders(self) -> Orders:
        usual = all_orders() if self.extent == "whole" else (DEFAULT_ORDER,)
        return Orders(self.fixed.get("mesh_order", usual), self.cluster.node_size, self.on_network)

    def _combinations(self, tally: Tally) -> SpaceTable:
        """Combines every mesh and order with every variant; counts the combinations that the batch does not fit."""
        orders, below = self._orders(), Variants()
        meshes: list[dict[str, Any]] = []
        placed: list[Placed] = []
        blocks: list[tuple[int, int]] = []
        for mesh in self._meshes():
            dp = mesh["dp_replicate"] * mesh["dp_shard"]
            local, rest = divmod(self.global_batch, dp)
            if rest:
                tally.considered += 1
                tally.refuse(BATCH_RULE, self._batch_reason(dp, local, rest, 1))
                continue
            plan = replace(_PLAIN, **mesh)  # type: ignore[arg-type]
            found, same = orders.of(plan)
            block = self._below(plan, local, below)
            tally.considered += block.length * (len(found) + same)
            tally.same += block.length * same
            if block.refused:
                reason = self._batch_reason(dp, local, rest, block.refused_micro_batch)
                tally.refuse(BATCH_RULE, reason, block.refused * (len(found) + same))
                tally.considered += block.refused * (len(found) + same)
            for each in found:
                meshes.append({**mesh, "mesh_order": each.order})
                placed.append(each)
                blocks.append((block.first, block.length))
        plain = Plan(seq_len=self.seq_len, stack=self.stack)
        usual = {name: [getattr(plain, name)] for name in FIELD_TYPES}
        return combined(
            usual, meshes, [each.groups for each in placed], blocks, below, list(map(self._unplaced, placed))
        )

    def _batch_reason(self, dp: int, local: int, rest: int, micro_batch: int) -> str:
        if rest:
            return f"global batch {self.global_batch} is not a multiple of {dp} data-parallel ranks"
        return f"the {local} sequences of a data-parallel rank do not split into micro batches of {micro_batch}"

    # -- axes ------------------------------------------------------------------------------------------------

    def _degrees(self, axis: str, most: int, of: int) -> tuple[int, ...]:
        if axis in self.fixed:
            return self.fixed[axis]
        if axis not in self.offered.axes:
            return (1,)
        return tuple(n for n in divisors(of) if n <= most)

    def _meshes(self) -> Iterator[dict[str, int]]:
        """Yields degrees of tp, cp, pp that divide the GPUs, each with every data-parallel split and every ep."""
        limits, model = self.limits, self.model
        max_cp = limits.max_cp or max(1, self.seq_len // TOKENS_PER_CP_RANK[self.extent])
        max_tp = model.n_heads if self.extent == "whole" and model.n_heads else self.cluster.node_size
        tps = self._degrees("tp", limits.max_tp or max_tp or self.n_gpus, self.n_gpus)
        cps = self._degrees("cp", max_cp if model.n_heads else 1, self.n_gpus)
        pps = self._degrees("pp", limits.max_pp or model.n_layers, self.n_gpus)
        eps = self._degrees("ep", limits.max_ep or self.n_gpus, model.moe.n_experts if model.moe else 1)
        for tp, cp, pp in product(tps, cps, pps):
            dp, rest = divmod(self.n_gpus, tp * cp * pp)
            if rest or not dp:
                continue
            for ep, etp in product(eps, self._etps(tp)):
                for split in self._splits(dp, tp, cp, ep * etp):
                    yield {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp, **split}

    def _etps(self, tp: int) -> tuple[int, ...]:
        """Returns how many ranks may split an expert: in the whole space also all of `tp`, as Megatron-Core does unless
        it is told otherwise."""
        if "etp" in self.fixed:
            return self.fixed["etp"]
        splits = self.extent == "whole" and "etp" in self.offered.axes and self.model.moe is not None
        return (1, tp) if splits and tp > 1 else (1,)

    def _splits(self, dp: int, tp: int, cp: int, experts: int) -> list[dict[str, int]]:
        """Returns the splits of `dp` ranks: dp_replicate, dp_shard and zero_stage. `experts` ranks hold other parts of
        them."""
        stages = self.fixed.get("zero_stage", self.offered.zero_stages)
        single = dp * cp == 1 and "zero_stage" not in self.fixed
        splits = []
        for stage in (0,) if single else stages:
            for replicate, shard in self._pairs(stage, dp, tp, cp, experts):
                splits.append({"dp_replicate": replicate, "dp_shard": shard, "zero_stage": stage})
        return splits

    def _pairs(self, stage: int, dp: int, tp: int, cp: int, experts: int) -> list[tuple[int, int]]:
        if "dp_replicate" in self.fixed or "dp_shard" in self.fixed:
            replicates = self.fixed.get("dp_replicate", (-1,))
            shards = self.fixed.get("dp_shard", (-1,))
            pairs = [_fill(dp, r, s) for r, s in product(replicates, shards)]
            return [pair for pair in dict.fromkeys(pairs) if pair[0] * pair[1] == dp]
        if stage == 0 and experts == 1:
            return [(dp, 1)]
        if self.extent == "whole":
            return [(replicate, dp // replicate) for replicate in divisors(dp) if dp // replicate * cp > 1]
        pairs = [(1, dp)]
        in_node = self.cluster.node_size // (tp * cp) if self.cluster.node_size else 0
        if stage == 3 and 1 < in_node < dp and dp % in_node == 0:
            pairs.append((dp // in_node, in_node))
        return pairs

    def _below(self, plan: Plan, local: int, below: Variants) -> Any:
        """Returns the block of `below` for a mesh with `local` sequences per data-parallel rank; adds it if new."""
        key = (local, plan.pp, plan.uses_fsdp, plan.shards_parameters, plan.tp > 1, plan.ep > 1)
        if key not in below.blocks:
            axes = self._axes(key)
            below.add(key, axes, local)
        return below.blocks[key]

    def _axes(self, key: tuple[int, int, bool, bool, bool, bool]) -> dict[str, Sequence[Any]]:
        """Returns the names and values of the axes that vary for one mesh."""
        local, pp, fsdp, sharded, split, exchanges = key
        fixed, offered, whole = self.fixed, self.offered, self.extent == "whole"
        most = self.limits.max_micro_batch or local
        micro = [n for n in divisors(local) if n <= most] if whole else powers_of_two(local, most)
        axes: dict[str, Sequence[Any]] = {
            "micro_batch": fixed.get("micro_batch") or micro,
            "+".join(_PASSES): self._passes(pp, exchanges and not fsdp),
            "compile": fixed.get("compile", offered.compile),
        }
        if exchanges:
            axes["dispatcher"] = fixed.get("dispatcher", offered.dispatchers)
        axes["reshard_after_forward"] = fixed.get("reshard_after_forward", offered.reshard if sharded else ("default",))
        if split:
            both = (True, False) if whole else (offered.sequence_parallel,)
            axes["sequence_parallel"] = fixed.get("sequence_parallel", both)
        if whole:
            axes["offload"] = [what for what in offered.offload if what != "params" or fsdp]
        taken = {"micro_batch", "reshard_after_forward", *_PASSES}
        taken |= {*MESH_FIELDS, *_COUNTED, "mesh_order"}
        return axes | {name: values for name, values in fixed.items() if name not in taken}

    def _passes(self, pp: int, may_overlap: bool) -> list[tuple[Any, ...]]:
        """Returns the values of _PASSES: the order of forward and backward passes, and the tensors that they keep.

        Frameworks that run passes side by side refuse to recompute whole layers there.
        """
        both = [overlap for overlap in (False, True) if may_overlap or not overlap]
        found = []
        for checkpointing, modules in self._checkpointing():
            for (schedule, virtual), overlap in product(self._schedules(pp), self.fixed.get("expert_overlap", both)):
                offered = schedule in self.offered.expert_overlap and (pp == 1 or schedule != "1F1B")
                if "expert_overlap" in self.fixed or not overlap or (offered and checkpointing != "full"):
                    found.append((checkpointing, modules, schedule, virtual, overlap))
        return found

    def _checkpointing(self) -> list[tuple[Any, tuple[str, ...]]]:
        """Returns the kinds of activation checkpointing, each with the parts of a layer that it recomputes."""
        kinds = self.fixed.get("activation_checkpointing", ("none", "selective", "full"))
        if "recompute_modules" in self.fixed:
            return list(product(kinds, self.fixed["recompute_modules"]))
        parts = {"mla_up_proj": self.model.mla is not None, "layernorm": True, "moe_act": self.model.moe is not None}
        named = [tuple(name for name in group if parts.get(name, True)) for group in self.offered.recompute_modules]
        sets = tuple(dict.fromkeys(((), *(named if self.model.moe is not None else ()))))
        return [(kind, modules) for kind in kinds for modules in (sets if kind == "selective" else ((),))]

    def _schedules(self, pp: int) -> Sequence[tuple[Any, int]]:
        if pp == 1:
            return (("1F1B", 1),)
        names, virtual = self.fixed.get("pp_schedule"), self.fixed.get("virtual_stages")
        whole = self.extent == "whole"
        pairs: list[tuple[Any, int]] = list(self.offered.all_schedules if whole else self.offered.schedules)
        if names:
            pairs = [pair for pair in pairs if pair[0] in names]
            listed = {name for name, _ in pairs}
            pairs += [(name, 1 if name in ("1F1B", "GPipe", "ZB1P") else 2) for name in names if name not in listed]
        if virtual:
            pairs = [(name, v) for name in dict.fromkeys(name for name, _ in pairs) for v in virtual]
        return pairs


def make_spaces(
    model: ModelSpec,
    cluster: Cluster,
    n_gpus: int,
    seq_len: int,
    global_batch: int,
    fixed: Mapping[str, object] | None = None,
    limits: Limits | None = None,
    extent: Extent = "default",
    on_network: bool = False,
) -> list[Space]:
    """Makes the space of each software stack that `fixed` lists, as `make_space` does for one."""
    fixed = fixed or {}
    stacks = dict.fromkeys(map(_stack_name, _values("stack", fixed.get("stack", _PLAIN.stack))))
    question = (model, cluster, n_gpus, seq_len, global_batch)
    return [make_space(*question, {**fixed, "stack": name}, limits, extent, on_network) for name in stacks]


def make_space(
    model: ModelSpec,
    cluster: Cluster,
    n_gpus: int,
    seq_len: int,
    global_batch: int,
    fixed: Mapping[str, object] | None = None,
    limits: Limits | None = None,
    extent: Extent = "default",
    on_network: bool = False,
) -> Space:
    """Makes the space of one question: the plans that the stack offers today, or all that it could run.

    A value of `fixed` is one value of a Plan field or a list of values; -1 for dp_shard or dp_replicate takes the ranks
    that the other axes leave. With `on_network` the GPUs communicate over a network, where not every order of mesh axes
    can be placed.

    Raises ForerunError for a number below 1, a field that Plan does not have, or a value that it can't take.
    """
    if extent not in TOKENS_PER_CP_RANK:
        raise ForerunError(f"space must be one of {', '.join(TOKENS_PER_CP_RANK)}, got {extent!r}")
    for name, value in (("gpus", n_gpus), ("seq_len", seq_len), ("global_batch", global_batch)):
        if value < 1:
            raise ForerunError(f"{name} must be at least 1, got {value}")
    values = {name: _values(name, value) for name, value in (fixed or {}).items()}
    stacks = values.get("stack", (Plan.__dataclass_fields__["stack"].default,))
    if len(stacks) != 1:
        raise ForerunError(f"stack: this search takes one software stack, got {', '.join(map(str, stacks))}")
    framework = load_stack(stacks[0])
    if framework.keeps_gathered_at_zero_2 and 2 in values.get("zero_stage", ()):
        values["zero_stage"] = tuple(dict.fromkeys(3 if stage == 2 else stage for stage in values["zero_stage"]))
        values.setdefault("reshard_after_forward", ("never",))
    offered = framework.search_space()
    return Space(
        model,
        cluster,
        n_gpus,
        seq_len,
        global_batch,
        values,
        limits or Limits(),
        framework,
        offered,
        extent,
        on_network,
    )


def _stack_name(given: str) -> str:
    """Returns the name of a stack as a catalogue spells it; the path of a file stays as it is."""
    return given if given.endswith((".yaml", ".yml")) else given.lower()


def divisors(number: int) -> tuple[int, ...]:
    """Returns all divisors of `number`, ascending."""
    low = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return tuple(dict.fromkeys([*low, *(number // n for n in reversed(low))]))


def powers_of_two(number: int, most: int) -> tuple[int, ...]:
    """Returns the powers of two up to `most` that divide `number`, ascending."""
    return tuple(2**k for k in range(most.bit_length()) if 2**k <= most and number % 2**k == 0)


def _values(name: str, value: object) -> tuple[Any, ...]:
    """Checks and returns the values of a fixed field."""
    if name not in FIELD_TYPES:
        raise ForerunError(f"a plan has no field {name!r}; it has: {', '.join(FIELD_TYPES)}")
    if name in _COUNTED:
        raise ForerunError(f"{name} follows from sequence length, batch and mesh, it can't be fixed")
    several = isinstance(value, (list, tuple)) and not (is_list(name) and all(isinstance(v, (int, str)) for v in value))
    listed: list[Any] = list(value) if several else [value]  # type: ignore[call-overload]
    if not listed:
        raise ForerunError(f"{name}: no value is left to try")
    values = tuple(dict.fromkeys(checked(name, v, name) for v in listed))
    for each in values:
        if not (name in _DATA_AXES and each == -1):
            replace(_PLAIN, **{name: each})  # type: ignore[arg-type]
    return values


def _fill(dp: int, replicate: int, shard: int) -> tuple[int, int]:
    """Returns the degrees of two axes over `dp` ranks. One or both degrees may be -1, which means the remaining
    ranks.
    """
    if shard == -1:
        replicate = 1 if replicate == -1 else replicate
        return replicate, dp // replicate
    return (dp // shard if replicate == -1 else replicate), shard
