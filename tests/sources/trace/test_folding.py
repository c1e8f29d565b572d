"""A compiled model of many equal blocks is traced from five of them, and its recording is the one of all blocks."""

from pathlib import Path

import pytest
from folded_steps import programs, steps_of

pytest.importorskip("torch", reason="tracing needs torch")
PROGRAM = Path(__file__).parent / "equal_blocks.py"
FOLDED = ("gpt", "two kinds", "llama", "recomputed")
WHOLE = ("one block again and again", "skips", "hidden states", "few", "scaled", "dropout")
USUAL = ("gpt",)
"""The program of the slow tests; the others are of the long ones."""


@pytest.fixture(scope="module")
def steps(tmp_path_factory, request):
    return steps_of(PROGRAM, tmp_path_factory.mktemp("folding"), request, USUAL, (*FOLDED, *WHOLE))


@pytest.mark.parametrize("name", programs(FOLDED, USUAL))
def test_a_folded_model_has_the_recording_of_all_its_blocks(steps, name):
    assert steps[name]["graphs"] == 1, "forward and backward graph of all blocks come from those of five"
    assert steps[name]["different"] == {}


@pytest.mark.parametrize("name", programs(WHOLE, USUAL))
def test_blocks_that_are_not_equal_are_compiled_whole(steps, name):
    assert steps[name]["graphs"] == 0
    assert steps[name]["different"] == {}


def spread(short, count, template=2):
    """A sequence of a graph of five blocks, such as "1a 2a x", in a graph of `count` blocks."""
    from forerun.sources.trace.inside.compiled.replicate import spread

    def block(item):
        return int(item[0]) if item[0].isdigit() else None

    found = spread(short.split(), block, count, template)
    return " ".join(item if number is None else f"{number}{item[1:]}" for item, number in found)


def test_blocks_between_follow_in_the_order_of_the_inner_ones():
    assert spread("x 0a 1a 1b 2a 2b 3a y", 7) == "x 0a 1a 1b 2a 2b 3a 3b 4a 4b 5a y"
    assert spread("4a 3a 2a 1a 0a", 7, template=1) == "6a 5a 4a 3a 2a 1a 0a"
    assert spread("1a 2a 3a 3b 2b 1b", 6) == "1a 2a 3a 4a 4b 3b 2b 1b"


def test_what_alternates_between_two_blocks_does_so_between_any_two():
    assert spread("2a 2b 1a 2c 1b 1c", 6, template=1) == "3a 3b 2a 3c 2b 1a 2c 1b 1c"
    assert spread("1a 1b 2a 1c 2b 2c", 6) == "1a 1b 2a 1c 2b 3a 2c 3b 3c"


@pytest.mark.parametrize("short", ["1a 1b 2a", "1a 2a 2b", "1a 2a 1b 1c 2b"])
def test_blocks_of_which_one_has_more_are_not_equal(short):
    from forerun.sources.trace.inside.compiled.repeats import NotEqual

    with pytest.raises(NotEqual):
        spread(short, 8)


def graph_of(numbers):
    """A graph that multiplies by each of `numbers` in turn and adds a parameter of its own each time."""
    import torch

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    weights = [graph.placeholder(f"w{place}") for place in range(len(numbers))]
    for weight, number in zip(weights, numbers, strict=True):
        x = graph.call_function(torch.add, (graph.call_function(torch.mul, (x, number)), weight))
    graph.output((x,))
    return torch.fx.GraphModule({}, graph)


def test_equal_blocks_are_found_and_shortened_to_five():
    import torch

    from forerun.sources.trace.inside.compiled.repeats import find_repeats

    whole = graph_of([3.0, *[2.0] * 9, 5.0])
    repeats = find_repeats(whole)
    assert (repeats.period, repeats.count) == (2, 9)
    short, positions = repeats.shortened(whole)
    kept = [3.0, *[2.0] * 5, 5.0]
    inputs = [torch.tensor(float(number)) for number in range(12)]
    assert positions[:2] == [0, 1]
    assert positions[-1] == 11
    assert len(positions) == 1 + len(kept)
    expected = inputs[0]
    for number, position in zip(kept, positions[1:], strict=True):
        expected = expected * number + inputs[position]
    assert short(*[inputs[position] for position in positions])[0] == expected


