"""Seconds of saving and loading a checkpoint, by bytes, host link and storage."""

from dataclasses import replace

import pytest

from forerun.common.errors import ForerunError
from forerun.core.cost.checkpoint import SavedState, load_s, save_cost
from forerun.describe.cluster.storage import Storage, usual_storage

STATE = SavedState(saved_bytes=10e9, total_bytes=80e9, held_bytes=20e9, held_total_bytes=160e9, tensors=0)
STORAGE = Storage(2e9, 8e9)
LINK = 20e9
MODES = ("disabled", "async", "async_with_pinned_mem")


def test_a_synchronous_save_waits_for_the_slower_of_copy_and_storage():
    assert save_cost(STATE, STORAGE, LINK, "disabled").stall_s == pytest.approx(80e9 / 8e9)
    assert save_cost(STATE, replace(STORAGE, bytes_per_s_total=1e15), LINK, "disabled").stall_s == pytest.approx(5.0)
    assert save_cost(STATE, Storage(1e15), LINK, "disabled").stall_s == pytest.approx(0.5)


def test_an_asynchronous_save_waits_for_a_copy_and_writes_beside():
    cost = save_cost(STATE, STORAGE, 1e9, "async")
    assert (cost.stall_s, cost.beside_s) == pytest.approx((10.0, 10.0))


def test_a_copy_without_pinned_memory_is_slower_than_the_link():
    pinned = save_cost(STATE, STORAGE, LINK, "async_with_pinned_mem")
    assert save_cost(STATE, STORAGE, LINK, "async").stall_s > pinned.stall_s == pytest.approx(10e9 / LINK)


@pytest.mark.parametrize(("cover_s", "stall_s"), [(0.0, 0.5), (0.2, 0.3), (0.5, 0.0), (9.0, 0.0)])
def test_pinned_copies_hide_behind_the_step_up_to_its_optimizer(cover_s, stall_s):
    cost = save_cost(STATE, STORAGE, LINK, "async_with_pinned_mem", cover_s)
    assert cost.stall_s == pytest.approx(stall_s)
    assert cost.whole_s == pytest.approx(0.5 + 10.0)


@pytest.mark.parametrize("mode", MODES)
def test_no_mode_saves_more_often_than_the_storage_can_take(mode):
    """A save that comes before the last one is complete waits for it: n steps and a save take a write at least."""
    for interval_s in (0.0, 1.0, 9.0, 11.0, 100.0):
        cost = save_cost(STATE, STORAGE, LINK, mode, 1.0, interval_s)
        assert cost.stall_s + interval_s >= 10.0 - 1e-9
        assert cost.beside_s <= interval_s
        assert cost.whole_s == pytest.approx(save_cost(STATE, STORAGE, LINK, mode, 1.0).whole_s)


@pytest.mark.parametrize("mode", MODES)
def test_more_bytes_or_tensors_never_save_faster(mode):
    least = save_cost(STATE, STORAGE, LINK, mode)
    for more in ({"saved_bytes": 11e9}, {"total_bytes": 90e9}, {"tensors": 500}):
        cost = save_cost(replace(STATE, **more), STORAGE, LINK, mode)
        assert cost.whole_s >= least.whole_s
        assert cost.stall_s >= least.stall_s


def test_loading_reads_all_that_ranks_hold_and_copies_it_to_the_device():
    assert load_s(STATE, STORAGE, LINK) == pytest.approx(160e9 / 8e9 + 20e9 / LINK)


def test_the_assumed_storage_is_that_of_its_source():
    """2.3 TB by 384 ranks in 40 s."""
    assert usual_storage().transfer_s(2.3e12 / 384, 2.3e12) == pytest.approx(40, rel=0.01)
    assert "2.3 TB saved by 384 GPUs" in " ".join(usual_storage().source.split())


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "1,2,3", "nan", "inf"])
def test_a_storage_is_one_or_two_rates(text):
    with pytest.raises(ForerunError, match=r"^expected GB/s of a rank"):
        Storage.of_text(text)
    assert Storage.of_text("2,100") == Storage(2e9, 100e9)
