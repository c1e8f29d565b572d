"""Settings of the allocator as PYTORCH_CUDA_ALLOC_CONF has them."""

from __future__ import annotations

import pytest

from forerun.common.errors import ForerunError
from forerun.core.memory import heap
from forerun.core.memory.allocator_settings import AllocatorSettings


def test_options_are_read_by_their_names() -> None:
    found = AllocatorSettings.parse(
        "expandable_segments:True, max_split_size_mb:128,garbage_collection_threshold:0.8,"
        "max_non_split_rounding_mb:40,roundup_power2_divisions:4,per_process_memory_fraction:0.5"
    )
    assert found == AllocatorSettings(True, 128, 40, 4, 0.8, 0.5)
    assert AllocatorSettings.parse("") == AllocatorSettings()
    assert AllocatorSettings.parse("expandable_segments:False") == AllocatorSettings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expandable:True", "no option 'expandable'; known: expandable_segments, garbage_collection_threshold"),
        ("expandable_segments:yes", "expandable_segments is True or False, not 'yes'"),
        ("max_split_size_mb:20", "max_split_size_mb is more than 20, not 20"),
        ("max_non_split_rounding_mb:20", "max_non_split_rounding_mb is more than 20, not 20"),
        ("max_split_size_mb:half", "max_split_size_mb is one number, not 'half'"),
        ("max_split_size_mb", "max_split_size_mb is one number, not ''"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions is a power of two, not 3"),
        ("roundup_power2_divisions:[256:1,>:8]", "roundup_power2_divisions is one number"),
        ("garbage_collection_threshold:1", "garbage_collection_threshold is between 0 and 1, not 1"),
        ("per_process_memory_fraction:nan", "per_process_memory_fraction is 0 to 1, not nan"),
        ("max_split_size_mb:64,max_split_size_mb:65", "max_split_size_mb is given twice"),
    ],
)
def test_what_pytorch_refuses_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ForerunError, match="allocator settings") as error:
        AllocatorSettings.parse(text)
    assert message in str(error.value)


def test_settings_that_say_nothing_limit_nothing() -> None:
    rules = AllocatorSettings().rules(None)
    assert rules[heap.MAX_SPLIT] == rules[heap.AVAILABLE] == rules[heap.ALLOWED] == heap.UNLIMITED
    assert (rules[heap.EXPANDABLE], rules[heap.DIVISIONS], rules[heap.GARBAGE]) == (0, 0, 0)
    assert rules[heap.NON_SPLIT_ROUNDING] == 20 * 2**20
    assert len(rules) == heap.N_RULES


def test_settings_are_bytes_of_what_the_device_can_give() -> None:
    rules = AllocatorSettings(True, 128, 40, 4, 0.8, 0.5).rules(1000)
    assert (rules[heap.EXPANDABLE], rules[heap.DIVISIONS]) == (1, 4)
    assert (rules[heap.MAX_SPLIT], rules[heap.NON_SPLIT_ROUNDING]) == (128 * 2**20, 40 * 2**20)
    assert (rules[heap.AVAILABLE], rules[heap.ALLOWED], rules[heap.GARBAGE]) == (1000, 500, 400)
    assert rules[heap.ADDRESS_SPACE] == 1125
    unbounded = AllocatorSettings(garbage_collection_threshold=0.8, per_process_memory_fraction=0.5).rules(None)
    assert (unbounded[heap.ALLOWED], unbounded[heap.GARBAGE]) == (heap.UNLIMITED, 0)


@pytest.mark.parametrize("available", [0, -5])
def test_less_than_nothing_is_nothing(available: int) -> None:
    rules = AllocatorSettings().rules(available)
    assert (rules[heap.AVAILABLE], rules[heap.ADDRESS_SPACE], rules[heap.ALLOWED]) == (0, 1, heap.UNLIMITED)


def test_only_builds_for_nvidia_expand_segments() -> None:
    asked = AllocatorSettings(expandable_segments=True, max_split_size_mb=64)
    assert asked.on("NVIDIA") == asked
    assert asked.on("amd") == AllocatorSettings(max_split_size_mb=64)


@pytest.mark.parametrize(
    "text",
    [
        *["max_split_size_mb:21", "max_non_split_rounding_mb:21", "roundup_power2_divisions:0"],
        *["roundup_power2_divisions:1", "garbage_collection_threshold:0.001", "per_process_memory_fraction:0"],
        *["per_process_memory_fraction:1", "garbage_collection_threshold:0.999"],
    ],
)
def test_the_ends_of_an_option(text: str) -> None:
    name, value = text.split(":")
    assert getattr(AllocatorSettings.parse(text), name) == float(value)


@pytest.mark.parametrize("text", ["garbage_collection_threshold:0", "per_process_memory_fraction:1.01"])
def test_beyond_the_ends_of_an_option(text: str) -> None:
    with pytest.raises(ForerunError, match=r"^allocator settings: "):
        AllocatorSettings.parse(text)
