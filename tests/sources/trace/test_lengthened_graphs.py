"""Graphs of many equal blocks made of those of five are the graphs that AOTAutograd captures of all of them."""

import json
from pathlib import Path

import pytest
from warm_process import fork, run_file, wait

pytest.importorskip("torch", reason="tracing needs torch")
PROGRAM = Path(__file__).parent / "lengthened_graphs.py"
TOLD = ("plain", "normed", "shared", "constants", "turned", "split")
NOT_TOLD = ("factors",)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    out = tmp_path_factory.mktemp("graphs") / "graphs.json"

    def run():
        run_file(PROGRAM, out, *TOLD, *NOT_TOLD)

    with out.with_suffix(".txt").open("wb") as sink:
        code = wait(fork(run, sink.fileno(), {}), 300)
    assert code == 0, out.with_suffix(".txt").read_text()[-4000:]
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", TOLD)
def test_graphs_of_five_blocks_tell_those_of_all(graphs, kind):
    for whole, made in zip(graphs[kind]["whole"], graphs[kind]["made"], strict=True):
        assert whole == made


@pytest.mark.parametrize("kind", NOT_TOLD)
def test_blocks_of_which_one_makes_what_others_read_are_not_told(graphs, kind):
    assert graphs[kind]["made"] is None
