"""Repeated layers are found by structure, and what is left of a shortened model is the same."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from forerun.sources.trace.inside.parallelize.depth import (  # noqa: E402
    blocks,
    keep_repeats,
    layer_containers,
    on_meta,
    repeated_layers,
)


class Layer(nn.Module):
    def __init__(self, number=0, width=8, kind="full", rate=0.0):
        super().__init__()
        self.number, self.kind, self.rate = number, kind, rate
        self.inner = nn.Linear(width, width)
        self.inner.place = number + 5

    def forward(self, x):
        return x + self.inner(x)


class Model(nn.Module):
    def __init__(self, layers, container=nn.ModuleList):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = (
            container(layers) if container is nn.ModuleList else container({str(i): m for i, m in enumerate(layers)})
        )
        self.head = nn.Linear(8, 16)


def run_of(layers, container=nn.ModuleList):
    model = Model(layers, container)
    return model, repeated_layers(model)


@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict])
def test_equal_layers_that_are_only_numbered_are_one_run(container):
    _, run = run_of([Layer(i) for i in range(10)], container)
    assert (run.path, run.first, run.period, run.repeats) == ("layers", 0, 1, 10)


def test_alternating_kinds_are_a_longer_period():
    _, run = run_of([Layer(i, kind="sliding" if i % 3 < 2 else "full") for i in range(12)])
    assert (run.first, run.period, run.repeats) == (0, 3, 4)


def test_a_leading_and_a_trailing_odd_layer_are_kept():
    layers = [Layer(0, kind="dense"), *(Layer(i) for i in range(1, 9)), Layer(9, kind="last")]
    model, run = run_of(layers)
    assert (run.first, run.period, run.repeats) == (1, 1, 8)
    keep_repeats(run, 3)
    assert [layer.kind for layer in model.layers] == ["dense", "full", "full", "full", "last"]
    assert [layer.number for layer in model.layers] == [0, 1, 2, 3, 4]
    assert [layer.inner.place for layer in model.layers] == [5, 6, 7, 8, 9]
    assert [name for name, _ in model.layers.named_children()] == ["0", "1", "2", "3", "4"]


def test_what_differs_from_layer_to_layer_is_no_repetition():
    _, run = run_of([Layer(i, rate=0.1 * i) for i in range(6)])
    assert run is None
    _, run = run_of([Layer(i, width=8 + i) for i in range(6)])
    assert run is None


def test_the_run_with_most_parameters_to_save_counts():
    model = nn.Module()
    model.small = nn.ModuleList([Layer(i, width=4) for i in range(12)])
    model.large = nn.ModuleList([Layer(i, width=64) for i in range(6)])
    run = repeated_layers(model)
    assert (run.path, run.repeats) == ("large", 6)


def test_layers_of_a_sequential_count_and_single_operations_do_not():
    model = nn.Sequential(*[Layer(i) for i in range(5)])
    assert repeated_layers(model).repeats == 5
    assert repeated_layers(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))) is None


def test_containers_inside_layers_are_not_layers():
    class Stack(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.parts = nn.ModuleList([Layer(i) for i in range(3)])

    model = Model([Stack(i) for i in range(4)])
    containers = layer_containers(model)
    assert containers == [model.layers]
    assert [name for _, name in blocks(containers)] == ["0", "1", "2", "3"]
    run = repeated_layers(model)
    assert (run.path, run.repeats) == ("layers", 4)


def test_a_shortened_model_computes_what_a_short_model_does():
    torch.manual_seed(0)
    layers = [Layer(i) for i in range(9)]
    model, run = run_of(layers)
    keep_repeats(run, 2)
    x = torch.randn(3, 8)
    expected = layers[1](layers[0](x))
    for layer in model.layers:
        x = layer(x)
    assert torch.equal(x, expected)


def test_a_model_is_made_without_memory():
    model = on_meta(lambda: Model([Layer(i, width=1 << 14) for i in range(64)]))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert repeated_layers(model).repeats == 64
