"""The caching allocator: known behaviours, properties, and what PyTorch's own code answered to the same requests."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.common.units import GIB, MIB
from forerun.core.memory.allocator_settings import AllocatorSettings
from forerun.core.memory.caching_allocator import (
    ALLOC,
    FREE,
    FREE_LATER,
    READY,
    CachingAllocator,
    Events,
    Replayed,
    replay,
)

pytestmark = pytest.mark.compiles(9)
EXPANDABLE = AllocatorSettings(expandable_segments=True)
Step = tuple[int, int]
"""(kind, tensor)"""


def events(sizes: list[int], steps: list[Step], streams: list[int] | None = None) -> Events:
    kind, tensor = [list(column) for column in zip(*steps, strict=True)] if steps else ([], [])
    return Events(
        np.array(kind, np.int8),
        np.array(tensor, np.int32),
        np.array(sizes, np.int64),
        np.array(streams or [0] * len(sizes), np.int8),
    )


def made(sizes: list[int], **options: int | bool) -> Replayed:
    return replay(events(sizes, [(ALLOC, i) for i in range(len(sizes))]), AllocatorSettings(**options))


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (19 * MIB + 1, 20 * MIB, 20 * MIB),  # no more than 1 MiB is left: the block is not split
        (21 * MIB, 22 * MIB, 22 * MIB),
        (21 * MIB - 512, 21 * MIB - 512, 22 * MIB),  # more than that is left
    ],
)
def test_one_request(size: int, allocated: int, reserved: int) -> None:
    result = made([size])
    assert (result.allocated_bytes, result.reserved_bytes) == (allocated, reserved)
    assert (result.segments, result.mallocs) == (1, 1)


def test_small_requests_share_a_segment_and_large_ones_another() -> None:
    assert made([MIB, MIB]).reserved_bytes == 2 * MIB
    assert made([MIB, MIB, 512]).reserved_bytes == 4 * MIB
    assert made([5 * MIB, 5 * MIB, 5 * MIB, 5 * MIB]).reserved_bytes == 20 * MIB
    assert made([5 * MIB, 512]).reserved_bytes == 22 * MIB


def test_requests_are_rounded_to_divisions_of_a_power_of_two() -> None:
    assert made([1200 * MIB], roundup_power2_divisions=4).allocated_bytes == 1280 * MIB
    assert made([1024 * MIB], roundup_power2_divisions=4).allocated_bytes == 1024 * MIB
    assert made([1025 * MIB], roundup_power2_divisions=2).allocated_bytes == 1536 * MIB


# -- blocks ------------------------------------------------------------------------------------------------------------


def test_the_smallest_block_that_is_large_enough_is_taken_and_split() -> None:
    sizes = [100 * MIB, 60 * MIB, 50 * MIB]
    allocator = CachingAllocator()
    allocator.follow(events(sizes, [(ALLOC, 0), (ALLOC, 1), (FREE, 0), (FREE, 1), (ALLOC, 2)]))
    assert [(size, in_use) for _, size, _, in_use in allocator.blocks()] == [
        (100 * MIB, False),
        (50 * MIB, True),
        (10 * MIB, False),
    ]
    assert allocator.reserved_bytes == 160 * MIB


def test_freed_neighbours_become_one_block() -> None:
    sizes = [5 * MIB] * 4
    steps = [(ALLOC, i) for i in range(4)] + [(FREE, 0), (FREE, 2), (FREE, 1)]
    allocator = CachingAllocator()
    allocator.follow(events(sizes, steps))
    assert [(size, in_use) for _, size, _, in_use in allocator.blocks()] == [(15 * MIB, False), (5 * MIB, True)]


def test_a_stream_does_not_get_what_another_one_freed() -> None:
    steps = [(ALLOC, 0), (FREE, 0), (ALLOC, 1)]
    assert replay(events([50 * MIB] * 2, steps)).reserved_bytes == 50 * MIB
    assert replay(events([50 * MIB] * 2, steps, [0, 1])).reserved_bytes == 100 * MIB


def test_blocks_from_the_split_limit_on_stay_whole() -> None:
    steps = [(ALLOC, 0), (FREE, 0), (ALLOC, 1)]
    whole = AllocatorSettings(max_split_size_mb=64)
    assert replay(events([100 * MIB, 30 * MIB], steps)).reserved_bytes == 100 * MIB
    assert replay(events([100 * MIB, 30 * MIB], steps), whole).reserved_bytes == 130 * MIB
    assert replay(events([100 * MIB, 90 * MIB], steps), whole).reserved_bytes == 100 * MIB  # within 20 MiB
    assert replay(events([100 * MIB, 80 * MIB], steps), whole).reserved_bytes == 180 * MIB


def test_a_block_that_another_stream_uses_waits_for_it() -> None:
    sizes = [50 * MIB] * 3
    early = events(sizes, [(ALLOC, 0), (FREE_LATER, 0), (READY, 0), (ALLOC, 1)])
    late = events(sizes, [(ALLOC, 0), (FREE_LATER, 0), (ALLOC, 1), (READY, 0), (ALLOC, 2)])
    assert replay(early).reserved_bytes == 50 * MIB
    assert replay(late).reserved_bytes == 100 * MIB
    assert replay(late).allocated_bytes == 100 * MIB  # tensors 1 and 2: 0 does not count any more


def test_short_of_memory_the_allocator_waits_for_other_streams() -> None:
    sizes = [50 * MIB] * 3
    steps = [(ALLOC, 0), (FREE_LATER, 0), (ALLOC, 1), (READY, 0), (ALLOC, 2)]
    result = replay(events(sizes[:2], steps[:4]), available_bytes=60 * MIB)
    assert (result.retries, result.returned, result.out_of_memory) == (1, 1, False)
    assert replay(events(sizes, steps), available_bytes=60 * MIB).out_of_memory


# -- short of memory ---------------------------------------------------------------------------------------------------


def test_unused_segments_are_given_back_and_asked_for_again() -> None:
    steps = [(ALLOC, 0), (FREE, 0), (ALLOC, 1)]
    result = replay(events([60 * MIB, 80 * MIB], steps), available_bytes=100 * MIB)
    assert (result.retries, result.returned, result.reserved_bytes, result.out_of_memory) == (1, 1, 80 * MIB, False)


def test_a_segment_in_use_is_not_given_back() -> None:
    steps = [(ALLOC, 0), (ALLOC, 1), (FREE, 0), (ALLOC, 2)]
    sizes = [12 * MIB, 5 * MIB, 90 * MIB]
    assert replay(events(sizes, steps), available_bytes=122 * MIB).out_of_memory is False
    # the 20 MiB of the second tensor hold 15 that nobody uses
    assert replay(events(sizes, steps), available_bytes=109 * MIB).out_of_memory


def test_expandable_segments_grow_and_shrink_by_pages() -> None:
    sizes = [30 * MIB, 30 * MIB, 70 * MIB]
    steps = [(ALLOC, 0), (FREE, 0), (ALLOC, 1), (FREE, 1), (ALLOC, 2)]
    plain, grown = replay(events(sizes, steps)), replay(events(sizes, steps), EXPANDABLE)
    assert (plain.reserved_bytes, plain.segments) == (100 * MIB, 2)
    assert (grown.reserved_bytes, grown.segments) == (80 * MIB, 1)
    allocator = CachingAllocator(EXPANDABLE)
    allocator.follow(events([30 * MIB, 30 * MIB], [(ALLOC, 0), (ALLOC, 1), (FREE, 0)]))
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MIB  # one page of 20 MiB is wholly unused
    assert [(size, in_use) for _, size, _, in_use in allocator.blocks()] == [
        (10 * MIB, False),
        (30 * MIB, True),
    ]


def test_a_tensor_larger_than_all_addresses_runs_out_of_memory() -> None:
    """No block stands behind the one that takes all addresses of a segment (64 TiB)."""
    steps = [(ALLOC, 0), (ALLOC, 1)]
    assert replay(events([30 * MIB, (1 << 46) + GIB], steps), EXPANDABLE).out_of_memory
    assert not replay(events([30 * MIB, 1 << 45], steps), EXPANDABLE).out_of_memory


def test_garbage_goes_before_more_is_asked_for() -> None:
    sizes = [30 * MIB, 40 * MIB, 46 * MIB, 90 * MIB]
    steps = [(ALLOC, 0), (ALLOC, 1), (FREE, 0), (ALLOC, 2), (FREE, 1), (ALLOC, 3)]
    careful = AllocatorSettings(garbage_collection_threshold=0.5, per_process_memory_fraction=1.0)
    # 116 MiB are held; of the two that nobody uses the first has been asked past more often
    assert replay(events(sizes, steps), careful, 200 * MIB).reserved_bytes == (116 - 30 + 90) * MIB
    assert replay(events(sizes, steps), careful, 240 * MIB).reserved_bytes == (116 + 90) * MIB
    assert replay(events(sizes, steps), None, 240 * MIB).returned == 0


# -- properties --------------------------------------------------------------------------------------------------------


@st.composite
def requests(draw: st.DrawFn) -> Events:
    """Some allocations and frees of tensors of 1 byte to 64 MiB on three streams."""
    sizes: list[int] = []
    streams: list[int] = []
    steps: list[Step] = []
    live: list[int] = []
    for action in draw(st.lists(st.integers(0, 99), max_size=120)):
        if live and action < 45:
            steps.append((FREE, live.pop(action % len(live))))
        else:
            live.append(len(sizes))
            steps.append((ALLOC, len(sizes)))
            sizes.append(draw(st.integers(1, 1 << draw(st.integers(0, 26)))))
            streams.append(action % 3)
    return events(sizes, steps, streams)


SETTINGS = st.builds(
    AllocatorSettings,
    expandable_segments=st.booleans(),
    max_split_size_mb=st.sampled_from([None, 21, 32]),
    roundup_power2_divisions=st.sampled_from([0, 4]),
)


@settings(max_examples=60, deadline=None)
@given(requests(), SETTINGS, st.sampled_from([None, 100 * MIB, 400 * MIB]))
def test_blocks_tile_what_is_held_and_the_counts_follow_them(
    what: Events, how: AllocatorSettings, available: int | None
) -> None:
    allocator = CachingAllocator(how, available)
    place = np.full(len(what.size_bytes), -1, np.int64)
    for i in range(len(what)):
        before = allocator.reserved_bytes
        one = Events(what.kind[i : i + 1], what.tensor[i : i + 1], what.size_bytes, what.stream)
        allocator.follow(one, place)
        if what.kind[i] == FREE:
            assert allocator.reserved_bytes == before
        assert allocator.reserved_bytes % (2 * MIB) == 0
    blocks = allocator.blocks()
    ends = [address + size for address, size, _, _ in blocks]
    assert all(end <= address for end, (address, *_) in zip(ends, blocks[1:], strict=False))
    assert sum(size for _, size, _, _ in blocks) == allocator.reserved_bytes
    assert sum(size for _, size, _, in_use in blocks if in_use) == allocator.allocated_bytes
    result = allocator.result
    assert result.reserved_bytes >= result.reserved_at_peak_bytes >= result.allocated_bytes
    assert available is None or result.reserved_bytes <= available
    assert result == replay(what, how, available)


@settings(max_examples=40, deadline=None)
@given(requests(), SETTINGS)
def test_when_all_is_freed_the_cache_empties(what: Events, how: AllocatorSettings) -> None:
    allocator = CachingAllocator(how)
    place = allocator.follow(what)
    live = np.flatnonzero(place >= 0).astype(np.int32)
    allocator.follow(Events(np.full(len(live), FREE, np.int8), live, what.size_bytes, what.stream), place)
    assert allocator.allocated_bytes == 0
    assert allocator.result.reserved_bytes == allocator.reserved_bytes
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.blocks()) == (0, [])


def test_many_live_tensors_need_more_slots_than_there_are_at_first() -> None:
    sizes = [1536 + 512 * (i % 3) for i in range(5000)]
    steps = [(ALLOC, i) for i in range(5000)] + [(FREE, i) for i in range(0, 5000, 2)]
    allocator = CachingAllocator()
    allocator.follow(events(sizes, steps))
    assert allocator.allocated_bytes == sum(sizes[1::2])


# -- PyTorch's own answers ---------------------------------------------------------------------------------------------


def recorded(seed: int, n: int = 1200) -> Events:
    """A sequence that is the same wherever it is made: mixed sizes, and sizes that come again, on three streams."""
    draw = random.Random(seed).random
    usual = [int(2 ** (8 + 20 * draw())) for _ in range(12)]
    sizes: list[int] = []
    streams: list[int] = []
    steps: list[Step] = []
    live: list[int] = []
    while len(steps) < n:
        if live and draw() < (0.4 if len(live) < 150 else 0.7):
            steps.append((FREE, live.pop(int(draw() * len(live)))))
        else:
            live.append(len(sizes))
            steps.append((ALLOC, len(sizes)))
            sizes.append(usual[int(draw() * 12)] if draw() < 0.7 else int(2 ** (4 + 24 * draw())))
            streams.append(int(draw() * 3))
    return events(sizes, steps, streams)


def answer(what: Events, conf: str, device_gib: float | None) -> tuple[int, ...]:
    allocator = CachingAllocator(AllocatorSettings.parse(conf), None if device_gib is None else int(device_gib * GIB))
    allocator.follow(what)
    result = allocator.result
    return (
        *(result.reserved_bytes, result.allocated_bytes, allocator.reserved_bytes, allocator.allocated_bytes),
        *(result.mallocs, result.returned, result.retries, int(result.out_of_memory)),
    )


ANSWERS = [
    (1, "", None, (3116367872, 2089085440, 3116367872, 2011110912, 69, 0, 0, 0)),
    (2, "", 1.0, (1046478848, 944781312, 1042284544, 944781312, 21, 8, 2, 1)),
    (3, "", 1.5, (1562378240, 1364689920, 1524629504, 1315031040, 19, 3, 2, 1)),
    (4, "", 3.0, (3154116608, 2480902656, 3126853632, 2004279808, 50, 9, 1, 0)),
    (1, "max_split_size_mb:64", None, (4303355904, 2107547136, 4303355904, 2028871168, 81, 0, 0, 0)),
    (2, "max_split_size_mb:64", 1.0, (1038090240, 966420992, 1033895936, 966420992, 23, 8, 2, 1)),
    (3, "max_split_size_mb:64", 1.5, (1608515584, 1578294272, 1608515584, 1560590848, 27, 9, 3, 1)),
    (4, "max_split_size_mb:64", 3.0, (3219128320, 2555363840, 2688548864, 2035121152, 79, 30, 1, 0)),
    (
        1,
        "max_split_size_mb:30,max_non_split_rounding_mb:40",
        None,
        (4039114752, 2204316160, 4039114752, 2124467712, 86, 0, 0, 0),
    ),
    (
        2,
        "max_split_size_mb:30,max_non_split_rounding_mb:40",
        1.0,
        (1038090240, 967184384, 1004535808, 967184384, 25, 10, 2, 1),
    ),
    (
        3,
        "max_split_size_mb:30,max_non_split_rounding_mb:40",
        1.5,
        (1493172224, 1398685696, 1394606080, 1349746688, 29, 10, 2, 1),
    ),
    (
        4,
        "max_split_size_mb:30,max_non_split_rounding_mb:40",
        3.0,
        (3208642560, 2657529856, 3204448256, 2061372928, 84, 26, 1, 0),
    ),
    (1, "expandable_segments:True", None, (3097493504, 2081632768, 3097493504, 2004208128, 73, 0, 0, 0)),
    (2, "expandable_segments:True", 1.0, (1038090240, 941032960, 1015021568, 941032960, 23, 3, 2, 1)),
    (3, "expandable_segments:True", 1.5, (1476395008, 1361140736, 1434451968, 1312528896, 24, 4, 2, 1)),
    (4, "expandable_segments:True", 3.0, (3139436544, 2476594176, 2805989376, 2000500736, 57, 8, 1, 0)),
    (1, "roundup_power2_divisions:8", None, (3172990976, 2158116352, 3172990976, 2076408320, 72, 0, 0, 0)),
    (2, "roundup_power2_divisions:8", 1.0, (1035993088, 975755776, 1031798784, 975755776, 23, 9, 2, 1)),
    (3, "roundup_power2_divisions:8", 1.5, (1598029824, 1429472256, 1598029824, 1375241216, 20, 4, 2, 1)),
    (4, "roundup_power2_divisions:8", 3.0, (3158310912, 2624275456, 2898264064, 2130184704, 53, 17, 2, 0)),
    (
        2,
        "garbage_collection_threshold:0.6,per_process_memory_fraction:0.9",
        1.0,
        (935329792, 811069440, 905969664, 787224576, 24, 9, 1, 1),
    ),
    (
        3,
        "garbage_collection_threshold:0.6,per_process_memory_fraction:0.9",
        1.5,
        (1400897536, 1088541184, 1371537408, 1026426368, 17, 4, 1, 1),
    ),
    (
        4,
        "garbage_collection_threshold:0.6,per_process_memory_fraction:0.9",
        3.0,
        (2755657728, 2480087040, 2485125120, 2003608064, 78, 42, 0, 0),
    ),
    (
        1,
        "expandable_segments:True,max_split_size_mb:64",
        None,
        (4271898624, 2081632768, 4271898624, 2004208128, 93, 0, 0, 0),
    ),
    (
        2,
        "expandable_segments:True,max_split_size_mb:64",
        1.0,
        (1038090240, 941032960, 1015021568, 941032960, 22, 3, 2, 1),
    ),
    (
        3,
        "expandable_segments:True,max_split_size_mb:64",
        1.5,
        (1579155456, 1361140736, 1413480448, 1312528896, 30, 5, 3, 1),
    ),
    (
        4,
        "expandable_segments:True,max_split_size_mb:64",
        3.0,
        (3219128320, 2476594176, 2743074816, 2000500736, 86, 20, 3, 0),
    ),
    (
        2,
        "expandable_segments:True,per_process_memory_fraction:0.5",
        1.0,
        (446693376, 338615808, 404750336, 338615808, 9, 1, 1, 1),
    ),
    (
        3,
        "expandable_segments:True,per_process_memory_fraction:0.5",
        1.5,
        (803209216, 755718656, 803209216, 755718656, 20, 4, 3, 1),
    ),
    (
        4,
        "expandable_segments:True,per_process_memory_fraction:0.5",
        3.0,
        (1579155456, 1493364224, 1558183936, 1476481024, 28, 2, 2, 1),
    ),
]
"""Seed, settings, GiB of the device (None: no limit), then peak of reserved and of allocated bytes, both at the end,
how often CUDA gave memory, how often it got some back, retries, and whether memory ran out: from libc10_cuda of PyTorch
2.13.0 (cu130), run on a CUDA runtime that hands out rising addresses and counts what it gave"""


@pytest.mark.parametrize(("seed", "conf", "device_gib", "expected"), ANSWERS)
def test_pytorch_answers_the_same(seed: int, conf: str, device_gib: float | None, expected: tuple[int, ...]) -> None:
    assert answer(recorded(seed), conf, device_gib) == expected


def recorded_beside(seed: int, n: int = 1200) -> Events:
    """The same on one stream; another stream goes on using four of ten tensors, and is through with them later."""
    draw = random.Random(seed).random
    usual = [int(2 ** (8 + 20 * draw())) for _ in range(12)]
    sizes: list[int] = []
    steps: list[Step] = []
    live: list[int] = []
    used: list[int] = []
    while len(steps) < n:
        action = draw()
        if used and action < 0.2:
            steps.append((READY, used.pop(0)))
        elif live and action < 0.55:
            tensor = live.pop(int(draw() * len(live)))
            steps.append((FREE_LATER if draw() < 0.4 else FREE, tensor))
            used += [tensor] if steps[-1][0] == FREE_LATER else []
        else:
            live.append(len(sizes))
            steps.append((ALLOC, len(sizes)))
            sizes.append(usual[int(draw() * 12)] if draw() < 0.7 else int(2 ** (4 + 24 * draw())))
    return events(sizes, steps)


ANSWERS_BESIDE = [
    (1, "", None, (914358272, 760878592, 914358272, 611432448, 17, 0, 0, 0)),
    (2, "", 1.0, (991952896, 904950784, 991952896, 837942272, 12, 2, 2, 1)),
    (3, "", 1.5, (1539309568, 1111124480, 1537212416, 1111124480, 15, 6, 3, 1)),
    (1, "max_split_size_mb:64", None, (1790967808, 762636800, 1790967808, 612030464, 34, 0, 0, 0)),
    (2, "max_split_size_mb:64", 1.0, (1046478848, 922041856, 947912704, 865180160, 19, 8, 2, 1)),
    (3, "max_split_size_mb:64", 1.5, (1564475392, 1364182528, 1447034880, 1359268352, 34, 22, 2, 1)),
    (1, "expandable_segments:True", None, (887095296, 757560832, 887095296, 608712192, 17, 0, 0, 0)),
    (2, "expandable_segments:True", 1.0, (1071644672, 1020015616, 945815552, 863822848, 13, 4, 2, 1)),
    (3, "expandable_segments:True", 1.5, (1537212416, 1358898688, 1409286144, 1353984512, 16, 9, 2, 1)),
]
"""As ANSWERS, with record_stream"""


@pytest.mark.parametrize(("seed", "conf", "device_gib", "expected"), ANSWERS_BESIDE)
def test_pytorch_answers_the_same_where_another_stream_uses_tensors(
    seed: int, conf: str, device_gib: float | None, expected: tuple[int, ...]
) -> None:
    assert answer(recorded_beside(seed), conf, device_gib) == expected


def test_blocks_that_are_split_are_as_many_as_need_be() -> None:
    """A thousand free blocks are cut in four each."""
    wide, narrow = [40 * MIB] * 1000, [10 * MIB] * 4000
    steps = [(kind, i) for kind in (ALLOC, FREE) for i in range(1000)]
    result = replay(events(wide + narrow, [*steps, *((ALLOC, i) for i in range(1000, 5000))]), AllocatorSettings())
    assert result.allocated_bytes == result.reserved_bytes == 1000 * 40 * MIB
    assert result.mallocs == 1000
