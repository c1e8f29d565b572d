"""The shell script around a training program: nodes, GPUs of each, rendezvous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.interfaces.report.launch.translation import Translation

_HOST_GPUS = 8
"""GPUs of the largest common host; a link domain may join several hosts (NVL72)"""


def nodes_of(world: int, node_size: int) -> tuple[int, int]:
    """Returns (nodes, GPUs of each): whole nodes where the world fills them, else the largest equal share of a node."""
    per_node = min(world, node_size or world)
    while world % per_node:
        per_node -= 1
    return world // per_node, per_node


def remark_nodes(t: Translation, nodes: int) -> None:
    """Adds a remark on how several nodes find each other."""
    if nodes > 1:
        t.remark("launch.sh runs on every node; MASTER_ADDR is the first node's address, NODE_RANK counts from 0")


def script(t: Translation, words: Sequence[str], lines: Sequence[str] = ()) -> str:
    """Returns a bash script that runs `lines`, then `words` under torchrun on every node.

    The variables NNODES, GPUS_PER_NODE, NODE_RANK, MASTER_ADDR and MASTER_PORT override the plan.
    """
    world = t.plan.world_size
    nodes, per_node = nodes_of(world, t.cluster.node_size)
    if per_node > _HOST_GPUS:
        t.remark(f"{per_node} GPUs share one link domain; where a host holds fewer, set NNODES and GPUS_PER_NODE")
    remark_nodes(t, nodes)
    run = [
        "torchrun",
        f'--nnodes "${{NNODES:-{nodes}}}"',
        f'--nproc-per-node "${{GPUS_PER_NODE:-{per_node}}}"',
        '--node-rank "${NODE_RANK:-0}"',
        '--master-addr "${MASTER_ADDR:-localhost}"',
        '--master-port "${MASTER_PORT:-29500}"',
        *words,
    ]
    return bash(t, lines, run)


def bash(t: Translation, lines: Sequence[str], command: Sequence[str]) -> str:
    """Returns a bash script that runs `lines` and then one command, to whose words it adds its own arguments."""
    head = [
        "#!/usr/bin/env bash",
        f"# {t.title}; see notes.txt.",
        "set -euo pipefail",
        'HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"',
        *lines,
    ]
    return "\n".join(head) + "\n" + " \\\n    ".join([*command, '"$@"']) + "\n"
