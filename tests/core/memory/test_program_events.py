"""Allocations and frees of a rank class: lifetimes across blocks, streams, and steps through the allocator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from random_programs import program, random_programs

from forerun.common.units import MIB
from forerun.core.memory.allocator_settings import AllocatorSettings
from forerun.core.memory.caching_allocator import ALLOC, FREE
from forerun.core.memory.carried_tensors import NONE, add, free, no_carried_tensors
from forerun.core.memory.profile import profile
from forerun.core.memory.program_events import StepEvents, replay_steps, step_events
from forerun.core.program.builder import BlockBuilder
from forerun.core.program.types import N_CATEGORIES, Block, Category, Phase, Program, Stream
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.build import build

CLUSTER = load_cluster("h100-sxm")
LLAMA = replace(load_model("llama-3.1-8b"), n_layers=4)


def listed(events: StepEvents) -> list[tuple[str, int]]:
    """("+" or "-", bytes) of each event of the step."""
    step = events.step
    sizes = step.size_bytes[step.tensor].tolist()
    return [("+" if kind == ALLOC else "-", size) for kind, size in zip(step.kind.tolist(), sizes, strict=True)]


def rise_and_fall(events: StepEvents) -> list[int]:
    """Bytes above the step's start after each event."""
    step = events.step
    return np.cumsum(step.size_bytes[step.tensor] * np.where(step.kind == ALLOC, 1, -1)).tolist()


def of_blocks(*blocks: Block, resident: dict[Category, int] | None = None) -> Program:
    made = program(list(blocks), [list(range(len(blocks)))])
    held = np.zeros(N_CATEGORIES, np.int64)
    for category, size in (resident or {}).items():
        held[category] = size
    return replace(made, rank_classes=(replace(made.rank_classes[0], resident_bytes=held),))


def leaving(*sizes: int, category: Category = Category.ACTIVATION) -> Block:
    block = BlockBuilder()
    block.node(0)
    for size in sizes:
        block.tensor(size, category, 0, -1)
    return block.build("leaves")


def taking(*sizes: int, category: Category = Category.ACTIVATION, phase: Phase = Phase.BACKWARD) -> Block:
    block = BlockBuilder()
    block.node(0, phase=phase)
    for size in sizes:
        block.tensor(size, category, -1, 0)
    return block.build("takes")


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_a_block_allocates_before_a_node_and_frees_after_it() -> None:
    block = BlockBuilder()
    block.tensor(100, Category.TEMPORARY, 0, 1)
    block.temporary(40, block.node(0))
    block.temporary(50, block.node(1))
    found = listed(step_events(of_blocks(block.build("block")), 0))
    assert found == [("+", 100), ("+", 40), ("-", 40), ("+", 50), ("-", 100), ("-", 50)]


def test_tensors_of_no_bytes_are_no_requests() -> None:
    assert listed(step_events(of_blocks(leaving(0, 7), taking(0, 7)), 0)) == [("+", 7), ("-", 7)]


def test_what_nobody_frees_goes_at_the_end_of_the_step() -> None:
    assert listed(step_events(of_blocks(leaving(7, 8), taking(8)), 0)) == [("+", 7), ("+", 8), ("-", 8), ("-", 7)]


def test_several_tensors_are_freed_as_one() -> None:
    found = step_events(of_blocks(leaving(10, 20, 30), taking(50), taking(10)), 0)
    assert listed(found) == [("+", 10), ("+", 20), ("+", 30), ("-", 20), ("-", 30), ("-", 10)]


def test_a_tensor_that_goes_in_parts_is_several_from_the_start() -> None:
    found = step_events(of_blocks(leaving(100), taking(30), taking(60), taking(10)), 0)
    assert sorted(listed(found)[:3]) == [("+", 10), ("+", 30), ("+", 60)]
    assert listed(found)[3:] == [("-", 30), ("-", 60), ("-", 10)]


def test_a_block_frees_what_its_own_layer_left() -> None:
    left = no_carried_tensors(n_tensors=4, n_left=4, n_pieces=4)
    for tensor, tag in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        add(left, tensor, 100, Category.ACTIVATION, *tag)
    free(left, 100, Category.ACTIVATION, 0, 1, 50)
    free(left, 100, Category.ACTIVATION, 7, 7, 51)  # nobody's: the newest
    assert left.died.tolist()[:4] == [NONE, 50, NONE, 51]
    free(left, 200, Category.ACTIVATION, 0, 0, 52)
    free(left, 100, Category.ACTIVATION, 0, 0, 53)  # nothing is there
    assert left.died.tolist()[:4] == [52, 50, 52, 51]
    assert left.counts.tolist() == [4]


