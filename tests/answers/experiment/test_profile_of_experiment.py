"""An experiment's cluster file may name a cost profile of the user's own."""

from importlib.resources import files

from forerun.answers.experiment.description.read import read_experiment


def test_a_cost_profile_is_relative_to_the_cluster_file_and_the_configuration_reads_back(tmp_path):
    (tmp_path / "machines").mkdir()
    text = (files("forerun.describe.cluster") / "devices" / "a100-sxm-80gb.yaml").read_text(encoding="utf-8")
    (tmp_path / "machines" / "profile.yaml").write_text(text, encoding="utf-8")
    device = "{like: a100-sxm-40gb, cost_profile: profile.yaml}"
    (tmp_path / "machines" / "mine.yaml").write_text(f"device: {device}\n", encoding="utf-8")
    file = tmp_path / "experiment.yaml"
    file.write_text(
        "hardware: {cluster: machines/mine.yaml}\nmodel: {model_type: gpt2}\ntraining: {batch_size_per_gpu: 1}",
        encoding="utf-8",
    )
    request = read_experiment(file)
    assert request.setup.cluster.device.cost_profile == str(tmp_path / "machines" / "profile.yaml")
    assert read_experiment(request.config) == request
