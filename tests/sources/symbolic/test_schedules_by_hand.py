"""The order of passes of each pipeline schedule, written out, and the blocks that stages exchange in that order.

`F3.1` is the forward pass of micro batch 1 through stage 3, B its backward and W its weight pass. ZBV, DualPipeV and
interleaved orders are those that torch.distributed.pipelining 2.13 lists.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.common.errors import ImpossiblePlan
from forerun.core.program.types import Category, Channel, Program
from forerun.sources.symbolic.build import build
from forerun.sources.symbolic.schedule import actions, layers_of_stages, rank_stages, rank_turns, stage_rank

from .by_hand import Held, Node, held_by, nodes_of, steps_of
from .cases import CLUSTER, DENSE, plan

ORDERS = {
    ("1F1B", 3, 1, 4): [
        "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3",
        "F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3",
        "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3",
    ],
    ("1F1B", 3, 1, 1): ["F0.0 B0.0", "F1.0 B1.0", "F2.0 B2.0"],
    ("GPipe", 2, 1, 3): ["F0.0 F0.1 F0.2 B0.0 B0.1 B0.2", "F1.0 F1.1 F1.2 B1.0 B1.1 B1.2"],
    ("Interleaved1F1B", 2, 2, 4): [
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    ],
    ("Interleaved1F1B", 2, 2, 2): [
        "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1",
    ],
    ("ZB1P", 3, 1, 5): [
        "F0.0 F0.1 F0.2 B0.0 W0.0 F0.3 B0.1 W0.1 F0.4 B0.2 W0.2 B0.3 W0.3 B0.4 W0.4",
        "F1.0 F1.1 B1.0 F1.2 B1.1 W1.0 F1.3 B1.2 W1.1 F1.4 B1.3 W1.2 B1.4 W1.3 W1.4",
        "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 W2.0 F2.3 B2.3 W2.1 F2.4 B2.4 W2.2 W2.3 W2.4",
    ],
    ("ZBV", 2, 2, 4): [
        "F0.0 F0.1 F0.2 F3.0 B3.0 W3.0 F3.1 B3.1 W3.1 F0.3 B0.0 W0.0 F3.2 B3.2 W3.2 B0.1 W0.1 F3.3 B3.3 W3.3 "
        "B0.2 W0.2 B0.3 W0.3",
        "F1.0 F2.0 F1.1 F2.1 B2.0 W2.0 F1.2 B1.0 W1.0 F2.2 B2.1 W2.1 F1.3 B1.1 W1.1 F2.3 B2.2 W2.2 "
        "B1.2 B2.3 B1.3 W1.2 W2.3 W1.3",
    ],
    ("ZBV", 3, 2, 6): [
        "F0.0 F0.1 F0.2 F0.3 F0.4 F5.0 B5.0 W5.0 F5.1 B5.1 W5.1 F5.2 B5.2 W5.2 F0.5 B0.0 W0.0 F5.3 B5.3 W5.3 B0.1 W0.1 "
        "F5.4 B5.4 W5.4 B0.2 W0.2 F5.5 B5.5 W5.5 B0.3 W0.3 B0.4 W0.4 B0.5 W0.5",
        "F1.0 F1.1 F1.2 F4.0 F1.3 F4.1 B4.0 W4.0 F4.2 B4.1 W4.1 F1.4 B1.0 W1.0 F4.3 B4.2 W4.2 F1.5 B1.1 W1.1 F4.4 B4.3 "
        "W4.3 B1.2 W1.2 F4.5 B4.4 W4.4 B1.3 B4.5 B1.4 W1.3 B1.5 W1.4 W4.5 W1.5",
        "F2.0 F3.0 F2.1 F3.1 F2.2 F3.2 B3.0 W3.0 F2.3 B2.0 W2.0 F3.3 B3.1 W3.1 F2.4 B2.1 W2.1 F3.4 B3.2 W3.2 F2.5 B2.2 "
        "W2.2 F3.5 B3.3 W3.3 B2.3 B3.4 B2.4 B3.5 B2.5 W2.3 W3.4 W3.5 W2.4 W2.5",
    ],
    ("DualPipe", 2, 2, 4): [
        "F0.0 F3.2 F0.1 B3.2 W3.2 F3.3 B0.0 W0.0 B3.3 W3.3 B0.1 W0.1",
        "F2.2 F1.0 F2.3 B1.0 W1.0 F1.1 B2.2 W2.2 B1.1 W1.1 B2.3 W2.3",
    ],
    ("DualPipeV", 2, 2, 4): [
        "F0.0 F0.1 F0.2 F3.0 B3.0 W3.0 F3.1 F0.3 B3.1 W3.1 F3.2 B0.0 W0.0 B3.2 W3.2 F3.3 B0.1 W0.1 B3.3 W3.3 "
        "B0.2 W0.2 B0.3 W0.3",
        "F1.0 F2.0 F1.1 F2.1 F1.2 B2.0 W2.0 F2.2 B1.0 W1.0 F1.3 B2.1 W2.1 F2.3 B1.1 W1.1 B2.2 W2.2 B1.2 W1.2 "
        "B2.3 B1.3 W2.3 W1.3",
    ],
    ("DualPipeV", 3, 2, 7): [
        "F0.0 F0.1 F0.2 F0.3 F0.4 F5.0 B5.0 W5.0 F5.1 B5.1 W5.1 F5.2 F0.5 B5.2 W5.2 F5.3 B0.0 W0.0 F0.6 B5.3 W5.3 F5.4 "
        "B0.1 W0.1 B5.4 W5.4 F5.5 B0.2 W0.2 B5.5 W5.5 F5.6 B0.3 W0.3 B5.6 W5.6 B0.4 W0.4 B0.5 W0.5 B0.6 W0.6",
        "F1.0 F1.1 F1.2 F4.0 F1.3 F4.1 B4.0 W4.0 F4.2 F1.4 B4.1 W4.1 F4.3 B1.0 W1.0 F1.5 B4.2 W4.2 F4.4 B1.1 W1.1 F1.6 "
        "B4.3 W4.3 F4.5 B1.2 W1.2 B4.4 W4.4 F4.6 B1.3 W1.3 B4.5 W4.5 B1.4 W1.4 B4.6 B1.5 W4.6 B1.6 W1.5 W1.6",
        "F2.0 F3.0 F2.1 F3.1 F2.2 F3.2 F2.3 B3.0 W3.0 F3.3 B2.0 W2.0 F2.4 B3.1 W3.1 F3.4 B2.1 W2.1 F2.5 B3.2 W3.2 F3.5 "
        "B2.2 W2.2 F2.6 B3.3 W3.3 F3.6 B2.3 W2.3 B3.4 W3.4 B2.4 W2.4 B3.5 W3.5 B2.5 B3.6 B2.6 W2.5 W3.6 W2.6",
    ],
}


@pytest.mark.parametrize(("case", "expected"), ORDERS.items(), ids=str)
def test_the_order_of_passes(case: tuple[str, int, int, int], expected: list[str]) -> None:
    schedule, pp, virtual, microbatches = case
    p = plan(pp=pp, pp_schedule=schedule, virtual_stages=virtual, n_microbatches=microbatches)
    ranks = actions(p)
    assert [" ".join(f"{a.kind}{a.stage}.{a.microbatch}" for a in rank) for rank in ranks] == expected
    for rank, order in enumerate(ranks):
        assert {action.stage for action in order} == set(rank_stages(p, rank))
        assert all(stage_rank(p, action.stage) == rank for action in order)


def test_megatron_to_0_9_runs_all_forward_passes_first_where_micro_batches_are_as_many_as_ranks() -> None:
    def order(stack: str, n_microbatches: int) -> str:
        p = plan(pp=2, pp_schedule="Interleaved1F1B", virtual_stages=2, n_microbatches=n_microbatches, stack=stack)
        return " ".join(f"{a.kind}{a.stage}.{a.microbatch}" for a in actions(p)[1])

    assert order("megatron-lm", 2) == "F1.0 F1.1 F3.0 F3.1 B3.0 B3.1 B1.0 B1.1"
    assert order("nemo-2024", 2) == order("megatron-lm", 2)
    assert order("megatron-core", 2) == "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1"
    assert order("megatron-lm", 4) == order("megatron-core", 4)


def test_a_single_stage_alternates() -> None:
    (order,) = actions(plan(n_microbatches=2))
    assert [(a.kind, a.stage, a.microbatch) for a in order] == [("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1)]


def test_interleaving_needs_groups_of_micro_batches() -> None:
    with pytest.raises(ImpossiblePlan, match="5 micro batches are not divisible by pp 2"):
        actions(plan(pp=2, pp_schedule="Interleaved1F1B", virtual_stages=2, n_microbatches=5))


@pytest.mark.parametrize(
    ("layers", "pp", "balance_ends", "expected"),
    [
        (8, 4, False, [2, 2, 2, 2]),
        (10, 4, False, [3, 3, 2, 2]),
        (6, 4, True, [1, 2, 2, 1]),
        (8, 4, True, [2, 3, 2, 1]),
        (2, 4, True, [0, 1, 1, 0]),
        (5, 1, True, [5]),
    ],
)
def test_layers_of_stages(layers: int, pp: int, balance_ends: bool, expected: list[int]) -> None:
    assert layers_of_stages(layers, plan(pp=pp, balance_ends=balance_ends)) == expected


def test_too_few_layers_for_the_stages() -> None:
    with pytest.raises(ImpossiblePlan, match="1 layers do not spread over 4 stages"):
        layers_of_stages(1, plan(pp=4, balance_ends=True))


# -- blocks of a pipeline ----------------------------------------------------------------------------------------------

BORDER = 2 * 2048 * DENSE.hidden
"""bytes of the activations of a micro batch"""


def pipeline(layers: int = 2, **fields: object) -> Program:
    return build(replace(DENSE, n_layers=layers), plan(**{"pp": 2, "n_microbatches": 2, **fields}), CLUSTER)


def exchanges(program: Program, rank: int) -> list[str]:
    """The steps of a rank without those that add up gradients."""
    return [step for step in steps_of(program, rank) if "accumulate" not in step and "reduce" not in step]


def test_a_blocking_pipeline_receives_when_it_needs() -> None:
    """Before each pass it waits for what arrives, and for what it has sent before."""
    program = pipeline(stack="megatron-core")
    assert exchanges(program, 0) == [
        *("wait", "embedding.forward", "layer.forward 0", "send activations"),
        *("wait of 1", "embedding.forward of 1", "layer.forward 0 of 1", "send activations of 1"),
        *("recv gradients", "wait", "layer.backward 0", "embedding.backward"),
        *("recv gradients of 1", "wait of 1", "layer.backward 0 of 1", "embedding.backward of 1"),
        "optimizer of 2",
    ]
    assert exchanges(program, 1) == [
        *("recv activations", "wait", "layer.forward 1", "head.forward 2", "read loss"),
        *("wait", "head.backward 2", "layer.backward 1", "send gradients"),
        *("recv activations of 1", "wait of 1", "layer.forward 1 of 1", "head.forward 2 of 1"),
        *("read loss of 1", "wait of 1", "head.backward 2 of 1", "layer.backward 1 of 1", "send gradients of 1"),
        "optimizer of 2",
    ]
    assert [(ranks.name, ranks.n_ranks) for ranks in program.rank_classes] == [("stage 0", 1), ("stage 1", 1)]
    assert program.channels == (
        Channel("activations between stages 0 and 1", (0, 1)),
        Channel("gradients between stages 0 and 1", (0, 1)),
    )


def test_an_overlapping_pipeline_posts_the_next_receive_before_it_computes() -> None:
    """A receive counts to the micro batch that computes beside it; nobody waits for sends."""
    program = pipeline(stack="nemo")
    assert exchanges(program, 0) == [
        *("embedding.forward", "layer.forward 0", "send activations"),
        *("recv gradients of 1", "embedding.forward of 1", "layer.forward 0 of 1", "send activations of 1"),
        *("wait", "recv gradients", "layer.backward 0", "embedding.backward"),
        *("wait of 1", "layer.backward 0 of 1", "embedding.backward of 1", "optimizer of 2"),
    ]
    assert exchanges(program, 1) == [
        *("recv activations", "wait", "layer.forward 1", "head.forward 2"),
        *("recv activations", "head.backward 2", "layer.backward 1", "send gradients"),
        *("wait of 1", "layer.forward 1 of 1", "head.forward 2 of 1"),
        *("head.backward 2 of 1", "layer.backward 1 of 1", "send gradients of 1", "optimizer of 2"),
    ]
    waits = [[-1 - int(n) for n in block.pred] for block in program.blocks if block.name == "wait"]
    assert waits == [[4], [3]]


def test_blocks_of_a_border() -> None:
    """A receive has a buffer while it runs; a send and a receive record that they have ended in slots of their own."""
    program = pipeline(stack="megatron-core")
    assert nodes_of(program, "send activations") == [
        Node("join", "compute"),
        Node("pipeline.activations", "pp_send", ("join",), (), 5),
    ]
    assert nodes_of(program, "recv activations") == [
        Node("join", "compute"),
        Node("pipeline.activations", "pp_recv", ("join",), (), 3),
    ]
    assert nodes_of(program, "send gradients")[1] == Node("pipeline.gradients", "pp_send_grad", ("join",), (), 5)
    assert nodes_of(program, "recv gradients")[1] == Node("pipeline.gradients", "pp_recv_grad", ("join",), (), 4)
    assert held_by(program, "send activations") == held_by(program, "send gradients") == []
    for name, tensor in (("recv activations", "activations"), ("recv gradients", "gradients")):
        assert held_by(program, name) == [Held(BORDER, "communication", "join", f"pipeline.{tensor}")]
    waits = [[-1 - int(n) for n in block.pred] for block in program.blocks if block.name == "wait"]
    assert sorted(waits) == [[3, 5], [4, 5], [5]]


def test_the_way_up_of_a_v_has_streams_of_its_own() -> None:
    """The two middle stages share a rank, so nothing crosses between them."""
    program = pipeline(4, stack="torchtitan", pp_schedule="ZBV", virtual_stages=2, n_microbatches=4)
    assert [channel.name for channel in program.channels] == [
        f"{what} between stages {border}"
        for what, border in (
            ("activations", "0 and 1"),
            ("activations", "2 and 3"),
            ("gradients", "2 and 3"),
            ("gradients", "0 and 1"),
        )
    ]
    streams = {(b.name, int(b.stream[1])) for b in program.blocks if b.name.startswith(("send", "recv"))}
    assert len(streams) == 8
    assert [ranks.name for ranks in program.rank_classes] == ["stage 0, 3", "stage 1, 2"]
    order = steps_of(program, 0)
    assert order[: order.index("wait")] == [
        step
        for micro in ("", " of 1", " of 2")
        for step in (f"embedding.forward{micro}", f"layer.forward 0{micro}", f"send activations{micro}")
    ] + ["recv activations"]
    assert order[order.index("head.backward 4") :][:7] == [
        *("head.backward 4", "layer.backward 3", "send gradients"),
        *("head.weights 4", "head.accumulate_first 4", "layer.weights 3", "layer.accumulate_first 3"),
    ]


def test_a_runtime_that_keeps_outputs_holds_them_until_their_backward_pass() -> None:
    """torch.distributed.pipelining: a receive buffer for each micro batch, and a stage's outputs."""
    program = pipeline(stack="pytorch", tp=2, n_microbatches=3)
    half = BORDER // 2
    assert held_by(program, "send activations") == [Held(half, "activation", "join", "")]
    assert held_by(program, "forget output") == [Held(half, "activation", "", "join")]
    assert held_by(program, "recv gradients") == []
    order = steps_of(program, 0)
    assert order.count("forget output") == 1
    assert "forget output of 2" in order
    assert not any("forget" in step for step in steps_of(program, 1))
    buffers = [int(ranks.resident_bytes[Category.COMMUNICATION]) for ranks in program.rank_classes]
    assert buffers == [3 * half, 3 * half]


