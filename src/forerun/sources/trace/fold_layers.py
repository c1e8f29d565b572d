"""Builds the Program of a model with many equal layers from recordings with few.

Recordings at three evenly spaced depths show the additions of every further layer to a step, and the parts elsewhere
that grow with the depth (fused optimizers, lists of norms, memory allocated before the step). The recording at any
depth follows from them (`extrapolate_layers`), and its Program stores equal layers once (`blocks`). Layers of different
kinds that alternate form a longer period: the depths then lie that far apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from forerun.common.errors import ForerunError
from forerun.core.program.types import Program
from forerun.sources.trace.blocks import Module, unit_changes
from forerun.sources.trace.described import Described, Known, describe
from forerun.sources.trace.extrapolate_layers import LayerExtrapolation
from forerun.sources.trace.recording import Recording
from forerun.sources.trace.roles import Roles
from forerun.sources.trace.to_program import to_program

_NEEDED = 3


def fold_layers(shallow: Mapping[int, Sequence[Recording]], depth: int) -> Program:
    """Returns the Program of a model with `depth` layers from recordings of all roles at three or more smaller depths.

    The depths are evenly spaced. They are one layer apart if all layers are equal (2, 3, 4), and p layers apart if
    kinds of layers repeat after p (2p, 3p, 4p). If every stage of a pipeline gets one more layer, the distance is the
    number of stages. The three largest are used. The result reproduces them exactly, or this function refuses.

    Raises:
        ForerunError: too few depths or uneven ones, a `depth` that is not theirs plus whole periods, roles that differ,
        or a step that doesn't grow by the same nodes, tensors and amounts with every layer (the message says where).
    """
    recordings, added = extrapolate(shallow, depth)
    return to_program(recordings, [_cuts(*one) for one in zip(recordings, added, strict=True)])


def extrapolate(shallow: Mapping[int, Sequence[Recording]], depth: int) -> tuple[list[Recording], list[list[range]]]:
    """Returns the recordings at `depth` that `fold_layers` makes its Program of, and the ranges of their added layers.

    Equal tensors may be in another order than in a recording of the whole model. Raises as `fold_layers` does.
    """
    depths, n = _depths(sorted(shallow), depth)
    runs = [Roles.of(shallow[one]) for one in depths]
    if len({tuple(one.rank for one in run.recordings) for run in runs}) > 1:
        raise ForerunError(
            "trace: recordings at different depths are of different ranks; record the same ranks at each depth"
        )
    known: Known = {}
    described = [[describe(run, role, known) for run in runs] for role in range(len(runs[0]))]
    growing = [LayerExtrapolation(three) for three in described]
    for number, told in enumerate(zip(*described, strict=True)):
        again = Roles.of([one.recording(number)[0] for one in growing])
        for role, expected in enumerate(told):
            _check_equal(describe(again, role, known), expected, depths[number])
    deep = [one.recording(n) for one in growing]
    return [one for one, _ in deep], [added for _, added in deep]


def _depths(found: list[int], depth: int) -> tuple[list[int], int]:
    """Returns the three depths to use, and how many periods `depth` lies above the first of them."""
    text = ", ".join(map(str, found))
    if len(found) < _NEEDED:
        raise ForerunError(f"trace: folding layers needs recordings at {_NEEDED} depths, got {text or 'none'}")
    used = found[-_NEEDED:]
    gaps = {b - a for a, b in pairwise(used)}
    if len(gaps) > 1:
        raise ForerunError(f"trace: depths to fold must be evenly spaced, got {text}")
    n, rest = divmod(depth - used[0], gaps.pop())
    if rest or n < 0:
        raise ForerunError(f"trace: {depth} layers can't be reached from {text} in whole periods")
    return used, n


def _check_equal(made: Described, expected: Described, depth: int) -> None:
    """Refuses a recording that is not reproduced."""
    rank = expected.recording.rank
    different = next(
        (
            i
            for i, (a, b) in enumerate(zip(made.nodes, expected.nodes, strict=False))
            if a is not b or made.paths[i] != expected.paths[i]
        ),
        min(len(made.nodes), len(expected.nodes)) - 1,
    )
    same = len(made.nodes) == len(expected.nodes) and made.nodes == expected.nodes and made.paths == expected.paths
    if not same or not np.array_equal(made.start_bytes, expected.start_bytes):
        raise ForerunError(
            f"trace: folding layers doesn't reproduce the step of rank {rank} with {depth} layers: "
            f"{expected.where(different)} is different; trace the whole model (fold=False)"
        )


def _cuts(recording: Recording, added: Iterable[range]) -> list[int]:
    """Returns the borders of added layers that no change of phase or module cuts, as in a model without modules."""
    modules = [Module.of(path) for path in recording.modules]
    beside = np.minimum(recording.stream, 1).astype(np.int8)
    starts, _, _ = unit_changes(recording.phase, beside, recording.module, modules)
    out: list[int] = []
    for run in added:
        inside = (starts > run.start) & (starts < run.start + run.step)
        if len(run) > 1 and not inside.any():
            out += [border for border in run if border < len(recording)]
    return out
