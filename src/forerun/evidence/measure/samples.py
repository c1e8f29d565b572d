"""Reads the measurements for a profile: CSV files of kernels and collectives, logs of nccl-tests, Parquet tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.common.errors import ForerunError
from forerun.common.units import US
from forerun.core.cost.measured import ANY, Curve, KernelProfile
from forerun.core.cost.measured_files import read_kernel_profile, read_network_profile
from forerun.core.program.types import F64, Collective
from forerun.evidence.measure.nccl_tests import Key, is_nccl_log, nodes_of, read_nccl_log

Table = dict[str, F64]
"""columns of one kind of measurement; `latency_us` holds the times"""
Mask = npt.NDArray[np.bool_]
OPS = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "all_to_all": Collective.ALL_TO_ALL,
}
"""collectives for which a profile has constants"""
_NAMES = {kind: name for name, kind in OPS.items()}
_SHAPE = ("batch", "heads", "kv_heads", "seq", "seq_kv", "head_dim", "causal", "backward", "v_head_dim")
_TABLES = ("gemm.parquet", "attention_forward.parquet", "nccl.parquet")
_TABLE_DTYPES = {"bfloat16": "bf16", "fp8": "fp8"}
_TABLE_OPS = {"alltoall": "all_to_all"}


@dataclass(frozen=True)
class Samples:
    """The measurements of one device, by kind."""

    gemm: Mapping[str, Table] = field(default_factory=dict)
    """dtype -> columns m, n, k, batch, layout (0 forward or any, 1 dgrad, 2 wgrad)"""
    attention: Mapping[str, Table] = field(default_factory=dict)
    """kernel, or ANY -> columns batch, heads, kv_heads, seq, seq_kv, head_dim, causal, backward, v_head_dim"""
    memory: Table = field(default_factory=dict)
    """bytes"""
    host_copy: Table = field(default_factory=dict)
    """bytes"""
    collectives: Mapping[str, Table] = field(default_factory=dict)
    """collectives inside a node: name in OPS -> columns num_gpus, message_bytes"""
    of_kernels: str = ""
    """names of the files with kernels"""
    of_network: str = ""
    serving: bool = False
    """whether inference stacks measured: fp8 times include quantisation, attention times the filling of a cache"""
    notes: tuple[str, ...] = ()


def read_samples(kernels: Sequence[Path], network: Sequence[Path], node_size: int) -> Samples:
    """Reads CSV files (see docs/cli.md) and, for collectives, logs of nccl-tests, all as one set of measurements.

    It omits collectives of more than `node_size` ranks, or of ranks that are not neighbours, and notes so.

    Raises:
        ForerunError: A file is unreadable or wrong.
    """
    products: dict[str, list[tuple[float, ...]]] = {}
    heads: dict[str, list[tuple[float, ...]]] = {}
    memory: list[tuple[float, float]] = []
    host: list[tuple[float, float]] = []
    for path in kernels:
        profile = read_kernel_profile(path)
        for dtype, rows in _products(profile):
            products.setdefault(dtype, []).append(rows)
        for (kernel, shape), time_s in profile.attention.items():
            heads.setdefault(kernel, []).append((*map(float, shape), time_s / US))
        for curve in profile.memory.values():
            memory += _points(curve)
        host += _points(profile.host_copy) if profile.host_copy is not None else []
    collectives, left_out = _collectives(network, node_size)
    return Samples(
        gemm={dtype: _table(("m", "n", "k", "batch", "layout"), rows) for dtype, rows in sorted(products.items())},
        attention={kernel: _table(_SHAPE, rows) for kernel, rows in sorted(heads.items())},
        memory=_table(("bytes",), memory),
        host_copy=_table(("bytes",), host),
        collectives=collectives,
        of_kernels=", ".join(path.name for path in kernels),
        of_network=", ".join(path.name for path in network),
        notes=(f"{left_out} collectives between nodes or of scattered ranks left out",) if left_out else (),
    )


def read_tables(folder: Path, name: str) -> Samples:
    """Reads the measurements of the device `name` in tables that inference stacks measured.

    The folder holds gemm.parquet, attention_forward.parquet and nccl.parquet.
    Columns: gemm: device, dtype, m, n, k, latency_us; attention_forward: device, batch, seq, heads, kv_heads, head_dim,
    latency_us (causal) and, where known, stacks (how many measured a shape); nccl: device, op, num_gpus, message_bytes,
    latency_us (several rows of a shape: their median) and, where known, dtype. It omits all-reduces of int8, which
    switches do not add and training does not run, and attention that fewer than half of the usual number of
    stacks measured, and notes so.

    Raises:
        ForerunError: Pandas is missing, a file is unreadable or lacks a column, or no file has the device.
    """
    gemm, attention, nccl = (_of_device(folder / file, name) for file in _TABLES)
    usual = _usual(attention)
    collectives: dict[str, Table] = {}
    for op, rows in nccl.groupby("op"):
        if op == "all_reduce" and "dtype" in rows:
            rows = rows[rows.dtype != "int8"]
        medians = rows.groupby(["num_gpus", "message_bytes"], as_index=False).latency_us.median()
        collectives[_TABLE_OPS.get(op, op)] = _columns(medians, ("num_gpus", "message_bytes", "latency_us"))
    shape = ("batch", "seq", "heads", "kv_heads", "head_dim", "latency_us")
    return Samples(
        gemm={
            _TABLE_DTYPES.get(dtype, dtype): _columns(rows, ("m", "n", "k", "latency_us"))
            for dtype, rows in gemm.groupby("dtype")
        },
        attention={ANY: _columns(attention[usual], shape)},
        collectives={name: table for name, table in collectives.items() if name in OPS},
        of_kernels=", ".join(_TABLES[:2]),
        of_network=_TABLES[2],
        serving=True,
        notes=(f"attention: {(~usual).sum()} rows left out, which few of the usual stacks measured",)
        if not usual.all()
        else (),
    )


def of_source(samples: Samples, source: str) -> Samples:
    """Returns `samples` with `source` in place of its files' names; a profile states it as their source."""
    kernels, network = (f"{files} ({source})" if files else "" for files in (samples.of_kernels, samples.of_network))
    return replace(samples, of_kernels=kernels, of_network=network)


