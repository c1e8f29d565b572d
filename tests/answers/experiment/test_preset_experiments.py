"""The experiments that come with Forerun, and the table of keys."""

import pytest
import yaml

from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.answers.experiment.description.hardware import hardware_presets
from forerun.answers.experiment.description.key_table import SECTIONS, key_table
from forerun.answers.experiment.description.read import preset_names, preset_table, read_experiment
from forerun.describe.plan.fields import FIELD_TYPES


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_fits_and_its_configuration_reads_back(name):
    request = read_experiment(name)
    assert request.name == name
    assert simulate_setup(request.setup, folded=True).prediction.fits
    text = yaml.safe_dump(request.config, sort_keys=False)
    again = read_experiment(yaml.safe_load(text))
    assert again == request
    assert yaml.safe_dump(again.config, sort_keys=False) == text


def test_presets_cover_models_devices_and_sizes():
    requests = [read_experiment(name) for name in preset_names()]
    models = {request.setup.model.name for request in requests}
    assert {"resnet50", "gpt2-small", "gpt2-medium", "gpt2-large", "bert-base", "bert-large", "llama-3.1-8b"} <= models
    devices = {request.setup.cluster.device.name for request in requests}
    assert {"a100-sxm-80gb", "h100-sxm-80gb", "v100-sxm2-32gb", "rtx-a6000"} <= devices
    assert {4, 8, 16, 32, 64, 256} <= {request.setup.n_gpus for request in requests}
    assert any(request.setup.kinds for request in requests)
    assert any(request.disturbance.straggler_probability for request in requests)


def test_the_table_of_presets():
    rows = {row.name: row for row in preset_table()}
    assert tuple(rows) == preset_names()
    assert rows["mixed-a100-v100"].gpus == "8 x a100-sxm-80gb + 8 x v100-sxm2-32gb"
    assert all(row.description for row in rows.values())


def test_sizes_of_clusters_are_those_that_the_key_names():
    (row,) = [row for row in key_table() if (row.section, row.key) == ("hardware", "preset")]
    for size, keys in hardware_presets().items():
        if "num_nodes" not in keys:
            assert f"{size} ({keys['network_bandwidth']})" in row.meaning
            continue
        nodes = "1 node" if keys["num_nodes"] == 1 else f"{keys['num_nodes']} nodes"
        assert f"{size} ({nodes} of {keys['num_gpus_per_node']} {keys['gpu_model']})" in row.meaning


def test_the_table_of_keys_has_every_key_with_a_meaning():
    rows = key_table()
    keys = {(row.section, row.key) for row in rows}
    assert len(keys) == len(rows)
    assert all(row.meaning for row in rows)
    assert {("training", name) for name in FIELD_TYPES} <= keys
    for section, kind in SECTIONS.items():
        assert {(section, name) for name in kind.model_fields} <= keys
    assert ("hardware", "mixed[].gpu_model") in keys
    assert ("training", "stragglers.probability") in keys


def test_units_that_people_mix_up_are_in_the_meanings():
    meaning = {row.key: row.meaning for row in key_table()}
    assert "bits a second" in meaning["network_bandwidth_gbps"]
    assert "GB/s" in meaning["network_bandwidth_gbps"]
    assert "bytes a second" in meaning["memory_bandwidth_gb_s"]
    assert "GiB" in meaning["memory_gb"]
    assert "MiB" in meaning["bucket_size_mb"]
    assert "microseconds" in meaning["base_latency_us"]


def test_defaults_in_the_table_are_those_of_a_run():
    config = read_experiment(
        {"hardware": {"gpu_model": "A100"}, "model": {"model_type": "gpt2"}, "training": {"batch_size_per_gpu": 1}}
    ).config
    for row in key_table():
        value = config.get(row.section, {}).get(row.key)
        if row.default not in ("", "auto") and value is not None and not isinstance(value, (list, dict)):
            assert row.default == (
                str(value).lower()
                if isinstance(value, bool)
                else f"{value:g}"
                if isinstance(value, float)
                else str(value)
            )


def test_common_keys_are_accepted_as_written():
    request = read_experiment(
        {
            "hardware": {
                "gpu_model": "A100",
                "compute_tflops": 312,
                "memory_gb": 80,
                "network_bandwidth_gbps": 100,
                "num_gpus_per_node": 8,
            },
            "model": {
                "model_type": "transformer",
                "num_layers": 12,
                "hidden_size": 768,
                "num_attention_heads": 12,
                "sequence_length": 512,
            },
            "training": {
                "batch_size_per_gpu": 8,
                "num_iterations": 100,
                "num_nodes": 4,
                "communication_pattern": "ring_allreduce",
                "mixed_precision": True,
            },
            "network": {"topology_type": "fat_tree", "base_latency_us": 5},
        }
    )
    assert (request.setup.n_gpus, request.num_iterations) == (32, 100)
