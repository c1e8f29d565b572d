"""The part of the traces that depends only on which degrees exceed 1: columns, links, symbolic sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from forerun.astrasim.chakra.trace import NodeKind, RankTrace, new_trace
from forerun.astrasim.stage.first_generation.members import stage_order
from forerun.astrasim.stage.first_generation.skeleton import DEGREES, ModelSkeleton, StageSkeleton, build
from forerun.astrasim.stage.first_generation.stretch import smallest, stretch
from forerun.astrasim.stage.sizes import Size
from forerun.common.errors import ForerunError
from forerun.core.program.types import F64, I32, I64

_KEPT = 64
_TERMS = 3
_LARGEST = float(1 << 63)


@dataclass(frozen=True, slots=True)
class StageLayout:
    """One pipeline stage."""

    skeleton: StageSkeleton
    trace: RankTrace
    """the columns that depend on neither sizes nor the rank; the others are 0"""
    is_message: npt.NDArray[np.bool_]
    link: I64
    """for a message: the number of the tensor that one stage sends and another receives; else 0"""
    partner: I32
    """for a message: the place of the other stage in `stage_order`; else 0"""
    n_numbered: int
    """node ids that each of its ranks takes, without messages"""


@dataclass(frozen=True, slots=True)
class Structure:
    """All pipeline stages, in the order of their ranks."""

    model: ModelSkeleton
    stages: tuple[StageLayout, ...]
    sizes: tuple[_Product, ...]
    terms: I64
    """(amounts, 3) the sizes of each amount as indexes into `sizes`; the index after the last stands for 0"""

    def amounts(self, values: Mapping[str, int]) -> I64:
        """Returns every amount as STAGE writes it: sizes as doubles, added up, truncated.

        Raises ForerunError if an amount doesn't fit in 63 bits.
        """
        sizes: F64 = np.array([*(size.value(values) for size in self.sizes), 0.0])
        first, second, third = sizes[self.terms].T
        found = first + second + third
        if found.max() >= _LARGEST:
            raise ForerunError(
                f"these sizes give a node with {found.max():.3g} operations or elements; use smaller ones"
            )
        truncated: I64 = found.astype(np.int64)
        return truncated


@dataclass(frozen=True, slots=True)
class _Product:
    """A size that is not a sum: factor * above / below."""

    factor: int
    above: tuple[str, ...]
    below: tuple[str, ...]

    def value(self, values: Mapping[str, int]) -> float:
        above, below = self.factor, 1
        for symbol in self.above:
            above *= values[symbol]
        for symbol in self.below:
            below *= values[symbol]
        return above / below


def structure(
    sharded: bool, recompute: bool, degrees: tuple[str, ...], stages: int, layers: int, copy_layers: bool
) -> Structure:
    """Returns the structure of a model on `stages` pipeline stages, with these `degrees` above 1.

    With `copy_layers`, inner layers are copies of one layer. Else each layer is made anew, which takes far longer.
    """
    made = smallest(stages, layers) if copy_layers else layers
    return _structure(sharded, recompute, degrees, stages, made, layers)


@lru_cache(_KEPT)
def _structure(
    sharded: bool, recompute: bool, degrees: tuple[str, ...], stages: int, made: int, layers: int
) -> Structure:
    model = stretch(_base(sharded, recompute, degrees, stages, made), stages, layers)
    sizes: dict[Size, int] = {}
    terms = [[sizes.setdefault(size, len(sizes)) for size in amount if size.terms] for amount in model.amounts]
    padded = [[*indices, *[len(sizes)] * (_TERMS - len(indices))] for indices in terms]
    links = _links(model, stages)
    group = np.array([degrees.index(degree) if degree in degrees else -1 for degree in (*DEGREES, "")], dtype=np.int32)
    layouts = tuple(_layout(stage, links, group, stages, layers) for stage in model.stages)
    return Structure(model, layouts, tuple(_product(size) for size in sizes), np.array(padded, dtype=np.int64))


_base = lru_cache(_KEPT)(build)


def _product(size: Size) -> _Product:
    ((factor, powers),) = size.terms
    above = [symbol for symbol, exponent in powers for _ in range(exponent)]
    below = [symbol for symbol, exponent in powers for _ in range(-exponent)]
    assert factor.denominator == 1
    return _Product(factor.numerator, tuple(str(symbol) for symbol in above), tuple(str(symbol) for symbol in below))


def _links(model: ModelSkeleton, stages: int) -> I64:
    """Returns the number of the tensor that each position sends forward (row 0) and backward (row 1)."""
    links = np.zeros((2, model.layers + 2), dtype=np.int64)
    count = 0
    for stage in model.stages:
        received = np.flatnonzero(stage.kind == NodeKind.RECV)
        links[stage.is_backward[received], stage.position[received]] = count + np.arange(len(received))
        count += len(received)
    return links


def _layout(stage: StageSkeleton, links: I64, group: I32, stages: int, layers: int) -> StageLayout:
    rows = len(stage.kind)
    is_message = stage.number < 0
    place = np.zeros(stages, dtype=np.int32)
    place[stage_order(layers, stages)] = np.arange(stages)
    receiver = stage.position + np.where(stage.is_backward, -1, 1)
    other = np.where(stage.kind == NodeKind.RECV, stage.position, receiver)
    trace = new_trace(
        rows,
        kind=stage.kind,
        comm_type=stage.comm_type,
        group=group[stage.degree],
        data_ptr=stage.data.ptr,
        data=stage.data.entry,
        ctrl_ptr=stage.ctrl.ptr,
        ctrl=stage.ctrl.entry,
        input_ptr=stage.inputs.ptr,
        input_tensor=stage.inputs.entry,
        output_ptr=stage.outputs.ptr,
        output_tensor=stage.outputs.entry,
    )
    return StageLayout(
        stage,
        trace,
        is_message,
        np.where(is_message, links[stage.is_backward, stage.position], 0),
        np.where(is_message, place[other % stages], 0).astype(np.int32),
        int(stage.numbered.sum()),
    )
