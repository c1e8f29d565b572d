"""Shipped stacks: complete, sourced, and only constants that exist are fitted."""

from __future__ import annotations

import dataclasses

import pytest

from forerun.common.errors import ForerunError, UnknownName
from forerun.describe.stacks.catalog import load_stack, stack_names
from forerun.describe.stacks.stack import Stack

RATES = ("gemm_rate", "memory_rate", "attention_rate", "network_rate")


def test_names_are_sorted_and_hold_the_default() -> None:
    names = stack_names()
    assert names == sorted(set(names))
    assert {"torchtitan", "megatron-core", "deepspeed"} <= set(names)


@pytest.mark.parametrize("name", stack_names())
def test_a_stack_says_what_it_is_and_where_that_is_from(name: str) -> None:
    stack = load_stack(name)
    assert stack.name == name
    assert stack.description
    assert stack.source
    assert "\n" not in stack.description.strip()


@pytest.mark.parametrize("name", stack_names())
def test_numbers_of_a_stack_are_possible(name: str) -> None:
    stack = load_stack(name)
    for field in dataclasses.fields(stack):
        value = getattr(stack, field.name)
        if field.name in RATES:
            assert 0.2 < value < 2, field.name
        elif isinstance(value, (int, float)):
            assert value >= 0, field.name
    assert stack.compiled_issue_us <= stack.issue_us
    assert 0 <= stack.overlap_slowdown < 1
    assert stack.bucket_mib > 0
    assert stack.padded_vocab_multiple >= 1


@pytest.mark.parametrize("name", stack_names())
def test_fitted_constants_exist_and_differ_from_the_default(name: str) -> None:
    stack = load_stack(name)
    defaults = {field.name: field.default for field in dataclasses.fields(Stack)}
    for constant, how in stack.fitted.items():
        assert constant in defaults, constant
        assert how, constant
    rates = [rate for rate in RATES if getattr(stack, rate) != defaults[rate]]
    assert set(rates) <= set(stack.fitted), "a rate that is not 1 says how it was fitted"


def test_names_do_not_depend_on_case() -> None:
    assert load_stack("TorchTitan") == load_stack("torchtitan")


@pytest.mark.parametrize("name", ["torchtitann", "", "../stack"])
def test_an_unknown_stack_is_an_error_that_lists_the_known(name: str) -> None:
    with pytest.raises(UnknownName, match=r"known: .*torchtitan") as raised:
        load_stack(name)
    assert isinstance(raised.value, ForerunError)
    assert "\n" not in str(raised.value)
