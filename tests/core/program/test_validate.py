from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from random_programs import program

from forerun.common.errors import ForerunError
from forerun.core.program.builder import BlockBuilder, OpTableBuilder
from forerun.core.program.kinds import Attention, Gemm
from forerun.core.program.types import Block, Category, Channel, Program
from forerun.core.program.validate import check, problems


def good_block() -> Block:
    block = BlockBuilder()
    block.node(0)
    block.node(1, after=[0], wait=[0], record=1)
    block.tensor(10, Category.ACTIVATION, 0, 1)
    return block.build("layer")


def good_program() -> Program:
    return program([good_block()], [[0, 0], [0]], [Channel("pipe", (0, 1))])


BAD_BLOCKS: list[tuple[dict[str, Any], str]] = [
    ({"op": [0, 6]}, "block 'layer' node 1: op is 6, allowed: 0 to 5"),
    ({"stream": [-1, 0]}, "block 'layer' node 0: stream is -1"),
    ({"phase": [0, 4]}, "block 'layer' node 1: phase is 4"),
    ({"module": [0, 1]}, "block 'layer' node 1: module is 1, allowed: 0 to 0"),
    ({"record": [-2, 0]}, "block 'layer' node 0: record is -2"),
    ({"channel": [0, 1]}, "block 'layer' node 1: channel is 1"),
    ({"sync": [0, 2]}, "block 'layer' node 1: sync is 2"),
    ({"pred": [1, -1]}, "block 'layer' node 1: predecessor 1 is not an earlier node"),
    ({"pred_ptr": [0, 3, 2]}, "block 'layer': pred_ptr must rise from 0 to the 2 entries of pred"),
    ({"pred_ptr": [0, 0, 1]}, "block 'layer': pred_ptr must rise"),
    ({"pred_ptr": [0, 2]}, "block 'layer': column pred_ptr has 2 entries, not 3"),
    ({"stream": [0]}, "block 'layer': column stream has 1 entries, not 2"),
    ({"tensor_bytes": [-1]}, "block 'layer' tensor 0: bytes is -1, allowed: 0 to 1.15292e+18"),
    ({"tensor_category": [9]}, "block 'layer' tensor 0: category is 9"),
    ({"tensor_alloc": [2]}, "block 'layer' tensor 0: alloc is 2, allowed: -1 to 1"),
    ({"tensor_free": [2]}, "block 'layer' tensor 0: free is 2"),
    ({"tensor_alloc": [1], "tensor_free": [0]}, "block 'layer' tensor 0: freed after node 0, before it is allocated"),
]


@pytest.mark.parametrize(("change", "message"), BAD_BLOCKS)
def test_a_bad_block_is_named(change: dict[str, Any], message: str) -> None:
    good = good_program()
    arrays = {name: np.array(value, getattr(good.blocks[0], name).dtype) for name, value in change.items()}
    bad = dataclasses.replace(good, blocks=(dataclasses.replace(good.blocks[0], **arrays),))
    with pytest.raises(ForerunError) as caught:
        check(bad)
    assert message in str(caught.value)


def test_a_good_program_passes() -> None:
    check(good_program())
    assert problems(good_program()) == []


def test_bad_ops_classes_and_channels_are_named() -> None:
    good = good_program()
    flops = good.ops.flops.copy()
    flops[3] = np.nan
    first = good.rank_classes[0]
    bad = dataclasses.replace(
        good,
        ops=dataclasses.replace(good.ops, flops=flops, group=np.full(6, 1, np.int16)),
        rank_classes=(
            dataclasses.replace(first, block=np.array([0, 1], np.int32), n_ranks=0),
            dataclasses.replace(first, layer=np.zeros(1, np.int32)),
        ),
        channels=(Channel("pipe", (1, 1)), Channel("far", (0, 2))),
    )
    assert problems(bad) == [
        "ops row 0: group is 1, allowed: -1 to 0",
        "ops row 3: flops is nan, allowed: 0 to 1e+24",
        "rank class 'class 0' step 1: block is 1, allowed: 0 to 0",
        "rank class 'class 0': n_ranks is 0, must be at least 1",
        "rank class 'class 0': column layer has 1 entries, not 2",
        "channel 'pipe': members (1, 1) must be different rank classes from 0 to 1",
        "channel 'far': members (0, 2) must be different rank classes from 0 to 1",
    ]
    with pytest.raises(ForerunError, match=r"^program: ops row 0: .*; and 4 more problems$"):
        check(bad)


@pytest.mark.parametrize("column", range(4))
def test_a_product_without_a_size_is_named(column: int) -> None:
    table = OpTableBuilder()
    for number in range(6):
        table.gemm(f"product {number}", 8, 16, 32)
    ops = table.build()
    ops.details[2, column] = 0
    bad = dataclasses.replace(good_program(), ops=ops)
    assert problems(bad) == [f"ops row 2: a size is 0, allowed: 1 to {2**40 - 1:g}"]


def test_a_kernel_with_more_flops_than_its_shape_is_named() -> None:
    table = OpTableBuilder()
    shape = Attention(2, 8, 8, 512, 512, 64, 1, 1, 64)
    for flops in (None, 3.0e10):
        table.attention("attention", shape, flops=flops)
    for flops in (2.0 * 512 * 1024 * 2048, 4.0 * 512 * 1024 * 2048):
        table.counted_gemm("product", Gemm(512, 1024, 2048), "bf16", flops, 1e6, 1e6)
    for name in ("norm", "sum"):
        table.memory(name, 1e6, 1e6, flops=1e12)
    built = table.build()
    found = problems(dataclasses.replace(good_program(), ops=built))
    assert found == ["ops row 1: attention has 3e+10 FLOPs, and at most 1.692e+09 fit its shape"]
    built.flops[1] = 0.0
    found = problems(dataclasses.replace(good_program(), ops=built))
    assert found == ["ops row 3: product has 4.295e+09 FLOPs, and at most 2.256e+09 fit its shape"]
