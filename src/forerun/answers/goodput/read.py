"""Reads a RunRequest from a file: failure rates of the components, the step of the plan, the cost of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf
from typing import Any

import numpy as np

from forerun.answers.goodput.description import (
    CheckpointEntry,
    FailuresEntry,
    KindEntry,
    PhaseEntry,
    RunEntry,
    SlowEntry,
)
from forerun.answers.goodput.formulas import daly_interval_s
from forerun.answers.goodput.planned import PlannedStep, StatedState
from forerun.answers.goodput.request import (
    CheckpointLevel,
    Elastic,
    FailureKind,
    Lemons,
    Maintenance,
    Phase,
    Recovery,
    RunRequest,
    Slowdown,
    Spares,
)
from forerun.common.errors import ForerunError, UnknownName, at
from forerun.common.shipped import shipped_data
from forerun.common.yaml_files import check
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.storage import Storage

_DAY_S, _HOUR_S, _MINUTE_S = 86_400.0, 3_600.0, 60.0
_MOST_STEPS = 10**9
_USUAL_NODE = 8
_INSTEAD_OF = {"step": "plan", "plan": "step"}
"""pairs of keys; an alternative with one of them removes the other one from the run"""
_RECOVERY = ("crash_detect_s", "hang_detect_s", "restart_s", "communicators_s", "warmup_s")


def run_of(data: Mapping[str, Any], place: str) -> RunRequest:
    """Returns the run that `data` describes.

    Raises ForerunError, which names the place and the key, where it says something wrong.
    """
    return _Reader(check(RunEntry, dict(data), place), place).request()


def alternatives_of(data: Mapping[str, Any], place: str) -> tuple[RunRequest, ...]:
    """Returns the alternatives that `data` describes: each is the run itself, with the keys that it changes.

    Raises ForerunError, which names the alternative, as `run_of` does.
    """
    own = {key: value for key, value in data.items() if key != "alternatives"}
    return tuple(
        run_of(_changed(own, changes) | {"name": name}, f"{place}: alternatives: {name}")
        for name, changes in check(RunEntry, dict(data), place).alternatives.items()
    )


def _changed(own: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `own` with the values of `changes` in place of its own. Sections are changed key by key."""
    kept = {key: value for key, value in own.items() if _INSTEAD_OF.get(key) not in changes}
    return kept | {
        key: _changed(kept[key], value) if isinstance(value, Mapping) and isinstance(kept.get(key), Mapping) else value
        for key, value in changes.items()
    }


def failure_presets() -> dict[str, str]:
    """Returns the source of each preset of failures, by name."""
    return {name: " ".join(entry["source"].split()) for name, entry in _presets()["failures"].items()}


def _presets() -> Any:
    return shipped_data(__package__, "presets.yaml")


@dataclass(frozen=True)
class _Known:
    """The step of a run as it is known, measured or predicted."""

    seconds: float
    tokens: float
    planned: PlannedStep | None = None


