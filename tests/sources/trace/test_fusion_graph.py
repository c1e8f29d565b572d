"""Graphs of aten operators as ops that fuse, and the kernels that they become, worked out by hand."""

import random

import pytest

torch = pytest.importorskip("torch")

from torch._inductor.choices import InductorChoices  # noqa: E402
from torch._inductor.runtime.hints import DeviceProperties  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from forerun.sources.trace.inside.compiled.fusion_graph import fusion_nodes  # noqa: E402
from forerun.sources.trace.inside.compiled.groups import Access, FusionNode, Kind  # noqa: E402
from forerun.sources.trace.inside.compiled.lowering import _splits  # noqa: E402
from forerun.sources.trace.inside.compiled.plan import steps_of  # noqa: E402

aten = torch.ops.aten
ROWS, COLUMNS = 512, 256
SIZE = ROWS * COLUMNS * 4
POINT, REDUCE, TEMPLATE, EXTERN, VIEW = Kind


def matrix():
    return torch.ones(ROWS, COLUMNS)


def graph_of(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs).graph


def ops_of(function, *inputs):
    return fusion_nodes(graph_of(function, *inputs))[0]


def moved(accesses):
    return [(one.storage, one.size_bytes, one.offset) for one in accesses]


# -- ops -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reduce", "outputs", "reduced", "inner"),
    [
        (lambda x: x.sum(-1), ROWS, COLUMNS, True),
        (lambda x: x.sum(1), ROWS, COLUMNS, True),
        (lambda x: x.sum(0), COLUMNS, ROWS, False),
        (lambda x: x.sum(), 1, ROWS * COLUMNS, True),
        (lambda x: x.mean((0, 1)), 1, ROWS * COLUMNS, True),
        (lambda x: x.amax(-1, keepdim=True), ROWS, COLUMNS, True),
        (lambda x: aten.sum.dim_IntList(x, dim=[0]), COLUMNS, ROWS, False),
        (lambda x: aten.amax(x, dim=[1]), ROWS, COLUMNS, True),
    ],
)
def test_a_reduction_says_how_many_neighbours_it_combines(reduce, outputs, reduced, inner):
    (op,) = ops_of(reduce, matrix())
    assert (op.kind, op.numel, op.reduced, op.inner, op.kept) == (REDUCE, outputs, reduced, inner, True)
    assert (moved(op.reads), moved(op.writes)) == ([(0, SIZE, 0)], [(1, outputs * 4, 0)])


@pytest.mark.parametrize("dim", [0, -1])
def test_dims_of_a_vector_count_from_both_ends(dim):
    (op,) = ops_of(lambda x: aten.sum.dim_IntList(x, [dim]), torch.ones(COLUMNS))
    assert (op.numel, op.reduced, op.inner) == (1, COLUMNS, True)


def test_strides_and_not_dims_say_which_elements_are_neighbours():
    view, turned = ops_of(lambda x: x.t().sum(0), matrix())
    assert (view.kind, turned.reduced, turned.inner) == (VIEW, COLUMNS, True)
    _, one = ops_of(lambda x: x[:1].sum(0), matrix())
    assert (one.reduced, one.inner) == (1, True)
    (scalar,) = ops_of(lambda x: x.sum(), torch.tensor(1.0))
    assert (scalar.numel, scalar.reduced, scalar.inner) == (1, 1, True)


def test_each_operator_has_its_kind():
    ops = ops_of(
        lambda x, y: (
            torch.relu(x @ y).sort(-1)[0],
            x.new_empty(3),
            torch.empty_like(x),
            x.view(-1).clone(),
            aten.bernoulli(x),
        ),
        matrix(),
        torch.ones(COLUMNS, 64),
    )
    kinds = {op.name: op.kind for op in ops}
    assert kinds == {
        "mm": TEMPLATE,
        "relu": POINT,
        "sort": EXTERN,
        "getitem": VIEW,
        "new_empty": VIEW,
        "empty_like": VIEW,
        "view": VIEW,
        "clone": POINT,
        "bernoulli": EXTERN,
    }
    assert next(op.numel for op in ops if op.name == "relu") == ROWS * 64
    kept = {op.name for op in ops if op.kept}
    assert kept == {"sort", "getitem", "new_empty", "empty_like", "clone", "bernoulli"}


def test_operators_of_libraries_run_on_their_own():
    with torch.library._scoped_library("forerun_graph_ops", "DEF") as library:
        library.define("twist(Tensor x) -> Tensor")
        library.impl("twist", lambda x: x.clone(), "CompositeExplicitAutograd")
        (op,) = ops_of(torch.ops.forerun_graph_ops.twist, matrix())
    assert (op.name, op.kind) == ("twist", EXTERN)


