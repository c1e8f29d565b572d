"""Small files as PyTorch's profiler writes them, and the place of public ones."""

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]
PUBLIC = Path(os.environ.get("FORERUN_PUBLIC_PROFILES", Path(__file__).parents[2] / "shared" / "public_profiles"))
"""a folder with checkouts of the public repositories, `owner+name` each"""
GOLDEN = Path(__file__).parents[2] / "shared" / "golden_kineto"


def write_profile(path: Path, events: Sequence[Any], **beside: Any) -> Path:
    """Writes a profile of rank 0 of 2 and returns its path; a name that ends with .gz packs it."""
    head = {"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 2}} | beside
    text = json.dumps(head | {"traceEvents": list(events), "displayTimeUnit": "ms"})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def host(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1, **args: Any) -> Event:
    """An event of the host."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 10, "tid": tid, "ts": ts, "dur": dur, "args": args}


def launch(ts: float, dur: float, correlation: int, name: str = "cudaLaunchKernel", tid: int = 1) -> Event:
    """A call of the runtime."""
    return host(name, ts, dur, "cuda_runtime", tid, correlation=correlation)


def kernel(name: str, ts: float, dur: float, correlation: int, stream: int = 7, **args: Any) -> Event:
    """A kernel, copy or fill by its name."""
    cat = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(name[:6], "kernel")
    more = {"stream": stream, "device": 0, "correlation": correlation} | args
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": more}
