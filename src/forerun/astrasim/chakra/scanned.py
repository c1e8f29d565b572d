"""Reads usual traces with the scanner, a piece of the file at a time."""

from __future__ import annotations

from functools import cache
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from forerun.astrasim.chakra.attributes import DIMENSION_SPELLINGS, decoded, dimensions, text_of
from forerun.astrasim.chakra.columns import Wanted, rank_trace
from forerun.astrasim.chakra.framing import chunks
from forerun.astrasim.chakra.groups import process_groups
from forerun.astrasim.chakra.scan_columns import KEYS, Known, Lists, Rows, Scratch, State, Status
from forerun.astrasim.chakra.scan_nodes import scan_nodes
from forerun.astrasim.chakra.schema import UNDECODABLE, GlobalMetadata
from forerun.astrasim.chakra.trace import NodeKind, RankTrace
from forerun.common.errors import ForerunError
from forerun.common.interned import Texts, intern

_FIRST_NODES = 1 << 12
_FIRST_ENTRIES = 1 << 14
_FIRST_BYTES = 1 << 17
_FIRST_TEXTS = 1 << 12


def scanned_rank(file: BinaryIO, place: str, names: bool, tensors: bool, lenient: bool) -> RankTrace | None:
    """Reads one rank's trace as `reader.read_rank_from` does, or returns None for one that isn't usual or damaged.

    Raises ValueError as `columns.rank_trace` does.
    """
    scan = _Scan(names, tensors)
    try:
        for piece in chunks(file, place):
            if not scan.takes(piece):
                return None
    except ForerunError:
        return None
    return scan.trace(lenient) if scan.is_whole else None


