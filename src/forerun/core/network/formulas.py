"""The bytes that collective algorithms send, divided by those of the full buffer (`nccl`), whatever links they run on.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005). What
their steps take is in `constants`.
"""

from __future__ import annotations

from forerun.core.program.types import Collective

TREE_PASSES = 2.0
"""bytes that an all-reduce in double binary trees sends through a node: all of them up, and all of them down"""


def rounds(kind: Collective) -> float:
    """Returns the number of turns round a ring: an all-reduce is a reduce-scatter and an all-gather."""
    return 2.0 if kind == Collective.ALL_REDUCE else 1.0


def passes(kind: Collective, ranks: int) -> float:
    """Returns the bytes that pass the link of each of `ranks` of a ring."""
    if kind in (Collective.BROADCAST, Collective.SEND_RECV):
        return 1.0
    return (ranks - 1) / ranks * rounds(kind)


def exchanged(nodes: int, ranks: int) -> tuple[float, float]:
    """Returns the bytes that each rank sends in an all-to-all over `nodes` of `ranks`: inside its node, and to other
    nodes."""
    n = nodes * ranks
    return (ranks - 1) / n, (n - ranks) / n
