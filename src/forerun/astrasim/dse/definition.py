"""Reads the YAML file that defines an exploration. `docs/dse.md` describes its keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from forerun.astrasim.astra.lower import IssueOrder
from forerun.astrasim.astra.release import DEFAULT_RELEASE, release_named
from forerun.astrasim.astra.remote_memory import read_remote_memory
from forerun.astrasim.astra.replay import Machine
from forerun.astrasim.astra.system import System, read_system, system_from
from forerun.astrasim.dse.limits import MemoryLimit, limit_from
from forerun.astrasim.dse.points import listed_points
from forerun.astrasim.dse.space import DEGREES, Draw, Plan, Point, Sampling, all_points
from forerun.astrasim.dse.workload import Workload, workload_from
from forerun.common.errors import ForerunError, UnknownName
from forerun.common.yaml_files import Entry, check, read_any_yaml, read_yaml
from forerun.core.network.network_file import Network, network_from, read_network

_FLAGS = ("weight_sharded", "activation_recompute")
_RANGE = ("from", "to", "step", "times")
_MOST_VALUES = 10_000


class _File(Entry):
    workloads: dict[str, Any]
    systems: dict[str, Any]
    pairs: list[Any] | None = None
    plan: dict[str, Any] | None = None
    points: Any = None
    sampling: Any = None
    sample: dict[str, Any] | None = None
    memory_limit: Any = None
    memory_limit_gib: float | None = None
    bytes_per_element: float = 1
    release: str = DEFAULT_RELEASE
    issue_order: Literal["ascending", "march-2025"] | None = None


class _SystemEntry(Entry):
    system: Any
    network: Any
    remote_memory: str | None = None
    memory_limit: Any = None
    memory_limit_gib: float | None = None


class _SamplingEntry(Entry):
    method: Literal["random", "grid", "latin"]
    points: int
    seed: int = 0


class _SampleEntry(Entry):
    n: int
    seed: int = 0


@dataclass(frozen=True)
class Exploration:
    """The points of an exploration, and the inputs of their simulations."""

    workloads: Mapping[str, Workload]
    machines: Mapping[str, Machine]
    pairs: tuple[tuple[str, str], ...]
    """names of (workload, system)"""
    points: tuple[Point, ...]
    memory_limits: Mapping[str, MemoryLimit]
    """memory limit of a rank by system, for the systems that have one"""
    bytes_per_element: float = 1
    """bytes for each byte of a trace, since STAGE's first generation writes numbers of elements"""
    issue_order: IssueOrder = "ascending"


def read_exploration(
    path: str | Path,
    points: str | Path | None = None,
    release: str | None = None,
    issue_order: IssueOrder | None = None,
) -> Exploration:
    """Reads the exploration in a YAML file; paths in it are relative to its folder.

    The points in a file `points` (see `listed_points`) take precedence over the file's plan and sample, and so do
    `release` and `issue_order` over its keys of these names. An issue order takes precedence over that of a release.

    Raises ForerunError if the file can't be read, or a key is unknown, missing or has a wrong value; the key is named.
    """
    path = Path(path)
    place = str(path)
    file = check(_File, read_yaml(path), place)
    for what, entries in (("workloads", file.workloads), ("systems", file.systems)):
        if not entries:
            raise ForerunError(f"{place}: {what}: give at least one, as a name with its keys below")
    workloads = {name: workload_from(name, data, f"{place}: workloads.{name}") for name, data in file.workloads.items()}
    entries = {name: _system_entry(data, f"{place}: systems.{name}") for name, data in file.systems.items()}
    machines = {name: _machine(entry, path.parent, f"{place}: systems.{name}") for name, entry in entries.items()}
    limit = limit_from(file.memory_limit, file.memory_limit_gib, f"{place}: ")
    limits = {name: _limit(entry, f"{place}: systems.{name}") or limit for name, entry in entries.items()}
    if not file.bytes_per_element > 0:
        raise ForerunError(f"{place}: bytes_per_element: give a number above 0, got {file.bytes_per_element}")
    pairs = _pairs(file.pairs, workloads, machines, place)
    npus = {name: machine.network.n_npus for name, machine in machines.items()}
    build = release_named(release or file.release)
    order = build.order(issue_order or (None if release else file.issue_order))
    own = build.group_algorithm == "own"
    machines = {name: replace(machine, own_group_algorithms=own) for name, machine in machines.items()}
    return Exploration(
        workloads,
        machines,
        pairs,
        tuple(_points(file, points, pairs, workloads, npus, place)),
        {name: limit for name, limit in limits.items() if limit is not None},
        file.bytes_per_element,
        order,
    )


