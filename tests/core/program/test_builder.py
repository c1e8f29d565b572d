from __future__ import annotations

import numpy as np
import pytest
from random_programs import program

from forerun.core.program.builder import BlockBuilder, OpTableBuilder
from forerun.core.program.kinds import Attention, Direction, Gemm, GemmRole, HostCopy, OpKind
from forerun.core.program.types import Category, Collective, Phase, Stream, joined_ops


def test_equal_ops_are_stored_once() -> None:
    ops = OpTableBuilder()
    first = ops.gemm("qkv", 8, 4, 2)
    assert ops.gemm("qkv", 8, 4, 2) == first
    assert ops.gemm("qkv", 8, 4, 2, role=1) != first
    assert ops.gemm("proj", 8, 4, 2) != first
    assert len(ops) == len(ops.build()) == 3


def test_gemm_counts_flops_and_bytes() -> None:
    ops = OpTableBuilder()
    ops.gemm("plain", m=8, n=4, k=2, batch=3)
    ops.gemm("accumulates in fp32", m=8, n=4, k=2, accumulate_bytes=4, role=2)
    table = ops.build()
    assert table.kind.tolist() == [OpKind.GEMM, OpKind.GEMM]
    assert table.flops.tolist() == [2 * 3 * 8 * 4 * 2, 2 * 8 * 4 * 2]
    assert table.bytes_read.tolist() == [3 * (8 + 4) * 2 * 2, (8 + 4) * 2 * 2 + 8 * 4 * 4]
    assert table.bytes_written.tolist() == [3 * 8 * 4 * 2, 8 * 4 * 4]
    assert table.details_of(0) == Gemm(m=8, n=4, k=2, batch=3)
    assert table.details_of(1) == Gemm(m=8, n=4, k=2, role=GemmRole.WGRAD, accumulate_bytes=4)
    assert table.gemm(np.array([1, 0])).batch.tolist() == [1, 3]


def test_attention_halves_the_causal_square_and_multiplies_backward() -> None:
    ops = OpTableBuilder()
    for causal, backward in ((0, 0), (1, 0), (1, 1)):
        ops.attention("attention", Attention(2, 8, 2, 128, 128, 64, causal, backward, 64))
    ops.attention("last 128 of 256", Attention(2, 8, 2, 128, 256, 64, 1, 0, 64))
    full, causal, backward, chunk = ops.build().flops.tolist()
    assert full == 4 * 2 * 8 * 128 * 128 * 64
    assert causal == full / 2
    assert backward == 2.5 * causal
    assert chunk == full * 1.5


def test_attention_reads_queries_keys_and_values_and_writes_its_output_or_three_gradients() -> None:
    ops = OpTableBuilder()
    for backward in (0, 1):
        ops.attention("attention", Attention(2, 8, 4, 16, 32, 64, 0, backward, 48))
    queries, output = 2 * 16 * 8 * 64 * 2, 2 * 16 * 8 * 48 * 2
    keys_and_values = 2 * 32 * 4 * (64 + 48) * 2
    table = ops.build()
    assert table.bytes_read.tolist() == [queries + keys_and_values, queries + keys_and_values + 2 * output]
    assert table.bytes_written.tolist() == [output, queries + keys_and_values]


def test_other_kinds_fill_their_columns() -> None:
    ops = OpTableBuilder()
    ops.memory("norm", 100, 50, launches=3, flops=7)
    ops.collective("gather", Collective.ALL_GATHER, 0, 1000, "fp32")
    ops.p2p("send", 0, 10, direction=Direction.OUT)
    ops.host_copy("offload", 20)
    ops.delay("wait", 99)
    table = ops.build()
    assert table.kind.tolist() == [OpKind.MEMORY, OpKind.COLLECTIVE, OpKind.P2P, OpKind.HOST_COPY, OpKind.DELAY]
    assert table.bytes_comm.tolist() == [0, 1000, 10, 20, 0]
    assert table.bytes_read.tolist() == [100, 0, 0, 0, 0]
    assert table.sends.tolist() == [False, False, True, False, False]
    assert table.details_of(3) == HostCopy(Direction.EITHER)
    assert table.delay(np.array([4])).duration_ps.tolist() == [99]
    assert table.collective.tolist() == [0, Collective.ALL_GATHER, Collective.SEND_RECV, 0, 0]
    assert table.group.tolist() == [-1, 0, 0, -1, -1]
    assert table.launches.tolist() == [3, 1, 1, 1, 0]


