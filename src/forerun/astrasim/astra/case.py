"""Case folders: traces, or the flags that generate them, with one system or a sub-folder for each system.

    case/  stage_args.json  comm_group.json  et/ (or et.tar.gz, et.tar.zst, et_rank0.et.zst, or no traces at all)
           system.json  network.yml  remote_memory.json      or      NAME/system.json  NAME/network.yml ...

Missing traces are generated from `stage_args.json`. A file `metrics.json` may name the systems and say which are
congestion-aware; so are all systems below a folder called `congestion_aware`.
"""

from __future__ import annotations

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
from forerun.common.admission import read_json
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import read_network

_TRACES = ("et", "et.tar.gz", "et.tar.zst", "et.tar", "et_rank0.et", "et_rank0.et.gz", "et_rank0.et.zst")
_AWARE = "congestion_aware"


@dataclass(frozen=True)
class Case:
    """The content of a case folder."""

    traces: Sequence[RankTrace]
    comm_groups: CommGroups
    machines: dict[str, Machine]


def read_case(folder: Path, aware: bool | None = None) -> Case:
    """Reads the case in `folder`; `aware` says whether its systems are congestion-aware, None leaves it to the folder.

    Raises ForerunError if there is no system, or a file is missing or wrong.
    """
    if not folder.is_dir():
        raise ForerunError(f"{folder}: no such folder")
    described = _described(folder)
    places = _systems(folder, described)
    machines = {}
    for name, place in places.items():
        flag = described.get(name, {}).get(_AWARE, _AWARE in folder.resolve().parts) if aware is None else aware
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


def _systems(folder: Path, described: dict[str, Any]) -> dict[str, Path]:
    """Returns the folder of each system by name."""
    if (folder / "system.json").is_file():
        return {next(iter(described)) if len(described) == 1 else folder.resolve().name: folder}
    places = {place.name: place for place in sorted(folder.iterdir()) if (place / "system.json").is_file()}
    if not places:
        raise ForerunError(f"{folder}: no system.json here or in a sub-folder")
    return places


def _described(folder: Path) -> dict[str, Any]:
    """Returns the entries of `metrics.json` about each system, by name."""
    try:
        systems = read_json(folder / "metrics.json").get("systems", {})
    except (ForerunError, AttributeError):
        return {}
    return {name: facts if isinstance(facts, dict) else {} for name, facts in dict(systems).items()}


def _traces(folder: Path, n_ranks: int) -> tuple[Sequence[RankTrace], CommGroups]:
    """Reads or generates the traces of all ranks and their groups."""
    if any((folder / name).exists() for name in _TRACES):
        found = open_traces(folder, n_ranks)
        if len(found.available) == n_ranks:
            return [found[rank] for rank in range(n_ranks)], {}
    arguments = folder / "stage_args.json"
    if not arguments.is_file():
        raise ForerunError(f"{folder}: neither the traces of all {n_ranks} ranks nor stage_args.json to make them from")
    made = generate(load_stage_args(arguments))
    return [made.rank(rank) for rank in range(made.n_ranks)], made.groups
