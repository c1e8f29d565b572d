"""Published times of collectives as rows that a model can predict: inside nodes, between them, over PCI Express."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, log
from pathlib import Path

import numpy as np

from forerun.common.units import GIGA, MIB
from forerun.core.cost.profile import load_profile
from forerun.core.network.host_path import host_path_s_per_byte
from forerun.core.network.nccl import algorithms
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import Collective
from forerun.describe.cluster.catalog import cluster_from_parts, load_cluster
from forerun.describe.cluster.types import Cluster, LinkKind

SHARED = Path(__file__).resolve().parents[3].parent / "shared"
NODES = SHARED / "calibration-2" / "nccl_nodes.csv"
IN_NODE = SHARED / "calibration-2" / "nccl_intranode_aiconfigurator.parquet"
DGX = SHARED / "calibration-2" / "vidur_network.parquet"
_KINDS = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "alltoall": Collective.ALL_TO_ALL,
    "send_recv": Collective.SEND_RECV,
}
_DEVICES = {
    "A100": "a100-sxm-80gb",
    "A100 SXM (Azure ND v4)": "a100-sxm-80gb",
    "A100 SXM 80GB": "a100-sxm-80gb",
    "A100 40GB SXM": "a100-sxm-40gb",
    "unstated (4 nodes, earlier cluster; busbw/algbw = 1.94)": "a100-sxm-80gb",
    "unstated, 4 x 200G NIC a node": "a100-sxm-80gb",
    "a100_dgx": "a100-sxm-80gb",
    "H100": "h100-sxm-80gb",
    "H100 SXM": "h100-sxm-80gb",
    "H100 SXM 80GB": "h100-sxm-80gb",
    "H100 SXM (Azure ND v5)": "h100-sxm-80gb",
    "H100 SXM (Voltage Park)": "h100-sxm-80gb",
    "H100 (p5.48xlarge)": "h100-sxm-80gb",
    "H100/H800, 4 GPUs of each of 2 nodes": "h100-sxm-80gb",
    "h100_dgx": "h100-sxm-80gb",
    "H200": "h200-sxm-141gb",
    "H200 SXM": "h200-sxm-141gb",
    "H200 (p5en)": "h200-sxm-141gb",
    "H200 (Azure ND v5)": "h200-sxm-141gb",
    "B200 SXM": "b200-sxm-180gb",
    "B200 (p6-b200)": "b200-sxm-180gb",
    "B300 SXM": "b300-sxm-288gb",
    "B300 (p6-b300)": "b300-sxm-288gb",
    "GB200": "gb200",
    "GB200 NVL72": "gb200",
    "GB300": "gb300",
    "L40S": "l40s",
    "RTX PRO 6000 Server": "rtx-pro-6000",
    "RTX 4090 (4 GPUs: busbw/algbw 1.5)": "rtx-4090",
}
_GBIT_S = {"unstated (about 12.5 GB/s a GPU)": 100.0, "400G x4 NIC": 400.0}
"""rates of NICs that the table has no figure for"""
_PRESETS = {"B200 (p6-b200)": "aws-p6-b200", "H100 (p5.48xlarge)": "aws-p5"}
"""clusters that are known"""


@dataclass(frozen=True)
class Row:
    """One measured collective."""

    cluster: Cluster
    kind: Collective
    nodes: int
    per_node: int
    size_bytes: int
    time_s: float
    fabric: str
    source: str
    dtype: str = ""
    algorithm: str = ""
    """that its author forced, if any"""

    @property
    def group(self) -> CommGroup:
        """Returns the group of all ranks."""
        return CommGroup("dp", self.nodes * self.per_node, self.nodes, self.per_node)

    @property
    def size_class(self) -> str:
        """Returns the class of the size."""
        bounds = {"below 1 MiB": 1, "1 to 16 MiB": 16, "16 to 256 MiB": 256}
        return next((name for name, mib in bounds.items() if self.size_bytes < mib * MIB), "256 MiB and more")

    @property
    def error(self) -> float:
        """Returns the logarithm of the predicted time over the measured one."""
        return log(predicted_s(self) / self.time_s)


def predicted_s(row: Row) -> float:
    """Returns the predicted time of a row. Switches do not add integers of 8 bits, and rings may be forced."""
    cluster, measured = row.cluster, load_profile(row.cluster.device.cost_profile).collectives
    if row.dtype == "int8" or row.algorithm == "NVLS off":
        cluster = replace(cluster, links=(replace(cluster.links[0], reduces=False), *cluster.links[1:]))
    found = algorithms(row.kind, row.nodes, row.per_node, cluster, measured)
    if "Ring" in row.algorithm:
        found = tuple(each for each in found if each.name == "Ring")
    times = np.array([each.lines.seconds(np.array(float(row.size_bytes))) for each in found])
    time_s = float((times**-8.0).sum() ** (-1 / 8))
    return max(time_s, row.size_bytes * host_path_s_per_byte(row.kind, row.group, cluster, row.group.size))


_PCIE5 = cluster_from_parts("rtx-pro-6000", "l40s", 8, intra_bytes_per_s=64 * GIGA)
"""a node of GPUs with peer access over PCI Express 5.0"""


@lru_cache(maxsize=64)
def _cluster(device: str, node_size: int | None, kind: LinkKind | None, gbit_s: float, peers: bool) -> Cluster:
    """Returns nodes of a device; `peers` says that its GPUs reach each other where they usually don't."""
    inter_bytes_per_s = None if kind is None else gbit_s * GIGA / 8
    found = cluster_from_parts(device, device, node_size, inter_kind=kind, inter_bytes_per_s=inter_bytes_per_s)
    if not peers:
        return found
    return replace(found, links=(replace(found.links[0], peer_to_peer=True), *found.links[1:]))


