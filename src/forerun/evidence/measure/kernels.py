"""Reads the kernels of a profiled step, with their operations, from a Kineto trace (torch.profiler, Chrome JSON)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from forerun.common.errors import ForerunError

_KERNELS = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}
_NCCL = re.compile(r"nccl(?:Dev)?Kernel_?(AllReduce|AllGather|ReduceScatter|Broadcast|Reduce|SendRecv)", re.IGNORECASE)
_KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "broadcast",
    "sendrecv": "send_recv",
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One run of a kernel."""

    name: str
    operations: tuple[str, ...]
    """operations on the host that launched it, innermost first, without their namespace"""
    start_us: float
    duration_us: float

    def key(self, known: Collection[str]) -> str:
        """Returns the name of its row: a collective's kind, or the innermost operation among `known`."""
        nccl = _NCCL.search(self.name)
        if nccl is not None:
            return collective_key(_KINDS[nccl.group(1).lower()])
        found = next((name for name in self.operations if name in known), None)
        return found or next(iter(self.operations), self.name)


def collective_key(kind: str) -> str:
    """Returns the row's name for collectives of a kind; NCCL runs an all-to-all as sends and receives."""
    return f"nccl {'send_recv' if kind == 'all_to_all' else kind}"


def kernels_of(trace: Mapping[str, Any]) -> list[Kernel]:
    """Returns the kernels of a Kineto trace in order of start.

    Raises:
        ForerunError: This is no Kineto trace, or it holds no kernel of a GPU.
    """
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        raise ForerunError(
            "not a Kineto trace: it has no traceEvents; write it with torch.profiler's export_chrome_trace"
        )
    whole = [e for e in events if isinstance(e, dict) and e.get("ph") == "X" and "ts" in e and "dur" in e]
    launched = _operations_of_launches(whole)
    kernels = [
        Kernel(str(e["name"]), launched.get(_correlation(e), ()), float(e["ts"]), float(e["dur"]))
        for e in whole
        if e.get("cat") in _KERNELS
    ]
    if not kernels:
        raise ForerunError("the profile holds no kernel of a GPU: the step ran on the CPU, or CUPTI is not permitted")
    return sorted(kernels, key=lambda kernel: kernel.start_us)


def _correlation(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("correlation")


def _operations_of_launches(events: Iterable[Mapping[str, Any]]) -> dict[Any, tuple[str, ...]]:
    """Maps the correlation number of a launch to the operations around it on its thread."""
    threads: dict[Any, list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("cat") == "cpu_op" or event.get("cat") in _LAUNCHES:
            threads.setdefault((event.get("pid"), event.get("tid")), []).append(event)
    found: dict[Any, tuple[str, ...]] = {}
    for mine in threads.values():
        running: list[tuple[float, str]] = []
        # Where an operation starts together with one that it calls, the longer one is the caller.
        for event in sorted(mine, key=lambda e: (float(e["ts"]), -float(e["dur"]))):
            start = float(event["ts"])
            while running and running[-1][0] <= start:
                running.pop()
            if event.get("cat") == "cpu_op":
                running.append((start + float(event["dur"]), str(event["name"]).rpartition("::")[2]))
            elif _correlation(event) is not None:
                found[_correlation(event)] = tuple(name for _, name in reversed(running))
    return found
