"""Pipelines of a search against schedules that are short enough to run by hand."""

from dataclasses import replace

import numpy as np
import pytest

from forerun.answers.search.pipelines import Pipeline, StageTimes
from forerun.answers.search.table import dense_ids
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.fsdp_units import EMBEDDING, HEAD, layer_unit, n_unit_kinds

MODEL = replace(load_model("llama-3.2-1b"), n_layers=4, tied_embeddings=True)
N_KINDS = n_unit_kinds(MODEL)
E, L, H = EMBEDDING, layer_unit(0, plain=False), HEAD
KINDS = {"embedding": E, "dense": L, "head": H}


def pipeline(pp=2, **fields) -> Pipeline:
    return Pipeline(MODEL, Plan(seq_len=512, pp=pp, stack="torchtitan", **fields))


def by_kind(**values: float) -> np.ndarray:
    """A figure of each kind of unit, 0 for those that are not named."""
    out = np.zeros(N_KINDS)
    for name, value in values.items():
        out[KINDS[name]] = value
    return out


def times(n, forward=1.0, backward=2.0, weights=0.0, again=0.0, border=0.0, first=None) -> StageTimes:
    """The same times on all of `n` stages; the first micro batch takes as long as others unless `first` is given."""
    one = np.ones(n)
    return StageTimes(
        (forward if first is None else first) * one, forward * one, backward * one, weights * one, again * one,
        border * one,
    )  # fmt: skip


def test_units_of_stages_and_ranks() -> None:
    four = pipeline(virtual_stages=2, pp_schedule="ZBV", n_microbatches=4)
    assert four.units.tolist() == [E, L, L, L, L, H]
    assert four.starts.tolist() == [0, 2, 3, 4, 6]
    assert four.rank.tolist() == [0, 1, 1, 0]
    assert four.on_ranks[:, [E, L, H]].tolist() == [[1, 2, 1], [0, 2, 0]]
    assert four.both_ends
    sizes = by_kind(embedding=10, dense=3, head=12)
    assert four.elements(sizes, 10.0).tolist() == [10 + 6 + 12 - 10, 6]
    assert pipeline().elements(sizes, 10.0).tolist() == [16, 18]


@pytest.mark.parametrize(
    ("blocking", "border", "ends"),
    [
        (False, 0.0, [9.0, 7.0]),
        (False, 0.5, [10.0, 7.5]),
        (True, 0.5, [10.5, 8.0]),
    ],
)
def test_two_stages_and_two_micro_batches(blocking: bool, border: float, ends: list[float]) -> None:
    """A forward pass takes a second and a backward pass two.

    Rank 1 starts when the first micro batch is there and alternates; rank 0 waits for its gradients. Where a transfer
    blocks, it starts only when the receiver has ended the pass before.
    """
    p = pipeline(n_microbatches=2)
    assert p.run(times(2, border=border), 2, blocking).tolist() == ends


def test_first_and_later_passes_differ() -> None:
    """A pass of the first micro batch gathers (3 s), later backward passes add up gradients (2 + 0.25 s)."""
    p = pipeline(n_microbatches=2)
    # rank 1: F0 3-6, B0 6-8, F1 8-9, B1 9-11.25; rank 0: F0 0-3, F1 3-4, B0 8-10, B1 11.25-13.5
    assert p.run(times(2, first=3.0, again=0.25), 2, False).tolist() == [13.5, 11.25]


def test_weight_passes_carry_the_sums_of_split_schedules() -> None:
    """ZB1P: rank 1 puts one weight pass off; sums cost in the second weight pass only."""
    p = pipeline(n_microbatches=2, pp_schedule="ZB1P")
    # rank 1: F0 1-2, B0 2-4, F1 4-5, B1 5-7, W0 7-7.5, W1 7.5-8.25; rank 0: F0, F1 0-2, B0 4-6, W0 6-6.5, B1 7-9, W1
    assert p.run(times(2, weights=0.5, again=0.25), 2, False).tolist() == [9.75, 8.25]


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize(("pp", "m"), [(1, 3), (2, 5), (4, 8)])
def test_the_bound_of_equal_stages_is_what_the_schedule_takes(schedule: str, pp: int, m: int) -> None:
    """m micro batches and pp - 1 more: (m + pp - 1) times the seconds of both passes."""
    p = pipeline(pp, n_microbatches=m, pp_schedule=schedule)
    even = replace(MODEL, n_layers=4 * pp)
    p = Pipeline(even, Plan(seq_len=512, pp=pp, n_microbatches=m, pp_schedule=schedule, stack="torchtitan"))
    forward, backward, nothing = by_kind(dense=0.25)[None], by_kind(dense=0.5)[None], np.zeros((1, N_KINDS))
    bound = p.least_end_s(forward, backward, nothing, nothing, np.array([m]))
    assert bound.tolist() == [3.0 * (m + pp - 1)]
    assert p.run(times(pp), m, False).max() == pytest.approx(3.0 * (m + pp - 1))
    more = p.least_end_s(forward, backward, nothing, by_kind(dense=0.125)[None], np.array([m]))
    assert more.tolist() == [3.0 * (m + pp - 1) + 0.5 * (m - 1)]


