"""Case folders: traces or the arguments that make them, with one system beside them, or one sub-folder a system.

    case/  stage_args.json  comm_group.json  et/ (or et.tar.gz, et.tar.zst, et_rank0.et.zst, or no traces at all)
           system.json  network.yml  remote_memory.json      or      NAME/system.json  NAME/network.yml ...

Traces that are not there are generated from `stage_args.json`. What a folder may say besides, in `metrics.json`, is how
its systems are called and whether they are congestion-aware; folders below one called `congestion_aware` are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.astrasim.astra.remote_memory import read_remote_memory
from forerun.astrasim.astra.replay import Machine
from forerun.astrasim.astra.system import read_system
from forerun.astrasim.chakra.groups import read_comm_groups
from forerun.astrasim.chakra.trace import CommGroups, RankTrace
from forerun.astrasim.chakra.traces import open_traces
from forerun.astrasim.stage.first_generation import generate, load_stage_args
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import read_network

_TRACES = ("et", "et.tar.gz", "et.tar.zst", "et.tar", "et_rank0.et", "et_rank0.et.gz", "et_rank0.et.zst")
_AWARE = "congestion_aware"


@dataclass(frozen=True)
class Case:
    traces: Sequence[RankTrace]
    comm_groups: CommGroups
    machines: dict[str, Machine]


def read_case(folder: Path, aware: bool | None = None) -> Case:
    """The case in `folder`; `aware` says whether links queue, None to let the folder say.

    Raises:
        ForerunError: there is no system, or a file is missing or makes no sense.
    """
    if not folder.is_dir():
        raise ForerunError(f"{folder}: no such folder")
    said = _said(folder)
    places = _systems(folder, said)
    machines = {}
    for name, place in places.items():
        flag = said.get(name, {}).get(_AWARE, _AWARE in folder.resolve().parts) if aware is None else aware
        memory = place / "remote_memory.json"
        machines[name] = Machine(
            read_system(place / "system.json"),
            read_network(place / "network.yml"),
            read_remote_memory(memory if memory.is_file() else None),
            aware=bool(flag),
        )
    n_ranks = next(iter(machines.values())).network.n_npus
    traces, groups = _traces(folder, n_ranks)
    given = folder / "comm_group.json"
    return Case(traces, read_comm_groups(given) if given.is_file() else groups, machines)


def _systems(folder: Path, said: dict[str, Any]) -> dict[str, Path]:
    """Folder of each system."""
    if (folder / "system.json").is_file():
        return {next(iter(said)) if len(said) == 1 else folder.resolve().name: folder}
    places = {place.name: place for place in sorted(folder.iterdir()) if (place / "system.json").is_file()}
    if not places:
        raise ForerunError(f"{folder}: no system.json, neither here nor in a sub-folder")
    return places


def _said(folder: Path) -> dict[str, Any]:
    """What the folder says about its systems: name -> facts."""
    try:
        systems = json.loads((folder / "metrics.json").read_text(encoding="utf-8")).get("systems", {})
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    return {name: facts if isinstance(facts, dict) else {} for name, facts in dict(systems).items()}


def _traces(folder: Path, n_ranks: int) -> tuple[Sequence[RankTrace], CommGroups]:
    """The traces of all ranks and the groups that belong to them, read or generated."""
    if any((folder / name).exists() for name in _TRACES):
        found = open_traces(folder, n_ranks)
        if len(found.available) == n_ranks:
            return [found[rank] for rank in range(n_ranks)], {}
    arguments = folder / "stage_args.json"
    if not arguments.is_file():
        raise ForerunError(f"{folder}: neither the traces of all {n_ranks} ranks nor stage_args.json to make them from")
    made = generate(load_stage_args(arguments))
    return [made.rank(rank) for rank in range(made.n_ranks)], made.groups