def test_parts_of_a_storage_have_its_number_and_a_place_of_their_own():
    split, first, second, op = ops_of(lambda x: x.split(COLUMNS // 2, 1)[1] * 2, matrix())
    half, offset = SIZE // 2, COLUMNS // 2 * 4
    assert moved(split.writes) == [(0, half, 0), (0, half, offset)]
    assert moved(first.reads) == [(0, half, 0)]
    assert moved(second.reads) == moved(second.writes) == moved(op.reads) == [(0, half, offset)]
    assert moved(op.writes) == [(1, half, 0)]
    assert [one.kept for one in (split, second, op)] == [False, False, True]
    _, below = ops_of(lambda x: x[2:] * 2, matrix())
    assert moved(below.reads) == [(0, SIZE - 2 * COLUMNS * 4, 2 * COLUMNS * 4)]


@pytest.mark.parametrize("gather", [lambda t, i: torch.nn.functional.embedding(i, t), lambda t, i: t[i]])
def test_a_gather_reads_the_rows_that_it_takes(gather):
    (op,) = ops_of(gather, torch.ones(1000, 64), torch.zeros(10, dtype=torch.int64))
    assert (op.kind, op.numel) == (POINT, 640)
    assert (moved(op.reads), moved(op.writes)) == ([(0, 2560, 0), (1, 80, 0)], [(2, 2560, 0)])
    few = ops_of(gather, torch.ones(4, 64), torch.zeros(10, dtype=torch.int64))[0]
    assert moved(few.reads) == [(0, 4 * 64 * 4, 0), (1, 80, 0)]  # no more than the table


def test_a_scatter_copies_and_then_adds_to_what_it_hits():
    table, ids, values = torch.ones(1000, 64), torch.zeros(10, dtype=torch.int64), torch.ones(10, 64)
    copy, hit = ops_of(lambda t, i, v: aten.index_put(t, [i], v), table, ids, values)
    assert (copy.kind, copy.numel, copy.kept) == (POINT, 64000, False)
    assert (moved(copy.reads), moved(copy.writes)) == ([(0, 256000, 0)], [(3, 256000, 0)])
    assert (hit.kind, hit.numel, hit.kept) == (POINT, 640, True)
    assert moved(hit.reads) == [(1, 80, 0), (2, 2560, 0), (3, 2560, 0)]
    assert moved(hit.writes) == [(3, 2560, 0)]
    (in_place,) = ops_of(lambda t, i, v: t.index_put_([i], v), table, ids, values)
    assert moved(in_place.reads) == [(1, 80, 0), (2, 2560, 0), (0, 2560, 0)]
    assert (moved(in_place.writes), in_place.kept, in_place.numel) == ([(0, 2560, 0)], True, 640)


def test_an_update_in_place_writes_what_it_changes_and_keeps_it():
    (op,) = ops_of(lambda x, y: x.add_(y), matrix(), matrix())
    assert (moved(op.reads), moved(op.writes)) == ([(0, SIZE, 0), (1, SIZE, 0)], [(0, SIZE, 0)])
    assert (op.kind, op.kept) == (POINT, True)


def test_ops_over_a_tensor_of_a_list_count_as_the_list_does():
    add, *parts, first, second = ops_of(
        lambda a, b: [one * 2 for one in torch._foreach_add([a, b], 1.0)], torch.ones(10), torch.ones(30)
    )
    assert (add.numel, moved(add.writes)) == (10, [(2, 40, 0), (3, 120, 0)])
    assert [part.kind for part in parts] == [VIEW, VIEW]
    assert [(one.numel, one.of_list, moved(one.writes)[0][1]) for one in (first, second)] == [
        (10, True, 40),
        (10, True, 120),
    ]
    (plain,) = ops_of(lambda a: a * 2, torch.ones(30))
    assert (plain.numel, plain.of_list) == (30, False)
    *_, reduced = ops_of(lambda a: torch._foreach_add([a], 1.0)[0].sum(), torch.ones(30))
    assert (reduced.numel, reduced.of_list) == (1, False)


# -- kernels -------------------------------------------------------------------------------------------------------


def described(function, *inputs, donated=()):
    """Name, bytes read and written of each step (nothing where it is recorded as in eager mode), what it leaves in
    memory, and the values whose buffers end with it, also those that never are in memory."""
    found = []
    for step in steps_of(graph_of(function, *inputs), frozenset(donated)):
        kernel = step.kernel
        bytes_moved = None if kernel is None else (kernel.read_bytes, kernel.written_bytes)
        freed = sorted(node.name for buffer in step.freed for node in buffer)
        found.append((step.name, bytes_moved, [node.name for node in step.written], freed))
    return found


def test_what_lies_between_products_is_one_kernel_named_after_its_ops():
    weight = torch.ones(COLUMNS, COLUMNS)
    steps = described(lambda x, w: (torch.relu(x @ w) * 2 + 1) @ w, matrix(), weight)
    assert steps == [
        ("fused_mm", None, ["mm"], []),
        ("fused_relu_mul_add", (SIZE, SIZE), ["add"], ["mm", "mul", "relu"]),
        ("fused_mm", None, ["mm_1"], ["add"]),
    ]


def test_arguments_end_with_their_last_reader_where_they_belong_to_the_graph():
    def program(x, y):
        return torch.relu(x @ y) @ y

    inputs = matrix(), torch.ones(COLUMNS, COLUMNS)
    for donated in ((), (0,), (1,), (0, 1)):
        first = ["x_1"] if 0 in donated else []
        last = ["relu", "y_1"] if 1 in donated else ["relu"]
        assert [step[-1] for step in described(program, *inputs, donated=donated)] == [first, ["mm"], last]


def test_views_of_a_result_keep_its_buffer_until_the_last_of_them():
    def program(x, w):
        y = x @ w
        return torch.relu(y.view(-1).view(ROWS, COLUMNS)) @ w, y.t() @ x

    steps = described(program, matrix(), torch.ones(COLUMNS, COLUMNS))
    assert [(name, freed) for name, _, _, freed in steps] == [
        ("fused_mm", []),
        ("fused_relu", []),
        ("fused_mm", ["relu"]),
        ("fused_mm", ["mm", "t", "view", "view_1"]),
    ]


def test_what_is_returned_is_written_and_does_not_end():
    steps = described(lambda x: (y := torch.relu(x), y + 1), matrix())
    assert steps == [("fused_relu_add", (SIZE, 2 * SIZE), ["relu", "add"], [])]


def test_a_graph_of_views_alone_has_a_step_that_launches_nothing():
    (step,) = steps_of(graph_of(lambda x: x.view(-1), matrix()))
    assert (step.kernel, step.computed, [node.name for node in step.nodes]) == (None, [], ["view"])


def test_a_scatter_of_one_value_has_an_element_for_each_index():
    ids = torch.zeros(32, COLUMNS, dtype=torch.int64)
    copy, hit = ops_of(lambda x, i: x.scatter(0, i, 1.0), matrix(), ids)
    assert (copy.numel, hit.numel) == (ROWS * COLUMNS, 32 * COLUMNS)
    assert moved(hit.writes) == [(copy.writes[0].storage, 32 * COLUMNS * 4, 0)]


def test_the_copy_for_a_scatter_is_made_right_before_it():
    def program(x, w, ids):
        return aten.index_put(aten.full([1000, COLUMNS], 0.0), [ids], x @ w, True)

    steps = described(program, matrix(), torch.ones(COLUMNS, COLUMNS), torch.zeros(ROWS, dtype=torch.int64))
    whole, ids = 1000 * COLUMNS * 4, ROWS * 8
    assert [(name, moved) for name, moved, *_ in steps] == [
        ("fused_mm", None),
        ("fused_full_index_put", (0, whole)),
        ("fused_index_put", (2 * SIZE + ids, SIZE)),
    ]
    assert [written for _, _, written, _ in steps] == [["mm"], ["full"], ["index_put"]]


# -- stages of reductions --------------------------------------------------------------------------------------------


def inductors_splits(numel, reduced, inner):
    """What torch/_inductor/ir.py (Reduction.num_splits) chooses on an H100."""
    if numel == 1:
        inner = True
    elif not inner and (reduced <= 32 or numel >= 132 * 2 * 32):
        return 1
    return InductorChoices.reduction_split_factor(torch.device("cuda"), reduced, numel, inner)


LENGTHS = (
    31,
    32,
    33,
    101,
    1024,
    4096,
    8191,
    8192,
    8193,
    10000,
    16384,
    65537,
    100000,
    131072,
    1000003,
    1 << 20,
    1 << 27,
)


@pytest.mark.parametrize("inner", [True, False])
def test_reductions_have_as_many_stages_as_inductor_gives_them(inner, monkeypatch):
    h100 = DeviceProperties("cuda", 0, 132, 90, major=9, regs_per_multiprocessor=65536, warp_size=32,
                            max_threads_per_multi_processor=2048)  # fmt: skip
    monkeypatch.setattr(DeviceProperties, "create", lambda device: h100)
    chance, several = random.Random(0), 0
    outputs = [
        1,
        2,
        3,
        127,
        128,
        129,
        255,
        256,
        263,
        264,
        1000,
        8447,
        8448,
        *(chance.randint(1, 9000) for _ in range(20)),
    ]
    for reduced in LENGTHS:
        for numel in outputs:
            op = FusionNode("sum", REDUCE, numel, (Access(0, 4),), (Access(1, 4),), reduced, inner)
            expected = inductors_splits(numel, reduced, inner)
            several += expected > 1
            assert _splits(op) == expected, (numel, reduced)
    assert several > 30