def test_an_op_leaves_the_columns_of_other_kinds_empty() -> None:
    ops = OpTableBuilder()
    ops.gemm("product", 8, 4, 2, element_bytes=(1, 4), kernels=3)
    ops.counted_gemm("implicit", Gemm(8, 4, 2), "bf16", 7, 5, 3)
    ops.attention("attention", Attention(1, 1, 1, 4, 4, 8, 0, 0, 8), element_bytes=1, flops=9.0, launches=2)
    ops.memory("norm", 100, 50)
    ops.collective("gather", Collective.ALL_GATHER, 0, 1000, launches=2)
    ops.p2p("send", 0, 10, launches=4)
    ops.host_copy("offload", 20)
    ops.delay("wait", 99, 2, 6.0, 8.0)
    product, implicit, attention, norm, gather, send, offload, wait = ops.build().rows()
    assert product[5:] == (128.0, 24.0, 128.0, 0, -1, 0.0, 3)
    assert implicit[5:] == (7.0, 5.0, 3.0, 0, -1, 0.0, 1)
    assert attention[5:] == (9.0, 96.0, 32.0, 0, -1, 0.0, 2)
    assert norm[5:] == (0.0, 100.0, 50.0, 0, -1, 0.0, 1)
    assert gather[5:] == (0.0, 0.0, 0.0, Collective.ALL_GATHER, 0, 1000.0, 2)
    assert send[5:] == (0.0, 0.0, 0.0, Collective.SEND_RECV, 0, 10.0, 4)
    assert offload[5:] == (0.0, 0.0, 0.0, 0, -1, 20.0, 1)
    assert wait[5:] == (6.0, 0.0, 8.0, 0, -1, 0.0, 2)


def test_tables_are_joined_row_after_row() -> None:
    ops = OpTableBuilder()
    ops.gemm("product", 8, 4, 2)
    ops.delay("wait", 99)
    table = ops.build()
    assert joined_ops([table]).rows() == table.rows()
    assert joined_ops([table, table]).rows() == 2 * table.rows()


def test_block_keeps_nodes_edges_and_tensors() -> None:
    builder = BlockBuilder()
    a = builder.node(5, Stream.GATHER, Phase.BACKWARD, 7, record=2)
    kept = builder.alloc(100, Category.ACTIVATION)
    b = builder.node(4, after=[a], wait=[0, 3], channel=1, sync=True)
    builder.free(kept)
    builder.tensor(50, Category.LOGITS, b, -1)
    builder.temporary(25, a)
    block = builder.build("block")
    assert (a, b, len(block), len(builder)) == (0, 1, 2, 2)
    assert block.op.tolist() == [5, 4]
    assert block.stream.tolist() == [Stream.GATHER, Stream.COMPUTE]
    assert block.phase.tolist() == [Phase.BACKWARD, Phase.FORWARD]
    assert block.module.tolist() == [7, 0]
    assert block.pred_ptr.tolist() == [0, 0, 3]
    assert block.pred.tolist() == [0, -1, -4]
    assert block.record.tolist() == [2, -1]
    assert block.channel.tolist() == [-1, 1]
    assert block.sync.tolist() == [0, 1]
    assert block.tensor_bytes.tolist() == [100, 50, 25]
    assert block.tensor_category.tolist() == [Category.ACTIVATION, Category.LOGITS, Category.TEMPORARY]
    assert block.tensor_alloc.tolist() == [1, 1, 0]
    assert block.tensor_free.tolist() == [1, -1, 0]


@pytest.mark.parametrize("nodes", [0, 1])
def test_small_blocks_and_tables_build(nodes: int) -> None:
    builder = BlockBuilder()
    for _ in range(nodes):
        builder.node(0)
    assert len(builder.build("small")) == nodes
    assert len(OpTableBuilder().build()) == 0
    assert len(program([builder.build("small")], [[0]]).blocks) == 1