class _Reader:
    def __init__(self, entry: RunEntry, place: str) -> None:
        self.entry, self.place = entry, place
        self.notes: list[str] = []
        if (entry.step is None) == (entry.plan is None):
            raise self._wrong("give either step (seconds and tokens) or plan (a plan to predict)")
        if entry.tokens is None and entry.days is None:
            raise self._wrong("give tokens to train on, days of wall time, or both")
        self.cluster = None if entry.plan is None else load_cluster(entry.plan.cluster)
        usual = _USUAL_NODE if self.cluster is None else min(_USUAL_NODE, self.cluster.node_size or _USUAL_NODE)
        self.per_node = entry.gpus_per_node or usual
        self.nodes = ceil(entry.gpus / self.per_node)

    def _wrong(self, message: str) -> ForerunError:
        return ForerunError(f"{self.place}: {message}")

    def request(self) -> RunRequest:
        """Returns the run."""
        entry, known = self.entry, self._step(None)
        kinds = self._failures(entry.failures)
        levels = self._levels(entry.checkpoint, known)
        rate = sum(kind.rate_per_s for kind in kinds)
        every_s = entry.checkpoint.every_minutes
        lemons = entry.failures.lemons
        node_rate = sum(kind.rate_per_s for kind in kinds if kind.nodes) / self.nodes
        return RunRequest(
            name=entry.name,
            gpus=entry.gpus,
            nodes=self.nodes,
            phases=self._phases(known),
            save_every_s=usual_interval_s(levels, rate) if every_s == "best" else every_s * _MINUTE_S,
            searches_interval=every_s == "best" and rate > 0.0,
            levels=levels,
            recovery=self._recovery(),
            failures=kinds,
            lemons=None
            if lemons is None
            else Lemons(lemons.share * self.nodes, lemons.times * node_rate, lemons.evict_after),
            slowdowns=tuple(self._slowdown(name, one, known) for name, one in entry.slow.items()),
            spares=self._spares(),
            elastic=self._elastic(known),
            maintenance=None
            if entry.maintenance is None
            else Maintenance(entry.maintenance.every_days * _DAY_S, entry.maintenance.hours * _HOUR_S),
            wall_s=None if entry.days is None else entry.days * _DAY_S,
            by_the_clock=entry.tokens is None,
            dollars_per_gpu_hour=self._price(),
            gpu_power_w=entry.gpu_power_w
            if entry.gpu_power_w is not None or self.cluster is None
            else self.cluster.device.power_w,
            notes=tuple(self.notes),
        )

    # steps

    def _step(self, phase: PhaseEntry | None) -> _Known:
        """Returns the step of a phase, or of the run where the phase says nothing else."""
        entry = self.entry
        own = entry.step if phase is None else phase.step
        if own is not None:
            return _Known(own.seconds, own.tokens)
        if entry.plan is None:  # only a phase can lack a step here
            raise self._wrong("schedule: a phase with seq_len or global_batch needs a plan; give its step instead")
        assert self.cluster is not None
        fields, batch = dict(entry.plan.fields), entry.plan.global_batch
        if phase is not None and phase.seq_len is not None:
            fields["seq_len"] = phase.seq_len
        if phase is not None and phase.global_batch is not None:
            batch = phase.global_batch
        storage = self._storage(entry.checkpoint)
        how = (entry.checkpoint.mode, storage, entry.plan.compress_gradients, entry.plan.outer_steps)
        with at(self.place):
            found = PlannedStep.of(entry.plan.model, fields, self.cluster, entry.gpus, batch, *how)
        if not found.fits:
            self.notes.append(f"The plan needs {found.prediction.peak_reserved_gib:.1f} GiB and doesn't fit in memory.")
        return _Known(found.step_s, found.tokens, found)

    def _phases(self, known: _Known) -> tuple[Phase, ...]:
        entry = self.entry
        schedule = entry.schedule or [PhaseEntry(share=1.0)]
        shares = sum(phase.share for phase in schedule)
        if abs(shares - 1.0) > 1e-6:
            raise self._wrong(f"schedule: the shares of its phases sum to {shares:g}, not to 1")
        steps = [known if _says_nothing(phase) else self._step(phase) for phase in schedule]
        tokens = entry.tokens
        if tokens is None:
            assert entry.days is not None
            rate = sum(phase.share * one.seconds / one.tokens for phase, one in zip(schedule, steps, strict=True))
            tokens = entry.days * _DAY_S / rate
        counts = [phase.share * tokens / one.tokens for phase, one in zip(schedule, steps, strict=True)]
        if sum(counts) > _MOST_STEPS:
            raise self._wrong(f"{sum(counts):.3g} steps are more than {_MOST_STEPS:,}; check tokens, days and step")
        return tuple(Phase(ceil(n), one.seconds, one.tokens) for n, one in zip(counts, steps, strict=True))

    # failures

    def _failures(self, entry: FailuresEntry) -> tuple[FailureKind, ...]:
        kinds: list[FailureKind] = []
        if entry.preset is not None:
            presets = _presets()["failures"]
            if entry.preset not in presets:
                with at(self.place):
                    raise UnknownName("preset of failures", entry.preset, list(presets))
            preset = presets[entry.preset]
            self.notes.append(f"Failures are those of {entry.preset}: {' '.join(preset['source'].split())}.")
            for name, values in preset["kinds"].items():
                kinds.append(self._preset_kind(name, dict(values), preset["observed"], entry.rate))
        kinds += [self._kind(name, one) for name, one in entry.kinds.items()]
        return tuple(kinds)

    def _preset_kind(
        self, name: str, values: dict[str, Any], observed: Mapping[str, float], times: float
    ) -> FailureKind:
        component = values.get("of", "node")
        seen = {"gpu": observed["gpus"], "node": observed["gpus"] / observed["gpus_per_node"], "job": 1.0}[component]
        if "events" in values:
            per_1000_days = values.pop("events") * 1000.0 / (seen * observed["days"])
            if component == "job":
                per_1000_days *= self.entry.gpus / observed["gpus"]
        else:
            per_1000_days = values.pop("per_1000_node_days")
        return self._kind(name, KindEntry(per_1000_days=per_1000_days * times, **values))

    def _kind(self, name: str, entry: KindEntry) -> FailureKind:
        if (entry.mtbf_hours is None) == (entry.per_1000_days is None):
            raise self._wrong(f"failures: {name}: give either mtbf_hours or per_1000_days")
        if entry.number is not None and "of" in entry.model_fields_set:
            raise self._wrong(f"failures: {name}: give either of or number")
        if entry.nodes > self.nodes:
            raise self._wrong(f"failures: {name}: {entry.nodes:,} nodes leave, and the run has {self.nodes:,}")
        components = entry.number or {"gpu": self.entry.gpus, "node": self.nodes, "job": 1}[entry.of]
        each = (
            1.0 / (entry.mtbf_hours * _HOUR_S) if entry.mtbf_hours else (entry.per_1000_days or 0.0) / (1000 * _DAY_S)
        )
        hours = entry.repair_hours if entry.repair_hours is not None else _presets()["defaults"]["repair_hours"]
        return FailureKind(
            name=name,
            rate_per_s=each * components,
            components=components,
            shape=entry.shape,
            scope=entry.scope,
            nodes=entry.nodes,
            repair_s=hours * _HOUR_S,
            hang_share=entry.hang_share,
            found_after_s=entry.found_after_hours * _HOUR_S,
        )

    # what the system does about them

    def _levels(self, entry: CheckpointEntry, known: _Known) -> tuple[CheckpointLevel, ...]:
        loop = None if known.planned is None else known.planned.prediction.loop
        blocking_s, persist_s, load_s = entry.blocking_s, entry.persist_s, entry.load_s
        if loop is not None and loop.checkpoint is not None:
            stall, times = loop.stalls[0], loop.checkpoint
            blocking_s = stall.stall_s if blocking_s is None else blocking_s
            persist_s = stall.beside_s if persist_s is None else persist_s
            load_s = times.load_s if load_s is None else load_s
            self.notes.append(
                f"A checkpoint has {times.total_gib:,.0f} GiB, at most {times.rank_gib:.2f} GiB of them"
                f" from one rank, and goes to {times.storage}; mode {times.mode}."
            )
        if entry.state is not None:
            state = entry.state
            with at(f"{self.place}: checkpoint.state"):
                stated = StatedState(state.parameters, state.weights, state.optimizer, state.moments)
            with at(f"{self.place}: checkpoint.state"):
                like = load_cluster(entry.state.host_link_of)
                save, load = stated.cost(self.entry.gpus, like, self._storage(entry), entry.mode)
            blocking_s = save.stall_s if blocking_s is None else blocking_s
            persist_s = save.beside_s if persist_s is None else persist_s
            load_s = load if load_s is None else load_s
            self.notes.append(
                f"A checkpoint holds {stated.parameter_bytes:g} bytes for each of {stated.parameters:,.0f} parameters,"
                f" in equal shares, over the host link of {like.name}."
            )
        if blocking_s is None or load_s is None:
            raise self._wrong("checkpoint: give blocking_s, load_s and persist_s, or state (the parameters), or a plan")
        drag = entry.drag
        if entry.network == "shared" and drag is None:
            if known.planned is None:
                raise self._wrong(
                    "checkpoint: network shared needs a plan, whose step tells the drag; give drag instead"
                )
            drag = known.planned.drag(persist_s or 0.0)
            self.notes.append(f"While a checkpoint is written over the training network, steps take {drag:.1%} longer.")
        first = CheckpointLevel("checkpoint", 1, blocking_s, persist_s or 0.0, load_s, entry.survives, drag or 0.0)
        more = (CheckpointLevel(**one.model_dump()) for one in entry.levels)
        return (first, *more)

    def _storage(self, entry: CheckpointEntry) -> Storage | None:
        if entry.storage is None:
            return None
        with at(f"{self.place}: checkpoint.storage"):
            return Storage.of_text(entry.storage)

    def _recovery(self) -> Recovery:
        defaults, given = dict(_presets()["defaults"]), self.entry.recovery
        points = defaults["communicators_s"]
        defaults["communicators_s"] = float(np.interp(self.entry.gpus, list(points), list(points.values())))
        values = {name: getattr(given, name) for name in _RECOVERY}
        open_ones = [name for name, value in values.items() if value is None]
        if open_ones:
            source = " ".join(defaults["source"].split())
            said = ", ".join(f"{name} {defaults[name]:g}" for name in open_ones)
            self.notes.append(f"Assumed: {said} ({source}).")
        values |= {name: float(defaults[name]) for name in open_ones}
        start_s = values["restart_s"] + values["communicators_s"] if given.start_s is None else given.start_s
        return Recovery(**values, start_s=start_s)

    def _spares(self) -> Spares | None:
        given = self.entry.spares
        if given is None:
            return None
        swap_s = float(_presets()["defaults"]["swap_s"]) if given.swap_s is None else given.swap_s
        return Spares(given.nodes, swap_s, None if given.replace_hours is None else given.replace_hours * _HOUR_S)

    def _slowdown(self, name: str, entry: SlowEntry, known: _Known) -> Slowdown:
        factor, told = entry.factor, entry.kernel_slowdown > 1.0 or entry.link_slowdown > 1.0
        if (factor is None) != told:
            raise self._wrong(f"slow: {name}: give either factor, or kernel_slowdown and link_slowdown")
        if factor is None:
            if known.planned is None:
                raise self._wrong(f"slow: {name}: kernel_slowdown and link_slowdown need a plan; give factor instead")
            factor = known.planned.slow_factor(entry.kernel_slowdown, entry.link_slowdown)
            self.notes.append(f"Under {name} a step takes {factor:.3g} times as long, as the plan's step tells.")
        onsets_per_s = entry.per_1000_node_days * self.nodes / (1000 * _DAY_S)
        return Slowdown(name, onsets_per_s, factor, entry.hours * _HOUR_S)

    def _elastic(self, known: _Known) -> Elastic | None:
        given = self.entry.elastic
        if given is None:
            return None
        planned, replicas = known.planned, given.replicas
        parts = 1 if planned is None or planned.replicas > 1 or given.state == "whole" else planned.parts
        if replicas is None:
            replicas = max(parts, 1 if planned is None else planned.replicas)
            if replicas < 2:
                raise self._wrong("elastic: give replicas, or a plan with dp_replicate or dp_shard on several nodes")
        if given.least_replicas > replicas:
            raise self._wrong(f"elastic: least_replicas {given.least_replicas} is more than replicas {replicas}")
        if given.step_factors and len(given.step_factors) != replicas:
            raise self._wrong(f"elastic: step_factors needs {replicas} values, got {len(given.step_factors)}")
        factors, least = tuple(given.step_factors), given.least_replicas
        shards = given.state == "shards" or (given.state is None and parts > 1 and replicas == parts)
        if not factors and planned is not None:
            if shards and replicas == parts:
                least, factors = planned.part_factors(parts, least)
                self.notes.append(f"Each of {parts} replicas holds a part of the state; {least} or more of them go on.")
            else:
                factors = planned.replica_factors(replicas)
        return Elastic(replicas, least, given.resize_s, factors, shards)

    def _price(self) -> float | None:
        own = self.entry.dollars_per_gpu_hour
        return own if own is not None or self.cluster is None else self.cluster.price_per_gpu_hour


def usual_interval_s(levels: tuple[CheckpointLevel, ...], failures_per_s: float) -> float:
    """Returns Daly's interval for the first level, or the time that it takes to persist where that is longer."""
    if not failures_per_s:
        return inf
    first = levels[0]
    return max(daly_interval_s(max(first.blocking_s, 1.0), 1.0 / failures_per_s), first.persist_s, 1.0)


def _says_nothing(phase: PhaseEntry) -> bool:
    return phase.step is None and phase.seq_len is None and phase.global_batch is None
