"""Constants into files: only values and their origin change, and what is read back is what was fitted."""

import shutil
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import yaml

from forerun.common.errors import ForerunError
from forerun.evidence.fitting.constants import Constant, load_registry
from forerun.evidence.fitting.fit import FittedConstant
from forerun.evidence.fitting.posterior import FILE as POSTERIOR
from forerun.evidence.fitting.posterior import Posterior, parse_posterior
from forerun.evidence.fitting.write import DEVICES, KERNELS, STACKS, write_constants

DEVICE = f"{DEVICES}/h200-sxm-141gb.yaml"
PACKAGE = Path(str(resources.files("forerun")))
UNSURE = Posterior(("sustained of a100-sxm-80gb", "memory_rate of composer"), np.array([[0.01, -0.01], [-0.01, 0.04]]))


@pytest.fixture
def folder(tmp_path):
    listed = [f"{part}/{path.name}" for part in (DEVICES, STACKS) for path in (PACKAGE / part).iterdir()]
    for part in (KERNELS, POSTERIOR, *listed):
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / part, tmp_path / part)
    return tmp_path


def all_constants(factor: float, rows: int = 2) -> list[FittedConstant]:
    return [
        FittedConstant(one, 1.0, round(one.shipped * factor, 4), 0.1, dict.fromkeys(one.of, rows))
        for one in load_registry().constants
    ]


def at(folder: Path, file: str, *keys: str):
    value = yaml.safe_load((folder / file).read_text())
    for key in keys:
        value = value[key]
    return value


def test_every_constant_is_written_where_it_is_read(folder):
    write_constants(all_constants(0.9), UNSURE, folder)
    for fitted in all_constants(0.9):
        for name in fitted.constant.of:
            kernel, _, architecture = name.partition(".")
            what = fitted.constant.what
            if what.startswith("attention_"):
                direction = what.removeprefix("attention_")
                assert at(folder, KERNELS, kernel, "rates", architecture, direction) == fitted.value
            else:
                assert at(folder, f"{STACKS}/{name}.yaml", what) == fitted.value
                assert "fitted on" in at(folder, f"{STACKS}/{name}.yaml", "fitted", what)


def test_a_diff_shows_values_and_nothing_else(folder):
    write_constants(all_constants(1.0), UNSURE, folder)
    before = {file: (folder / file).read_text().splitlines() for file in (f"{STACKS}/composer.yaml", KERNELS)}
    write_constants(all_constants(0.9), UNSURE, folder)
    for file, lines in before.items():
        changes = [
            (old, new) for old, new in zip(lines, (folder / file).read_text().splitlines(), strict=True) if old != new
        ]
        assert changes
        assert all("_rate: " in old or "forward: " in old for old, _ in changes)
    assert write_constants(all_constants(0.9), UNSURE, folder) == []


def test_what_the_fit_leaves_unsure_is_read_back(folder):
    write_constants([], UNSURE, folder)
    found = parse_posterior((folder / POSTERIOR).read_text())
    assert found.names == UNSURE.names
    assert found.covariance == pytest.approx(UNSURE.covariance)


def test_what_no_step_informs_says_so(folder):
    write_constants(all_constants(0.9, rows=0), UNSURE, folder)
    assert at(folder, f"{STACKS}/nanotron.yaml", "fitted", "memory_rate").endswith(
        "eager-memory that forerun fit finds"
    )
    assert "userbuffers" in at(folder, f"{STACKS}/nemo.yaml", "fitted", "network_rate")


def test_a_clock_is_written_into_the_file_of_its_device(folder):
    clock = Constant("sustained", ("h200-sxm-141gb",), prior=1.0, sigma=0.1, source="here")
    write_constants([FittedConstant(clock, 1.0, 0.9, 0.1, {"h200-sxm-141gb": 3})], UNSURE, folder)
    assert at(folder, DEVICE, "sustained") == 0.9


def test_stacks_that_share_a_constant_say_whose_steps_informed_it(folder):
    (shared,) = (one for one in all_constants(0.9) if one.constant.name == "memory_rate of torchtitan")
    shared.rows_of.update(dict.fromkeys(shared.rows_of, 0) | {"torchtitan": 7})
    write_constants([shared], UNSURE, folder)
    assert at(folder, f"{STACKS}/torchtitan.yaml", "fitted", "memory_rate").startswith("fitted on 7")
    assert at(folder, f"{STACKS}/pytorch.yaml", "fitted", "memory_rate").startswith("torchtitan's, fitted on 7")


def test_a_file_without_the_place_is_named(folder):
    (folder / KERNELS).write_text("flash2: {}\n")
    with pytest.raises(ForerunError, match=r"attention\.yaml"):
        write_constants(all_constants(0.9), UNSURE, folder)
