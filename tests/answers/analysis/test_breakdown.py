"""The breakdown of steps that are short enough to divide by hand, in picoseconds."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.answers.analysis.breakdown import breakdown_ps, exposed_s, node_causes, pace_setter
from forerun.core.engine.simulate import Timeline, simulate
from forerun.core.program.builder import BlockBuilder, OpTableBuilder
from forerun.core.program.causes import EXPOSED, N_CAUSES, Cause
from forerun.core.program.groups import CommGroup
from forerun.core.program.kinds import Attention
from forerun.core.program.types import (
    N_CATEGORIES,
    Block,
    Channel,
    Collective,
    FlatProgram,
    Phase,
    Program,
    RankClass,
    Stream,
)
from forerun.core.program.unfold import unfold

PRODUCT, ATTENTION, MEMORY, GATHER, SEND, HOST_COPY, DELAY, RUN = range(8)
"""numbers of the ops of every program here"""
DURATIONS = [10, 5, 4, 20, 6, 8, 0, 30]


def program_of(*blocks: Block, channels: tuple[Channel, ...] = ()) -> Program:
    """A program whose rank classes each run one block."""
    ops = OpTableBuilder()
    ops.gemm("product", 1, 1, 1)
    ops.attention("attention", Attention(1, 1, 1, 1, 1, 1, 0, 0, 1))
    ops.memory("memory", 1, 1)
    ops.collective("gather", Collective.ALL_GATHER, 0, 1)
    ops.p2p("send", 0, 1)
    ops.host_copy("copy", 1)
    ops.delay("idle", 0)
    ops.memory("run", 2, 2)
    nothing, resident = np.zeros(1, np.int32), np.zeros(N_CATEGORIES, np.int64)
    classes = tuple(
        RankClass(f"class {n}", 1, np.array([n], np.int32), nothing, nothing, resident) for n in range(len(blocks))
    )
    return Program(ops.build(), blocks, classes, (CommGroup("tp", 2, 1, 2, 1),), channels, ("all",))


def run(program: Program, issue: int = 0) -> tuple[FlatProgram, Timeline]:
    flat, n = unfold(program), len(program.ops)
    nothing, never = np.zeros(n), np.zeros(n, np.bool_)
    durations = np.array(DURATIONS, np.int64)
    return flat, simulate(flat, durations, np.full(n, issue, np.int64), nothing, nothing, never)


def divided(program: Program, issue: int = 0, **options: object) -> list[dict[str, int]]:
    """The causes of each rank class that take time."""
    flat, timeline = run(program, issue)
    rows = breakdown_ps(flat, program, timeline, **options)  # type: ignore[arg-type]
    if not options.get("alone"):
        assert rows.sum(axis=1).tolist() == [timeline.end_of_step_ps] * len(rows)
    return [{Cause(cause).name.lower(): int(ps) for cause, ps in enumerate(row) if ps} for row in rows]


def one_class(*nodes: tuple, name: str = "block") -> Block:
    """A block of nodes (op, stream, phase, nodes before)."""
    block = BlockBuilder()
    for op, stream, phase, after in nodes:
        block.node(op, stream, phase, after=after)
    return block.build(name)


F, R, B, U = Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.OPTIMIZER
C = Stream.COMPUTE


def test_kernels_count_by_kind_and_by_phase() -> None:
    block = one_class(*((op, C, phase, ()) for phase in (F, R, B, U) for op in (PRODUCT, ATTENTION, MEMORY)))
    each = 10 + 5 + 4
    assert divided(program_of(block)) == [
        {"matmul": 20, "attention": 10, "memory_bound": 8, "recompute": each, "optimizer": each}
    ]


@pytest.mark.parametrize(
    ("stream", "cause"),
    [
        (Stream.GATHER, "exposed_data_parallel"),
        (Stream.REDUCE, "exposed_data_parallel"),
        (Stream.TP, "exposed_tensor_parallel"),
        (Stream.CP, "exposed_context_parallel"),
        (Stream.EP, "exposed_expert_parallel"),
        (Stream.PP_SEND, "exposed_pipeline_transfer"),
        (Stream.PP_RECV_GRAD_BACK, "exposed_pipeline_transfer"),
        (Stream.COPY, "exposed_host_copy"),
    ],
)
def test_a_gap_counts_for_the_stream_that_ended_it(stream: Stream, cause: str) -> None:
    """A gather of 20 begins after a product and runs 4 beside a kernel; attention waits for the other 16."""
    block = one_class((PRODUCT, C, F, ()), (GATHER, stream, F, (0,)), (MEMORY, C, F, ()), (ATTENTION, C, F, (1,)))
    assert divided(program_of(block)) == [{"matmul": 10, "memory_bound": 4, "attention": 5, cause: 16}]


def test_the_last_of_several_nodes_ends_a_gap() -> None:
    """Attention waits for a gather until 30 and for a host copy until 18: only the gather counts, in either order."""
    for after in ((1, 2), (2, 1)):
        block = one_class(
            (PRODUCT, C, F, ()),
            (GATHER, Stream.TP, F, (0,)),
            (HOST_COPY, Stream.COPY, F, (0,)),
            (ATTENTION, C, F, after),
        )
        assert divided(program_of(block)) == [{"matmul": 10, "attention": 5, "exposed_tensor_parallel": 20}]


def test_a_gap_without_a_node_on_another_stream_is_the_hosts() -> None:
    """The host takes 7 to launch each kernel: it is at 7, 14 and 21, while kernels end at 17, 22 and 26."""
    block = one_class((PRODUCT, C, F, ()), (ATTENTION, C, F, ()), (MEMORY, C, F, ()))
    assert divided(program_of(block), issue=7) == [{"matmul": 10, "attention": 5, "memory_bound": 4, "host": 7}]
    # 18 to launch: 18-28, 36-41, 54-58
    assert divided(program_of(block), issue=18) == [
        {"matmul": 10, "attention": 5, "memory_bound": 4, "host": 18 + 8 + 13}
    ]


def test_a_node_that_ends_before_the_launch_is_not_waited_for() -> None:
    """The gather ends at 20 + 20; the host launches attention at 60 and ends the gap."""
    block = one_class((GATHER, Stream.TP, F, ()), (PRODUCT, C, F, ()), (ATTENTION, C, F, (0,)))
    assert divided(program_of(block), issue=20) == [{"matmul": 10, "attention": 5, "host": 40 + 10}]


def test_a_delay_on_the_compute_stream_is_the_hosts_in_every_phase() -> None:
    durations = [*DURATIONS]
    durations[DELAY] = 9
    program = program_of(one_class((PRODUCT, C, U, ()), (DELAY, C, U, ())))
    flat = unfold(program)
    nothing, never = np.zeros(len(program.ops)), np.zeros(len(program.ops), np.bool_)
    timeline = simulate(
        flat, np.array(durations, np.int64), np.zeros(len(durations), np.int64), nothing, nothing, never
    )
    row = breakdown_ps(flat, program, timeline)[0]
    assert {Cause(cause): int(ps) for cause, ps in enumerate(row) if ps} == {Cause.OPTIMIZER: 10, Cause.HOST: 9}


def test_what_runs_after_the_last_kernel_is_data_parallelism() -> None:
    block = one_class((PRODUCT, C, B, ()), (GATHER, Stream.REDUCE, B, (0,)))
    assert divided(program_of(block)) == [{"matmul": 10, "exposed_data_parallel": 20}]


def pipeline() -> Program:
    """The second class receives (6) what the first sends after a product (10), and then runs a product of its own."""
    send, receive = BlockBuilder(), BlockBuilder()
    start = send.node(PRODUCT)
    send.node(SEND, Stream.PP_SEND, after=(start,), channel=0)
    send.node(MEMORY)
    receive.node(ATTENTION)
    arrived = receive.node(SEND, Stream.PP_RECV, channel=0)
    receive.node(PRODUCT, after=(arrived,))
    return program_of(send.build("send"), receive.build("receive"), channels=(Channel("border", (0, 1)),))


def test_of_a_wait_for_another_stage_only_the_transfer_is_communication() -> None:
    """The second class is ready at 5 and waits until 10 for the first; then the transfer takes 6."""
    assert divided(pipeline()) == [
        {"matmul": 10, "memory_bound": 4, "bubble": 26 - 14},
        {"attention": 5, "bubble": 5, "exposed_pipeline_transfer": 6, "matmul": 10},
    ]


def test_classes_that_are_programs_of_their_own_end_on_their_own() -> None:
    flat, timeline = run(pipeline())
    rows = breakdown_ps(flat, pipeline(), timeline, alone=True)
    assert rows.sum(axis=1).tolist() == [14, 26]


def test_an_op_that_stands_for_many_is_divided() -> None:
    """An op of 30 ps counts as it says, and others as they are."""
    split = np.zeros((8, N_CAUSES), np.int64)
    split[RUN, Cause.ATTENTION], split[RUN, Cause.HOST] = 12, 18
    block = one_class((PRODUCT, C, F, ()), (RUN, C, R, ()))
    assert divided(program_of(block), split_ps=split) == [{"matmul": 10, "attention": 12, "host": 18}]


def test_the_cause_of_each_node() -> None:
    block = one_class(
        (PRODUCT, C, F, ()), (MEMORY, C, R, ()), (ATTENTION, C, U, ()), (DELAY, C, U, ()), (GATHER, Stream.EP, B, ())
    )
    program = program_of(block)
    flat = unfold(program)
    assert [Cause(cause) for cause in node_causes(flat, program, np.arange(5))] == [
        Cause.MATMUL,
        Cause.RECOMPUTE,
        Cause.OPTIMIZER,
        Cause.HOST,
        Cause.EXPOSED_EXPERT_PARALLEL,
    ]


def test_the_class_that_waits_least_sets_the_pace() -> None:
    rows = np.zeros((3, N_CAUSES))
    rows[:, Cause.BUBBLE], rows[:, Cause.WAITING] = [3.0, 1.0, 0.0], [0.0, 1.5, 4.0]
    assert pace_setter(rows) == 1
    rows[0] = np.arange(N_CAUSES)
    assert exposed_s(rows[0]) == sum(EXPOSED)
