"""The compiled list of events is the plain one, and a step that asks nothing of CUDA stands for all after it."""

from __future__ import annotations

import numpy as np
import pytest
from events_in_python import events_in_python
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.common.units import MIB
from forerun.core.memory.allocator_settings import AllocatorSettings
from forerun.core.memory.caching_allocator import ALLOC, CachingAllocator, Events, Replayed, replay
from forerun.core.memory.program_events import StepEvents, follow_steps, replay_steps, step_events
from forerun.core.program.builder import BlockBuilder, OpTableBuilder
from forerun.core.program.types import N_CATEGORIES, Block, Category, Collective, Phase, Program, RankClass, Stream

OPS = OpTableBuilder()
KERNEL, REDUCTION = OPS.memory("kernel", 1, 1), OPS.collective("sum", Collective.ALL_REDUCE, 0, 1)
CATEGORIES = st.sampled_from([Category.ACTIVATION, Category.GRADIENT, Category.UNSHARDED])
STREAMS = st.sampled_from([Stream.COMPUTE, Stream.GATHER, Stream.REDUCE])


@st.composite
def blocks_that_take_and_leave(draw: st.DrawFn, unit: int) -> Block:
    """A few nodes; tensors of few different sizes, some of earlier blocks, some of this one, some for later ones."""
    block = BlockBuilder()
    for _ in range(draw(st.integers(1, 3))):
        block.node(draw(st.sampled_from([KERNEL, REDUCTION])), draw(STREAMS), draw(st.sampled_from(Phase)))
    nodes = st.integers(0, len(block) - 1)
    for _ in range(draw(st.integers(0, 6))):
        size, category = draw(st.integers(0, 4)) * unit, draw(CATEGORIES)
        alloc = draw(st.one_of(st.just(-1), nodes))
        free = draw(nodes) if alloc < 0 else draw(st.one_of(st.just(-1), st.integers(alloc, len(block) - 1)))
        block.tensor(size, category, alloc, free)
    return block.build("block")


@st.composite
def programs(draw: st.DrawFn, unit: int) -> Program:
    """One rank class, whose blocks leave and take tensors of multiples of `unit` bytes."""
    blocks = draw(st.lists(blocks_that_take_and_leave(unit), min_size=1, max_size=4))
    n = draw(st.integers(0, 14))
    numbers = st.lists(st.integers(0, 1), min_size=n, max_size=n)
    order = draw(st.lists(st.integers(0, len(blocks) - 1), min_size=n, max_size=n))
    resident = np.zeros(N_CATEGORIES, np.int64)
    resident[Category.PARAMETER] = draw(st.integers(0, 5)) * unit
    resident[Category.OPTIMIZER] = draw(st.integers(0, 5)) * unit
    columns = (np.array(each, np.int32) for each in (order, draw(numbers), draw(numbers)))
    return Program(OPS.build(), tuple(blocks), (RankClass("all", 1, *columns, resident),), (), (), ())


@settings(deadline=None, max_examples=100)
@given(programs(unit=1))
def test_the_compiled_list_is_the_plain_one(program: Program) -> None:
    listed = step_events(program, 0)
    step = listed.step
    found = zip(*(step.kind, step.tensor, step.size_bytes[step.tensor], step.stream[step.tensor]), strict=True)
    assert ([tuple(map(int, event)) for event in found], listed.optimizer) == events_in_python(program, 0)


def one_by_one(events: StepEvents, rules: AllocatorSettings, available: int, steps: int) -> list[Replayed]:
    """All steps, whatever they ask for."""
    step, work = events.step, events.optimizer
    allocator = CachingAllocator(rules, available)
    place = allocator.follow(events.before)
    done: list[Replayed] = []
    while len(done) < steps and not (done and done[-1].out_of_memory):
        allocator.follow(Events(step.kind[:work], step.tensor[:work], step.size_bytes, step.stream), place)
        if not done:
            allocator.follow(events.states, place)
        allocator.follow(Events(step.kind[work:], step.tensor[work:], step.size_bytes, step.stream), place)
        done.append(allocator.result)
    return done


@settings(deadline=None, max_examples=100)
@given(
    programs(unit=3 * MIB),
    st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:21", "roundup_power2_divisions:4"]),
    st.integers(40, 240),
)
def test_a_step_that_asks_nothing_stands_for_those_after_it(program: Program, rules: str, mib: int) -> None:
    chosen, events = AllocatorSettings.parse(rules), step_events(program, 0)
    assert list(follow_steps(events, chosen, mib * MIB, 5)) == one_by_one(events, chosen, mib * MIB, 5)
    assert replay_steps(program, 0, chosen, mib * MIB) == follow_steps(events, chosen, mib * MIB)


def test_sizes_that_share_all_low_bits_are_told_apart() -> None:
    """Many sizes of one category, all multiples of 4 GiB, freed in the order in which they were made."""
    leaves, takes = BlockBuilder(), BlockBuilder()
    leaves.node(KERNEL)
    takes.node(KERNEL)
    sizes = [number << 32 for number in range(1, 200)]
    for size in sizes:
        leaves.tensor(size, Category.ACTIVATION, 0, -1)
        takes.tensor(size, Category.ACTIVATION, -1, 0)
    numbers = np.array([0, 1], np.int32)
    whole = RankClass("all", 1, numbers, numbers, numbers, np.zeros(N_CATEGORIES, np.int64))
    program = Program(OPS.build(), (leaves.build("leaves"), takes.build("takes")), (whole,), (), (), ())
    step = step_events(program, 0).step
    assert step.size_bytes[step.tensor].tolist() == sizes * 2


@pytest.mark.parametrize("rules", [AllocatorSettings(), AllocatorSettings(expandable_segments=True)])
@pytest.mark.parametrize("available_bytes", [0, -300 * MIB])
def test_a_device_without_memory_is_out_of_it_at_once(rules: AllocatorSettings, available_bytes: int) -> None:
    asked = Events(np.array([ALLOC], np.int8), np.array([0], np.int32), np.array([MIB]), np.array([0], np.int8))
    result = replay(asked, rules, available_bytes)
    assert (result.out_of_memory, result.reserved_bytes) == (True, 0)
