"""The table by which the compiled reader knows the keys of an event: its hash, and keys that share a place."""

import numpy as np
import pytest

from forerun.sources.profile.event_keys import ARGUMENT_SPELLINGS, SPELLINGS, Key, key_hash, key_table
from forerun.sources.profile.scan import _find_key


@pytest.mark.parametrize(
    ("text", "value"),
    [(b"", 0xCBF29CE484222325), (b"a", 0xAF63DC4C8601EC8C), (b"foobar", 0x85944171F73967E8)],
)
def test_keys_have_the_hash_of_fowler_noll_and_vo(text, value):
    assert key_hash(text) == value


def _found(text, table):
    buffer = np.frombuffer(f'"{text}"'.encode(), np.uint8)
    return _find_key(buffer, 1, len(buffer) - 1, *table)


@pytest.mark.parametrize("spellings", [SPELLINGS, ARGUMENT_SPELLINGS])
def test_every_key_is_found_and_no_other(spellings):
    table = key_table(spellings)
    assert {text: _found(text, table) for text in spellings} == spellings
    assert [_found(text, table) for text in ("", "T", "streams", "dura")] == [-1] * 4


def test_keys_of_one_place_stand_after_each_other_also_over_the_end():
    last = [text for number in range(3000) if key_hash((text := f"key {number}").encode()) % 256 == 255][:5]
    spellings = dict(zip(last[:4], (Key.PH, Key.CAT, Key.NAME, Key.PID), strict=True))
    table = key_table(spellings)
    assert {text: _found(text, table) for text in last} == {**spellings, last[4]: -1}
    assert (table[1] >= 0).sum() == 4
