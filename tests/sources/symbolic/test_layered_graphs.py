"""Layers that read any layers before them: whatever the graph, work is conserved and memory ends where it began."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.program.types import Phase
from forerun.core.program.validate import check
from forerun.describe.model.layer_types import activation, add, batch_norm, conv2d, pool
from forerun.describe.model.layered import INPUT, Layer, LayeredModel
from forerun.sources.symbolic.build import build

from .cases import CLUSTER
from .test_conservation import leak
from .test_layered_programs import flops, plan

SHAPE = (8, 6, 6)


@st.composite
def models(draw: st.DrawFn) -> LayeredModel:
    """Up to 14 layers of one shape; each reads the one before it, any other, or sums several."""
    layers: list[Layer] = []
    for number in range(draw(st.integers(1, 14))):
        name, before = f"l{number}", [INPUT, *(layer.layer_id for layer in layers)]
        reads = (draw(st.sampled_from(before)),) if draw(st.booleans()) else ()
        unit = draw(st.sampled_from(["", "a", "b"]))
        kind = draw(st.sampled_from(["conv", "norm", "relu", "gelu", "dropout", "pool", "add"]))
        if kind == "conv":
            layers.append(conv2d(name, SHAPE, 8, (3, 3), bias=True, reads=reads, unit=unit))
        elif kind == "norm":
            layers.append(batch_norm(name, SHAPE, unit))
        elif kind == "pool":
            layers.append(pool(name, SHAPE, SHAPE, True, unit))
        elif kind == "add":
            summands = draw(st.lists(st.sampled_from(before), min_size=2, max_size=3, unique=True)) if number else []
            layers.append(add(name, SHAPE, tuple(summands) or (INPUT, INPUT), unit))
        else:
            layers.append(activation(name, SHAPE, kind, unit, reads))
    return LayeredModel("graph", tuple(layers))


@settings(max_examples=100)
@given(
    model=models(),
    stack=st.sampled_from(["pytorch-vision", "mxnet-vision", "mxnet-vision-nchw", "megatron-core"]),
    zero_stage=st.sampled_from([0, 1, 3]),
    checkpointing=st.sampled_from(["none", "full", "selective"]),
    n_microbatches=st.sampled_from([1, 2]),
    compiled=st.booleans(),
)
def test_any_graph_is_conserved(
    model: LayeredModel, stack: str, zero_stage: int, checkpointing: str, n_microbatches: int, compiled: bool
) -> None:
    p = plan(
        stack=stack, zero_stage=zero_stage, dp_shard=2, activation_checkpointing=checkpointing,
        n_microbatches=n_microbatches, compile=compiled,
    )  # fmt: skip
    program = build(model, p, CLUSTER)
    check(program)
    assert leak(program) == {}
    samples = p.micro_batch * n_microbatches
    assert flops(program, Phase.FORWARD) == samples * model.forward_flops
    assert flops(program, Phase.BACKWARD) == samples * model.backward_flops