def test_a_tied_embedding_is_summed_between_the_ends() -> None:
    tied = replace(DENSE, n_layers=3, tied_embeddings=True)
    program = build(tied, plan(pp=3, n_microbatches=4, stack="megatron-core"), CLUSTER)
    assert [steps_of(program, rank)[-2:] for rank in range(3)] == [
        ["tied embedding gradients of 4", "optimizer of 4"],
        [steps_of(program, 1)[-2], "optimizer of 4"],
        ["tied embedding gradients of 4", "optimizer of 4"],
    ]
    assert "tied embedding gradients of 4" not in steps_of(program, 1)
    assert nodes_of(program, "tied embedding gradients") == [
        Node("join", "compute", (), (2,)),
        Node("embedding.tied", "reduce", ("join",), (), 2),
    ]
    assert [channel for channel in program.channels if "tied" in channel.name] == [
        Channel("tied embedding gradients", (0, 2))
    ]
    op = program.ops.name.index("embedding.tied")
    assert float(program.ops.bytes_comm[op]) == 4 * 32000 * 1024
    sharded = build(tied, plan(pp=3, n_microbatches=4, dp_shard=4, zero_stage=2, stack="torchtitan"), CLUSTER)
    op = sharded.ops.name.index("embedding.tied")
    assert float(sharded.ops.bytes_comm[op]) == 4 * 32000 * 1024 / 4


