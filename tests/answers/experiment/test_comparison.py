"""Comparisons: one change at a time or all together; each variant is the experiment that says so itself."""

from __future__ import annotations

from typing import Any

import pytest
from small_requests import request as made_in_python
from study_sections import sections

from forerun.answers.experiment.comparison import BASE, compare, varied
from forerun.answers.experiment.description.read import read_experiment
from forerun.answers.experiment.records import comparison_record
from forerun.answers.experiment.run import run
from forerun.common.errors import ForerunError


def test_one_change_at_a_time() -> None:
    request = read_experiment(sections())
    found = compare(
        request,
        patterns=("ring_allreduce",),
        topologies=("ring", "torus_2d"),
        devices=("H100",),
        precisions=("fp32",),
    )
    assert [(each.label, each.axis) for each in found.variants] == [
        (BASE, "base"),
        ("ring_allreduce", "pattern"),
        ("ring", "topology"),
        ("torus_2d", "topology"),
        ("H100", "device"),
        ("fp32", "precision"),
    ]
    assert [each.error for each in found.variants] == [""] * 6
    assert found.variants[0].samples_per_s == run(request).samples_per_s
    speed = {each.label: each.samples_per_s for each in found.variants}
    assert speed["fp32"] < speed[BASE] < speed["H100"]
    assert found.summary()["fastest"] == "H100"
    assert found.summary()["fastest_speed_up"] == pytest.approx(speed["H100"] / speed[BASE])
    for each in found.variants:
        assert each.prediction is not None
        assert sum(each.breakdown_s.values()) == pytest.approx(each.prediction.step_time_s)


@pytest.mark.parametrize(
    ("change", "own"),
    [
        ({"pattern": "tree_allreduce"}, {"communication_pattern": "tree_allreduce"}),
        ({"precision": "tf32"}, {"mixed_precision": "tf32"}),
        ({"device": "V100"}, {"hardware": {"gpu_model": "V100", "num_gpus_per_node": 8}}),
        ({"topology": "torus_2d"}, {"network": {"topology_type": "torus_2d"}}),
    ],
    ids=str,
)
def test_a_variant_is_the_experiment_that_says_so(change: dict[str, str], own: dict[str, Any]) -> None:
    assert varied(read_experiment(sections()), change).setup == read_experiment(sections(**own)).setup


def test_all_combinations() -> None:
    found = compare(
        read_experiment(sections()), patterns=("nccl", "ring_allreduce"), devices=("A100", "V100", "H100"), grid=True
    )
    labels = [each.label for each in found.variants]
    assert labels == [BASE, *(f"{p}, {d}" for p in ("nccl", "ring_allreduce") for d in ("A100", "V100", "H100"))]
    assert {each.axis for each in found.variants[1:]} == {"pattern, device"}
    assert found.variants[1].samples_per_s == found.variants[0].samples_per_s
    assert len({each.samples_per_s for each in found.variants}) == 6


def test_variants_that_cannot_run_say_why() -> None:
    found = compare(
        read_experiment(sections()),
        patterns=("carrier_pigeons",),
        topologies=("moebius",),
        devices=("abacus",),
        precisions=("fp8",),
    )
    errors = [each.error for each in found.variants]
    assert errors[0] == ""
    for error, word in zip(errors[1:], ("carrier_pigeons", "moebius", "abacus", "fp8"), strict=True):
        assert word in error
        assert "\n" not in error
    assert all(each.prediction is None and each.bill is None for each in found.variants[1:])
    assert found.summary()["n_errors"] == 4
    frame = found.to_dataframe()
    assert list(frame["error"].astype(bool)) == [False, True, True, True, True]


def test_another_device_has_figures_of_its_own() -> None:
    given = sections(hardware={"compute_tflops": 100.0, "memory_gb": 20, "network_bandwidth_gbps": 50.0})
    request = read_experiment(given)
    other = varied(request, {"device": "H100"}).setup.cluster
    own = read_experiment(sections(hardware={"gpu_model": "H100"})).setup.cluster
    assert other.device == own.device
    assert other.links[0] == own.links[0]
    assert other.links[1].bytes_per_s == request.setup.cluster.links[1].bytes_per_s == 50e9 / 8


def test_another_device_keeps_the_number_of_gpus() -> None:
    request = read_experiment(sections())
    pair = varied(request, {"device": "gb200"}).setup
    assert (pair.n_gpus, pair.cluster.node_size) == (16, 8)
    given = read_experiment(sections(hardware={"num_gpus_per_node": 4}))
    assert varied(given, {"device": "H100"}).setup.cluster.node_size == 4


def test_peaks_that_are_given_follow_the_precision() -> None:
    request = read_experiment(sections(hardware={"compute_tflops": 156.0}))
    peaks = request.setup.cluster.device.peak_flops
    assert varied(request, {"precision": "tf32"}).setup.cluster.device.peak_flops == pytest.approx(peaks)


def test_one_value_given_twice_is_one_variant() -> None:
    assert len(compare(read_experiment(sections()), precisions=("fp32", "fp32")).variants) == 2


def test_a_record_holds_predictions() -> None:
    record = comparison_record(compare(read_experiment(sections()), precisions=("fp8",)))
    assert record["variants"][0]["prediction"]["n_gpus"] == 16
    assert record["variants"][1]["prediction"] is None


def test_an_experiment_without_sections() -> None:
    with pytest.raises(ForerunError, match="only an experiment that was read from sections"):
        compare(made_in_python())
