"""Which layers of a traced model become float8, and which recipes torchao has."""

import sys

import pytest

from forerun.common.errors import ForerunError
from forerun.describe.plan.plan import Plan

torch = pytest.importorskip("torch", reason="tracing needs torch")
pytest.importorskip("torchao", reason="float8 needs torchao")
float8 = pytest.importorskip("forerun.sources.trace.inside.parallelize.float8")


def converted(**settings):
    """The names of the layers of a model that become float8, and the model."""
    with torch.device("meta"):
        model = torch.nn.Sequential(
            *(torch.nn.Linear(*sizes) for sizes in ((32, 48), (48, 24), (24, 16), (16, 16), (16, 64))),
            torch.nn.LayerNorm(64),
        )
    float8.to_float8(model, model[4], Plan(seq_len=16, precision="fp8", **settings))
    return [name for name, part in model.named_children() if type(part).__name__ == "Float8Linear"], model


@pytest.mark.parametrize("recipe", ["none", "tensorwise", "rowwise"])
def test_linear_layers_of_sizes_that_16_divides_become_float8_except_the_head(recipe):
    names, model = converted(fp8_recipe=recipe)
    assert names == ["0", "3"]
    granularity = model[0].config.cast_config_weight.scaling_granularity.value
    assert granularity == ("axiswise" if recipe == "rowwise" else "tensorwise")
    assert not model[0].config.enable_fsdp_float8_all_gather


def test_weights_are_gathered_in_float8_where_the_plan_says_so():
    _, model = converted(fp8_recipe="tensorwise", fp8_all_gather=True, dp_shard=2)
    assert model[0].config.enable_fsdp_float8_all_gather
    with pytest.raises(ForerunError, match="fp8_all_gather needs fp8_recipe tensorwise in torchao, not rowwise"):
        converted(fp8_recipe="rowwise", fp8_all_gather=True, dp_shard=2)


def test_recipes_that_torchao_lacks_are_refused():
    with pytest.raises(ForerunError, match="fp8_recipe block has no counterpart in torchao; known: tensorwise"):
        converted(fp8_recipe="block")


def test_without_torchao_there_is_no_float8(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ForerunError, match=r"precision fp8: .*tracing it needs torchao"):
        converted()


@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        ({"precision": "fp8", "fp8_recipe": "tensorwise", "fp8_all_gather": True, "dp_shard": 2}, 1),
        ({"precision": "fp8", "fp8_recipe": "tensorwise"}, 0),
        ({}, 0),
    ],
)
def test_scales_are_computed_after_a_step_where_weights_are_gathered_in_float8(monkeypatch, settings, calls):
    seen = []
    monkeypatch.setattr("torchao.float8.precompute_float8_dynamic_scale_for_fsdp", seen.append)
    model = torch.nn.Linear(16, 16, device="meta")
    float8.after_step(model, Plan(seq_len=16, **settings))
    assert seen == [model] * calls
