"""Which versions of torch are traced, and that each one makes of a program what the pinned one makes of it."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from forerun.common.errors import ForerunError

pytest.importorskip("torch", reason="tracing needs torch")
from version_programs import PLANS, WHOLE, counts, traced

from forerun.sources.trace.inside.torch_versions.adapters import ADAPTERS
from forerun.sources.trace.inside.torch_versions.supported import (
    FIRST,
    LAST,
    TESTED,
    check_version,
    minor_release,
    untested,
)

HERE = Path(__file__).parent
EXPECTED = yaml.safe_load((HERE / "version_counts.yaml").read_text(encoding="utf-8"))
RELEASE = ".".join(map(str, minor_release()))
pytestmark = pytest.mark.versions


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cpu", "2.14.1+cu130", "2.15.0a0+git123"])
def test_versions_in_the_range_are_accepted(version):
    check_version(version)


@pytest.mark.parametrize("version", ["2.9.1", "1.13.1", "2.16.0", "3.0.0", "main", "2.x", ""])
def test_other_versions_get_one_line_that_says_which_will_do(version):
    with pytest.raises(ForerunError, match=r"supported: torch 2\.10 to 2\.15") as refused:
        check_version(version)
    assert "\n" not in str(refused.value)
    assert version in str(refused.value)


def test_a_version_newer_than_those_tested_is_noted():
    assert untested("2.14.1") == untested("2.10.0") == ""
    assert "2.15.0" in untested("2.15.0")
    assert FIRST < TESTED <= LAST


def test_adapters_run_from_the_newest_to_the_oldest():
    assert [one.last for one in ADAPTERS] == sorted((one.last for one in ADAPTERS), reverse=True)
    assert all(FIRST <= one.last < LAST for one in ADAPTERS)


def test_this_torch_has_every_private_part_that_tracing_leans_on():
    run = subprocess.run(
        [sys.executable, str(HERE / "looked_up_internals.py")], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    *lacks, found = run.stdout.splitlines()
    assert lacks == []
    assert int(found.split()[0]) > 60


@pytest.mark.long
@pytest.mark.parametrize("name", [*PLANS, *WHOLE])
def test_a_program_does_the_same_under_every_version(name):
    """FLOPs, collectives and their bytes are equal. Which kernels torch runs besides, and what it saves, may change a
    little from version to version."""
    found, expected = counts(traced(name)), EXPECTED[name] | EXPECTED["differs"].get(RELEASE, {}).get(name, {})
    for figure in ("flops", "collectives", "failures"):
        assert found[figure] == expected[figure]
    assert found["kernels"] == pytest.approx(expected["kernels"], rel=0.02)
    assert found["peak_bytes"] == pytest.approx(expected["peak_bytes"], rel=0.02)


def test_names_of_older_releases_are_where_programs_import_them():
    script = """
from importlib import import_module
from forerun.sources.trace.inside.data_files import read_data
from forerun.sources.trace.inside.torch_versions import former_names
former_names.install()
for module, names in read_data("torch_versions/formerly.yaml").items():
    for name, place in names.items():
        where, _, now = place.partition(":")
        assert getattr(import_module(module), name) is getattr(import_module(where), now), name
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