def test_layers_share_one_block_of_each_kind() -> None:
    few, many = (build(replace(DENSE, n_layers=n), plan(dp_shard=4), CLUSTER) for n in (3, 9))
    assert len(few.blocks) == len(many.blocks)


def test_passes_that_run_side_by_side_are_of_different_micro_batches() -> None:
    """One forward pass more comes before the first backward pass; DualPipe pairs its passes without one."""
    for fields in ({"pp": 1}, {"pp": 4}, {"pp": 4, "pp_schedule": "DualPipe", "virtual_stages": 2}):
        of = plan(n_microbatches=16, expert_overlap=True, zero_stage=1, dp_shard=2, ep=2, **fields)
        for rank in range(of.pp):
            pairs = [turn for turn in rank_turns(of, rank) if len(turn) > 1]
            assert len(pairs) > 16 - 2 * of.pp
            assert all(turn[0].kind == "F" and turn[1].kind == "B" for turn in pairs)
            assert all(turn[0].microbatch != turn[1].microbatch for turn in pairs)
        alone = replace(of, expert_overlap=False)
        assert all(len(turn) == 1 for rank in range(of.pp) for turn in rank_turns(alone, rank))
        for rank in range(of.pp):
            passes = [rank_turns(each, rank) for each in (of, alone)]
            assert {a for turn in passes[0] for a in turn} == {a for turn in passes[1] for a in turn}