def _points(
    file: _File, listed: str | Path | None, pairs: Sequence[tuple[str, str]], workloads: Mapping[str, Workload],
    npus: Mapping[str, int], place: str,
) -> Sequence[Point]:  # fmt: skip
    """Returns the listed points, or those of the plan, or a sample of them."""
    if listed is not None:
        return listed_points(read_any_yaml(Path(listed)), pairs, npus, str(listed))
    if file.points is not None and file.plan is not None:
        raise ForerunError(f"{place}: points and plan both say what is explored; leave one out")
    if file.sampling is not None and file.sample is not None:
        raise ForerunError(f"{place}: sampling and sample both choose points; leave one out")
    if file.points is not None:
        points = listed_points(file.points, pairs, npus, f"{place}: points")
    else:
        plan = _plan(file.plan or {}, {system: npus[system] for _, system in pairs}, place)
        points = all_points(plan, [(workloads[workload], system) for workload, system in pairs], npus, place)
    if file.sample is not None:
        entry = check(_SampleEntry, {str(key): each for key, each in file.sample.items()}, f"{place}: sample")
        if entry.n < 1:
            raise ForerunError(f"{place}: sample.n: give at least 1, got {entry.n}")
        return Draw(entry.n, entry.seed).sample(points)
    return _sampling("all" if file.sampling is None else file.sampling, place).sample(points)


def _limit(entry: _SystemEntry, place: str) -> MemoryLimit | None:
    return limit_from(entry.memory_limit, entry.memory_limit_gib, f"{place}.")


def _system_entry(data: Any, place: str) -> _SystemEntry:
    if not isinstance(data, dict):
        raise ForerunError(f"{place}: expected keys system and network, got {str(data)[:60]!r}")
    return check(_SystemEntry, {str(key): value for key, value in data.items()}, place)


def _machine(entry: _SystemEntry, folder: Path, place: str) -> Machine:
    system = _system(entry.system, folder, f"{place}.system")
    if not system.roofline_enabled:
        raise ForerunError(
            f"{place}.system: roofline-enabled is 0, and generated traces have no durations of their own; set it to 1"
        )
    memory = read_remote_memory(None if entry.remote_memory is None else folder / entry.remote_memory)
    # An exploration always reports memory.
    return Machine(system.model_copy(update={"track_local_mem": True}), _network(entry.network, folder, place), memory)


def _system(value: Any, folder: Path, place: str) -> System:
    if isinstance(value, str):
        return read_system(folder / value)
    if not isinstance(value, dict):
        raise ForerunError(f"{place}: expected a path or the keys of a system file, got {str(value)[:60]!r}")
    return system_from(value, place)


def _network(value: Any, folder: Path, place: str) -> Network:
    if isinstance(value, str):
        return read_network(folder / value)
    if not isinstance(value, dict):
        raise ForerunError(f"{place}.network: expected a path or the keys of a network file, got {str(value)[:60]!r}")
    return network_from(value, f"{place}.network")


