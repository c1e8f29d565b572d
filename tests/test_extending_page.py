"""docs/extending.md: each recipe is carried out on a copy of Forerun, where its other blocks then run."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import forerun

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"
SOURCE = Path(forerun.__file__).parent
BLOCK = re.compile(r"((?:[^\n]+\n)*)\n```(python|yaml)\n(.*?)```", re.S)
"""the paragraph before a block, its language and its text"""
TRACED = """
import torch
from forerun.core.program.builder import OpTableBuilder
from forerun.sources.trace.inside.kernels.rules import describe

@torch.library.custom_op("mine::row_scale", mutates_args=())
def row_scale(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

x, table = torch.empty(8, 16), OpTableBuilder()
(kernel,) = describe(table, torch.ops.mine.row_scale.default, (x,), {}, x)
ops = table.build()
assert (ops.launches[kernel.op], ops.bytes_read[kernel.op]) == (2, 2 * x.nbytes)
"""
"""what the entry of another kernel brings about"""


def recipes() -> tuple[list[tuple[str, str, str]], list[str]]:
    """(file, how the text goes into it, text) of each entry; and the blocks that run."""
    entries, runs = [], []
    for before, _, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        named = re.findall(r"(As|At the\s+top of|Under `traits:` of)\s+`src/forerun/([^`]+)`", before)
        if named:
            entries.append((named[-1][1], named[-1][0].split()[0], text))
        else:
            runs.append(text)
    return entries, runs


def carried_out(entries: list[tuple[str, str, str]], folder: Path) -> None:
    """Put each text into its file of the copy in `folder`."""
    for name, how, text in entries:
        path = folder / name
        if how == "As":
            assert not path.exists(), f"{name} is a file already"
            path.write_text(text, encoding="utf-8")
            os.utime(path, (0, 0))  # an older file than any, so that compiled functions of the copy hold
            continue
        old = path.read_text(encoding="utf-8")
        new = text + old if how == "At" else old.replace("\ntraits:\n", f"\ntraits:\n{text}")
        assert new != old
        path.write_text(new, encoding="utf-8")


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(SOURCE, folder / "forerun")
    carried_out(recipes()[0], folder / "forerun")
    return folder


def run(folder: Path, text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_page_has_a_recipe_for_each() -> None:
    files = [name for name, _, _ in recipes()[0]]
    for part in ("devices/", "attention", "rules", "model/huggingface_", "dispatchers", "topology/"):
        assert sum(part in name for name in files) == 1


def test_the_recipes_work(extended: Path) -> None:
    own = f"import forerun, pathlib; assert pathlib.Path(forerun.__file__).is_relative_to({str(extended)!r})"
    run(extended, "\n".join([own, *recipes()[1]]))


def test_the_entry_of_another_kernel_counts_its_launches_and_bytes(extended: Path) -> None:
    run(extended, TRACED)


def test_a_recipe_that_is_not_carried_out_fails() -> None:
    with pytest.raises(AssertionError, match="x1"):
        run(SOURCE.parent, "\n".join(recipes()[1]))
