"""A bandwidth without a unit: what a step takes with either reading."""

from dataclasses import replace

import pytest
from study_sections import sections

from forerun.answers.experiment.description.read import changed, read_experiment
from forerun.answers.experiment.other_reading import other_reading


@pytest.fixture(scope="module")
def request_of_two_nodes():
    return read_experiment(sections(hardware={"network_bandwidth_gbps": 20}, num_nodes=2))


def test_both_readings_are_those_of_the_stated_units(request_of_two_nodes):
    reading = other_reading(request_of_two_nodes)
    for unit, step_s in (("Gbit/s", reading.gbit_step_s), ("GB/s", reading.gbyte_step_s)):
        stated = changed(request_of_two_nodes, {"hardware.network_bandwidth": f"20 {unit}"})
        assert other_reading(stated) is None
        again = other_reading(changed(stated, {"hardware.network_bandwidth_gbps": 20}))
        assert again == reading
        bare = changed(stated, {"hardware.network_bandwidth_gbps": 160 if unit == "GB/s" else 20})
        assert other_reading(bare).gbit_step_s == step_s
    assert reading.gbyte_step_s < reading.gbit_step_s


def test_it_is_one_line_with_both_figures_and_how_to_choose(request_of_two_nodes):
    text = other_reading(request_of_two_nodes).text
    assert "\n" not in text
    for words in ("20 Gbit/s (2.5 GB/s)", "as 20 GB/s", "network_bandwidth: 20 Gbit/s or network_bandwidth: 20 GB/s"):
        assert words in text


def test_nothing_is_said_where_nothing_depends_on_it(request_of_two_nodes):
    assert other_reading(changed(request_of_two_nodes, {"training.num_nodes": 1})) is None
    assert other_reading(changed(request_of_two_nodes, {"network.topology_type": "ideal"})) is None
    assert other_reading(replace(request_of_two_nodes, given={})) is None
    assert other_reading(changed(request_of_two_nodes, {"hardware.network_bandwidth_gbps": None})) is None
