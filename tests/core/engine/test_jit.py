from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

from forerun.common.jit import kernel, njit


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
