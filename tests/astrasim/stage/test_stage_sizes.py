"""Sizes in symbols, and the collectives between two layouts."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.astrasim.chakra.trace import CommType
from forerun.astrasim.stage.matching import collectives
from forerun.astrasim.stage.sizes import ONE, ZERO, number, product, size
from forerun.astrasim.stage.tensors import layout
from forerun.common.errors import ForerunError

VALUES = {"a": 2, "b": 3, "c": 5, "d": 7}

atoms = st.sampled_from(["a", "b", "c", "d", "1", "2", "6"])
texts = st.recursive(
    atoms,
    lambda inner: st.tuples(inner, st.sampled_from("+*/"), inner).map(lambda parts: "({}{}{})".format(*parts)),
    max_leaves=8,
)


@given(texts)
def test_value_is_that_of_the_text(text):
    exact = eval(re.sub(r"(\d)", r"F(\1)", text), {"F": Fraction} | {name: Fraction(v) for name, v in VALUES.items()})
    assert size(text).value(VALUES) == exact


@given(texts, texts)
def test_order_does_not_matter(one, other):
    a, b = size(one), size(other)
    assert a + b == b + a
    assert a * b == b * a
    assert hash(a * b) == hash(b * a)
    assert str(a + b) == str(b + a)


@given(texts)
def test_setting_symbols_to_one(text):
    assert size(text).without({"a", "c"}).value(VALUES) == size(text).value(VALUES | {"a": 1, "c": 1})
    assert not size(text).without({"a", "c"}).symbols() & {"a", "c"}


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("Seq/cp/tp", "Seq/(cp*tp)"),
        ("(Head+2*Head)/tp", "3*Head/tp"),
        ("Dmodel*(Dmodel/Head)*((Head+2*KVHead)/tp)", "Dmodel**2*(Head + 2*KVHead)/(Head*tp)"),
        ("Dmodel*Dmodel/tp + 2*Dff*Dmodel/tp", "2*Dff*Dmodel/tp + Dmodel**2/tp"),
        ("(a+b)/c*c", "a + b"),
        ("2*(a+b)", "2*a + 2*b"),
        ("a/2", "a/2"),
        ("a+0*b", "a"),
    ],
)
def test_print(text, printed):
    assert str(size(text)) == printed


def test_zero_and_one():
    assert ZERO * size("a") == ZERO
    assert size("a") + ZERO == size("a")
    assert product(()) == ONE == number(1)


ALL, DP, TP = ("dp", "tp"), ("dp",), ("tp",)


@pytest.mark.parametrize(
    ("have", "want", "degrees", "expected"),
    [
        (("B/dp, D", ""), ("B/dp, D", ""), ALL, []),
        (("B/dp, D/tp", ""), ("B/dp, D", ""), ALL, [(CommType.ALL_GATHER, "tp")]),
        (("B/dp, D", ""), ("B/dp, D/tp", ""), ALL, []),
        (("B/dp, D/tp", ""), ("B/(dp*tp), D", ""), ALL, [(CommType.ALL_TO_ALL, "tp")]),
        (("B/(dp*tp), D", ""), ("B/tp, D", ""), ALL, [(CommType.ALL_GATHER, "dp")]),
        (("B, D", "F/tp"), ("B, D", ""), ALL, [(CommType.ALL_REDUCE, "tp")]),
        (("B, D", "F/tp"), ("B/tp, D", ""), ALL, [(CommType.REDUCE_SCATTER, "tp")]),
        (("B, D", "F/tp"), ("B, D", "1/tp"), ALL, []),
        (("D, F", "B/dp, S/tp"), ("D/dp, F", ""), ALL, [(CommType.REDUCE_SCATTER, "dp"), (CommType.ALL_REDUCE, "tp")]),
        (("D, F", "B/dp, S/tp"), ("D/dp, F", ""), DP, [(CommType.REDUCE_SCATTER, "dp")]),
        (("D, F", "B/dp, S/tp"), ("D/dp, F", ""), (), []),
    ],
)
def test_collectives(have, want, degrees, expected):
    assert list(collectives(layout(*have), layout(*want), degrees, shared_dims=True)) == expected


def test_partial_sums_do_not_come_from_nowhere():
    with pytest.raises(ForerunError, match="partial sums"):
        collectives(layout("B, D"), layout("B, D", "1/tp"), TP, shared_dims=True)