@pytest.mark.parametrize("numbers", [[2.0] * 7, [float(number) for number in range(12)]])
def test_few_or_unequal_blocks_are_not_shortened(numbers):
    from forerun.sources.trace.inside.compiled.repeats import find_repeats

    assert find_repeats(graph_of(numbers)) is None


def short_graph(third):
    """A forward graph of five blocks h * a + b, of which `third(graph, earlier, a, b)` makes the third."""
    import torch

    def value(rows=4):
        return torch.empty(rows, device="meta")

    graph, owned = torch.fx.Graph(), {}
    h = graph.placeholder("x")
    h.meta["val"] = value()
    pairs = []
    for block in range(5):
        pair = [graph.placeholder(f"{name}{block}") for name in "ab"]
        for number, node in enumerate(pair):
            node.meta["val"] = value()
            owned[node] = block, number
        pairs.append(pair)
    earlier = [h]
    for block, (a, b) in enumerate(pairs):
        make = third if block == 2 else usual
        earlier.append(make(graph, earlier, a, b))
    graph.output((earlier[-1],))
    for node in graph.nodes:
        node.meta.setdefault("val", value())
    return torch.fx.GraphModule({}, graph), owned


def usual(graph, earlier, a, b):
    import torch

    product = graph.call_function(torch.mul, (earlier[-1], a))
    return graph.call_function(torch.add, (product, b))


def test_nodes_belong_to_the_last_block_that_they_read():
    from forerun.sources.trace.inside.compiled.replicate import blocks_of

    gm, owned = short_graph(usual)
    blocks = blocks_of(gm, owned, backward=False)
    assert [blocks.of.get(node, -1) for node in blocks.nodes] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [blocks.number[node] for node in blocks.nodes] == [10, 11] * 5
    assert blocks.template == 2


def test_constants_belong_to_the_only_block_that_reads_them():
    import torch

    from forerun.sources.trace.inside.compiled.replicate import Blocks

    gm, owned = short_graph(usual)
    graph = gm.graph
    for total in [node for node in graph.nodes if node.target is torch.add]:
        with graph.inserting_before(total):
            constant = graph.call_function(torch.ones, (4,))
            scaled = graph.call_function(torch.div, (total.args[0], constant))
        constant.meta["val"] = scaled.meta["val"] = torch.empty(4, device="meta")
        total.args = (scaled, total.args[1])
    blocks = Blocks(gm, owned, backward=False, constants=True)
    own = [blocks.of.get(node) for node in blocks.nodes if node.target is torch.ones]
    assert own == [0, 1, 2, 3, 4]


def other(operator="add", literal=None, back=1, swapped=False, more=False, rows=4):
    def make(graph, earlier, a, b):
        import torch

        a, b = (b, a) if swapped else (a, b)
        product = graph.call_function(torch.mul, (earlier[-back], a if literal is None else literal))
        product.meta["val"] = torch.empty(rows, device="meta")
        if more:
            product = graph.call_function(torch.neg, (product,))
        return graph.call_function(getattr(torch, operator), (product, b))

    return make


@pytest.mark.parametrize(
    "third",
    [{"operator": "sub"}, {"literal": 2.0}, {"back": 2}, {"swapped": True}, {"more": True}, {"rows": 5}],
    ids=lambda given: next(iter(given)),
)
def test_inner_blocks_that_differ_are_not_equal(third):
    from forerun.sources.trace.inside.compiled.repeats import NotEqual
    from forerun.sources.trace.inside.compiled.replicate import blocks_of

    gm, owned = short_graph(other())
    blocks_of(gm, owned, backward=False)
    gm, owned = short_graph(other(**third))
    with pytest.raises(NotEqual):
        blocks_of(gm, owned, backward=False)