class _Scan:
    """The columns of one rank's trace while it is scanned."""

    def __init__(self, names: bool, tensors: bool) -> None:
        self._with_names, self._with_tensors = names, tensors
        self._state = np.zeros(len(State), np.int64)
        self._rows = Rows.empty(_FIRST_NODES)
        self._lists = Lists.empty(_FIRST_ENTRIES, _FIRST_ENTRIES if tensors else 0)
        self._known = Known(_texts_of_keys(), _no_texts(), _no_texts(), np.empty(_FIRST_TEXTS, np.int64))
        self._scratch = Scratch.empty()
        self._waiting: list[bytes] = []
        self._n_waiting = 0
        self._names: list[str] = []
        self._process_groups: dict[str, tuple[int, ...]] = {}

    @property
    def is_whole(self) -> bool:
        """Returns whether the bytes so far end with a message, and contain one."""
        return not self._n_waiting and self._state[State.MESSAGES] > 0

    def takes(self, piece: bytes) -> bool:
        """Reads the messages that end in the next piece of the file. Returns False if the trace isn't usual."""
        self._waiting.append(piece)
        self._n_waiting += len(piece)
        if self._n_waiting < max(self._state[State.WANTED], 1):
            return True
        data = b"".join(self._waiting)
        pos, status = 0, int(Status.GROW)
        while status == Status.GROW:
            before, messages = int(self._state[State.NODES]), int(self._state[State.MESSAGES])
            pos, status = self._scan(data, pos)
            if not messages and self._state[State.MESSAGES] and not self._begins_with_metadata(data):
                return False
            self._keep_texts(data, before)
            if status == Status.UNUSUAL:
                return False
            if status == Status.GROW:
                self._grow()
        self._waiting, self._n_waiting = [data[pos:]], len(data) - pos
        return True

    def _scan(self, data: bytes, pos: int) -> tuple[int, int]:
        found: tuple[int, int] = scan_nodes(
            np.frombuffer(data, np.uint8),
            pos,
            len(data),
            self._rows,
            self._lists,
            self._known,
            self._scratch,
            self._state,
            self._with_tensors,
        )
        return found

    def _begins_with_metadata(self, data: bytes) -> bool:
        first = data[self._state[State.METADATA_FIRST] : self._state[State.METADATA_END]]
        try:
            GlobalMetadata.FromString(first)
        except UNDECODABLE:
            return False
        return not first.startswith(b"\x08")

    def _keep_texts(self, data: bytes, before: int) -> None:
        """Keeps names, and process groups, of the nodes from `before` on, which lie in `data`."""
        some = slice(before, int(self._state[State.NODES]))
        rows = self._rows
        if self._with_names:
            spans = zip(rows.name_first[some].tolist(), rows.name_end[some].tolist(), strict=True)
            self._names += [data[first:end].decode() for first, end in spans]
        for row in before + np.flatnonzero(rows.kind[some] == NodeKind.METADATA):
            self._process_groups.update(process_groups(data[rows.text_first[row] : rows.text_end[row]].decode()))

    def _grow(self) -> None:
        state, wanted = self._state, int(self._state[State.WANTED])
        n_nodes = int(state[State.NODES])
        if n_nodes == len(self._rows.node_id):
            self._rows = Rows(*(_larger(column, 2 * n_nodes + len(column) - n_nodes) for column in self._rows))
        n_ids = int(max(state[State.DATA], state[State.CTRL])) + wanted
        if n_ids > len(self._lists.data):
            data, ctrl = (_larger(column, 2 * n_ids) for column in self._lists[:2])
            self._lists = self._lists._replace(data=data, ctrl=ctrl)
        n_tensors = int(max(state[State.INPUTS], state[State.OUTPUTS])) + wanted
        if self._with_tensors and n_tensors > len(self._lists.inputs):
            inputs, outputs = (_larger(column, 2 * n_tensors) for column in self._lists[2:])
            self._lists = self._lists._replace(inputs=inputs, outputs=outputs)
        names, participants, tensors, tensor_bytes = self._known
        names, participants, tensors = (
            texts.with_room(wanted, wanted // 2) for texts in (names, participants, tensors)
        )
        self._known = Known(names, participants, tensors, _larger(tensor_bytes, len(tensors.hashes)))

    def trace(self, lenient: bool) -> RankTrace | None:
        """Returns the trace, or None if an attribute that says who takes part is unusual.

        Raises ValueError as `rank_trace` does.
        """
        try:
            group, group_names, dims = self._groups()
        except ValueError:
            return None
        state, known, n = self._state, self._known, int(self._state[State.NODES])
        rows, lists = self._rows, self._lists
        data_ptr, ctrl_ptr, input_ptr, output_ptr = (
            pointer[: n + 1].copy() for pointer in (rows.data_ptr, rows.ctrl_ptr, rows.input_ptr, rows.output_ptr)
        )
        if not self._with_tensors:
            input_ptr = output_ptr = np.zeros(n + 1, np.int64)
        return rank_trace(
            Wanted(data_ptr, lists.data[: state[State.DATA]], ctrl_ptr, lists.ctrl[: state[State.CTRL]]),
            lenient,
            **{name: getattr(rows, name)[:n].copy() for name in _SAME},
            group=group,
            input_ptr=input_ptr,
            input_tensor=lists.inputs[: state[State.INPUTS]].copy(),
            output_ptr=output_ptr,
            output_tensor=lists.outputs[: state[State.OUTPUTS]].copy(),
            tensor_bytes=known.tensor_bytes[: known.tensors.n_texts].copy(),
            group_names=group_names,
            names=tuple(self._names),
            tensor_names=tuple(name.decode() for name in known.tensors.stored()) if self._with_names else (),
            involved_dims=dims or None,
            has_tensors=self._with_tensors and not state[State.LACKS_TENSORS],
            stream=rows.stream[:n].copy() if state[State.HAS_STREAMS] else None,
            process_groups=self._process_groups or None,
        )

    def _groups(self) -> tuple[npt.NDArray[np.int32], tuple[str, ...], dict[int, tuple[bool, ...]]]:
        """Returns the group of each node, the names of groups, and the dimensions of nodes that name these instead.

        Raises ValueError if an attribute is neither.
        """
        who = self._rows.participants[: self._state[State.NODES]]
        names: dict[str, int] = {}
        said: list[tuple[bool, ...]] = []
        code = np.full(self._known.participants.n_texts + 1, -1, np.int32)
        """the group that each attribute says; -2, -3, ... for dimensions; the last entry is that of nodes without"""
        for number, blob in enumerate(self._known.participants.stored()):
            name, value = decoded(blob)
            if name in DIMENSION_SPELLINGS:
                said.append(dimensions(value, name))
                code[number] = -1 - len(said)
            elif text := text_of(value, name):
                code[number] = names.setdefault(text, len(names))
        group = code[who]
        dims = {int(row): said[-2 - group[row]] for row in np.flatnonzero(group < -1)}
        return np.maximum(group, -1), tuple(names), dims


_SAME = (
    *("node_id", "kind", "is_cpu", "duration_us", "num_ops", "tensor_size", "comm_type", "comm_size", "comm_tag"),
    *("peer", "priority"),
)
"""columns that the scanner fills as a RankTrace has them"""


def _larger(column: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """Returns `column` with at least `size` entries. The new entries are empty."""
    if size <= len(column):
        return column
    larger = np.empty(size, column.dtype)
    larger[: len(column)] = column
    return larger


def _no_texts() -> Texts:
    return Texts.empty(_FIRST_BYTES, _FIRST_TEXTS)


def _texts_of_keys() -> Texts:
    """Returns a table of texts that begins with the names of the attributes that are read."""
    return Texts(*(column.copy() for column in _keys()))


@cache
def _keys() -> Texts:
    texts = Texts.empty(1 << 12, 1 << 8)
    for key in KEYS:
        intern(np.frombuffer(key.encode(), np.uint8), 0, len(key), texts)
    return texts
