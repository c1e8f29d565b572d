from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

from forerun.common import jit
from forerun.common.jit import inlined, kernel, njit


def add(a: int, b: int) -> int:
    return a + b


def make(n: int) -> np.ndarray:
    return np.zeros(n)


def test_compiled_functions_compute() -> None:
    assert njit(add)(2, 3) == 5


def test_a_folder_that_cannot_be_written_means_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    real = numba.njit

    def no_locator(*args: object, **options: object) -> object:
        if options.get("cache"):
            raise RuntimeError("cannot cache function 'add': no locator available for file")
        return real(*args, **options)

    monkeypatch.setattr(numba, "njit", no_locator)
    assert njit(add)(2, 3) == 5


def test_the_engine_runs_where_nothing_can_be_cached(tmp_path: Path) -> None:
    """The package's cache folder is a file, as is the home: numba finds nowhere to write."""
    package = tmp_path / "lonely"
    package.mkdir()
    (package / "__pycache__").write_text("")
    (package / "module.py").write_text(
        "from forerun.common.jit import njit\n@njit\ndef add(a, b):\n    return a + b\nprint(add(2, 3))\n"
    )
    home = tmp_path / "home"
    home.write_text("")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "NUMBA_"))}
    done = subprocess.run(
        [sys.executable, "-c", "import module"],
        cwd=package,
        env=environment | {"HOME": str(home)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "5\n", done.stderr


def test_a_kernel_makes_no_arrays() -> None:
    assert kernel(add)(2, 3) == 5
    with pytest.raises(numba.core.errors.TypingError):
        kernel(make)(2)


def test_a_cache_is_outdated_by_any_module_beside_the_compiled_one_and_by_its_constants(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("def one(a):\n    return a\n")
    spec = importlib.util.spec_from_file_location("one", tmp_path / "one.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def stamp() -> object:
        jit._newest.cache_clear()
        return njit(module.one).dispatcher._cache._cache_file._source_stamp  # type: ignore[attr-defined]

    stamps = [stamp()]
    for number, name in enumerate(("callee.py", "constants.yaml", "notes.txt"), 1):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, ns=(0, 4_000_000_000_000_000_000 + number))
        stamps.append(stamp())
    assert len(set(stamps)) == 3
    assert stamps[2] == stamps[3]
    jit._newest.cache_clear()


def test_the_shared_packages_are_folders_of_forerun() -> None:
    assert all(list(folder.glob("*.py")) for folder in jit._SHARED)


@pytest.mark.parametrize(
    ("decorator", "asked"), [(njit, {}), (kernel, {"_nrt": False}), (inlined, {"_nrt": False, "forceinline": True})]
)
def test_what_numba_is_asked(decorator: object, asked: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, object]] = []
    monkeypatch.setattr(numba, "njit", lambda **options: found.append(options) or (lambda function: function))
    monkeypatch.setattr(jit, "_watch_callees", lambda *what: None)
    assert decorator(add).dispatcher is add  # type: ignore[operator]
    assert found == [{"cache": True, **asked}]
