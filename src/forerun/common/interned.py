"""Texts that compiled code meets many times: each is stored once and is a number from then on."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.common.jit import kernel

_COUNT, _BYTES, _LONGEST = range(3)


class Texts(NamedTuple):
    """Each text once: its bytes in one array, and an open-addressing table of their hashes."""

    arena: npt.NDArray[np.uint8]
    start: npt.NDArray[np.int64]
    """first byte of each text, and the end of the last one"""
    hashes: npt.NDArray[np.uint64]
    slots: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int64]
    """(3,): texts, bytes of all of them, and the most places of the table that one search looked at"""

    @classmethod
    def empty(cls, n_bytes: int, n_texts: int) -> Texts:
        """Returns room for `n_texts` texts (a power of two) of `n_bytes` together."""
        return cls(
            np.empty(n_bytes, np.uint8),
            np.zeros(n_texts + 1, np.int64),
            np.empty(n_texts, np.uint64),
            np.full(2 * n_texts, -1, np.int32),
            np.zeros(3, np.int64),
        )

    @property
    def n_texts(self) -> int:
        """Returns how many texts are stored."""
        return int(self.counts[_COUNT])

    def grown(self, n_bytes: int) -> Texts:
        """Returns the same texts with room for twice as many, and `n_bytes` more."""
        return self._in(n_bytes, 2 * len(self.hashes) if 2 * self.n_texts > len(self.hashes) else len(self.hashes))

    def with_room(self, n_bytes: int, n_texts: int) -> Texts:
        """Returns the same texts, with room for more than `n_texts` new ones of `n_bytes` together."""
        room = len(self.hashes)
        while self.n_texts + n_texts >= room:
            room *= 2
        if room == len(self.hashes) and self.counts[_BYTES] + n_bytes <= len(self.arena):
            return self
        return self._in(max(2 * n_bytes, len(self.arena)), room)

    def _in(self, n_bytes: int, room: int) -> Texts:
        """Returns the same texts in a table for `room`, with `n_bytes` more."""
        n_texts, used = self.n_texts, int(self.counts[_BYTES])
        larger = Texts.empty(used + n_bytes, room)
        larger.arena[:used] = self.arena[:used]
        larger.start[: n_texts + 1] = self.start[: n_texts + 1]
        larger.hashes[:n_texts] = self.hashes[:n_texts]
        larger.counts[:] = self.counts
        _rehash(n_texts, larger.hashes, larger.slots)
        return larger

    def stored(self) -> list[bytes]:
        """Returns the texts in the order of their numbers."""
        whole, ends = self.arena[: self.counts[_BYTES]].tobytes(), self.start[: self.n_texts + 1].tolist()
        return [whole[first:end] for first, end in pairwise(ends)]


@kernel
def _hash(buf: npt.NDArray[np.uint8], first: int, end: int) -> Any:
    """Hashes eight bytes at a time."""
    value = np.uint64(end - first) * np.uint64(0x9E3779B97F4A7C15)
    i = first
    while i + 8 <= end:
        word = (
            np.uint64(buf[i])
            | np.uint64(buf[i + 1]) << np.uint64(8)
            | np.uint64(buf[i + 2]) << np.uint64(16)
            | np.uint64(buf[i + 3]) << np.uint64(24)
            | np.uint64(buf[i + 4]) << np.uint64(32)
            | np.uint64(buf[i + 5]) << np.uint64(40)
            | np.uint64(buf[i + 6]) << np.uint64(48)
            | np.uint64(buf[i + 7]) << np.uint64(56)
        )
        value = (value ^ word) * np.uint64(0x9FB21C651E98DF25)
        value ^= value >> np.uint64(32)
        i += 8
    while i < end:
        value = (value ^ np.uint64(buf[i])) * np.uint64(0x100000001B3)
        i += 1
    return value ^ (value >> np.uint64(29))


@kernel
def _rehash(n_texts: int, hashes: npt.NDArray[np.uint64], slots: npt.NDArray[np.int32]) -> None:
    mask = np.uint64(len(slots) - 1)
    for number in range(n_texts):
        slot = np.int64(hashes[number] & mask)
        while slots[slot] >= 0:
            slot = (slot + 1) & (len(slots) - 1)
        slots[slot] = number


@kernel
def intern(buf: npt.NDArray[np.uint8], first: int, end: int, texts: Texts) -> int:
    """Returns the number of the text `buf[first:end]`; -1 if it is new and there is no room for it."""
    arena, start, hashes, slots, counts = texts
    value = _hash(buf, first, end)
    mask = np.uint64(len(slots) - 1)
    slot = np.int64(value & mask)
    size = end - first
    looked = 0
    while slots[slot] >= 0:
        number = slots[slot]
        at = start[number]
        if hashes[number] == value and start[number + 1] - at == size:
            same = True
            for i in range(size):
                if arena[at + i] != buf[first + i]:
                    same = False
                    break
            if same:
                return int(number)
        slot = (slot + 1) & (len(slots) - 1)
        looked += 1
    counts[_LONGEST] = max(counts[_LONGEST], looked)
    number = counts[_COUNT]
    used = counts[_BYTES]
    if number >= len(hashes) or used + size > len(arena):
        return -1
    for i in range(size):
        arena[used + i] = buf[first + i]
    hashes[number] = value
    slots[slot] = number
    start[number + 1] = used + size
    counts[_COUNT] = number + 1
    counts[_BYTES] = used + size
    return int(number)
