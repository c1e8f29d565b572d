"""The lock files of what CI installs cover pyproject.toml, and every file in them has hashes."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "packaging" / "locks"
_ENTRY = re.compile(r"^([a-z0-9][a-z0-9-]*)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)


def locked(extra: str) -> dict[str, str]:
    """Returns the version of each package of a lock file, all of whose text must be entries with hashes."""
    text = (LOCKS / f"{extra}.txt").read_text()
    assert not _ENTRY.sub("", text).strip()
    return {name: version for name, version, _ in _ENTRY.findall(text)}


def required(extra: str) -> list[str]:
    """Returns the names of the packages that pyproject.toml asks for with `extra`, torch left out."""
    text = (ROOT / "pyproject.toml").read_text()
    base = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    more = re.search(rf"^{extra} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    assert base is not None
    assert more is not None
    found = re.findall(r'"([A-Za-z0-9_.-]+)(?:\[[a-z]+\])?[^"\n]*"', base[1] + more[1])
    return [name.lower().replace("_", "-") for name in found if name not in ("torch", "tomli")]


@pytest.mark.parametrize("extra", ["test", "docs", "ray"])
def test_every_package_that_is_asked_for_is_locked(extra: str) -> None:
    assert set(required(extra)) <= set(locked(extra))
    assert "torch" not in locked(extra)


def test_one_environment_has_all_of_them() -> None:
    tests = locked("test")
    for extra in ("docs", "ray"):
        other = locked(extra)
        assert {name: tests[name] for name in other if name in tests} == {
            name: other[name] for name in other if name in tests
        }
