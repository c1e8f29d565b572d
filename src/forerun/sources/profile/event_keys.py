"""The keys of a Kineto event that a profile keeps, and how each of their values is read.

Kineto's own list is `libkineto/include/MetadataFieldCatalog.h`. Older releases wrote some keys in other cases, so a
field may have several spellings.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt


class Key(IntEnum):
    """A field of an event: first those of the event itself, then those of its `args`."""

    PH = 0
    CAT = 1
    NAME = 2
    PID = 3
    TID = 4
    TS = 5
    DUR = 6
    ARGS = 7
    STREAM = 8
    CORRELATION = 9
    EXTERNAL_ID = 10
    BYTES = 11
    """of a copy or a memory event"""
    BANDWIDTH = 12
    """of a copy, in 10**9 bytes a second"""
    WAIT_STREAM = 13
    """the stream on which the event was recorded that is waited for"""
    WAIT_RECORD = 14
    """correlation of the record of the event that is waited for"""
    COLLECTIVE = 15
    IN_ELEMENTS = 16
    OUT_ELEMENTS = 17
    GROUP_SIZE = 18
    DTYPE = 19
    GROUP_NAME = 20
    GROUP_RANKS = 21
    SEQUENCE = 22
    """number of a collective in its group"""
    INPUT_DIMS = 23
    TOTAL_ALLOCATED = 24
    TOTAL_RESERVED = 25
    DEVICE_TYPE = 26
    INPUT_TYPES = 27
    NODE_NUMBER = 28
    """number of the node of autograd that a forward operator makes, and of the one that a backward operator runs"""


SPELLINGS = {
    "ph": Key.PH,
    "cat": Key.CAT,
    "name": Key.NAME,
    "pid": Key.PID,
    "tid": Key.TID,
    "ts": Key.TS,
    "dur": Key.DUR,
    "args": Key.ARGS,
}
ARGUMENT_SPELLINGS = {
    "stream": Key.STREAM,
    "correlation": Key.CORRELATION,
    "External id": Key.EXTERNAL_ID,
    "external id": Key.EXTERNAL_ID,
    "bytes": Key.BYTES,
    "Bytes": Key.BYTES,
    "memory bandwidth (GB/s)": Key.BANDWIDTH,
    "wait_on_stream": Key.WAIT_STREAM,
    "wait_on_cuda_event_record_corr_id": Key.WAIT_RECORD,
    "Collective name": Key.COLLECTIVE,
    "In msg nelems": Key.IN_ELEMENTS,
    "Out msg nelems": Key.OUT_ELEMENTS,
    "Group size": Key.GROUP_SIZE,
    "dtype": Key.DTYPE,
    "Process Group Name": Key.GROUP_NAME,
    "Process Group Ranks": Key.GROUP_RANKS,
    "Seq": Key.SEQUENCE,
    "Input Dims": Key.INPUT_DIMS,
    "Input dims": Key.INPUT_DIMS,
    "Input type": Key.INPUT_TYPES,
    "Total Allocated": Key.TOTAL_ALLOCATED,
    "Total Reserved": Key.TOTAL_RESERVED,
    "Device Type": Key.DEVICE_TYPE,
    "Sequence number": Key.NODE_NUMBER,
}
TEXT_KEYS = (Key.COLLECTIVE, Key.DTYPE, Key.GROUP_NAME, Key.GROUP_RANKS, Key.INPUT_DIMS, Key.INPUT_TYPES)
"""arguments whose values are kept as texts, also where they are lists or numbers"""
REAL_KEYS = (Key.BANDWIDTH,)
"""arguments whose values are real numbers; all others are whole numbers"""

_FNV_OFFSET = 0xCBF29CE484222325
_FNV_PRIME = 0x100000001B3
_SLOTS = 256


def key_hash(text: bytes) -> int:
    """Returns the 64-bit FNV-1a hash of `text`."""
    value = _FNV_OFFSET
    for byte in text:
        value = ((value ^ byte) * _FNV_PRIME) & 0xFFFFFFFFFFFFFFFF
    return value


def key_table(spellings: dict[str, Key]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int8]]:
    """Returns an open-addressing table of hashes and fields, (256,) each; a free slot has the field -1."""
    hashes, fields = np.zeros(_SLOTS, np.uint64), np.full(_SLOTS, -1, np.int8)
    for text, field in spellings.items():
        value = key_hash(text.encode())
        slot = value % _SLOTS
        while fields[slot] >= 0:
            slot = (slot + 1) % _SLOTS
        hashes[slot], fields[slot] = value, field
    return hashes, fields
