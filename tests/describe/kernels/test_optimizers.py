"""Optimizers keep and compute what their published code does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.common.errors import ForerunError, UnknownName
from forerun.common.shipped import validated
from forerun.describe.kernels.optimizers import OfMatrices, Product, optimizer, optimizers

SIDE = st.integers(1, 20_000)


def flops(name: str, rows: int, columns: int) -> float:
    own = optimizer(name).matrices
    assert own is not None
    return sum(work.flops for work in own.work(rows, columns))


@given(rows=SIDE, columns=SIDE)
def test_muon_multiplies_as_five_steps_of_newton_schulz_do(rows: int, columns: int) -> None:
    short, long = sorted((rows, columns))
    assert flops("muon", rows, columns) == pytest.approx(5 * (4 * short**2 * long + 2 * short**3))


@given(rows=SIDE, columns=SIDE)
def test_what_an_optimizer_does_with_a_matrix_does_not_depend_on_its_orientation(rows: int, columns: int) -> None:
    for entry in optimizers().values():
        own = entry.matrices
        if own is not None:
            assert flops(entry.name, rows, columns) == pytest.approx(flops(entry.name, columns, rows))
            assert own.state_bytes(rows, columns, 4) == pytest.approx(own.state_bytes(columns, rows, 4))


def test_soap_projects_ten_times_a_step_and_refreshes_its_bases_every_tenth() -> None:
    m, n = 1024, 4096
    steps = 5 * 2 * m * n * (m + n)  # gradient, first moment twice, update, and outer products: on either side
    refresh = (3 * 2 + 8 / 3) * (m**3 + n**3) / 10
    assert flops("soap", m, n) == pytest.approx(steps + refresh, rel=1e-6)
    assert flops("soap", m, 14336) == pytest.approx(5 * 2 * m * m * 14336 + (6 + 8 / 3) * m**3 / 10, rel=1e-6)


def test_shampoo_works_on_blocks() -> None:
    assert flops("shampoo", 2048, 3072) == pytest.approx(6 * flops("shampoo", 1024, 1024))
    assert flops("shampoo", 1024, 1100) == pytest.approx(flops("shampoo", 1024, 1024) + flops("shampoo", 1024, 76))


@pytest.mark.parametrize(
    ("name", "rows", "columns", "size"),
    [
        ("muon", 1000, 3000, 4 * 3_000_000),
        ("adafactor", 1000, 3000, 4 * 4000),
        ("soap", 1000, 3000, 8 * 3_000_000 + 8 * (1000**2 + 3000**2)),
        ("soap", 1000, 12000, 8 * 12_000_000 + 8 * 1000**2),
        ("shampoo", 1024, 2048, 8 * 2 * 1024**2 + 2 * 16 * 1024**2),
    ],
)
def test_states_of_a_matrix(name: str, rows: int, columns: int, size: int) -> None:
    own = optimizer(name).matrices
    assert own is not None
    assert own.state_bytes(rows, columns, 4) == size


@pytest.mark.parametrize(("name", "per_element"), [("adamw", 8), ("adam", 8), ("sgd", 4), ("adamw8bit", 2 + 8 / 256)])
def test_states_of_a_large_parameter(name: str, per_element: float) -> None:
    each = optimizer(name).elements
    assert each.state_bytes(1 << 20, 4) == (1 << 20) * per_element


def test_a_parameter_below_4096_elements_keeps_wide_moments_in_8_bit_adamw() -> None:
    each = optimizer("adamw8bit").elements
    assert each.state_bytes(4095, 4) == 8 * 4095
    assert each.state_bytes(4096, 4) == 4096 * (2 + 8 / 256)


@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    name=st.sampled_from(sorted(optimizers())),
    bits=st.booleans(),
)
def test_no_state_is_below_the_least(rows: int, columns: int, name: str, bits: bool) -> None:
    entry, moment = optimizer(name), 2 if bits else 4
    least = entry.least_state_bytes(moment) * rows * columns
    assert entry.elements.state_bytes(rows * columns, moment) >= least - 1e-6
    if entry.matrices is not None:
        assert entry.matrices.state_bytes(rows, columns, moment) >= least - 1e-6


def test_an_unknown_optimizer_is_named_with_those_there_are() -> None:
    with pytest.raises(UnknownName, match="muon"):
        optimizer("lion9")


@pytest.mark.parametrize("sides", ["ss", "sxl", "slll"])
def test_a_product_has_three_sides(sides: str) -> None:
    with pytest.raises(ValueError, match="three letters"):
        Product(sides)
    entry = {"dtype": "bf16", "at_zero": "flat", "at_fsdp": "never", "read": 1, "written": 1, "kernels": 1}
    with pytest.raises(ForerunError, match=r"here: products\.0"):
        validated(OfMatrices, entry | {"products": [{"sides": sides}]}, "here")
