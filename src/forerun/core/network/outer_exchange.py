"""The exchange of an outer step: replicas that trained alone average their parameters or pseudo-gradients.

Each rank exchanges its part with the ranks of the other replicas that hold the same part. In fp32 and bf16 that is an
all-reduce. In 8 or 4 bits ranks send each other quantized parts all to all, sum one part each, and gather the quantized
sums, as torchft's `allreduce_quantized` does.
"""

from __future__ import annotations

import numpy as np

from forerun.core.network.gradient_sums import AllToAll
from forerun.core.network.patterns import Wires
from forerun.core.network.patterns_collectives import AllGather, Nccl
from forerun.core.program.groups import CommGroup

WIRE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "fp4": 0.5}
"""bytes of an element on the wire; scales of rows are left out"""
_SUMMED_ON_THE_WAY = ("fp32", "bf16")


def outer_exchange_s(
    elements: float, element_bytes: int, wire: str, group: CommGroup, wires: Wires, far_s: float = 0.0
) -> float:
    """Returns the seconds in which all ranks of `group` get the mean of their `elements`.

    `element_bytes` is the size of a parameter, which is cast or quantized to `wire`, a key of `WIRE_BYTES`, and back.
    All equal groups exchange at the same time. The time includes the kernels of the casts and of the division. From one
    replica to the next a message takes `far_s` longer than over `wires`: n replicas wait for 2 (n - 1) messages one
    after the other in the ring of an all-reduce, and for n where they first send all to all and then gather in a ring.
    """
    whole, narrow = elements * element_bytes, elements * WIRE_BYTES[wire]
    sent = np.array([narrow])
    casts = 0.0 if whole == narrow else 2.0 * _pass_s(wires, whole + narrow)
    mean = _pass_s(wires, 2.0 * whole)
    if wire in _SUMMED_ON_THE_WAY:
        return float(Nccl().seconds(sent, group, wires)[0]) + 2 * (group.size - 1) * far_s + casts + mean
    part = narrow / group.size
    there, back = (each.nccl_lines(group, wires).seconds(sent) for each in (AllToAll(), AllGather()))
    sums = _pass_s(wires, narrow + part)
    return float(there[0] + back[0]) + group.size * far_s + casts + sums + mean


def _pass_s(wires: Wires, size_bytes: float) -> float:
    return float(wires.pass_s(np.array([size_bytes]))[0])