def test_the_bound_of_a_split_schedule_is_the_rank_that_starts_last() -> None:
    """Rank 1 of 2 starts after one forward pass and runs all of its own; nobody waits for gradients to come home."""
    p = Pipeline(replace(MODEL, n_layers=8), Plan(512, pp=2, n_microbatches=3, pp_schedule="ZB1P", stack="torchtitan"))
    forward, backward, weights = by_kind(dense=0.25)[None], by_kind(dense=0.5)[None], by_kind(dense=0.125)[None]
    bound = p.least_end_s(forward, backward, weights, np.zeros((1, N_KINDS)), np.array([3]))
    assert bound.tolist() == [1 + 3 * (1 + 2 + 0.5)]


def test_what_the_first_rank_holds() -> None:
    """1F1B on two ranks: two micro batches of embedding and two layers are alive at each backward pass but the last."""
    first, most = pipeline(n_microbatches=6).held(6)
    assert first.passes[[E, L, H]].tolist() == most.passes[[E, L, H]].tolist() == [2, 4, 0]
    assert first.gradients.tolist() == [0] * N_KINDS
    assert most.gradients[[E, L, H]].tolist() == [1, 2, 0]
    assert first.part == most.part == L
    (whole, _) = pipeline(n_microbatches=6, pp_schedule="GPipe").held(6)
    assert whole.passes[[E, L, H]].tolist() == [6, 12, 0]
    alone, _ = pipeline(1, n_microbatches=3).held(3)
    assert alone.passes[[E, L, H]].tolist() == [1, 4, 1]
    assert alone.part == H
    assert pipeline(n_microbatches=64).held(64)[1].passes.tolist() == most.passes.tolist()


def test_the_fullest_rank_is_the_first_with_the_most_layers() -> None:
    """1F1B: rank 1 of three has three of seven layers, with two micro batches alive; rank 2 has as many layers."""
    model = replace(MODEL, n_layers=7)
    uneven = Pipeline(model, Plan(512, pp=3, n_microbatches=6, layers_per_stage=(1, 3, 3), stack="torchtitan"))
    assert uneven.fullest == 1
    first, most = uneven.held(6, uneven.fullest)
    assert first.passes[[E, L, H]].tolist() == most.passes[[E, L, H]].tolist() == [0, 6, 0]
    assert most.gradients[[E, L, H]].tolist() == [0, 3, 0]
    assert first.part == most.part == L
    assert pipeline().fullest == 0


def test_units_wait_for_gathers_that_start_with_the_unit_before() -> None:
    """A unit waits for what its gather takes longer than the pass before it; the first of a stage waits for nothing."""
    p = pipeline()
    passes, waits = by_kind(embedding=1.0, dense=2.0, head=5.0), by_kind(embedding=9.0, dense=3.5, head=4.0)
    # forward: embedding, layer (3.5 - 1 longer), layer (3.5 - 2); layer, layer (3.5 - 2), head (4 - 2)
    assert p.chained_s(passes, waits, backward=False).tolist() == [5 + 2.5 + 1.5, 9 + 1.5 + 2]
    # backward: layer, layer (3.5 - 2), embedding (9 - 2); head, layer (3.5 - 5 < 0), layer (3.5 - 2)
    assert p.chained_s(passes, waits, backward=True).tolist() == [5 + 1.5 + 7, 9 + 0 + 1.5]


def test_combinations_are_numbered_densely() -> None:
    ids, rows = dense_ids(np.array([3, 0, 3, 1]), 7, np.array([1, 0, 1, 0]))
    assert sorted(set(ids.tolist())) == [0, 1, 2]
    assert ids[0] == ids[2] != ids[1] != ids[3] != ids[0]
    assert ids[rows].tolist() == [0, 1, 2]
    many, _ = dense_ids(*(np.array([size, 0, size, 1]) for size in (5000, 6000, 7000)))
    assert many[0] == many[2]
    assert sorted(set(many.tolist())) == [0, 1, 2]
    assert dense_ids(3)[0].tolist() == [0]
