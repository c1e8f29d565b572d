"""Chakra traces that a user drops: their contents and, with a system and a network, their replay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forerun.astrasim.astra.case import read_case
from forerun.astrasim.astra.release import DEFAULT_RELEASE, release_named
from forerun.astrasim.astra.replay import replay
from forerun.astrasim.astra.statistics import RankStatistics
from forerun.astrasim.chakra.info import info, overall
from forerun.common.errors import ForerunError
from forerun.common.files import make_folder
from forerun.common.units import NS
from forerun.interfaces.report.figures import seconds
from forerun.interfaces.report.page import Document, Figures, Heading, Table, Text

_NETWORKS = (".yml", ".yaml")
_CASE_FILES = ("system.json", "comm_group.json", "remote_memory.json")


def is_trace(path: Path) -> bool:
    """Returns whether a file is the trace of a rank, packed or not."""
    return ".et" in path.suffixes


def traces_document(paths: Sequence[Path]) -> Document:
    """Returns a document on the contents of the traces, rank by rank. Raises ForerunError."""
    by_rank = info([str(path) for path in paths])
    total = overall(by_rank)
    columns = ("rank", "nodes", "operations", "tensor bytes", "collectives", "messages", "comm bytes", "path nodes")
    every = [(str(one.rank), one.figures) for one in by_rank] + [("all", total)]
    rows = tuple(
        (
            rank,
            *(
                f"{number:,}"
                for number in (
                    *(figures.nodes.total(), figures.num_ops, figures.tensor_bytes, figures.nodes["collective"]),
                    *(figures.nodes["send"] + figures.nodes["recv"], figures.comm_bytes.total(), figures.depth),
                )
            ),
        )
        for rank, figures in every
    )
    calls = tuple(
        (str(row["operation"]), str(row["group"]), f"{row['calls']:,}", f"{row['bytes']:,}")
        for row in total.record()["communication"]
    )
    names = " ".join(path.name for path in paths[:4]) + (" ..." if len(paths) > 4 else "")
    parts = (
        Heading("Nodes, operations and bytes"),
        Table(columns, rows, f"forerun chakra info {names}", numeric=frozenset(range(8))),
        Heading("Communication"),
        Table(("operation", "group", "calls", "bytes"), calls, numeric=frozenset({2, 3})),
    )
    return Document(f"Chakra traces of {len(paths)} ranks", names, parts)


def case_document(paths: Sequence[Path]) -> Document:
    """Returns a document on the traces and their replay on the system and the network that were dropped with them.

    The files have the names of a case folder: `system.json`, a network in YAML, and where there are any
    `comm_group.json` and `remote_memory.json`. Raises ForerunError if one is missing, unknown or wrong.
    """
    folder, traces = paths[0].parent, [path for path in paths if is_trace(path)]
    networks = [path for path in paths if path.suffix in _NETWORKS]
    for path in paths:
        if not is_trace(path) and path not in networks and path.name not in _CASE_FILES:
            raise ForerunError(f"{path.name}: beside traces expected {', '.join(_CASE_FILES)} and a network in YAML")
    if len(networks) != 1 or not (folder / _CASE_FILES[0]).is_file():
        raise ForerunError(f"a replay needs {_CASE_FILES[0]} and one network in YAML beside the traces")
    held = traces_document(traces)
    networks[0].rename(folder / "network.yml")
    place = make_folder(folder / "et")
    for path in traces:
        path.rename(place / path.name)
    case = read_case(folder)
    (machine,) = case.machines.values()
    found = replay(case.traces, case.comm_groups, machine, release_named(DEFAULT_RELEASE).order(None))
    ranks = found.statistics
    last = max(ranks, key=lambda one: one.wall_time)
    entries = (
        ("replay", _s(last.wall_time), f"of {len(ranks)} ranks"),
        ("communication", _s(last.comm_time), "of the last rank"),
        ("exposed communication", _s(last.exposed_communication), "of the last rank"),
        ("compute", _s(last.gpu_time), "of the last rank"),
    )
    columns = ("rank", "wall time", "compute", "communication", "exposed communication")
    parts = (
        Figures(entries),
        Heading("Times of the ranks"),
        Table(columns, tuple(_row(str(i), one) for i, one in enumerate(ranks)), numeric=frozenset(range(5))),
        Text(
            f"ASTRA-sim's statistics, as of its build {DEFAULT_RELEASE}; forerun astra --case prints the same.", "note"
        ),
        *held.parts,
    )
    return Document(f"Replay of {len(ranks)} ranks", f"{networks[0].name}, {_CASE_FILES[0]}", parts)


def _row(rank: str, one: RankStatistics) -> tuple[str, ...]:
    times = (one.wall_time, one.gpu_time, one.comm_time, one.exposed_communication)
    return (rank, *map(_s, times))


def _s(time_ns: int) -> str:
    return seconds(time_ns * NS)
