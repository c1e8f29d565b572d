"""Settings of the allocator as PYTORCH_CUDA_ALLOC_CONF has them."""

from __future__ import annotations

import pytest

from forerun.common.errors import ForerunError
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
