"""Numbers as people write them."""

import pytest

from forerun.common.errors import ForerunError
from forerun.interfaces.cli.numbers import memory_gib, memory_left, whole_numbers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64", (64,)),
        ("64,96,128", (64, 96, 128)),
        ("128, 64,64", (64, 128)),
        ("64..1024", (64, 128, 256, 512, 1024)),
        ("64..1000", (64, 128, 256, 512)),
        ("96..400", (96, 192, 384)),
        ("8..8", (8,)),
        ("64..256:64", (64, 128, 192, 256)),
        ("64..250:64", (64, 128, 192)),
        ("8,64..256:64", (8, 64, 128, 192, 256)),
    ],
)
def test_several_numbers(text, expected):
    assert whole_numbers(text, "--gpus") == expected


@pytest.mark.parametrize(
    "text", ["x", "", "64,", "64..", "..64", "128..64", "64:2", "0..8", "8..64:0", "8..64:-8", "1.5"]
)
def test_what_is_no_number_is_said_with_what_would_be(text):
    with pytest.raises(ForerunError, match=r"^--gpus: expected a whole number, 64\.\.1024 \(doublings\)"):
        whole_numbers(text, "--gpus")


def test_a_range_that_would_take_for_ever_is_refused():
    with pytest.raises(ForerunError, match="more than 1,000 numbers"):
        whole_numbers("1..100000:1", "--gpus")
    with pytest.raises(ForerunError, match="more than 1,000 numbers"):
        whole_numbers("1..900:1,1001..1900:1", "--gpus")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10%", 72.0), ("8", 72.0), ("8GiB", 72.0), ("2.5 gib", 77.5), ("0", 80.0), ("8GB", 80 - 8e9 / 2**30)],
)
def test_headroom(text, expected):
    assert memory_left(text, 80.0) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["100%", "80", "-1", "-5%"])
def test_headroom_that_leaves_nothing_or_is_negative(text):
    with pytest.raises(ForerunError, match=r"expected at least 0 and less than the 80\.0 GiB"):
        memory_left(text, 80.0)


def test_headroom_in_other_words():
    with pytest.raises(ForerunError, match="expected GiB"):
        memory_left("a lot", 80.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("70", 70.0),
        ("74.5GiB", 74.5),
        ("80GB", 80e9 / 2**30),
        ("80 gb", 80e9 / 2**30),
        ("512MiB", 0.5),
        ("0.5TiB", 512),
    ],
)
def test_a_memory_limit_in_gib_or_with_a_unit(text, expected):
    assert memory_gib(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["x", "GB", "80XB", "80Gbit", "inf", "nan", "", "1,5GB"])
def test_a_memory_limit_that_is_none(text):
    with pytest.raises(ForerunError, match="expected GiB"):
        memory_gib(text)
