"""Packed documents attend to themselves alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.answers.analysis.predict import predict
from forerun.common.errors import ForerunError, ImpossiblePlan
from forerun.core.program.counts import op_counts
from forerun.core.program.types import Program
from forerun.describe.plan.constraints import check_plan
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.build import build

from .cases import BERT, CLUSTER, DENSE, plan


def attention(program: Program) -> float:
    """FLOPs of attention kernels."""
    return float(op_counts(program)[0] @ (program.ops.flops * program.ops.is_attention))


def products(program: Program) -> float:
    return float(op_counts(program)[0] @ (program.ops.flops * program.ops.is_gemm))


@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=5), seq_len=st.integers(1, 4096))
@settings(max_examples=60, deadline=None)
def test_documents_fill_a_sequence_in_order(lengths: list[int], seq_len: int) -> None:
    found = Plan(seq_len=seq_len, document_lengths=tuple(lengths)).documents
    assert sum(found) == seq_len
    assert all(one == lengths[i % len(lengths)] for i, one in enumerate(found[:-1]))
    assert found[-1] <= lengths[(len(found) - 1) % len(lengths)]


@pytest.mark.parametrize("lengths", [(2048,), (4096,), (512,), (512, 1536), (300,)])
def test_attention_multiplies_the_squares_of_documents(lengths: tuple[int, ...]) -> None:
    one = build(DENSE, plan(), CLUSTER)
    packed_plan = plan(document_lengths=lengths)
    packed = build(DENSE, packed_plan, CLUSTER)
    squares = sum(length**2 for length in packed_plan.documents)
    assert attention(packed) == pytest.approx(attention(one) * squares / 2048**2, rel=2e-3)
    assert products(packed) == products(one)


def test_documents_of_a_model_without_a_mask_read_all_their_keys() -> None:
    one, packed = (build(BERT, Plan(seq_len=512, document_lengths=lengths), CLUSTER) for lengths in ((), (128,)))
    assert attention(packed) == attention(one) / 4


def test_a_window_counts_inside_of_documents() -> None:
    windowed = replace(DENSE, sliding_window=256)
    short, long = (build(windowed, plan(document_lengths=(n,)), CLUSTER) for n in (128, 1024))
    assert attention(short) == attention(build(DENSE, plan(document_lengths=(128,)), CLUSTER))
    pairs = 2 * (1024 * 256 - 256**2 / 2)
    assert attention(long) == pytest.approx(attention(short) * 2 * 1024 * 256 / (16 * 128**2 / 2), rel=1e-2)
    mixed = build(windowed, plan(document_lengths=(1024, 1023)), CLUSTER)
    assert attention(mixed) == pytest.approx(attention(short) * pairs / (16 * 128**2 / 2), rel=2e-2)


def test_short_documents_take_less_time_and_no_less_memory() -> None:
    one, packed = (predict(DENSE, plan(document_lengths=lengths), CLUSTER) for lengths in ((), (256,)))
    assert packed.step_time_s < one.step_time_s
    assert packed.peak_allocated_gib == one.peak_allocated_gib
    assert one.mfu is not None
    assert packed.mfu is not None
    assert packed.mfu * packed.step_time_s < one.mfu * one.step_time_s


def test_a_document_as_long_as_the_sequence_is_the_sequence() -> None:
    one, packed = (predict(DENSE, plan(document_lengths=lengths), CLUSTER) for lengths in ((), (2048,)))
    assert (packed.step_time_s, packed.mfu) == (one.step_time_s, one.mfu)


def test_documents_of_nearly_equal_lengths_take_the_time_of_equal_ones() -> None:
    equal, nearly = (predict(DENSE, plan(document_lengths=lengths), CLUSTER) for lengths in ((512,), (512, 508, 516)))
    assert nearly.step_time_s == pytest.approx(equal.step_time_s, rel=0.02)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cp": 2}, "packed documents are not split over cp 2"),
        ({"attention": "naive"}, "document_lengths needs a fused attention kernel, not naive"),
    ],
)
def test_plans_that_pack_no_documents(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(ImpossiblePlan, match=reason):
        check_plan(DENSE, plan(document_lengths=(512,), **fields), CLUSTER)


def test_an_empty_document_is_an_error() -> None:
    with pytest.raises(ForerunError, match="document_lengths must be at least 1 each"):
        Plan(seq_len=8, document_lengths=(4, 0))