def network_times(paths: Sequence[Path]) -> dict[Key, float]:
    """Returns the seconds of all collectives in CSV files and logs, between nodes too; medians of repeated ones."""
    found: dict[Key, list[float]] = {}
    for path in paths:
        for key, time_s in (read_nccl_log(path) if is_nccl_log(path) else _of_csv(path)).items():
            found.setdefault(key, []).append(time_s)
    return {key: float(np.median(times)) for key, times in sorted(found.items())}


def _products(profile: KernelProfile) -> Iterable[tuple[str, tuple[float, ...]]]:
    for (dtype, *shape), time_s in profile.gemm.items():
        yield dtype, (*map(float, shape), 0.0, time_s / US)
    for (layout, (dtype, *shape)), time_s in profile.gemm_of_layout.items():
        yield dtype, (*map(float, shape), float(layout), time_s / US)


def _points(curve: Curve) -> list[tuple[float, float]]:
    return [(size, time_s / US) for size, time_s in zip(curve.size_bytes, curve.time_s, strict=True)]


def _collectives(paths: Sequence[Path], node_size: int) -> tuple[dict[str, Table], int]:
    """Returns the columns of collectives inside a node by name, and the number of the other measurements."""
    rows: dict[str, list[tuple[float, ...]]] = {}
    left_out = 0
    for path in paths:
        is_log = is_nccl_log(path)
        times = read_nccl_log(path) if is_log else _of_csv(path)
        several = is_log and nodes_of(path) > 1
        for (kind, ranks, stride, size), time_s in times.items():
            if several or ranks > node_size or stride != 1:
                left_out += 1
            elif kind in _NAMES:
                rows.setdefault(_NAMES[kind], []).append((float(ranks), size, time_s / US))
    columns = ("num_gpus", "message_bytes")
    return {name: _table(columns, rows[name]) for name in OPS if name in rows}, left_out


def _of_csv(path: Path) -> dict[Key, float]:
    curves = read_network_profile(path).curves
    return {
        (kind, ranks, stride, size): time_s
        for (kind, ranks, stride), curve in curves.items()
        for size, time_s in zip(curve.size_bytes, curve.time_s, strict=True)
    }


def _table(names: Sequence[str], rows: Sequence[tuple[float, ...]]) -> Table:
    """Returns the columns of the sorted rows, so that their order in a file has no effect; none for no rows."""
    if not rows:
        return {}
    values = np.array(sorted(rows), np.float64).T
    return dict(zip([*names, "latency_us"], values, strict=True))


def _of_device(path: Path, device: str) -> Any:
    try:
        import pandas
    except ImportError:
        raise ForerunError("tables in Parquet need pandas: pip install 'forerun[data]'") from None
    try:
        table = pandas.read_parquet(path)
    except (OSError, ValueError) as error:
        raise ForerunError(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from None
    if "device" not in table:
        raise ForerunError(f"{path}: column 'device' is missing")
    rows = table[table.device == device]
    if not len(rows):
        raise ForerunError(f"{path}: no rows of {device!r}; it has {', '.join(sorted(set(table.device)))}")
    return rows


def _usual(rows: Any) -> Mask:
    """Returns a mask of the rows that at least half of the most frequent number of stacks for the head size measured.

    Medians of fewer stacks are those of other kernels, up to twice as fast or a quarter slower; that of a single stack
    may exceed the peak of the device.
    """
    usual = np.ones(len(rows), np.bool_)
    if "stacks" not in rows:
        return usual
    stacks, head_dim = rows.stacks.to_numpy(np.int64), rows.head_dim.to_numpy()
    for size in np.unique(head_dim):
        same = head_dim == size
        usual[same] = 2 * stacks[same] >= np.bincount(stacks[same]).argmax()
    return usual


def _columns(rows: Any, names: Sequence[str]) -> Table:
    missing = [name for name in names if name not in rows]
    if missing:
        raise ForerunError(f"tables: column {missing[0]!r} is missing; needed: {', '.join(names)}")
    ordered = rows.sort_values(list(names))
    return {name: ordered[name].to_numpy(np.float64) for name in names}
