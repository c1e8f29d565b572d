"""The plans that a search considers: every combination of the axes, lazily, impossible ones counted by rule.

The default space (see `spaces.yaml` for what each stack offers):

* tp: divisors of the GPUs up to the node size; cp: up to one rank for 4,096 tokens; pp: up to one layer a stage;
  ep: divisors of the experts;
* data parallelism of the rest: replicated, sharded (ZeRO stages of the stack), and sharded in the node and replicated
  across nodes (HSDP) at ZeRO-3;
* micro batches: powers of two that divide the batch of a data-parallel rank;
* schedules of the stack; activation checkpointing none, selective, full; FSDP's reshard policy.

Every field of Plan can be fixed to a value or to a list of values, which then replaces the default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import isqrt
from typing import Any

from forerun.cluster.types import Cluster
from forerun.errors import ForerunError
from forerun.model.spec import ModelSpec
from forerun.plan.constraints import refuse
from forerun.plan.fields import FIELD_TYPES, checked, is_list
from forerun.plan.plan import Plan
from forerun.search.habits import Habits, habits_of

TOKENS_PER_CP_RANK = 4096
"""the default space cuts sequences down to this length, not further"""
BATCH_RULE = "batch does not split over data parallelism"
_COUNTED = ("seq_len", "n_microbatches")
"""fields that follow from the question, not from the plan"""
_DATA_AXES = ("dp_replicate", "dp_shard")
_PLAIN = Plan(seq_len=1)


@dataclass
class Tally:
    """How many combinations an enumeration met. A mesh that the batch does not fit counts once."""

    considered: int = 0
    impossible: Counter[str] = field(default_factory=Counter)
    """by rule"""
    examples: dict[str, str] = field(default_factory=dict)
    """rule -> the first reason in full"""

    def refuse(self, rule: str, reason: str) -> None:
        """Count one impossible combination."""
        self.impossible[rule] += 1
        self.examples.setdefault(rule, reason)


@dataclass(frozen=True)
class Limits:
    """Upper ends of the axes that are not fixed; None for the default."""

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
    habits: Habits

    def plans(self, tally: Tally) -> Iterator[Plan]:
        """Every possible plan once, in a fixed order; `tally` grows as they are drawn."""
        for mesh in self._meshes():
            yield from self._plans_of(mesh, tally)

    # -- axes ------------------------------------------------------------------------------------------------

    def _degrees(self, axis: str, most: int, of: int) -> tuple[int, ...]:
        if axis in self.fixed:
            return self.fixed[axis]
        if axis not in self.habits.axes:
            return (1,)
        return tuple(n for n in divisors(of) if n <= most)

    def _meshes(self) -> Iterator[dict[str, int]]:
        """Degrees of tp, cp, pp that divide the GPUs, each with every data-parallel split and every ep."""
        limits, model = self.limits, self.model
        max_cp = limits.max_cp or max(1, self.seq_len // TOKENS_PER_CP_RANK)
        tps = self._degrees("tp", limits.max_tp or self.cluster.node_size or self.n_gpus, self.n_gpus)
        cps = self._degrees("cp", max_cp if model.n_heads else 1, self.n_gpus)
        pps = self._degrees("pp", limits.max_pp or model.n_layers, self.n_gpus)
        eps = self._degrees("ep", limits.max_ep or self.n_gpus, model.moe.n_experts if model.moe else 1)
        for tp, cp, pp in product(tps, cps, pps):
            dp, rest = divmod(self.n_gpus, tp * cp * pp)
            if rest or not dp:
                continue
            for ep in eps:
                for split in self._splits(dp, tp, cp, ep):
                    yield {"tp": tp, "cp": cp, "pp": pp, "ep": ep, **split}

    def _splits(self, dp: int, tp: int, cp: int, ep: int) -> list[dict[str, int]]:
        """dp_replicate, dp_shard and what is sharded."""
        stages = self.fixed.get("zero_stage", self.habits.zero_stages)
        single = dp * cp == 1 and "zero_stage" not in self.fixed
        splits = []
        for stage in (0,) if single else stages:
            for replicate, shard in self._pairs(stage, dp, tp, cp, ep):
                splits.append({"dp_replicate": replicate, "dp_shard": shard, "zero_stage": stage})
        return splits

    def _pairs(self, stage: int, dp: int, tp: int, cp: int, ep: int) -> list[tuple[int, int]]:
        if "dp_replicate" in self.fixed or "dp_shard" in self.fixed:
            replicates = self.fixed.get("dp_replicate", (-1,))
            shards = self.fixed.get("dp_shard", (-1,))
            pairs = [_fill(dp, r, s) for r, s in product(replicates, shards)]
            return [pair for pair in dict.fromkeys(pairs) if pair[0] * pair[1] == dp]
        if stage == 0 and ep == 1:
            return [(dp, 1)]
        pairs = [(1, dp)]
        in_node = self.cluster.node_size // (tp * cp) if self.cluster.node_size else 0
        if stage == 3 and 1 < in_node < dp and dp % in_node == 0:
            pairs.append((dp // in_node, in_node))
        return pairs

    def _plans_of(self, mesh: dict[str, int], tally: Tally) -> Iterator[Plan]:
        dp = mesh["dp_replicate"] * mesh["dp_shard"]
        local, rest = divmod(self.global_batch, dp)
        if rest:
            tally.considered += 1
            tally.refuse(BATCH_RULE, f"global batch {self.global_batch} is not a multiple of {dp} data-parallel ranks")
            return
        names, axes = self._variants(mesh, local)
        for values in product(*axes):
            tally.considered += 1
            fields = dict(zip(names, values, strict=True))
            schedule, virtual = fields.pop("schedule")
            micro = fields["micro_batch"]
            if local % micro:
                reason = f"the {local} sequences of a data-parallel rank do not split into micro batches of {micro}"
                tally.refuse(BATCH_RULE, reason)
                continue
            plan = Plan(
                seq_len=self.seq_len,
                n_microbatches=local // micro,
                pp_schedule=schedule,
                virtual_stages=virtual,
                **mesh,  # type: ignore[arg-type]
                **fields,
            )
            refusal = refuse(self.model, plan, self.cluster)
            if refusal:
                tally.refuse(refusal.rule, refusal.reason)
            else:
                yield plan

    def _variants(self, mesh: dict[str, int], local: int) -> tuple[list[str], list[Sequence[Any]]]:
        """Names and values of the axes below the mesh."""
        fixed = self.fixed
        axes: dict[str, Sequence[Any]] = {
            "micro_batch": fixed.get("micro_batch") or powers_of_two(local, self.limits.max_micro_batch or local),
            "activation_checkpointing": fixed.get("activation_checkpointing", ("none", "selective", "full")),
            "schedule": self._schedules(mesh["pp"]),
        }
        sharded = mesh["zero_stage"] == 3 and mesh["dp_shard"] * mesh["cp"] > 1
        axes["reshard_after_forward"] = fixed.get(
            "reshard_after_forward", self.habits.reshard if sharded else ("default",)
        )
        axes["selective_policy"] = fixed.get("selective_policy", (self.habits.selective_policy,))
        axes["cp_method"] = fixed.get("cp_method", (self.habits.cp_method,))
        taken = {*axes, *mesh, *_COUNTED, "pp_schedule", "virtual_stages"}
        axes |= {name: values for name, values in fixed.items() if name not in taken}
        return list(axes), list(axes.values())

    def _schedules(self, pp: int) -> Sequence[tuple[Any, int]]:
        if pp == 1:
            return (("1F1B", 1),)
        names, virtual = self.fixed.get("pp_schedule"), self.fixed.get("virtual_stages")
        pairs: list[tuple[Any, int]] = list(self.habits.schedules)
        if names:
            pairs = [pair for pair in pairs if pair[0] in names]
            pairs += [(name, _usual_stages(name)) for name in names if name not in {pair[0] for pair in pairs}]
        if virtual:
            pairs = [(name, v) for name in dict.fromkeys(name for name, _ in pairs) for v in virtual]
        return pairs


def make_space(
    model: ModelSpec,
    cluster: Cluster,
    n_gpus: int,
    seq_len: int,
    global_batch: int,
    fixed: Mapping[str, object] | None = None,
    limits: Limits | None = None,
) -> Space:
    """The space of one question. A value of `fixed` is one value of a Plan field or a list of them; -1 for dp_shard or
    dp_replicate is what the other axes leave.

    Raises ForerunError for a number below 1, a field that Plan does not have, or a value that it can't take.
    """
    for name, value in (("gpus", n_gpus), ("seq_len", seq_len), ("global_batch", global_batch)):
        if value < 1:
            raise ForerunError(f"{name} must be at least 1, got {value}")
    values = {name: _values(name, value) for name, value in (fixed or {}).items()}
    stacks = values.get("stack", (Plan.__dataclass_fields__["stack"].default,))
    if len(stacks) != 1:
        raise ForerunError(f"stack: one search is about one software stack, got {', '.join(map(str, stacks))}")
    return Space(model, cluster, n_gpus, seq_len, global_batch, values, limits or Limits(), habits_of(stacks[0]))


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    low = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return tuple(dict.fromkeys([*low, *(number // n for n in reversed(low))]))


def powers_of_two(number: int, most: int) -> tuple[int, ...]:
    """The powers of two up to `most` that divide `number`, ascending."""
    return tuple(2**k for k in range(most.bit_length()) if 2**k <= most and number % 2**k == 0)


def _values(name: str, value: object) -> tuple[Any, ...]:
    """The checked values of a fixed field."""
    if name not in FIELD_TYPES:
        raise ForerunError(f"a plan has no field {name!r}; it has: {', '.join(FIELD_TYPES)}")
    if name in _COUNTED:
        raise ForerunError(f"{name} follows from sequence length, batch and mesh, it can't be fixed")
    several = isinstance(value, (list, tuple)) and not (is_list(name) and all(isinstance(v, int) for v in value))
    listed: list[Any] = list(value) if several else [value]  # type: ignore[call-overload]
    if not listed:
        raise ForerunError(f"{name}: no value is left to try")
    values = tuple(dict.fromkeys(checked(name, v, name) for v in listed))
    for each in values:
        if not (name in _DATA_AXES and each == -1):
            replace(_PLAIN, **{name: each})  # type: ignore[arg-type]
    return values


def _fill(dp: int, replicate: int, shard: int) -> tuple[int, int]:
    """Degrees of two axes of which one or both may be -1, the rest."""
    if shard == -1:
        replicate = 1 if replicate == -1 else replicate
        return replicate, dp // replicate
    return (dp // shard if replicate == -1 else replicate), shard


def _usual_stages(schedule: str) -> int:
    return 1 if schedule in ("1F1B", "GPipe", "ZB1P") else 2
