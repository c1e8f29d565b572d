"""Shipped stacks: complete, sourced, and only constants that exist are fitted."""

from __future__ import annotations

import dataclasses

import pytest

from forerun.common.errors import ForerunError, UnknownName
from forerun.describe.stacks.catalog import imported_by, load_stack, stack_names
from forerun.describe.stacks.stack import SearchSpace, Stack, gradient_dtype

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
def test_an_unknown_stack_is_an_error_that_says_how_to_list_the_known(name: str) -> None:
    with pytest.raises(UnknownName, match=r"forerun stacks lists the \d+ known ones$") as raised:
        load_stack(name)
    assert isinstance(raised.value, ForerunError)
    assert "\n" not in str(raised.value)


PLAIN = Stack(name="plain", description="a stack that states nothing", source="here")


def test_a_stack_that_states_nothing_does_what_most_frameworks_do() -> None:
    """Files rely on these: they say only what is otherwise."""
    flags = {field.name for field in dataclasses.fields(Stack) if isinstance(getattr(PLAIN, field.name), bool)}
    assert {name for name in flags if getattr(PLAIN, name)} == {
        *("sequence_parallel", "loss_in_fp32", "compiles_loss", "save_gathered_input", "lazy_kernels", "clip_grad"),
        *("fsdp_reduce_every_microbatch", "grad_reduce_overlap", "channels_last", "cp_overlap", "recompute_early_stop"),
        *("inductor", "min_cut"),
    }


def test_a_stack_that_states_no_numbers_has_an_eager_host_and_the_devices_rates() -> None:
    numbers = {
        field.name: getattr(PLAIN, field.name)
        for field in dataclasses.fields(Stack)
        if type(getattr(PLAIN, field.name)) in (int, float) and getattr(PLAIN, field.name)
    }
    assert numbers == {
        "blas_workspaces": 2,
        "padded_vocab_multiple": 1,
        "issue_us": 6.0,
        "compiled_issue_us": 2.5,
        "kernel_gap_us": 1.0,
        "step_us": 3000.0,
        "bucket_mib": 25.0,
        "overlap_slowdown": 0.15,
        "gemm_rate": 1.0,
        "memory_rate": 1.0,
        "attention_rate": 1.0,
        "attention_backward_rate": 1.0,
        "network_rate": 1.0,
    }


def test_the_allocator_of_several_nodes_replaces_that_of_one() -> None:
    both = dataclasses.replace(PLAIN, allocator="one", allocator_across_nodes="several")
    assert [both.across(nodes).allocator for nodes in (1, 2, 8)] == ["one", "several", "several"]
    assert dataclasses.replace(PLAIN, allocator="one").across(2).allocator == "one"
    assert dataclasses.replace(both, allocator_across_nodes="").across(2).allocator == ""


def test_a_space_that_states_least_has_one_schedule_and_no_offload() -> None:
    space = SearchSpace("here", ("tp",), (3,))
    assert space.schedules == space.all_schedules == (("1F1B", 1),)
    assert (space.reshard, space.more_schedules, space.offload) == (("default",), (), ("none",))
    assert space.sequence_parallel is True
    with pytest.raises(ForerunError, match="stack plain has no section search"):
        PLAIN.search_space()
    assert dataclasses.replace(PLAIN, search=space).search_space() is space


@pytest.mark.parametrize(
    ("named", "wide", "dtype"),
    [
        *[("fp32", "bf16", "fp32"), ("bf16", "fp32", "bf16"), ("param", "fp16", "fp16"), ("param", "bf16", "bf16")],
        *[("fp32-unless-fp16", "fp16", "fp16"), ("fp32-unless-fp16", "bf16", "fp32")],
    ],
)
def test_gradients_are_in_the_dtype_of_their_name(named: str, wide: str, dtype: str) -> None:
    assert gradient_dtype(named, wide) == dtype


def test_stacks_can_be_keys_and_how_a_rate_was_fitted_does_not_tell_them_apart() -> None:
    fitted = dataclasses.replace(PLAIN, fitted={"gemm_rate": "on 3 rows"})
    assert fitted == PLAIN
    assert hash(fitted) == hash(PLAIN)
    assert dataclasses.replace(PLAIN, gemm_rate=0.9) != PLAIN


@pytest.mark.parametrize(
    ("modules", "stack"),
    [
        (["numpy", "simple_fsdp"], "simple-fsdp"),
        (["torchtitan", "torchtitan.train"], "torchtitan"),
        (["numpy", "mine.torchtitan"], None),
        ([], None),
    ],
)
def test_the_modules_of_a_program_tell_its_stack(modules: list[str], stack: str | None) -> None:
    assert imported_by(modules) == stack


def test_no_module_tells_two_stacks() -> None:
    told = [module for name in stack_names() for module in load_stack(name).imports]
    assert len(told) == len(set(told))