def _pairs(
    given: list[Any] | None, workloads: Mapping[str, Workload], machines: Mapping[str, Machine], place: str
) -> tuple[tuple[str, str], ...]:
    """Returns the listed pairs, or every workload on every system."""
    if given is None:
        return tuple((workload, system) for workload in workloads for system in machines)
    pairs: dict[tuple[str, str], None] = {}
    for pair in given:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(name, str) for name in pair)):
            raise ForerunError(f"{place}: pairs: expected [workload, system], got {str(pair)[:60]!r}")
        for name, what, known in ((pair[0], "workload", [*workloads]), (pair[1], "system", [*machines])):
            if name not in known:
                raise UnknownName(f"{what} in {place}: pairs:", name, known)
        pairs[pair[0], pair[1]] = None
    if not pairs:
        raise ForerunError(f"{place}: pairs: give at least one [workload, system], or leave the key out for all")
    return tuple(pairs)


def _plan(data: dict[str, Any], npus: Mapping[str, int], place: str) -> Plan:
    """Reads the values of every axis."""
    known = ("npus", "factors", *DEGREES, *_FLAGS)
    values: dict[str, Any] = {}
    for key, value in data.items():
        where = f"{place}: plan.{key}"
        if key not in known:
            raise UnknownName(f"key in {place}: plan:", str(key), list(known))
        if key == "npus":
            for system, n_npus in npus.items():
                if value != n_npus:
                    raise ForerunError(f"{where}: {value}, but system {system!r} has {n_npus} NPUs")
        elif key == "factors":
            if value not in ("divisors", "powers_of_two"):
                raise ForerunError(f"{where}: {str(value)[:60]!r} is neither divisors nor powers_of_two")
            values[key] = value
        elif key in _FLAGS:
            values[key] = _flags(value, where)
        else:
            values[key] = None if value == "any" else _numbers(value, where)
    return Plan(**values)


def _flags(value: Any, where: str) -> tuple[bool, ...]:
    values = value if isinstance(value, list) else [value]
    if not values or any(each not in (True, False) for each in values):
        raise ForerunError(f"{where}: expected true, false or [false, true], got {str(value)[:60]!r}")
    return tuple(dict.fromkeys(bool(each) for each in values))


def _numbers(value: Any, where: str) -> tuple[int, ...]:
    """Reads a number, a list of numbers, or {from, to} with step (added) or times (multiplied)."""
    values = value if isinstance(value, list) else [value]
    if isinstance(value, dict):
        values = _range(value, where)
    if not values or any(not isinstance(each, int) or isinstance(each, bool) or each < 1 for each in values):
        raise ForerunError(
            f"{where}: expected whole numbers of at least 1, as 8, [1, 2, 4], {{from: 1, to: 64, times: 2}} or any; "
            f"got {str(value)[:60]!r}"
        )
    return tuple(dict.fromkeys(values))


def _range(value: dict[Any, Any], where: str) -> list[int]:
    numbers = {key: each for key, each in value.items() if isinstance(each, int) and not isinstance(each, bool)}
    by_step, by_times = numbers.get("step", 0), numbers.get("times", 0)
    asked = {"from", "to"} <= numbers.keys() <= set(_RANGE) and len(numbers) == len(value) == 3
    if not asked or numbers["from"] < 1 or not (by_step >= 1 or by_times >= 2):
        raise ForerunError(
            f"{where}: a range has from, to and either step (at least 1) or times (at least 2), got {str(value)[:60]!r}"
        )
    values, at = [], numbers["from"]
    while at <= numbers["to"]:
        values.append(at)
        if len(values) > _MOST_VALUES:
            raise ForerunError(f"{where}: more than {_MOST_VALUES:,} values; use a larger step")
        at = at + by_step if by_step else at * by_times
    return values


def _sampling(value: Any, place: str) -> Sampling:
    if value == "all":
        return Sampling()
    if not isinstance(value, dict):
        raise ForerunError(
            f"{place}: sampling: expected all or {{method: random, points: 100, seed: 0}}, got {str(value)[:60]!r}"
        )
    entry = check(_SamplingEntry, {str(key): each for key, each in value.items()}, f"{place}: sampling")
    if entry.points < 1:
        raise ForerunError(f"{place}: sampling.points: give at least 1, got {entry.points}")
    return Sampling(entry.method, entry.points, entry.seed)
