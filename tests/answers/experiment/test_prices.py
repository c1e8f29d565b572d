"""Price files and the prices section: what they say, and how a mistake in them is told."""

from pathlib import Path

import pytest

from forerun.answers.experiment.prices import prices_of, read_prices
from forerun.answers.experiment.request import Prices
from forerun.common.errors import ForerunError


def write(folder, text):
    path = folder / "prices.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_section_of_its_own(tmp_path):
    section = {"dollars_per_gpu_hour": 2, "dollars_per_kwh": 0.1, "pue": 1.25, "host_power_w": 900, "idle_power": 0.5}
    assert prices_of(section, tmp_path, "e.yaml: prices") == Prices(2, {}, 0.1, 1.25, 900, 0.5)
    assert prices_of({}, tmp_path, "e.yaml: prices") == Prices()


def test_names_are_those_of_the_catalogue(tmp_path):
    section = {"dollars_per_gpu_hour": {"H200": 3.5, "aws-p4d": 2.75, "mine": 1}}
    prices = prices_of(section, tmp_path, "e.yaml: prices", own_names=["mine"])
    assert prices.by_name == {"h200-sxm": 3.5, "h200-sxm-141gb": 3.5, "aws-p4d": 2.75, "mine": 1}
    assert prices.dollars_per_gpu_hour is None


def test_the_section_goes_over_its_file(tmp_path):
    write(tmp_path, "dollars_per_gpu_hour: {h200: 3, b200: 5}\ndollars_per_kwh: 0.2\npue: 1.5\n")
    names = prices_of({"file": "prices.yaml", "dollars_per_gpu_hour": {"h200": 4}, "pue": 1}, tmp_path, "e")
    assert names.by_name["h200-sxm"] == 4
    assert names.by_name["b200-sxm"] == 5
    assert (names.dollars_per_kwh, names.pue) == (0.2, 1)
    for_all = prices_of({"file": "prices.yaml", "dollars_per_gpu_hour": 7}, tmp_path, "e")
    assert for_all.dollars_per_gpu_hour == 7
    assert not for_all.by_name


def test_a_file_alone(tmp_path):
    path = write(tmp_path, "dollars_per_gpu_hour: 1.5\nidle_power: 0.3\n")
    assert read_prices(path).dollars_per_gpu_hour == 1.5
    assert prices_of({"file": "prices.yaml"}, tmp_path, "e") == Prices(1.5, idle_power=0.3)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("dolars_per_kwh: 1", "unknown key 'dolars_per_kwh'"),
        ("pue: 0.5", "pue"),
        ("idle_power: 2", "idle_power"),
        ("host_power_w: many", "host_power_w"),
        ("dollars_per_gpu_hour: -1", "dollars_per_gpu_hour"),
        ("dollars_per_gpu_hour: {h100-smx: 1}", "h100-smx"),
        ("dollars_per_gpu_hour: {h200: 1, h200-sxm: 2}", "h200-sxm has two prices, 1 and 2"),
        ("[1]", "expected keys and values"),
    ],
)
def test_mistakes_name_file_and_key(tmp_path, text, told):
    path = write(tmp_path, text)
    with pytest.raises(ForerunError) as error:
        prices_of({"file": "prices.yaml"}, tmp_path, "e.yaml: prices")
    assert told in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_missing_and_a_key_of_the_section(tmp_path):
    with pytest.raises(ForerunError, match=r"nowhere\.yaml: can't be read"):
        prices_of({"file": "nowhere.yaml"}, tmp_path, "e.yaml: prices")
    with pytest.raises(ForerunError, match=r"e\.yaml: prices: unknown key 'fle'"):
        prices_of({"fle": "x"}, tmp_path, "e.yaml: prices")


def test_the_example_is_a_price_file():
    examples = Path(__file__).parents[3] / "examples"
    prices = prices_of({"file": "prices.yaml"}, examples, "e.yaml: prices")
    assert prices.by_name["a100-80gb-sxm"] == 1.2
    assert (prices.dollars_per_kwh, prices.pue) == (0.11, 1.25)