def test_what_lives_through_the_step_is_split_as_gradients_are() -> None:
    blocks = (leaving(10, 30, category=Category.GRADIENT), taking(40, category=Category.GRADIENT))
    found = step_events(of_blocks(*blocks, resident={Category.PARAMETER: 80, Category.OPTIMIZER: 160}), 0)
    sizes = found.step.size_bytes
    assert sizes[found.before.tensor].tolist() == [20, 60]
    assert sizes[found.states.tensor].tolist() == [20, 20, 60, 60]
    whole = step_events(of_blocks(leaving(10), taking(10), resident={Category.PARAMETER: 80}), 0)
    assert whole.step.size_bytes[whole.before.tensor].tolist() == [80]


def test_the_optimizer_makes_its_states_in_the_first_step() -> None:
    """They go into what the activations left, and the second step's activations need memory of their own."""
    blocks = (leaving(64 * MIB), taking(64 * MIB), taking(phase=Phase.OPTIMIZER))
    made = of_blocks(*blocks, resident={Category.OPTIMIZER: 64 * MIB})
    assert step_events(made, 0).optimizer == 2
    assert [step.reserved_bytes // MIB for step in replay_steps(made, 0)] == [64, 128, 128]
    assert [step.allocated_bytes // MIB for step in replay_steps(made, 0)] == [64, 128, 128]


def test_steps_end_where_memory_does() -> None:
    made = of_blocks(leaving(64 * MIB), taking(64 * MIB), resident={Category.OPTIMIZER: 64 * MIB})
    assert [step.out_of_memory for step in replay_steps(made, 0, available_bytes=100 * MIB)] == [False, True]
    assert [step.out_of_memory for step in replay_steps(made, 0, available_bytes=50 * MIB)] == [True]


# -- built and random Programs -----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(random_programs())
def test_every_tensor_is_allocated_once_and_freed_once_later(what: Program) -> None:
    for rank in range(len(what.rank_classes)):
        step = step_events(what, rank).step
        born, died = step.tensor[step.kind == ALLOC], step.tensor[step.kind == FREE]
        assert sorted(born.tolist()) == sorted(died.tolist()) == sorted(set(born.tolist()))
        live: set[int] = set()
        for kind, tensor in zip(step.kind.tolist(), step.tensor.tolist(), strict=True):
            live.add(tensor) if kind == ALLOC else live.remove(tensor)
        assert not live


PLANS = [
    Plan(seq_len=2048, dp_shard=8),
    Plan(seq_len=2048, dp_shard=8, activation_checkpointing="full", n_microbatches=2),
    Plan(seq_len=2048, dp_shard=2, tp=2, pp=2, n_microbatches=4, activation_checkpointing="selective"),
    Plan(seq_len=2048, dp_shard=4, zero_stage=1, stack="megatron-core"),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"pp{plan.pp}-zero{plan.zero_stage}-{plan.stack}")
def test_the_step_rises_to_the_peak_of_the_profile(plan: Plan) -> None:
    made = build(LLAMA, plan, CLUSTER)
    for rank, expected in enumerate(profile(made)):
        events = step_events(made, rank)
        resident = int(made.rank_classes[rank].resident_bytes.sum())
        assert resident + max(rise_and_fall(events)) == expected.peak_bytes
        steps = replay_steps(made, rank)
        # blocks are rounded up: 512 bytes of each tensor, and 1 MiB of a large one that is not worth splitting
        assert expected.peak_bytes <= steps[-1].allocated_bytes <= expected.peak_bytes * 1.02
        assert steps[-1].reserved_bytes > steps[-1].allocated_bytes
        assert steps[-1].reserved_bytes == steps[-2].reserved_bytes
        assert steps == replay_steps(made, rank)


def test_sums_of_gradients_and_gathered_buffers_have_streams_of_their_own() -> None:
    made = build(LLAMA, PLANS[0], CLUSTER)
    step = step_events(made, 0).step
    by_stream = {stream: int(step.size_bytes[step.stream == stream].sum()) for stream in set(step.stream.tolist())}
    assert set(by_stream) == {Stream.COMPUTE, Stream.GATHER, Stream.REDUCE}
    parameters = int(made.rank_classes[0].resident_bytes[Category.PARAMETER])
    assert by_stream[Stream.REDUCE] == parameters  # fp32 gradients of fp32 shards


def test_settings_change_what_is_held() -> None:
    made = build(LLAMA, PLANS[0], CLUSTER)
    plain = replay_steps(made, 0)[-1]
    grown = replay_steps(made, 0, AllocatorSettings(expandable_segments=True))[-1]
    whole = replay_steps(made, 0, AllocatorSettings(max_split_size_mb=64))[-1]
    assert grown.reserved_bytes < plain.reserved_bytes < whole.reserved_bytes
