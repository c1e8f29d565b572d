"""Communicator groups: named lists of ranks, from a JSON file or from the METADATA nodes of a trace."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from forerun.astrasim.chakra.trace import CommGroups, RankTrace
from forerun.common.admission import parse_json, read_text
from forerun.common.errors import ForerunError


def read_comm_groups(path: str | Path) -> CommGroups:
    """Reads the communicator groups of a file `{"1": [0, 1], ...}`; groups and their ranks keep their order.

    Raises ForerunError, naming the file and the group, if the file can't be read, is not JSON, or has a group that is
    given twice, has no ranks, a rank twice, or an entry that is not a rank.
    """
    return parse_comm_groups(read_text(path), str(path))


def parse_comm_groups(text: str, place: str) -> CommGroups:
    """Reads the communicator groups of a JSON text. Raises ForerunError as `read_comm_groups` does, naming `place`."""
    data = parse_json(text, place)
    if not isinstance(data, dict):
        raise ForerunError(f"{place}: not a mapping of group names to lists of ranks")
    return {name: _ranks(ranks, f"{place}: group {name!r}") for name, ranks in data.items()}


def _ranks(ranks: Any, where: str) -> tuple[int, ...]:
    if not isinstance(ranks, list) or not ranks:
        raise ForerunError(f"{where}: expected a list of ranks, got {json.dumps(ranks)[:60]}")
    for rank in ranks:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < 1 << 31:
            raise ForerunError(f"{where}: expected ranks, got {json.dumps(rank)[:60]}")
    twice = next((rank for rank, times in Counter(ranks).items() if times > 1), None)
    if twice is not None:
        raise ForerunError(f"{where}: rank {twice} is in it twice")
    return tuple(ranks)


def process_groups(text: str) -> dict[str, tuple[int, ...]]:
    """Reads the groups that a METADATA node of a PyTorch trace lists in its inputs: name -> ranks, () for all ranks.

    The text is a Python list with one JSON text: `['[{"pg_name": "0", "ranks": [0, 1], ...}, ...]']`. Other texts give
    no groups.
    """
    start, end = text.find("[{"), text.rfind("}]")
    if start < 0 or end < start:
        return {}
    try:
        items = parse_json(text[start : end + 2].replace("\\'", "'"), "groups")
        found = {str(item["pg_name"]): tuple(item["ranks"]) for item in items}
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}
    wrong = any(type(rank) is not int or not 0 <= rank < 1 << 31 for ranks in found.values() for rank in ranks)
    return {} if wrong or any(len(set(ranks)) < len(ranks) for ranks in found.values()) else found


def process_group_text(groups: Mapping[str, tuple[int, ...]]) -> str:
    """Writes `groups` as the text that `process_groups` reads."""
    items = [{"pg_name": name, "ranks": list(ranks), "group_size": len(ranks)} for name, ranks in groups.items()]
    return f"['{json.dumps(items)}']"


def with_world(
    traces: Sequence[RankTrace], comm_groups: CommGroups, names: Sequence[str]
) -> tuple[list[RankTrace], CommGroups]:
    """Returns traces and groups in which collectives of groups called one of `names` are collectives of all ranks.

    Raises ForerunError if the file of groups gives such a name to ranks.
    """
    taken = next((name for name in names if name in comm_groups), None)
    if taken is not None:
        raise ForerunError(
            f"communicator group {taken!r}: this build of ASTRA-sim takes that name for all ranks; number it otherwise"
        )
    return [_with_world(trace, names) for trace in traces], comm_groups


def _with_world(trace: RankTrace, names: Sequence[str]) -> RankTrace:
    meant = [k for k, name in enumerate(trace.group_names) if name in names]
    return replace(trace, group=np.where(np.isin(trace.group, meant), -1, trace.group)) if meant else trace


def resolve_groups(traces: Sequence[RankTrace], comm_groups: CommGroups) -> tuple[list[RankTrace], CommGroups]:
    """Returns traces and groups in which every name means the same group on all ranks.

    The METADATA nodes of a trace take precedence over the file of groups. PyTorch numbers groups on each rank, so a
    name may mean different groups: all but the first one are renamed to `name (ranks)`.
    """
    if not any(trace.process_groups for trace in traces):
        return list(traces), comm_groups
    resolved: dict[str, tuple[int, ...]] = {}
    renamed = []
    everyone = tuple(range(len(traces)))
    for trace in traces:
        own = trace.process_groups or {}
        names = []
        for name in trace.group_names:
            if name in own or name in comm_groups:
                ranks = own[name] or everyone if name in own else comm_groups[name]
                if resolved.setdefault(name, ranks) != ranks:
                    name = f"{name} ({', '.join(map(str, ranks))})"
                    resolved[name] = ranks
            names.append(name)
        renamed.append(trace if tuple(names) == trace.group_names else replace(trace, group_names=tuple(names)))
    return renamed, {**comm_groups, **resolved}
