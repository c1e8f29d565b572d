"""A compiled optimizer of many parameters is traced from two of each kind, and its recording is the one of all."""

from pathlib import Path

import pytest
from folded_steps import programs, steps_of

pytest.importorskip("torch", reason="tracing needs torch")
PROGRAM = Path(__file__).parent / "equal_parameters.py"
WHOLE = ("AdamW, fused", "AdamW, unlike shapes", "one norm")
"""A fused step breaks the graph; the others have no equal parameters that are independent."""
USUAL = ("AdamW, its learning rate on the device",)
"""The program of the slow tests; the others are of the long ones."""
FOLDED = (
    *USUAL,
    "AdamW",
    "AdamW, loop",
    "AdamW, tied",
    "AdamW, two dtypes",
    "AdamW, groups",
    "AdamW, learning rate in a tensor",
    "Adam, amsgrad",
    "SGD",
    "SGD, momentum",
    "SGD, loop",
    "RMSprop",
    "Adagrad",
    "NAdam",
    "Adamax",
    "an optimizer of its own",
    "clipping",
)


@pytest.fixture(scope="module")
def steps(tmp_path_factory, request):
    return steps_of(PROGRAM, tmp_path_factory.mktemp("parameters"), request, USUAL, ())


@pytest.mark.parametrize("name", programs(FOLDED, USUAL))
def test_a_folded_optimizer_has_the_recording_of_all_its_parameters(steps, name):
    assert steps[name]["graphs"] == 1, "the graph of all parameters comes from that of two of each kind"
    assert steps[name]["different"] == {}


@pytest.mark.parametrize("name", programs(WHOLE, USUAL))
def test_parameters_that_are_not_equal_and_independent_are_compiled_whole(steps, name):
    assert steps[name]["graphs"] == 0
    assert steps[name]["different"] == {}


def update(sizes, rate=None, normalized=False, in_one_piece=False, reverse=False):
    """The graph of an update of parameters of some sizes: p += g * rate, with an operator over lists first and last."""
    from operator import getitem

    import torch
    from torch.fx import Graph

    graph = Graph()
    memory = torch.empty(sum(sizes), device="meta").split(list(sizes))

    def argument(name, value):
        node = graph.placeholder(name)
        node.meta["val"] = value
        return node

    def computed(target, *args, like):
        node = graph.call_function(target, args)
        node.meta["val"] = like.meta["val"]
        return node

    p = [argument(f"p{i}", torch.empty(n, device="meta")) for i, n in enumerate(sizes)]
    g = [argument(f"g{i}", memory[i] if in_one_piece else torch.empty(n, device="meta")) for i, n in enumerate(sizes)]
    rate = 0.1 if rate is None else argument("rate", torch.empty(rate, device="meta"))
    scaled = graph.call_function(torch.ops.aten._foreach_mul, (g, 2.0))
    items = [computed(getitem, scaled, i, like=n) for i, n in enumerate(g)]
    if normalized:
        total = graph.call_function(torch.ops.aten.stack, (items,))
        items = [computed(torch.ops.aten.div, n, total, like=n) for n in items]
    items = [computed(torch.ops.aten.mul, n, rate, like=n) for n in items]
    pairs = list(zip(p, items, strict=True))
    graph.call_function(
        torch.ops.aten._foreach_add_, tuple(map(list, zip(*pairs[:: -1 if reverse else 1], strict=True)))
    )
    graph.output(())
    return graph


def lanes_of(graph, sharing=False):
    from forerun.sources.trace.inside.compiled.lanes import find_lanes

    return find_lanes(graph, lambda node: node.meta.get("val"), sharing)


def test_parameters_of_one_size_are_of_one_kind():
    found = lanes_of(update([4, 8, 4, 4, 8]))
    assert list(found.kinds) == [0, 1, 0, 0, 1]
    assert found.kept() == [0, 1, 2, 4], "the first two of each kind"
    assert {len(nodes) for nodes in found.nodes} == {4}, "parameter, gradient, item of the list, product"


def test_a_rate_that_all_parameters_read_is_shared_only_if_it_is_one_number():
    from forerun.sources.trace.inside.compiled.repeats import NotEqual

    assert list(lanes_of(update([4, 4, 8], rate=()), sharing=True).kinds) == [0, 0, 1]
    for rate, sharing in (((), False), ((4,), True)):
        with pytest.raises(NotEqual):
            lanes_of(update([4, 4, 4], rate=rate), sharing)


@pytest.mark.parametrize("what", ["normalized", "in_one_piece", "reverse"])
def test_what_depends_on_several_parameters_has_no_lanes(what):
    from forerun.sources.trace.inside.compiled.repeats import NotEqual

    with pytest.raises(NotEqual):
        lanes_of(update([4, 4, 4], **{what: True}))
