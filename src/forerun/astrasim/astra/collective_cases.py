"""Cases of collectives and messages, one JSON object on each line, and their times.

A case describes a network, how collectives are cut and scheduled, and the operation: a collective of all ranks, one of
strided groups (`group_size`, `stride`; every rank is in one group, and all groups run at once), or a message (`p2p`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from forerun.astrasim.astra.single import collective_times, message_times
from forerun.astrasim.astra.system import System, system_from
from forerun.astrasim.chakra.trace import CommType
from forerun.common.admission import parse_json
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import Network, network_from
from forerun.core.program.types import I64

COLLECTIVES = {
    "all_reduce": CommType.ALL_REDUCE,
    "all_gather": CommType.ALL_GATHER,
    "reduce_scatter": CommType.REDUCE_SCATTER,
    "all_to_all": CommType.ALL_TO_ALL,
}
_NETWORK_KEYS = {
    "topology": "topology",
    "npus_count": "npus_count",
    "bandwidth_GBps": "bandwidth",
    "latency_ns": "latency",
}
_SYSTEM_KEYS = {
    "policy": "scheduling-policy",
    "endpoint_delay": "endpoint-delay",
    "active_chunks": "active-chunks-per-dimension",
    "splits": "preferred-dataset-splits",
    "opt": "collective-optimization",
    "local_mem_bw": "local-mem-bw",
}
_LISTED_RANKS = 256
"""the times of this many ranks are listed even if they are all equal"""
_SHORT = 80


def case_results(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yields the result of each case in order: `case` with `time_ns_max` and `time_ns_per_rank`, or with `error`.

    `time_ns_per_rank` is null if there are more than 256 ranks and all end together. Blank lines are skipped. Cases
    without a name, and lines that are no case, are named by their line numbers.
    """
    networks: dict[str, Network] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name = f"line {number}"
        try:
            case = _parse(line)
            name = case["case"] if isinstance(case.get("case"), str) else name
            yield {"case": name, **_times_record(case_times(case, networks))}
        except ForerunError as error:
            place = "" if name == f"line {number}" else f"line {number}: "
            yield {"case": name, "error": f"{place}{error}"}


def _parse(line: str) -> dict[str, Any]:
    try:
        case = parse_json(line, "it")
    except ForerunError as error:
        raise ForerunError(f"not a JSON object ({str(error)[:_SHORT]})") from None
    if not isinstance(case, dict):
        raise ForerunError(f"not a JSON object but {line.strip()[:_SHORT]}")
    return case


def _times_record(times_ns: I64) -> dict[str, Any]:
    longest = int(times_ns.max())
    many = len(times_ns) > _LISTED_RANKS and (times_ns == longest).all()
    per_rank = None if many else {str(rank): time for rank, time in enumerate(times_ns.tolist())}
    return {"time_ns_max": longest, "time_ns_per_rank": per_rank}


def case_times(case: Mapping[str, Any], networks: dict[str, Network] | None = None) -> I64:
    """Returns when each rank of a case ends, in ns (ranks,). `networks` caches networks between calls.

    Raises ForerunError if a key is missing, a value is wrong, or the collective can't be simulated.
    """
    network = _network(case, {} if networks is None else networks)
    size = _whole(case, "bytes", 1)
    aware = case.get("congestion_aware", False)
    if not isinstance(aware, bool):
        raise ForerunError(f"congestion_aware is {_text(aware)}, it must be true or false")
    if "p2p" in case:
        pair = case["p2p"]
        if not isinstance(pair, list) or len(pair) != 2 or not all(type(rank) is int for rank in pair):
            raise ForerunError(f"p2p is {_text(pair)}, it must be [sender, receiver]")
        return message_times(network, pair[0], pair[1], size, aware)
    name = _key(case, "collective")
    if not isinstance(name, str) or name not in COLLECTIVES:
        raise ForerunError(f"collective {_text(name)} is unknown; known: {', '.join(COLLECTIVES)}")
    groups: tuple[tuple[int, ...], ...] = ()
    if "group_size" in case or "stride" in case:
        groups = strided_groups(network.n_npus, _whole(case, "group_size", 2), _whole(case, "stride", 1))
    return collective_times(network, _system(case), COLLECTIVES[name], size, groups, aware).ends_ns


def strided_groups(n_ranks: int, group_size: int, stride: int) -> tuple[tuple[int, ...], ...]:
    """Returns groups of ranks `stride` apart, with every rank in one; () for one group of all ranks.

    Raises ForerunError if such groups don't divide the ranks.
    """
    if group_size < 2 or stride < 1 or n_ranks % (group_size * stride):
        raise ForerunError(f"groups of {group_size} ranks {stride} apart do not divide {n_ranks} ranks")
    if group_size == n_ranks:
        return ()
    first = np.arange(n_ranks).reshape(-1, group_size, stride)
    return tuple(tuple(group) for group in first.swapaxes(1, 2).reshape(-1, group_size).tolist())


def _network(case: Mapping[str, Any], networks: dict[str, Network]) -> Network:
    data = {key: _key(case, name) for name, key in _NETWORK_KEYS.items()}
    text = repr(data)
    if text not in networks:
        networks[text] = network_from(data, "network")
    network = networks[text]
    if case.get("npus", network.n_npus) != network.n_npus:
        raise ForerunError(f"npus is {_text(case['npus'])}, but npus_count makes {network.n_npus}")
    return network


def _system(case: Mapping[str, Any]) -> System:
    data = {key: _key(case, name) for name, key in _SYSTEM_KEYS.items()}
    implementation = _key(case, "implementation")
    return system_from({**data, **implementations(implementation)}, "system")


def implementations(algorithms: Any) -> dict[str, Any]:
    """Returns keys of a system file: `algorithms`, one for each dimension, for every collective."""
    return {f"{name.replace('_', '-')}-implementation": algorithms for name in COLLECTIVES}


def _key(case: Mapping[str, Any], name: str) -> Any:
    if name not in case:
        raise ForerunError(f"key {name!r} is missing")
    return case[name]


def _whole(case: Mapping[str, Any], name: str, least: int) -> int:
    value = _key(case, name)
    if type(value) is not int or value < least:
        raise ForerunError(f"{name} is {_text(value)}, it must be a whole number of at least {least}")
    return value


def _text(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to print it
        return f"a number of {value.bit_length()} bits"
    return repr(value)[:_SHORT]
