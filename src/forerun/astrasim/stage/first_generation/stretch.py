"""Makes models of many layers from models of few layers, by copying an inner layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from forerun.astrasim.stage.first_generation.members import Form
from forerun.astrasim.stage.first_generation.skeleton import Lists, ModelSkeleton, Places, StageSkeleton, Tensors
from forerun.common.arrays import pointers
from forerun.core.program.types import I32, I64

_LAYERS_A_STAGE = 3
"""enough layers to tell the first and the last layer of a stage from those between"""
_COPIED = ("name", "role", "kind", "is_backward", "num_ops", "size", "comm_type", "degree")


def smallest(stages: int, layers: int) -> int:
    """Returns how many layers are enough to `stretch` a model to `layers`."""
    return min(layers, _LAYERS_A_STAGE * stages + layers % stages)


def stretch(base: ModelSkeleton, stages: int, layers: int) -> ModelSkeleton:
    """Returns the skeleton of `layers` layers, given that of `smallest(stages, layers)`.

    Every stage gets copies of its second layer, behind that layer.
    """
    if layers == base.layers:
        return base
    stretched = tuple(_Stretch(stage, stages, base.layers, layers).skeleton() for stage in base.stages)
    return replace(base, stages=stretched, layers=layers)


class _Insertion:
    """Copies of position `second`, behind it at every `stages`-th position; later positions move back."""

    def __init__(self, second: int, stages: int, layers: int, new_layers: int) -> None:
        self.end = layers + 1
        self.moved = new_layers - layers
        self._second, self._stages = second, stages

    def lengths(self, old: I32) -> I32:
        """Returns the lengths of the new segments, given those of the old ones; both (3, positions)."""
        second, stages, moved = self._second, self._stages, self.moved
        new = np.zeros((len(old), old.shape[1] + moved), dtype=np.int32)
        new[:, : second + 1] = old[:, : second + 1]
        new[:, second + 1 + moved :] = old[:, second + 1 :]
        new[:, second + stages : second + moved + 1 : stages] = old[:, second, None]
        return new

    def positions(self, old: int) -> I64:
        """Returns the new positions of an old position and its copies."""
        if old == self._second:
            return np.arange(old, old + self.moved + 1, self._stages)
        return np.array([old if old < self._second else old + self.moved])


@dataclass(frozen=True, slots=True)
class _Copy:
    """Describes how the entries of a stretched list follow from those of the old list."""

    source: I64
    """for each new entry: the old one"""
    user: I32
    """for each new entry: its position"""
    shift: I32
    """for each new entry: its position minus that of the old one"""
    old: Places
    offset: I64
    """for each old entry: its place in its segment"""
    start: I64
    """first entry of each new segment, (3, positions)"""


def _copied(places: Places, insertion: _Insertion) -> _Copy:
    lengths = np.zeros((len(Form), insertion.end + 1), dtype=np.int32)
    np.add.at(lengths, (places.form, places.user), 1)
    old_start, start = _starts(lengths), _starts(insertion.lengths(lengths))
    sources, users = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for form, old in product(range(len(Form)), _order(insertion.end + 1).tolist()):
        length = lengths[form, old]
        if length:
            positions = insertion.positions(old)
            rows = np.arange(old_start[form, old], old_start[form, old] + length)
            sources.append(np.tile(rows, len(positions)))
            users.append(np.repeat(positions, length))
    source, user = np.concatenate(sources), np.concatenate(users).astype(np.int32)
    offset = np.arange(len(places.user)) - old_start[places.form, places.user]
    return _Copy(source, user, user - places.user[source], places, offset, start)


def _order(positions: int) -> I64:
    """Returns the positions in the order of their segments: the embeddings precede the layers."""
    return np.array([0, positions - 1, *range(1, positions - 1)])


def _starts(lengths: I32) -> I64:
    """Returns the first entry of each segment; segments are ordered by form."""
    order = _order(lengths.shape[1])
    flat = lengths[:, order].ravel().astype(np.int64)
    starts = np.zeros(lengths.shape, dtype=np.int64)
    starts[:, order] = (np.cumsum(flat) - flat).reshape(lengths.shape)
    return starts


class _Stretch:
    """The stretching of one pipeline stage.

    A copy refers to entries at the same distance in positions as its original does, except that references to the
    embeddings stay.
    """

    def __init__(self, stage: StageSkeleton, stages: int, layers: int, new_layers: int) -> None:
        on_stage = np.unique(stage.places.user)
        second = int(on_stage[(on_stage >= 1) & (on_stage <= layers)][1])
        self._stage = stage
        self._insertion = _Insertion(second, stages, layers, new_layers)
        self._rows = _copied(stage.places, self._insertion)
        self._tensors = _copied(stage.tensors.places, self._insertion)

    def skeleton(self) -> StageSkeleton:
        stage, rows, tensors = self._stage, self._rows, self._tensors
        copied = {column: getattr(stage, column)[rows.source] for column in _COPIED}
        return StageSkeleton(
            places=Places(stage.places.form[rows.source], rows.user),
            position=stage.position[rows.source] + rows.shift,
            number=self._number(),
            data=self._lists(stage.data, rows),
            ctrl=self._lists(stage.ctrl, rows),
            inputs=self._lists(stage.inputs, tensors),
            outputs=self._lists(stage.outputs, tensors),
            tensors=Tensors(
                Places(stage.tensors.places.form[tensors.source], tensors.user),
                stage.tensors.position[tensors.source] + tensors.shift,
                stage.tensors.name[tensors.source],
                stage.tensors.amount[tensors.source],
            ),
            numbered=self._insertion.lengths(stage.numbered),
            **copied,
        )

    def _number(self) -> I32:
        rows, stage = self._rows, self._stage
        form, number = stage.places.form[rows.source], stage.number[rows.source]
        before = _starts(stage.numbered)[form, stage.places.user[rows.source]]
        now = _starts(self._insertion.lengths(stage.numbered))[form, rows.user]
        return np.where(number < 0, -1, number - before + now).astype(np.int32)

    def _lists(self, old: Lists, target: _Copy) -> Lists:
        source = self._rows.source
        length = np.diff(old.ptr)[source]
        ptr = pointers(length)
        entry = old.entry[np.arange(ptr[-1]) + np.repeat(old.ptr[source] - ptr[:-1], length)]
        user = target.old.user[entry]
        moved = np.where(user == self._insertion.end, self._insertion.moved, np.repeat(self._rows.shift, length))
        position = np.where(user == 0, 0, user + moved)
        return Lists(ptr, (target.start[target.old.form[entry], position] + target.offset[entry]).astype(np.int32))
