"""Which versions of torch are traced, and that each one makes of a program what the pinned one makes of it."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from forerun.common.errors import ForerunError

pytest.importorskip("torch", reason="tracing needs torch")
from version_programs import PLANS, WHOLE, counts, traced

from forerun.sources.trace.inside.torch_versions import torch_2_12
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


def c10d_of_2_12():
    """The tables of torch.distributed before any group, with what 2.12 has of the functions that fill them."""
    names = ("pg_map", "pg_names", "pg_backend_config", "pg_group_ranks", "tags_to_pg", "pg_to_tag", "registered")
    world = SimpleNamespace(**{name: {} for name in names})
    return SimpleNamespace(_world=world, _register_process_group=world.registered.__setitem__)


@pytest.mark.parametrize(
    ("settings", "tag", "tags"),
    [
        ({}, "ptd:pairs", ["ptd:pairs"]),
        ({"add_to_default_tag": True}, "ptd:pairs", ["", "ptd:pairs"]),
        ({"pg_tag": "user:mine", "add_to_default_tag": True}, "user:mine", ["", "user:mine"]),
    ],
)
def test_torch_2_12_registers_a_group_as_newer_ones_do(settings, tag, tags, monkeypatch):
    older = c10d_of_2_12()
    monkeypatch.setattr(torch_2_12, "c10d", older)
    torch_2_12.adapt()
    older._register_pg_in_world("group", "nccl", "store", "pairs", "cuda:nccl", **settings)
    assert vars(older._world) == {
        "pg_map": {"group": ("nccl", "store")},
        "pg_names": {"group": "pairs"},
        "pg_backend_config": {"group": "cuda:nccl"},
        "pg_group_ranks": {},
        "tags_to_pg": {name: ["group"] for name in tags},
        "pg_to_tag": {"group": tag},
        "registered": {"pairs": "group"},
    }
    newer, tables = import_module("torch.distributed.distributed_c10d"), c10d_of_2_12()
    if minor_release() > (2, 12):
        for name, value in vars(tables).items():
            monkeypatch.setattr(newer, name, value)
        newer._register_pg_in_world("group", "nccl", "store", "pairs", "cuda:nccl", **settings)
        assert vars(tables._world) == vars(older._world)


def test_torch_2_12_takes_the_reason_for_which_a_frame_is_skipped(monkeypatch):
    class ConvertFrameReturn:
        def __init__(self, strategy="skip", apply_to_code=True):
            self.strategy, self.apply_to_code = strategy, apply_to_code

    older = SimpleNamespace(ConvertFrameReturn=ConvertFrameReturn)
    monkeypatch.setattr(torch_2_12, "import_module", {"torch._dynamo.types": older}.__getitem__)
    torch_2_12.adapt_compiler()
    made = older.ConvertFrameReturn("run", apply_to_code=False, skip_reason="too deep")
    assert isinstance(made, ConvertFrameReturn)
    assert vars(made) == {"strategy": "run", "apply_to_code": False}


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
