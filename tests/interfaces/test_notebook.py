"""Answers show themselves in a notebook: tables that are escaped, pictures with words, rows of data."""

from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

import forerun
from forerun.answers.search.result import SearchResult
from forerun.common.errors import ForerunError
from forerun.common.shown import Picture, Shown
from forerun.interfaces import notebook
from forerun.interfaces.report import in_notebook

JOBS = """
nodes: 2
jobs:
  - {name: "<b>a</b>", gpus: 8, duration_s: 7200}
  - {name: b, gpus: 16, duration_s: 3600, submit_s: 60}
"""


class Table(HTMLParser):
    """The tags of a page and the text of its cells."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def prediction():
    plan = forerun.Plan(seq_len=4096, dp_shard=8)
    return forerun.predict("llama-3.1-8b", plan, "h100-sxm")


def checked(answer):
    """Its table, after what holds for every answer."""
    table = Table(answer._repr_html_())
    heads = [attrs for tag, attrs in table.tags if tag == "th"]
    assert heads
    assert all(attrs.get("scope") for attrs in heads)
    assert not {"script", "style", "b"} & {tag for tag, _ in table.tags}
    picture = answer.plot()
    assert picture.png.startswith(b"\x89PNG")
    assert picture._repr_png_() == picture.png
    assert picture.about
    return table


def test_a_prediction(prediction):
    table = checked(prediction)
    assert "step time" in table.texts
    (row,) = prediction.to_rows()
    causes = sum(row[f"{cause}_s"] for cause in prediction.breakdown)
    assert causes == pytest.approx(row["step_time_s"])
    assert row["plan_dp_shard"] == 8
    assert prediction.to_dataframe().shape == (1, len(row))


def test_names_are_escaped(prediction):
    bad = replace(prediction, model='<script>alert("x")</script>', warnings=("<b>bold</b>",))
    assert "<script" not in bad._repr_html_()
    assert "<b>" not in bad._repr_html_()
    assert "<script" not in bad.plot()._repr_html_()


def test_a_simulated_step():
    simulation = forerun.simulate("llama-3.1-8b", forerun.Plan(seq_len=4096, dp_shard=8), "h100-sxm")
    checked(simulation)
    assert simulation.to_rows() == simulation.prediction.to_rows()


def test_a_search_and_a_range():
    fixed = {"tp": [1], "pp": [1], "cp": [1], "compile": [True], "stack": ["torchtitan"]}
    result = forerun.search("llama-3.1-8b", "h100-sxm", 8, 4096, 32, fixed=fixed)
    table = checked(result)
    assert any("proved" in text for text in table.texts)
    frame = result.to_dataframe()
    counts = result.counts
    assert len(frame) == counts["considered"] - counts["impossible"] - counts.get("same", 0)
    sweep = forerun.sweep("llama-3.1-8b", "h100-sxm", [8, 16], 4096, [32], fixed=fixed)
    checked(sweep)
    assert list(sweep.to_dataframe().n_gpus) == [8, 16]


def test_a_search_in_which_nothing_fits_says_so():
    nothing = SimpleNamespace(ranked=(), model="m")
    with pytest.raises(ForerunError, match="no plan fits"):
        notebook.search_picture(nothing)
    assert issubclass(SearchResult, Shown)


def test_experiments_whole_runs_and_schedules(tmp_path):
    experiment = forerun.Experiment.from_preset("gpt2-large-ethernet")
    checked(experiment.run())
    study = experiment.scale([1, 2])
    checked(study)
    checked(study.result)
    runs = forerun.Run("llama-3-405b").simulate(runs=2, gains=False, workers=1)
    checked(runs)
    assert len(runs.to_dataframe()) == 2
    path = tmp_path / "jobs.yaml"
    path.write_text(JOBS, encoding="utf-8")
    schedules = forerun.Jobs(path).schedule(["fifo", "srtf"])
    checked(schedules)
    assert set(schedules.to_dataframe().policy) == {"fifo", "srtf"}
    assert len(schedules.to_rows()) == 4
    with pytest.raises(forerun.UnknownName, match="fifo"):
        forerun.Jobs(path).schedule(["fiffo"])


def test_without_matplotlib_one_line_says_what_to_install(prediction, monkeypatch):
    monkeypatch.setattr(in_notebook, "drawing_is_possible", lambda: False)
    with pytest.raises(ForerunError, match=r"forerun\[plot\]"):
        prediction.plot()


def test_a_picture_is_saved_whole(tmp_path):
    path = Picture(b"\x89PNG", "nothing").save(tmp_path / "a.png")
    assert path.read_bytes() == b"\x89PNG"
    with pytest.raises(ForerunError):
        Picture(b"", "").save(tmp_path / "no" / "a.png")
