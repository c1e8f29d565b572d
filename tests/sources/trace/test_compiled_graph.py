"""A compiled graph frees its arguments and its values where Inductor's code does."""

import pytest
from virtual_process import run_virtual

from forerun.core.program.types import Category

pytest.importorskip("torch", reason="tracing needs torch")
SIDE = 256
SIZE = SIDE * SIDE * 4


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_virtual(
        """
        import weakref
        from forerun.sources.trace.inside.compiled.graph import CompiledGraph
        from forerun.sources.trace.inside.compiled.places import Places
        from forerun.sources.trace.inside.modules import Modules
        aten = torch.ops.aten

        def graph_of(build, count):
            "A graph of `count` arguments, with the values of its nodes."
            graph, nodes = torch.fx.Graph(), []
            def node(made, value):
                made.meta["val"] = value
                nodes.append(made)
                return made
            def call(target, *args, **kwargs):
                values = torch.fx.node.map_arg(args, lambda one: one.meta["val"])
                return node(graph.call_function(target, args, kwargs), target(*values, **kwargs))
            given = [node(graph.placeholder(f"x{i}"), matrix()) for i in range(count)]
            graph.output(tuple(build(call, *given)))
            return torch.fx.GraphModule({}, graph)

        def matrix():
            return torch.empty(256, 256, device="cuda")

        places = Places(Modules())
        def run(name, build, count, **settings):
            recorder.paused += 1
            gm = graph_of(build, count)
            recorder.paused -= 1
            made = CompiledGraph(gm, mode, recorder, places, **settings)
            args = [matrix() for _ in range(count)]
            storages = [weakref.ref(one.untyped_storage()) for one in args]
            recorder.start()
            before = recorder.memory.allocated_bytes
            recorder.memory.peak_bytes = before
            out = made(args)
            names = [row[0] for row in nodes()]
            result[name] = [len(args), names, recorder.memory.peak_bytes - before,
                            recorder.memory.allocated_bytes - before, [one() is None for one in storages]]
            return out

        def chain(call, x, w):
            y = call(aten.mm.default, x, w)
            z = call(aten.mm.default, y, w)
            return [call(aten.mm.default, z, w)]
        run("products", chain, 2)
        run("unused", lambda call, x, w, other: chain(call, x, w), 3)

        def waves(call, x):
            y = call(aten.mm.default, x, x)
            return [call(aten.cos.default, call(aten.sin.default, y))]
        run("overwritten", waves, 1)
        run("donated", lambda call, x: [call(aten.sin.default, x)], 1, donated=frozenset([0]))
        run("kept", lambda call, x: [call(aten.sin.default, x)], 1)
        def made_as():
            return [row.purpose() for row in recorder.memory.of_step() if row.alloc >= 0]
        plain = run("plain", lambda call, x: [call(aten.mm.default, x, x)], 1)
        result["plain category"] = made_as()
        pooled = run("pooled", lambda call, x: [call(aten.mm.default, x, x)], 1, pooled=True)
        result["pooled category"] = made_as()
        result["after"] = [recorder.memory.category, recorder.compiled, recorder.recomputing]
        def failing(call, x):
            return [call(torch.ops.aten.sin.default, x)]
        recorder.paused += 1
        gm = graph_of(failing, 1)
        recorder.paused -= 1
        next(n for n in gm.graph.nodes if n.op == "call_function").target = aten.mm.default
        made = CompiledGraph(gm, mode, recorder, places)
        result["failed"] = fails(lambda: made([matrix()])).split(":")[0]
        result["restored"] = [recorder.compiled, recorder.paused, recorder.memory.category]
        """,
        tmp_path_factory.mktemp("graph"),
    )


@pytest.mark.parametrize(
    ("name", "kernels", "peak", "left"),
    [
        ("products", ["mm"] * 3, 1, -1),  # the first argument ends with the first product
        ("unused", ["mm"] * 3, 0, -2),  # what nothing reads ends before
        ("overwritten", ["mm", "fused_sin_cos"], 1, 0),
        ("donated", ["fused_sin"], 0, 0),
        ("kept", ["fused_sin"], 1, 0),
        ("plain", ["mm"], 1, 0),
    ],
)
def test_memory_ends_with_its_last_reader_or_is_written_over(answers, name, kernels, peak, left):
    arguments, names, most, more, gone = answers[name]
    assert names == kernels
    assert (most, more) == (peak * SIZE, left * SIZE)
    assert (arguments, set(gone)) == (0, {True}), "the list of arguments is emptied"


def test_what_a_cuda_graph_makes_is_of_its_pool(answers):
    assert answers["plain category"] == [Category.TEMPORARY]
    assert answers["pooled category"] == [Category.GRAPH_POOL]
    assert answers["after"] == [-1, 0, False]


def test_a_graph_that_fails_leaves_the_recorder_as_it_was(answers):
    assert answers["failed"] in ("RuntimeError", "TypeError")
    assert answers["restored"] == [0, 0, -1]
