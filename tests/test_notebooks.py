"""The example notebooks run from their first cell to their last, and their answers are tables and pictures."""

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples" / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} == {"plan_a_run", "trace_and_predict", "scaling_study"}


USUAL = "scaling_study"
"""the notebook of every run of the tests; the others are of the long ones"""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem == USUAL else pytest.mark.long)
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    book = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells), "commit notebooks without outputs"
    NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [
        output["data"] for cell in book.cells if cell.cell_type == "code" for output in cell.outputs if "data" in output
    ]
    pages = [data["text/html"] for data in shown if "text/html" in data]
    assert sum("<table" in html and 'scope="col"' in html for html in pages) >= 2
    pictures = [html for html in pages if html.startswith("<img alt=")]
    assert pictures
    assert all("image/png" in data for data in shown if data.get("text/html", "").startswith("<img"))
