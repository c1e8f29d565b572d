"""The scanner of a trace file: the bytes of its nodes become columns, without an object for any node.

A call takes as many whole messages as a buffer holds. If a node is unusual in any way (a field or a type that writers
don't use, an error), the scanner gives the file up. `columns.Columns` then reads it node by node, and reports errors.
So both differ only in speed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from forerun.astrasim.chakra.attributes import DIMENSION_SPELLINGS
from forerun.astrasim.chakra.framing import MAX_MESSAGE_BYTES
from forerun.astrasim.chakra.scan_columns import I32, KEYS, U64, Known, Lists, Rows, Scratch, State, Status
from forerun.astrasim.chakra.schema import IOInfo, Node
from forerun.astrasim.chakra.trace import CommType, NodeKind
from forerun.astrasim.chakra.wire import (
    CUT,
    END,
    FIELD,
    FIRST,
    I64,
    LENGTH,
    NAME_END,
    NAME_FIRST,
    RAW,
    STRING_LIST,
    U8,
    VARINT,
    is_text,
    length,
    read_attribute,
    span,
    varint,
    whole_number,
)
from forerun.common.interned import Texts, intern
from forerun.common.jit import inlined, kernel

_NUM_OPS, _TENSOR_SIZE, _IS_CPU, _STREAM, _COMM_TYPE, _COMM_SIZE, _COMM_TAG, _PRIORITY, _DST, _SRC = range(10)
_INPUTS, _OUTPUTS, _PARTICIPANTS = 10, 11, 12
_IS_DIMENSIONS = np.array([name in DIMENSION_SPELLINGS for name in KEYS])
_TENSOR_LISTS = np.array([list(b"\n\x06inputs "), list(b"\n\x07outputs")], np.uint8)
_TENSOR_LIST_BYTES = np.array([8, 9])
"""how attributes begin that are not looked at where no tensors are wanted, and how long that is"""
_MISSING, _EMPTY, _GIVEN = 0, 1, 2
"""whether a node has an attribute, and whether that has a value"""
_HOW, _FIELD, _RAW, _FIRST, _END, _BEGIN, _STOP = range(7)
"""values that are kept of an attribute: the above, the results of `read_attribute`, and the place of the whole
attribute
"""
_ID, _KIND, _DURATION, _NAME_FIRST, _NAME_END, _TEXT_FIRST, _TEXT_END, _DATA_END, _CTRL_END = range(9)
"""values that are kept of a node until it is known to be a usual one"""
_FIELDS = {field.name: field.number for field in Node.DESCRIPTOR.fields}


def _tag(name: str, wire: int = VARINT) -> int:
    return int(_FIELDS[name] << 3 | wire)


_ID_TAG, _NAME_TAG, _KIND_TAG = _tag("id"), _tag("name", LENGTH), _tag("type")
_CTRL_TAG, _CTRLS_TAG = _tag("ctrl_deps"), _tag("ctrl_deps", LENGTH)
_DATA_TAG, _DATAS_TAG = _tag("data_deps"), _tag("data_deps", LENGTH)
_START_TAG, _DURATION_TAG = _tag("start_time_micros"), _tag("duration_micros")
_INPUTS_TAG, _OUTPUTS_TAG, _ATTRIBUTE_TAG = _tag("inputs", LENGTH), _tag("outputs", LENGTH), _tag("attr", LENGTH)
_VALUES_TAG, _SHAPES_TAG, _TYPES_TAG = (
    IOInfo.DESCRIPTOR.fields_by_name[name].number << 3 | LENGTH for name in ("values", "shapes", "types")
)
_METADATA, _SEND, _COLLECTIVE = int(NodeKind.METADATA), int(NodeKind.SEND), int(NodeKind.COLLECTIVE)
_LAST_KIND, _LAST_COMM_TYPE = int(max(NodeKind)), int(max(CommType))
_MORE, _GROW, _UNUSUAL = map(int, Status)
_MESSAGES, _NODES, _N_DATA, _N_CTRL, _N_INPUTS, _N_OUTPUTS, *_OTHERS = map(int, State)
_HAS_STREAMS, _LACKS_TENSORS, _WANTED, _METADATA_FIRST, _METADATA_END = _OTHERS
_INT31 = 1 << 31
_MOST_DIGITS, _MOST_EXACT_DIGITS = 18, 15
"""digits of whole numbers that fit 64 bits, and of numbers with a point that a float tells from the next whole one"""
_ZERO, _NINE, _POINT = ord("0"), ord("9"), ord(".")
_CROWDED = 256
"""places of a table that a search looks at only where a file was made for that"""


@kernel
def _ids(buf: U8, first: int, end: int, ids: U64, n: int) -> int:
    """Adds packed ids to the first `n`. Returns how many there are then, -1 if the bytes are none."""
    while first < end:
        value, first = varint(buf, first, end)
        if first < 0:
            return -1
        ids[n] = np.uint64(value)
        n += 1
    return n


@kernel
def _note_text(buf: U8, pos: int, end: int, node: I64) -> bool:
    """Keeps where the text of the inputs lies. Returns False if these are not three texts at most, each once."""
    seen = 0
    while pos < end:
        key = np.int64(buf[pos])
        if key != _VALUES_TAG and key != _SHAPES_TAG and key != _TYPES_TAG:
            return False
        if seen & (1 << key):
            return False
        seen |= 1 << key
        first, pos = span(buf, pos + 1, end)
        if pos < 0 or not is_text(buf, first, pos):
            return False
        if key == _VALUES_TAG:
            node[_TEXT_FIRST], node[_TEXT_END] = first, pos
    return True


@kernel
def _is_tensor_list(buf: U8, first: int, end: int) -> bool:
    """Returns whether an attribute begins with the name of a list of tensors."""
    for one in range(2):
        size = _TENSOR_LIST_BYTES[one]
        if end - first < size:
            continue
        same = True
        for i in range(size):
            if buf[first + i] != _TENSOR_LISTS[one, i]:
                same = False
                break
        if same:
            return True
    return False


@kernel
def _note_attribute(buf: U8, first: int, end: int, attributes: I64, found: I64, names: Texts) -> bool:
    """Stores the value of an attribute. Returns False if it can't be told, or the node has said something else
    before.
    """
    if not read_attribute(buf, first, end, found):
        return False
    key = intern(buf, found[NAME_FIRST], found[NAME_END], names)
    if key < len(_IS_DIMENSIONS):
        if attributes[key, _HOW] != _MISSING:
            return False
        attributes[key, _HOW] = _EMPTY if found[FIELD] == 0 else _GIVEN
        attributes[key, _FIELD], attributes[key, _RAW] = found[FIELD], found[RAW]
        attributes[key, _FIRST], attributes[key, _END] = found[FIRST], found[END]
        attributes[key, _BEGIN], attributes[key, _STOP] = first, end
    return True


@inlined
def _read_node(
    buf: U8, pos: int, end: int, scratch: Scratch, data: U64, ctrl: U64, names: Texts, with_tensors: bool
) -> bool:
    """Reads one node into `scratch` and its dependencies. Returns False if it is unusual."""
    node, attributes, found = scratch
    attributes[:, _HOW] = _MISSING
    node[_ID] = node[_KIND] = node[_DURATION] = 0
    node[_NAME_FIRST] = node[_NAME_END] = node[_TEXT_FIRST] = node[_TEXT_END] = 0
    has_inputs = has_outputs = False
    n_data, n_ctrl = node[_DATA_END], node[_CTRL_END]
    while pos < end:
        key = np.int64(buf[pos])
        pos += 1
        if key & 7 == LENGTH:
            first, pos = span(buf, pos, end)
            if pos < 0:
                return False
            if key == _ATTRIBUTE_TAG:
                if not with_tensors and _is_tensor_list(buf, first, pos):
                    continue
                if not _note_attribute(buf, first, pos, attributes, found, names):
                    return False
            elif key == _NAME_TAG:
                if not is_text(buf, first, pos):
                    return False
                node[_NAME_FIRST], node[_NAME_END] = first, pos
            elif key == _DATAS_TAG:
                n_data = _ids(buf, first, pos, data, n_data)
                if n_data < 0:
                    return False
            elif key == _CTRLS_TAG:
                n_ctrl = _ids(buf, first, pos, ctrl, n_ctrl)
                if n_ctrl < 0:
                    return False
            elif key == _INPUTS_TAG:
                if has_inputs or not _note_text(buf, first, pos, node):
                    return False
                has_inputs = True
            elif key == _OUTPUTS_TAG:
                before, last = node[_TEXT_FIRST], node[_TEXT_END]
                if has_outputs or not _note_text(buf, first, pos, node):
                    return False
                has_outputs = True
                node[_TEXT_FIRST], node[_TEXT_END] = before, last
            else:
                return False
            continue
        value, pos = varint(buf, pos, end)
        if pos < 0:
            return False
        if key == _ID_TAG:
            node[_ID] = value
        elif key == _KIND_TAG:
            node[_KIND] = value
        elif key == _DURATION_TAG:
            node[_DURATION] = value
        elif key == _DATA_TAG:
            data[n_data] = np.uint64(value)
            n_data += 1
        elif key == _CTRL_TAG:
            ctrl[n_ctrl] = np.uint64(value)
            n_ctrl += 1
        elif key != _START_TAG:
            return False
    node[_DATA_END], node[_CTRL_END] = n_data, n_ctrl
    return bool(0 <= node[_KIND] <= _LAST_KIND and node[_ID] >= 0 and node[_DURATION] >= 0)


@kernel
def _number(attributes: I64, key: int) -> tuple[bool, Any]:
    """Returns (True, the whole number of an attribute), 0 without a value, or (False, 0) if it is not a number."""
    if attributes[key, _HOW] != _GIVEN:
        return True, np.int64(0)
    return whole_number(attributes[key, _FIELD], attributes[key, _RAW])


@kernel
def _who_takes_part(attributes: I64) -> int:
    """Returns the attribute that says who takes part in a collective, -1 for none."""
    for key in range(_PARTICIPANTS, len(_IS_DIMENSIONS)):
        if attributes[key, _HOW] == _GIVEN:
            return key
    return -1


@inlined
def _add_communication(buf: U8, row: int, kind: int, attributes: I64, rows: Rows, participants: Texts) -> bool:
    """Writes the columns of a node that communicates. Returns False if it is unusual."""
    comm_type, peer, who = -1, -1, -1
    if kind == _COLLECTIVE and attributes[_COMM_TYPE, _HOW] == _MISSING:
        # What launches a collective on the host.
        told, value = _number(attributes, _IS_CPU)
        if not told or value == 0:
            return False
    elif attributes[_COMM_SIZE, _HOW] != _GIVEN:
        return False
    elif kind == _COLLECTIVE:
        told, value = _number(attributes, _COMM_TYPE)
        if not told or attributes[_COMM_TYPE, _HOW] != _GIVEN or not 0 <= value <= _LAST_COMM_TYPE:
            return False
        comm_type = value
        who = _who_takes_part(attributes)
    else:
        key = _DST if kind == _SEND else _SRC
        told, value = _number(attributes, key)
        if attributes[key, _HOW] == _GIVEN:
            if not told or not 0 <= value < _INT31:
                return False
            peer = value
        else:
            who = _who_takes_part(attributes)
            if who < 0 or _IS_DIMENSIONS[who]:
                return False
    number = -1
    if who >= 0:
        number = intern(buf, attributes[who, _BEGIN], attributes[who, _STOP], participants)
    has_size, size = _number(attributes, _COMM_SIZE)
    has_tag, tag = _number(attributes, _COMM_TAG)
    has_priority, priority = _number(attributes, _PRIORITY)
    if not has_size or not has_tag or not has_priority or size < 0 or not -_INT31 <= priority < _INT31:
        return False
    rows.comm_type[row] = comm_type
    rows.peer[row] = peer
    rows.participants[row] = number
    rows.comm_size[row] = size
    rows.comm_tag[row] = tag
    rows.priority[row] = priority
    return True


@kernel
def size_of_tensor(buf: U8, first: int, end: int) -> tuple[bool, Any]:
    """Returns (True, value) of a text of digits, perhaps with a point, cut to a whole number; else (False, 0)."""
    value, digits, i = np.int64(0), 0, first
    while i < end and _ZERO <= buf[i] <= _NINE:
        value = value * 10 + (np.int64(buf[i]) - _ZERO)
        digits += 1
        i += 1
        if digits > _MOST_DIGITS:
            return False, np.int64(0)
    if digits == 0 or i == end:
        return digits > 0, value
    if buf[i] != _POINT:
        return False, np.int64(0)
    for k in range(i + 1, end):
        if not _ZERO <= buf[k] <= _NINE:
            return False, np.int64(0)
    return end - first - 1 <= _MOST_EXACT_DIGITS, value


@inlined
def _add_tensors(buf: U8, key: int, attributes: I64, tensors: Texts, tensor_bytes: I64, entries: I32, n: int) -> int:
    """Adds the tensors of a list to the first `n` entries. Returns how many there are then, -1 for an unusual list."""
    if attributes[key, _HOW] != _GIVEN:
        return n
    if attributes[key, _FIELD] != STRING_LIST:
        return -1
    pos, end = attributes[key, _FIRST], attributes[key, _END]
    while pos < end:
        first, name_end = span(buf, pos + 1, end)
        if name_end >= end:
            return -1
        size_first, pos = span(buf, name_end + 1, end)
        new = tensors.counts[0]
        number = intern(buf, first, name_end, tensors)
        if number == new:
            told, size = size_of_tensor(buf, size_first, pos)
            if not told:
                return -1
            tensor_bytes[number] = size
        entries[n] = number
        n += 1
    return n


@inlined
def _add_node(
    buf: U8, scratch: Scratch, rows: Rows, lists: Lists, known: Known, state: I64, with_tensors: bool
) -> bool:
    """Adds the node in `scratch` to the columns. Returns False if it is unusual."""
    node, attributes, _ = scratch
    row, kind = state[_NODES], node[_KIND]
    has_ops, num_ops = _number(attributes, _NUM_OPS)
    has_size, tensor_size = _number(attributes, _TENSOR_SIZE)
    has_cpu, is_cpu = _number(attributes, _IS_CPU)
    has_stream, stream = _number(attributes, _STREAM)
    if not (has_ops and has_size and has_cpu and has_stream) or num_ops < 0 or tensor_size < 0:
        return False
    if attributes[_IS_CPU, _HOW] == _EMPTY or not 0 <= stream < _INT31:
        return False
    if _SEND <= kind <= _COLLECTIVE:
        if not _add_communication(buf, row, kind, attributes, rows, known.participants):
            return False
    else:
        rows.comm_type[row] = rows.peer[row] = rows.participants[row] = -1
        rows.comm_size[row] = rows.comm_tag[row] = rows.priority[row] = 0
    if with_tensors:
        n_inputs = _add_tensors(
            buf, _INPUTS, attributes, known.tensors, known.tensor_bytes, lists.inputs, state[_N_INPUTS]
        )
        if n_inputs < 0:
            return False
        n_outputs = _add_tensors(
            buf, _OUTPUTS, attributes, known.tensors, known.tensor_bytes, lists.outputs, state[_N_OUTPUTS]
        )
        if n_outputs < 0:
            return False
        state[_N_INPUTS], state[_N_OUTPUTS] = n_inputs, n_outputs
        rows.input_ptr[row + 1], rows.output_ptr[row + 1] = n_inputs, n_outputs
        if attributes[_INPUTS, _HOW] == _MISSING or attributes[_OUTPUTS, _HOW] == _MISSING:
            state[_LACKS_TENSORS] = 1
    rows.stream[row] = -1
    if attributes[_STREAM, _HOW] != _MISSING:
        rows.stream[row] = stream
        state[_HAS_STREAMS] = 1
    rows.node_id[row] = node[_ID]
    rows.kind[row] = kind
    rows.is_cpu[row] = is_cpu != 0
    rows.duration_us[row] = node[_DURATION]
    rows.num_ops[row] = num_ops
    rows.tensor_size[row] = tensor_size
    rows.data_ptr[row + 1], rows.ctrl_ptr[row + 1] = node[_DATA_END], node[_CTRL_END]
    rows.name_first[row], rows.name_end[row] = node[_NAME_FIRST], node[_NAME_END]
    rows.text_first[row], rows.text_end[row] = node[_TEXT_FIRST], node[_TEXT_END]
    state[_N_DATA], state[_N_CTRL] = node[_DATA_END], node[_CTRL_END]
    state[_NODES] = row + 1
    return True


@kernel
def _has_room(texts: Texts, size: int) -> bool:
    """Returns whether the texts of a message of `size` bytes have room. Each text takes two more bytes there."""
    n_texts, n_bytes = texts.counts[0] + size // 2, texts.counts[1] + size
    return bool(n_texts < len(texts.hashes) and n_bytes <= len(texts.arena))


@kernel
def scan_nodes(
    buf: U8, pos: int, n: int, rows: Rows, lists: Lists, known: Known, scratch: Scratch, state: I64, with_tensors: bool
) -> tuple[int, int]:
    """Reads the messages of `buf[pos:n]` into the columns. Returns the place behind the last one, and a Status.

    `state` has a counter for each State. The first message is the metadata; only its place is kept.
    """
    while pos < n:
        begin = pos
        size, pos = length(buf, pos, n)
        if pos == CUT:
            state[_WANTED] = n - begin + 1
            return begin, _MORE
        if pos < 0 or size > MAX_MESSAGE_BYTES:
            return begin, _UNUSUAL
        end = pos + size
        state[_WANTED] = end - begin
        if end > n:
            return begin, _MORE
        if state[_MESSAGES] == 0:
            state[_METADATA_FIRST], state[_METADATA_END] = pos, end
        else:
            if state[_NODES] == len(rows.node_id):
                return begin, _GROW
            if max(state[_N_DATA], state[_N_CTRL]) + size > len(lists.data):
                return begin, _GROW
            if with_tensors and max(state[_N_INPUTS], state[_N_OUTPUTS]) + size > len(lists.inputs):
                return begin, _GROW
            if not (
                _has_room(known.names, size) and _has_room(known.participants, size) and _has_room(known.tensors, size)
            ):
                return begin, _GROW
            scratch.node[_DATA_END], scratch.node[_CTRL_END] = state[_N_DATA], state[_N_CTRL]
            if size == 0 or not _read_node(buf, pos, end, scratch, lists.data, lists.ctrl, known.names, with_tensors):
                return begin, _UNUSUAL
            if not _add_node(buf, scratch, rows, lists, known, state, with_tensors):
                return begin, _UNUSUAL
            if max(known.names.counts[2], known.participants.counts[2], known.tensors.counts[2]) > _CROWDED:
                return begin, _UNUSUAL
        state[_MESSAGES] += 1
        pos = end
    state[_WANTED] = 1
    return pos, _MORE