def _fabric_kind(text: str) -> LinkKind | None:
    for word in ("efa", "roce", "infiniband"):
        if word in text.lower():
            return word
    return "infiniband" if "nic" in text.lower() or "unstated" in text.lower() else None


def between_nodes() -> Iterator[Row]:
    """Yields the rows of nccl_nodes.csv but those that their authors report as slow."""
    with NODES.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if "reported as slow" in row["note"]:
            continue
        nodes, per_node, racks = int(row["nodes"]), int(row["gpus_per_node"]), "NVL72" in row["gpu"]
        if racks:
            nodes, per_node = nodes * per_node // 72, 72
        kind = _fabric_kind(row["fabric"]) if nodes > 1 else None
        preset = _PRESETS.get(row["gpu"]) if kind == "efa" else None
        gbit_s = float(row["nic_gbit_per_gpu"] or _GBIT_S.get(row["fabric"], 0.0))
        size = None if racks else max(8, per_node)
        yield Row(
            load_cluster(preset)
            if preset
            else _cluster(_DEVICES[row["gpu"]], size, kind, gbit_s, "p2p" in row["fabric"]),
            _KINDS[row["op"]],
            nodes,
            per_node,
            int(row["size_bytes"]),
            float(row["time_us"]) * 1e-6,
            f"{kind or 'node'} {row['gpu'].split(' ')[0]}{' NVL72' if racks else ''} x{nodes}x{per_node}",
            row["source"],
            algorithm=row["algo"],
        )


def in_nodes() -> Iterator[Row]:
    """Yields the rows of the tables of collectives inside nodes, whose sizes are numbers of elements."""
    import pandas

    table = pandas.read_parquet(IN_NODE)
    table["bytes"] = table.message_size * np.where(table.nccl_dtype == "half", 2, 1)
    keys = ["gpu", "op_name", "nccl_dtype", "num_gpus", "bytes"]
    for (gpu, op, dtype, gpus, size), time_us in table.groupby(keys).time_us.median().items():
        if gpu in _DEVICES:
            cluster = _PCIE5 if "PRO" in gpu else _cluster(_DEVICES[gpu], None, None, 0.0, False)
            yield Row(
                cluster, _KINDS[op], 1, int(gpus), int(size), time_us * 1e-6, f"node {gpu}", "aiconfigurator", dtype
            )


def on_dgx() -> Iterator[Row]:
    """Yields the rows of DGX nodes, of 64 KiB and more (their clock ticks a microsecond)."""
    import pandas

    table = pandas.read_parquet(DGX)
    table = table[table.gpu.isin(["a100_dgx", "h100_dgx"]) & (table.gpus == table.devices_per_node)]
    for row in table[table.size_bytes >= MIB // 16].iloc[::25].itertuples():
        cluster = _cluster(_DEVICES[row.gpu], None, None, 0.0, False)
        yield Row(
            cluster, _KINDS[row.op], 1, row.gpus, row.size_bytes, row.time_us * 1e-6, f"node {row.gpu}", row.source
        )


def by_class(rows: Iterable[Row], key: Callable[[Row], object]) -> dict[object, tuple[int, float, float]]:
    """Returns (rows, mean absolute error, median ratio of predicted to measured time) of each class, in the order of
    their keys."""
    found: dict[object, list[float]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row.error)
    return {
        name: (len(found[name]), float(np.mean(np.abs(found[name]))), exp(float(np.median(found[name]))))
        for name in sorted(found, key=str)
    }
