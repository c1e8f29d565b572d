"""Communicator groups: a JSON file that names lists of ranks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from forerun.chakra.trace import CommGroups
from forerun.errors import ForerunError


def read_comm_groups(path: str | Path) -> CommGroups:
    """The communicator groups of a file `{"1": [0, 1], ...}`; groups and their ranks keep their order.

    Raises ForerunError, naming the file and the group: unreadable file, not JSON, a group given twice, without ranks,
    with a rank twice, or with something that is no rank.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ForerunError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except (OSError, ValueError) as error:
        raise ForerunError(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from None
    return parse_comm_groups(text, str(path))


def parse_comm_groups(text: str, place: str) -> CommGroups:
    """The communicator groups of a JSON text; `place` names it in the ForerunError raised as by `read_comm_groups`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen = dict(pairs)
        for name, _ in pairs:
            if name not in seen:
                raise ForerunError(f"{place}: group {name!r} is given twice")
            del seen[name]
        return dict(pairs)

    try:
        data = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ForerunError(f"{place}, line {error.lineno}: not JSON: {error.msg}") from None
    except ForerunError:
        raise
    except (ValueError, RecursionError):
        raise ForerunError(f"{place}: not a mapping of group names to lists of ranks") from None
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
