"""Units, columns, suggestions in errors, shipped constants: known answers."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.common import shipped as shipped_module
from forerun.common import units
from forerun.common.arrays import csr, grouped, pointers, positions, union
from forerun.common.errors import ForerunError, UnknownName
from forerun.common.shipped import shipped


def test_units_are_powers_of_two_for_memory_and_of_ten_for_rates():
    assert (units.KIB, units.MIB, units.GIB) == (1024, 1_048_576, 1_073_741_824)
    assert (units.GIGA, units.TERA) == (1_000_000_000, 1_000_000_000_000)
    assert (units.PS_PER_S, units.PS_PER_US) == (1_000_000_000_000, 1_000_000)


def test_pointers_begin_at_zero_and_end_at_the_number_of_entries():
    assert pointers([2, 0, 3]).tolist() == [0, 2, 2, 5]
    assert pointers([]).tolist() == [0]


def test_grouped_values_keep_the_order_within_their_owner():
    pointer, values = grouped(np.array([2, 0, 2, 0]), np.array([10, 11, 12, 13]), 4)
    assert pointer.tolist() == [0, 2, 2, 4, 4]
    assert values.tolist() == [11, 13, 10, 12]


def test_lists_become_a_pointer_and_entries():
    pointer, entries = csr([[5, 6], [], [7]])
    assert (pointer.tolist(), entries.tolist()) == ([0, 2, 2, 3], [5, 6, 7])


def test_positions_are_the_inverse_of_an_order():
    order = np.array([3, 0, 2, 1])
    assert positions(order).tolist() == [1, 3, 2, 0]
    assert positions(order)[order].tolist() == [0, 1, 2, 3]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=12))
def test_a_union_covers_the_same_moments_without_overlaps(pairs):
    start = np.array([begin for begin, _ in pairs], np.int64)
    end = start + np.array([length for _, length in pairs], np.int64)
    first, last = union(start, end)
    assert (first[1:] > last[:-1]).all()
    moments = [
        {moment for a, b in zip(*ends, strict=True) for moment in range(a, b)} for ends in ((start, end), (first, last))
    ]
    assert moments[0] == moments[1]


def test_intervals_that_touch_are_one_and_negative_ones_stay():
    first, last = union(np.array([4.0, 0.0, 9.0]), np.array([6.0, 4.0, 8.5]))
    assert (first.tolist(), last.tolist()) == ([0.0, 9.0], [6.0, 8.5])


def test_an_unknown_name_gets_the_longer_names_first_and_at_most_three():
    known = ["h100-sxm", "h100-pcie", "h100-nvl", "h100-other", "a100-sxm"]
    assert str(UnknownName("device", "H100", known)) == (
        "unknown device 'H100'; did you mean h100-sxm or h100-pcie or h100-nvl? "
        "known: a100-sxm, h100-nvl, h100-other, h100-pcie, h100-sxm"
    )


@pytest.mark.parametrize("name", ["", "zzzzzz"])
def test_a_name_that_resembles_none_gets_the_list_alone(name):
    assert str(UnknownName("device", name, ["b", "a"])) == f"unknown device {name!r}; known: a, b"


@dataclass(frozen=True)
class Constants:
    rate: float


@pytest.fixture
def package(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped_module.resources, "files", lambda name: tmp_path / name)
    return tmp_path


def test_shipped_constants_are_an_object(package):
    (package / "good.yaml").write_text("rate: 2.5\n")
    assert shipped(Constants, "", "good.yaml") == Constants(2.5)


def test_a_shipped_file_with_a_bad_value_names_file_and_key(package):
    (package / "bad.yaml").write_text("rate: fast\n")
    with pytest.raises(ForerunError, match=r"^bad\.yaml: rate: Input should be a valid number"):
        shipped(Constants, "", "bad.yaml")
