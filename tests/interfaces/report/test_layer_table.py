"""A model part by part adds up to the model."""

import pytest

from forerun.describe.model.catalog import layered_names, load_any, model_names
from forerun.describe.model.parameters import parameter_count
from forerun.describe.model.spec import ModelSpec
from forerun.interfaces.report.layer_table import layer_rows, model_record, part_rows


@pytest.mark.parametrize("name", layered_names())
def test_layers_add_up_to_the_model(name):
    model = load_any(name)
    rows = layer_rows(model)
    assert sum(row.num_parameters for row in rows) == model.parameter_count
    assert sum(row.forward_flops for row in rows) == pytest.approx(model.forward_flops)
    assert sum(row.backward_flops for row in rows) == pytest.approx(model.backward_flops)
    sample_mb = model.kept_of(2)["input"] / 1e6
    assert sum(row.activation_memory_mb for row in rows) + sample_mb == pytest.approx(model.activation_bytes(2) / 1e6)


@pytest.mark.parametrize("name", model_names())
def test_parts_add_up_to_the_model(name):
    model = load_any(name)
    assert isinstance(model, ModelSpec)
    assert sum(row.count * row.num_parameters for row in part_rows(model)) == parameter_count(model)
    assert model_record(model)["parameters"] == parameter_count(model)
    names = [row.part for row in part_rows(model)]
    assert len(set(names)) == len(names)


def test_kinds_of_layers_with_the_same_name_are_numbered_from_the_second_on():
    kinds = dict.fromkeys(row.part.partition(":")[0] for row in part_rows(load_any("nemotron-h-8b")))
    assert list(kinds)[-3:] == ["layer", "layer 2", "layer 3"]
    assert "moe layer 2" in {row.part.partition(":")[0] for row in part_rows(load_any("gpt-oss-20b"))}
