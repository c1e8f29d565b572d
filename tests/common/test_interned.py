"""Texts that are numbers: each once, whatever they are, and also when their table grows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.common import interned
from forerun.common.interned import Texts, intern


def number_of(text, texts):
    """The number of a text that lies between others."""
    return intern(np.frombuffer(b"\x07" + text + b"\xff", np.uint8), 1, 1 + len(text), texts)


@pytest.mark.parametrize("text", [bytes(19), bytes(range(200, 219)), b"ncclDevKernel_AllGather"])
def test_texts_that_differ_anywhere_have_other_hashes(text):
    """Texts are told apart by their hashes alone."""
    flipped = [bytes([*text[:i], text[i] ^ 1 << bit, *text[i + 1 :]]) for i in range(len(text)) for bit in range(8)]
    swapped = [text[:i] + text[i + 1 : i + 2] + text[i : i + 1] + text[i + 2 :] for i in range(len(text) - 1)]
    texts = {text, *flipped, *swapped, *(text[:n] for n in range(len(text))), *(bytes(n) for n in range(30))}
    function = getattr(interned._hash, "py_func", interned._hash)
    with np.errstate(over="ignore"):
        found = {int(function(np.frombuffer(b"\x07" + each + b"\xff", np.uint8), 1, 1 + len(each))) for each in texts}
    assert len(found) == len(texts)


@given(st.lists(st.binary(max_size=20)))
def test_each_text_is_stored_once(many):
    texts, order = Texts.empty(8, 2), {}
    for text in many:
        number = number_of(text, texts)
        if number < 0:
            assert text not in order, "there is room for what is there already"
            texts = texts.with_room(len(text), 1)
            number = number_of(text, texts)
        assert number == order.setdefault(text, len(order))
    assert texts.stored() == list(order)
    assert texts.n_texts == len(order)


def test_a_full_table_says_so_and_grows():
    texts = Texts.empty(6, 2)
    assert [number_of(text, texts) for text in (b"ab", b"", b"c", b"ab")] == [0, 1, -1, 0]
    texts = texts.grown(6)
    assert [number_of(text, texts) for text in (b"c", b"wxyz", b"ab", b"")] == [2, 3, 0, 1]
    assert number_of(b"1", texts) == -1, "no room for a text more"
    texts = Texts.empty(2, 4)
    assert [number_of(text, texts) for text in (b"abc", b"ab")] == [-1, 0]


def test_room_is_made_only_where_it_is_needed():
    texts = Texts.empty(10, 4)
    assert number_of(b"abc", texts) == 0
    assert texts.with_room(7, 2) is texts
    for n_bytes, n_texts in ((8, 1), (1, 3), (100, 50)):
        larger = texts.with_room(n_bytes, n_texts)
        assert larger.stored() == [b"abc"]
        assert len(larger.arena) >= 3 + n_bytes
        assert len(larger.hashes) > 1 + n_texts


def test_the_longest_search_is_counted():
    texts = Texts.empty(100, 8)
    for k in range(8):
        number_of(bytes([k]), texts)
    assert 0 <= texts.counts[2] < 8
