"""Entries of attention kernels and dispatchers: what one says by saying nothing, and errors that name a wrong one."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.common import shipped
from forerun.common.errors import ForerunError, UnknownName
from forerun.describe.kernels import dispatchers
from forerun.describe.kernels.attention import (
    AttentionKernel,
    Backward,
    KernelRate,
    attention_choices,
    attention_kernel,
    attention_kernels,
    fused_kernel,
)
from forerun.describe.kernels.dispatchers import Dispatcher, dispatcher

GOOD = "mine: {says: my own, words: mine, rates: {default: {forward: 0.5, backward: 0.25}}}\n"


def test_an_entry_that_says_least_is_a_plain_fused_kernel() -> None:
    kernel = AttentionKernel("mine", "my own", "mine")
    assert (kernel.form, kernel.keeps, kernel.head_dim_multiple, kernel.mask_block) == ("fused", ("lse",), 1, 0)
    assert (kernel.runs_on, kernel.becomes, kernel.rates, kernel.names, kernel.operators) == ((), {}, {}, {}, {})
    assert kernel.breaks_graphs is False
    assert (Backward().launches, Backward().grouped_gradients, Backward().registers_hold) == (3, "summed", 0)
    assert kernel.runs("any architecture")


def test_a_kernel_has_its_own_rates_those_it_borrows_or_its_default() -> None:
    flash4 = attention_kernel("flash4")
    hopper = attention_kernel("flash3").rate_on("hopper")
    assert flash4.rate_on("hopper") == replace(hopper, stands_in="those of flash3")
    assert flash4.rate_on("volta") == KernelRate(0.6, 0.7, "assumed ones")
    assert hopper.stands_in == ""
    assert flash4.rate_on("blackwell").stands_in == ""
    assert flash4.runs("hopper")
    assert not flash4.runs("ampere")


def test_a_rate_by_head_size_is_linear_between_measured_sizes_and_level_beyond() -> None:
    rate = KernelRate({64: 1.0, 128: 0.5}, {128: 0.8})
    assert [rate.at(size) for size in (32, 64, 96, 128, 256)] == [
        (1, 0.8),
        (1, 0.8),
        (0.75, 0.8),
        (0.5, 0.8),
        (0.5, 0.8),
    ]
    assert KernelRate(0.7, 0.9).at(64) == (0.7, 0.9)


def test_extra_keys_are_those_of_the_profile_unless_a_kernel_has_its_own() -> None:
    assert KernelRate(1.0, 1.0).extra_keys_at(128, 400.0) == (400.0, 400.0)
    assert KernelRate(1.0, 1.0, extra_keys=300.0).extra_keys_at(128, 400.0) == (300.0, 300.0)
    assert KernelRate(1.0, 1.0, backward_extra_keys={64: 500, 128: 700}).extra_keys_at(96, 400.0) == (400.0, 600.0)


def test_plans_choose_any_kernel_or_leave_it_to_the_stack() -> None:
    assert attention_choices() == ("auto", *attention_kernels())
    assert fused_kernel("flash2").name == "flash2"
    with pytest.raises(UnknownName, match="unknown fused attention kernel 'naive'"):
        fused_kernel("naive")


def test_kernels_and_dispatchers_can_be_keys() -> None:
    assert len(set(attention_kernels().values())) == len(attention_kernels())
    assert hash(dispatcher("allgather")) == hash(dispatcher("allgather"))


def test_backward_of_the_efficient_kernel_sums_small_heads_in_registers() -> None:
    assert attention_kernel("efficient").backward == Backward(1, "wide", 64)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose files stand for the shipped ones."""
    cached = (shipped.shipped_data, attention_kernels, dispatchers.dispatchers)
    monkeypatch.setattr(shipped.resources, "files", lambda package: tmp_path)
    for each in cached:
        each.cache_clear()
    yield tmp_path
    for each in cached:
        each.cache_clear()


def test_an_entry_of_a_file_is_a_kernel(folder: Path) -> None:
    (folder / "attention.yaml").write_text(GOOD)
    assert attention_kernels() == {
        "mine": AttentionKernel("mine", "my own", "mine", rates={"default": KernelRate(0.5, 0.25)})
    }


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("a: {says: a, words: a}", r"^attention.yaml: a.rates: give it a 'default' with forward and backward"),
        ("a: {says: a, words: a, rates: {default: {like: mine}}}", "a.rates: give it a 'default'"),
        ("a: {says: a, words: a, rates: {x: {like: b}}}", "a.x: there is no kernel 'b'"),
        ("a: {says: a, words: a, form: products, becomes: {x: b}}", "a.x: there is no kernel 'b'"),
        ("a: {says: a, words: a, color: red}", "attention.yaml: a.color: "),
        ("a: {says: a}", "attention.yaml: a.words: "),
    ],
)
def test_a_wrong_kernel_is_named(folder: Path, entry: str, message: str) -> None:
    (folder / "attention.yaml").write_text(f"{GOOD}{entry}\n")
    with pytest.raises(ForerunError, match=message):
        attention_kernels()


def test_a_kernel_without_a_softmax_of_its_own_needs_no_rates(folder: Path) -> None:
    (folder / "attention.yaml").write_text("a: {says: a, words: a, form: products}\n")
    assert attention_kernels()["a"].rates == {}


def test_dispatchers_exchange_and_sort_as_their_frameworks_do() -> None:
    found = {
        name: (one.exchange, one.counts, one.sorts, one.rounds_to) for name, one in dispatchers.dispatchers().items()
    }
    assert found == {
        "alltoall": ("all_to_all", False, True, 1),
        "alltoall_with_counts": ("all_to_all", True, True, 1),
        "allgather": ("gather", False, False, 1),
        **dict.fromkeys(("deepep", "deepep_fp8", "hybridep"), ("all_to_all", False, False, 1)),
    }
    own = {name: one.transport is not None for name, one in dispatchers.dispatchers().items()}
    assert {name for name, kernels in own.items() if kernels} == {"deepep", "deepep_fp8", "hybridep"}
    assert all(name == one.name and len(one.source) > 20 for name, one in dispatchers.dispatchers().items())


def test_an_unknown_dispatcher_is_named(folder: Path) -> None:
    (folder / "dispatchers.yaml").write_text("mine: {says: my own, source: here, exchange: gather}\n")
    assert dispatcher("mine") == Dispatcher("mine", "my own", "here", "gather", counts=False, sorts=False, rounds_to=1)
    with pytest.raises(UnknownName, match="unknown dispatcher 'yours'; known: mine"):
        dispatcher("yours")


def test_a_wrong_dispatcher_is_named(folder: Path) -> None:
    (folder / "dispatchers.yaml").write_text("mine: {says: my own, source: here, exchange: mail}\n")
    with pytest.raises(ForerunError, match=r"^dispatchers.yaml: mine.exchange"):
        dispatcher("mine")
