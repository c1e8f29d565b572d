"""Passes that are cut at their exchanges do what they did whole."""

from itertools import pairwise

import numpy as np

from forerun.core.program.types import Stream
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.sources.symbolic.fsdp_units import build_units
from forerun.sources.symbolic.kernels import TransformerKernels
from forerun.sources.symbolic.mesh import groups_of
from forerun.sources.symbolic.segments import in_turns

MODEL, CLUSTER = load_model("qwen3-30b-a3b"), load_cluster("h100-sxm")
PLAN = Plan(seq_len=1024, dp_shard=8, ep=8, n_microbatches=4, zero_stage=1, expert_overlap=True, stack="megatron-core")


def units():
    kernels = TransformerKernels(MODEL, PLAN, load_stack(PLAN.stack), groups_of(PLAN, 8), "hopper")
    return build_units(kernels, split=False).values()


def change(block) -> int:
    made = (block.tensor_alloc >= 0) & (block.tensor_free < 0)
    gone = (block.tensor_alloc < 0) & (block.tensor_free >= 0)
    return int(block.tensor_bytes[made].sum() - block.tensor_bytes[gone].sum())


def test_pieces_have_the_nodes_and_leave_the_memory_of_the_whole():
    for unit in units():
        assert [op for piece in unit.forward_pieces for op in piece.op] == unit.forward.op.tolist()
        assert sorted(op for piece in unit.backward_pieces for op in piece.op) == sorted(unit.backward.op.tolist())
        assert sum(map(change, unit.forward_pieces)) == change(unit.forward)
        assert sum(map(change, unit.backward_pieces)) == change(unit.backward)


def test_each_piece_but_the_last_ends_with_an_exchange_that_the_next_one_waits_for():
    cut = [pieces for unit in units() for pieces in (unit.forward_pieces, unit.backward_pieces) if len(pieces) > 1]
    assert cut
    for pieces in cut:
        assert len(pieces) == 3
        for piece, after in pairwise(pieces):
            assert piece.stream[-1] == Stream.EP
            assert -1 - piece.record[-1] in after.pred
            assert not np.any(after.pred >= len(after))


def test_the_pass_with_more_segments_begins_and_the_backward_pass_of_equally_many():
    assert in_turns([["f1"], ["f2"]], [["b1"], ["b2"]]) == ["b1", "f1", "b2", "f2"]
    assert in_turns([["f1"], ["f2", "f3"], ["f4"]], [["b1"]]) == ["f1", "b1", "f2", "f3", "f4"]
