"""`forerun.Experiment`, as a Python program uses it."""

from pathlib import Path

import pytest

import forerun

EXAMPLE = Path(__file__).parent.parent / "examples" / "experiment.yaml"


@pytest.fixture(scope="module")
def example():
    return forerun.Experiment.from_yaml(EXAMPLE)


def test_a_run_is_summed_up_and_tabled(example):
    pytest.importorskip("pandas")
    run = example.changed({"training.num_iterations": 20}).run()
    summary, table = run.summary(), run.to_dataframe()
    assert summary["num_iterations"] == table["repeats"].sum() == 20
    assert summary["total_s"] == pytest.approx((table["step_time_s"] * table["repeats"]).sum())
    assert summary["n_gpus"] == 32


def test_changes_make_another_experiment(example):
    assert example.changed({"training.num_nodes": 2}).request.setup.n_gpus == 16
    assert example.request.setup.n_gpus == 32


@pytest.mark.slow
def test_a_run_is_analysed_drawn_and_written(example, tmp_path):
    run = example.changed({"training.num_iterations": 5}).run()
    answers = run.analyze()
    assert answers is run.analyze()
    assert [usage.name for usage in answers.bottlenecks.usages][:3] == ["compute", "memory", "network"]
    assert sum(answers.path.by_cause_ps.values()) == run.result.simulation.timeline.end_of_step_ps
    pictures = run.plot(tmp_path / "pictures")
    assert pictures
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    written = {path.name for path in run.export(tmp_path / "all")}
    assert {"report.html", "gpt2-four-nodes_config.yaml", "timeline.png"} <= written
    again = forerun.Experiment.from_yaml(tmp_path / "all" / "gpt2-four-nodes_config.yaml")
    assert again.run().summary() == run.summary()


@pytest.mark.slow
def test_studies_come_from_presets_too(tmp_path):
    experiment = forerun.Experiment.from_preset("gpt2-small-a100")
    scaling = experiment.scale([1, 2], folder=tmp_path)
    assert [point.num_nodes for point in scaling.result.points] == [1, 2]
    assert (tmp_path / "points").is_dir()
    rows = experiment.compare(precisions=["fp32"]).to_dataframe()
    assert len(rows) == 2
    slow = experiment.changed({"hardware.slow_gpus": {3: 1.5}, "training.num_iterations": 3}).stragglers()
    assert slow.result.blame[0][0] == 3


def test_presets_are_named_and_unknown_ones_refused():
    assert "resnet50-a100" in forerun.Experiment.presets()
    with pytest.raises(forerun.UnknownName, match="resnet50-a100"):
        forerun.Experiment.from_preset("resnet51-a100")
    with pytest.raises(forerun.ForerunError, match=r"nowhere\.yaml"):
        forerun.Experiment.from_yaml("nowhere.yaml")
