"""Finds the process groups of data parallelism by the collectives that a step ran on them."""

from __future__ import annotations

import numpy as np

from forerun.core.program.types import Category, Collective, Phase
from forerun.sources.trace.recording import Recording

_MODEL_AXES = frozenset({"tp", "sp", "cp", "ep", "pp"})
"""Words in the names of groups that gradients are not averaged over."""
_REDUCTIONS = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
_LEAST = 0.01
"""The share of the parameters' bytes that a gradient group reduces at least. Norms and losses are smaller."""


def words(name: str) -> set[str]:
    """Returns the words in a group's name."""
    return set(name.split("#")[0].lower().split("_"))


def data_parallel(recording: Recording) -> tuple[list[str], list[str]]:
    """Returns the names of the groups over which gradients are reduced, and of those over which state is sharded too.

    The groups of DistributedDataParallel are known (`averages` of the recording). Another one reduces much in the
    backward pass or the optimizer, and in the forward pass it at most gathers and broadcasts parameters, or exchanges
    parts of a sequence or tokens of experts. Groups named after another axis don't count, nor do groups that reduce
    activations in the forward pass.
    """
    ops, op = recording.ops, recording.op
    kept = (recording.tensor_category == Category.PARAMETER) & (recording.tensor_alloc < 0)
    least = _LEAST * float(recording.tensor_bytes[kept].sum())
    communicates = ops.is_communication[op]
    forward = recording.phase == Phase.FORWARD
    names, sharded = [], []
    for number, (name, _) in enumerate(recording.groups):
        averages = name in recording.meta.get("averages", ())
        if not averages and words(name) & _MODEL_AXES and not words(name) & {"dp", "fsdp"}:
            continue
        on = communicates & (ops.group[op] == number)
        kind, size = ops.collective[op], ops.bytes_comm[op]
        gathers = kind == Collective.ALL_GATHER
        spreads = gathers | np.isin(kind, (Collective.BROADCAST, Collective.ALL_TO_ALL))
        reduced = size[on & ~forward & np.isin(kind, _REDUCTIONS)].sum()
        if averages and reduced:
            names.append(name)
            continue
        if not reduced or reduced < least or (on & forward & ~spreads & (size > least)).any():
            continue
        names.append(name)
        if size[on & gathers].sum() >= least or (on & (kind == Collective.REDUCE_SCATTER)).any():
            sharded.append(name)
    return names, sharded


def distinct_ranks(recording: Recording, names: list[str]) -> int:
    """Returns the number of ranks that see different samples or tokens: those that the groups in `names` join."""
    groups = dict(recording.groups)
    total, covered = 1, {recording.rank}
    for members in sorted((groups[name] for name in names), key=len, reverse=True):
        if not set(members) <= covered:
            total *= len(members)
            covered |= set(members)
    return total
