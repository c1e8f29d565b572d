"""What each rank computes at each step of a ring, against masks that are counted."""

from dataclasses import replace

import numpy as np
import pytest

from forerun.answers.analysis.predict import predict
from forerun.common.errors import ImpossiblePlan
from forerun.core.program.counts import op_counts
from forerun.core.program.kinds import OpKind
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.canonical import canonical
from forerun.describe.plan.constraints import check_plan
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.build import build
from forerun.sources.symbolic.ring import far_piece, gathered_piece, pairs

BALANCES = ("head_tail", "striped", "none")
H100 = load_cluster("h100-sxm")
MODEL = replace(load_model("llama-3.1-8b"), n_layers=2)


def tokens_of(balance, cp, seq):
    """Places in the sequence of each rank's tokens, (cp, seq)."""
    places = np.arange(cp * seq)
    if balance == "none":
        return places.reshape(cp, seq)
    if balance == "striped":
        return places.reshape(seq, cp).T
    chunks = places.reshape(2 * cp, seq // 2)
    return np.array([np.concatenate((chunks[r], chunks[2 * cp - 1 - r])) for r in range(cp)])


def counted(balance, cp, seq):
    """Pairs (cp, cp) by looking at every query and key of rank r at step i."""
    tokens = tokens_of(balance, cp, seq)
    return [[int((tokens[r][:, None] >= tokens[(r - i) % cp][None, :]).sum()) for i in range(cp)] for r in range(cp)]


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("seq", [2, 6, 16])
def test_pairs_are_those_of_the_mask(balance, cp, seq):
    assert pairs(balance, cp, seq).tolist() == counted(balance, cp, seq)
    assert pairs(balance, cp, seq).sum() == cp * seq * (cp * seq + 1) // 2


@pytest.mark.parametrize("cp", [2, 4, 8, 64])
def test_without_balance_the_last_rank_holds_up_the_ring(cp):
    """Its path over a balanced one is (2 cp - 1) / cp, but for the diagonal, which is one pair in so many tokens."""
    seq = 4096
    path = {balance: int(pairs(balance, cp, seq).max(axis=0).sum()) for balance in BALANCES}
    assert path["none"] / path["head_tail"] == pytest.approx((2 * cp - 1) / cp, rel=2 / seq)
    assert path["head_tail"] < path["striped"] < path["none"]
    assert path["striped"] / path["head_tail"] == pytest.approx(1, rel=2 / seq)
    alone = pairs("none", cp, seq)[-1].sum()
    assert path["none"] == alone


@pytest.mark.parametrize("balance", BALANCES)
def test_pieces_have_the_pairs_of_the_slowest_rank(balance):
    cp, seq = 8, 4096

    def area(piece):
        return piece.queries * piece.keys - (0.5 * min(piece.queries, piece.keys) ** 2 if piece.causal else 0)

    exact, piece = pairs(balance, cp, seq), far_piece(balance, seq)
    assert area(piece) == pytest.approx(exact[:, 1:].max(), rel=2 / seq)
    assert area(piece) * piece.share == pytest.approx(exact[:, 1:].mean(), rel=2 / seq)
    gathered = gathered_piece(balance, cp, seq)
    assert area(gathered) == pytest.approx(exact.sum(axis=1).max(), rel=2 / seq)
    assert area(gathered) * gathered.share == pytest.approx(exact.sum(axis=1).mean(), rel=2 / seq)


@pytest.mark.parametrize("seq", [2, 4, 16])
def test_a_far_piece_of_chunks_from_both_ends_is_exact(seq):
    piece = far_piece("head_tail", seq)
    assert piece.queries * piece.keys == pairs("head_tail", 4, seq)[0, 1]


def attention_flops(plan):
    program = build(MODEL, plan, H100)
    here = program.ops.kind == OpKind.ATTENTION
    return float((op_counts(program)[0] * program.ops.flops)[here].sum())


@pytest.mark.parametrize("stack", ["torchtitan", "megatron-core"])
@pytest.mark.parametrize("method", ["ring", "allgather"])
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_flops_of_all_ranks_are_those_of_the_mask(stack, method, balance, cp):
    plan = Plan(seq_len=16384, cp=cp, cp_method=method, cp_load_balance=balance, stack=stack)
    assert cp * attention_flops(plan) == pytest.approx(attention_flops(Plan(seq_len=16384, stack=stack)), rel=1e-6)


@pytest.mark.parametrize("stack", ["torchtitan", "megatron-core"])
@pytest.mark.parametrize("method", ["ring", "allgather"])
def test_a_ring_without_balance_takes_longer(stack, method):
    """Attention of a long sequence takes nearly (2 cp - 1) / cp times as long, and as many FLOPs."""
    found = {
        balance: predict(
            MODEL, Plan(seq_len=131072, cp=8, cp_method=method, cp_load_balance=balance, stack=stack), H100
        )
        for balance in BALANCES
    }
    attention = {balance: one.breakdown["attention"] for balance, one in found.items()}
    assert attention["none"] / attention["head_tail"] == pytest.approx(15 / 8, rel=0.05)
    assert attention["head_tail"] <= attention["striped"] < attention["none"]
    assert attention["striped"] / attention["head_tail"] == pytest.approx(1, abs=0.05)
    for one in found.values():  # the same FLOPs, in another time
        assert one.hfu * one.step_time_s == pytest.approx(found["head_tail"].hfu * found["head_tail"].step_time_s)
        assert one.mfu * one.step_time_s == pytest.approx(found["head_tail"].mfu * found["head_tail"].step_time_s)


def test_head_and_tail_need_two_chunks_a_rank():
    plan = Plan(seq_len=4 * 1021, cp=4)
    with pytest.raises(ImpossiblePlan, match=r"2 x cp 4 \(cp_load_balance head_tail gives a rank two chunks"):
        check_plan(MODEL, plan, H100)
    for balance in ("striped", "none"):
        check_plan(MODEL, replace(plan, cp_load_balance=balance), H100)
    check_plan(MODEL, replace(plan, cp_method="ulysses"), H100)


def test_balance_makes_no_difference_where_there_is_none_to_make():
    for fields in ({"cp": 1}, {"cp": 2, "cp_method": "ulysses"}):
        plans = [Plan(seq_len=4096, **fields, cp_load_balance=balance) for balance in BALANCES]
        assert len({canonical(MODEL, plan) for plan in plans}) == 1
        assert len({predict(MODEL, plan, H100).step_time_s for plan in plans}) == 1
    open_mask = replace(MODEL, causal=False)
    plans = [Plan(seq_len=4096, cp=2, cp_load_balance=balance) for balance in BALANCES]
    assert len({predict(open_mask, plan, H100).step_time_s for plan in plans}) == 1
