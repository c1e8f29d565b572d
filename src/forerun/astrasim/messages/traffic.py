"""Message patterns: cases of messages on a network, read from JSON.

A file holds one case, a list of cases, or an object of cases by name. A case is an object with these keys:

* `messages`: a list of `{"start_ns": 0, "src": 0, "dst": 1, "bytes": 1024}`; `start_ns` defaults to 0.
* `topology`: `["Mesh2D", 4, 4]`, a list of such lists for several dimensions (innermost first), or text such as
  `"ring:8,switch:4"` (see `forerun.core.network.network_file`).
* `bandwidth_GBps` and `latency_ns`: numbers, or lists with one number for each dimension.
* `bandwidth_unit`: `GiB/s` (the default, since ASTRA-sim's GB has 2**30 bytes) or `GB/s` (10**9 bytes).
* `network`, in place of the four keys above: an object with the keys of a network file.

Other keys, such as `arrival_ns` and `finish_ns` of an earlier run, are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forerun.astrasim.messages.flows import share
from forerun.astrasim.messages.links import Delivery, deliver
from forerun.common.admission import read_json
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import Network, network_from, parse_topology, unit_is_gib

Model = Literal["links", "flows"]
_DELIVER: dict[Model, Callable[..., Delivery]] = {"links": deliver, "flows": share}


@dataclass(frozen=True)
class Case:
    """A message pattern, not checked yet."""

    name: str
    content: Any


def read_cases(path: str | Path) -> list[Case]:
    """Reads the cases in a file. Raises ForerunError if the file can't be read, is not JSON, or holds no cases."""
    data = read_json(path)
    if isinstance(data, dict) and "messages" in data:
        return [Case(str(data.get("case", Path(path).stem)), data)]
    if isinstance(data, dict):
        return [Case(name, content) for name, content in data.items()]
    if isinstance(data, list):
        return [Case(_name(content, number), content) for number, content in enumerate(data)]
    raise ForerunError(f"{path}: expected an object of cases by name, a list of cases, or one case with messages")


def run_cases(
    cases: list[Case], model: Model = "links", hottest: int = 0, network: Network | None = None
) -> Iterator[dict[str, Any]]:
    """Delivers the messages of each case. Yields a record with arrivals in the order of the messages, or `error`.

    `hottest` adds that many of the busiest links. `network` replaces the networks of the cases.
    """
    for case in cases:
        try:
            yield {"case": case.name, "ok": True, **_run(case, model, hottest, network)}
        except ForerunError as error:
            yield {"case": case.name, "ok": False, "error": str(error)}


def _run(case: Case, model: Model, hottest: int, network: Network | None) -> dict[str, Any]:
    if not isinstance(case.content, dict):
        raise ForerunError("a case must be an object with messages and a topology")
    messages = _messages(case.content)
    network = network or _network(case.content)
    columns = ([message[key] for message in messages] for key in ("start_ns", "src", "dst", "bytes"))
    delivery = _DELIVER[model](network.topology(), *columns, gib=network.gib)
    arrivals = [_figure(arrival) for arrival in delivery.arrival_ns]
    record: dict[str, Any] = {"finish_ns": _figure(delivery.finish_ns) if model == "flows" else int(delivery.finish_ns)}
    if hottest:
        record["hottest"] = _hottest(delivery, hottest)
    record["arrival_ns"] = arrivals
    record["messages"] = [
        {**message, "arrival_ns": arrival} for message, arrival in zip(messages, arrivals, strict=True)
    ]
    return record


def _figure(value: Any) -> int | float:
    return int(value) if isinstance(value, np.integer) else round(float(value), 3)


def _hottest(delivery: Delivery, n: int) -> list[dict[str, Any]]:
    use = delivery.use
    return [
        {
            "src": int(use.links.src[link]),
            "dst": int(use.links.dst[link]),
            "busy_ns": _figure(use.busy_ns[link]),
            "bytes": int(use.size_bytes[link]),
            "messages": int(use.messages[link]),
            "utilisation": round(float(use.utilisation[link]), 6),
        }
        for link in use.hottest(n)
    ]


def _name(content: Any, number: int) -> str:
    return str(content["case"]) if isinstance(content, dict) and "case" in content else str(number)


def _messages(content: dict[str, Any]) -> list[dict[str, Any]]:
    messages = content.get("messages")
    if not isinstance(messages, list):
        raise ForerunError("messages must be a list")
    checked = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ForerunError(f"message {number} must be an object with src, dst and bytes")
        values = {"start_ns": message.get("start_ns", 0), **{key: message.get(key) for key in ("src", "dst", "bytes")}}
        for key, value in values.items():
            if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and value % 1 == 0)):
                problem = f"no {key}" if value is None else f"{key} {str(value)[:40]!r}, not a whole number"
                raise ForerunError(f"message {number} has {problem}")
        checked.append({key: int(value) for key, value in values.items()})
    return checked


def _network(content: dict[str, Any]) -> Network:
    if "network" in content:
        if not isinstance(content["network"], dict):
            raise ForerunError("network must be an object with the keys of a network file")
        return network_from(content["network"], "network")
    for key in ("topology", "bandwidth_GBps", "latency_ns"):
        if key not in content:
            raise ForerunError(f"key {key!r} is missing; a case has topology, bandwidth_GBps, latency_ns and messages")
    topology, bandwidth, latency = content["topology"], content["bandwidth_GBps"], content["latency_ns"]
    unit = content.get("bandwidth_unit", "GiB/s")
    if isinstance(topology, str):
        figures = ([value] if not isinstance(value, list) else value for value in (bandwidth, latency))
        return parse_topology(topology, *figures, gib=unit_is_gib(unit, "case"))
    if not isinstance(topology, list) or not topology:
        raise ForerunError('topology must be a list such as ["Mesh2D", 4, 4]')
    dims = topology if all(isinstance(dim, list) and dim for dim in topology) else [topology]
    data = {"topology": [dim[0] for dim in dims], "npus_count": [dim[1:] for dim in dims]}
    return network_from(data | {"bandwidth": bandwidth, "latency": latency, "bandwidth_unit": unit}, "case")
