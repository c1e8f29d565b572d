"""ASTRA-sim's remote memory file: the time of a load or store beyond the local memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forerun.common.admission import read_json
from forerun.common.errors import ForerunError
from forerun.core.program.types import I64


@dataclass(frozen=True, slots=True)
class RemoteMemory:
    """The expansion memory of each rank. Without it, loads and stores are errors."""

    expansion: bool = False
    latency_ns: int = 0
    bandwidth_gbps: float = 0.0
    """GB/s of 1e9 bytes (bytes per ns)"""

    def runtime_ns(self, size_bytes: I64) -> I64:
        """Returns the time of each access: latency, and the bytes at full bandwidth truncated to ns.

        Raises ForerunError if there is no remote memory.
        """
        if not self.expansion:
            raise ForerunError(
                "the trace loads from or stores to remote memory, but the remote memory file says there is none"
            )
        return (self.latency_ns + (size_bytes / self.bandwidth_gbps).astype(np.int64)).astype(np.int64)


def read_remote_memory(path: str | Path | None) -> RemoteMemory:
    """Reads the remote memory file at `path`; None means no expansion.

    Raises ForerunError if it can't be read, or its kind of memory is not simulated.
    """
    if path is None:
        return RemoteMemory()
    try:
        data = read_json(path)
        kind = data["memory-type"]
        if kind == "NO_MEMORY_EXPANSION":
            return RemoteMemory()
        if kind == "PER_NPU_MEMORY_EXPANSION":
            memory = RemoteMemory(True, int(data["remote-mem-latency"]), float(data["remote-mem-bw"]))
            if memory.latency_ns < 0 or not memory.bandwidth_gbps > 0:
                raise ForerunError(f"{path}: remote-mem-latency must be at least 0 and remote-mem-bw above 0")
            return memory
    except ForerunError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise ForerunError(f"{path}: not a remote memory file ({type(error).__name__}: {error})") from None
    raise ForerunError(
        f"{path}: memory-type {str(kind)[:40]!r} is not simulated; known: NO_MEMORY_EXPANSION, PER_NPU_MEMORY_EXPANSION"
    )


NO_EXPANSION = RemoteMemory()
