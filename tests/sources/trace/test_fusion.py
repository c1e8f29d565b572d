"""Kernels that a compiled region becomes: cases worked out by hand, and Inductor's own scheduler on the same graphs."""

import json
import random
import subprocess
import sys
import textwrap
import time

import pytest

from forerun.sources.trace.inside.compiled.fusion import fuse
from forerun.sources.trace.inside.compiled.groups import Access, FusionNode, Kind

ROWS, WIDTH = 512, 256
BIG, ROW = ROWS * WIDTH, ROWS
HALF, FULL = 2, 4
"""bytes of bf16 and fp32"""


class Region:
    """Writes ops down as a tracer would: every op makes a new storage."""

    def __init__(self):
        self.nodes, self.storages = [], 0

    def given(self, elements, width=HALF):
        self.storages += 1
        return Access(self.storages, elements * width)

    def op(self, kind, reads, elements, width=HALF, **options):
        out = self.given(elements, width)
        name = options.pop("name", kind.name.lower())
        self.nodes.append(FusionNode(name, kind, elements, tuple(reads), (out,), **options))
        return out

    def point(self, *reads, elements=BIG, width=FULL, kept=False):
        return self.op(Kind.POINTWISE, reads, elements, width, kept=kept)

    def reduce(self, *reads, elements=ROW, reduced=WIDTH, width=FULL, inner=True, kept=False):
        return self.op(Kind.REDUCTION, reads, elements, width, reduced=reduced, inner=inner, kept=kept)

    def product(self, *reads, elements=BIG):
        return self.op(Kind.TEMPLATE, reads, elements)

    def kernels(self):
        return [(group.kind, group.read_bytes, group.written_bytes) for group in fuse(self.nodes)]

    def rmsnorm(self, x, weight, kept_statistics=True):
        wide = self.point(x)
        mean = self.reduce(self.point(wide))
        scale = self.point(mean, elements=ROW, kept=kept_statistics)
        return wide, scale, self.point(self.point(wide, scale), weight, width=HALF, kept=True)


def test_rmsnorm_is_one_kernel_that_reads_its_input_once():
    region = Region()
    region.rmsnorm(region.given(BIG), region.given(WIDTH))
    read, written = BIG * HALF + WIDTH * HALF, BIG * HALF + ROW * FULL
    assert region.kernels() == [(Kind.REDUCTION, read, written)]


def test_residual_and_norm_are_one_kernel_that_writes_the_sum_too():
    region = Region()
    x, y = region.given(BIG), region.given(BIG)
    total = region.point(x, y, width=HALF, kept=True)
    region.rmsnorm(total, region.given(WIDTH))
    read, written = 2 * BIG * HALF + WIDTH * HALF, 2 * BIG * HALF + ROW * FULL
    assert region.kernels() == [(Kind.REDUCTION, read, written)]


def test_a_gated_unit_is_one_kernel_between_its_products():
    region = Region()
    x = region.given(BIG)
    gate, up = region.product(x), region.product(x)
    wide = region.point(gate)
    silu = region.point(region.point(wide, region.point(wide)), width=HALF)
    region.product(region.point(silu, up, width=HALF))
    kinds = [kind for kind, _, _ in region.kernels()]
    assert kinds == [Kind.TEMPLATE, Kind.TEMPLATE, Kind.POINTWISE, Kind.TEMPLATE]
    assert region.kernels()[2][1:] == (2 * BIG * HALF, BIG * HALF)


def test_rotations_of_queries_and_keys_share_their_angles_in_one_kernel():
    region = Region()
    q, k, cos, sin = region.given(BIG), region.given(BIG), region.given(BIG // 8, FULL), region.given(BIG // 8, FULL)
    for x in (q, k):
        wide = region.point(x)
        region.point(region.point(wide, cos), region.point(wide, sin), width=HALF, kept=True)
    angles = 2 * (BIG // 8) * FULL
    assert region.kernels() == [(Kind.POINTWISE, 2 * BIG * HALF + angles, 2 * BIG * HALF)]


def test_softmax_is_one_kernel():
    region = Region()
    x = region.given(BIG)
    wide = region.point(x)
    shifted = region.point(region.point(wide, region.reduce(wide)))
    region.point(shifted, region.reduce(shifted), width=HALF, kept=True)
    assert region.kernels() == [(Kind.REDUCTION, BIG * HALF, BIG * HALF)]


def test_cross_entropy_is_a_kernel_for_rows_and_one_for_the_mean():
    region = Region()
    scores, target = region.given(BIG), region.given(ROW, 8)
    wide = region.point(scores)
    top = region.reduce(wide)
    log_sum = region.point(region.reduce(region.point(wide, top)), elements=ROW)
    picked = region.point(Access(scores.storage, ROW * HALF), target, elements=ROW)
    loss = region.point(picked, top, log_sum, elements=ROW)
    region.reduce(loss, elements=1, reduced=ROW, kept=True)
    kernels = region.kernels()
    assert [kind for kind, _, _ in kernels] == [Kind.REDUCTION, Kind.REDUCTION]
    assert kernels[-1][2] == FULL
    assert sum(read for _, read, _ in kernels) <= BIG * HALF + ROW * 8 + 4 * ROW * FULL


def norm_backward(rows, width):
    """Gradients of an RMS norm: of its input, by rows, and of its weight, by columns."""
    region = Region()
    big = rows * width
    gradient, x = region.given(big), region.given(big)
    scale, weight = region.given(rows, FULL), region.given(width)
    wide, normed = region.point(gradient, elements=big), region.point(x, scale, elements=big)
    region.reduce(
        region.point(wide, normed, elements=big), elements=width, reduced=rows, inner=False, width=HALF, kept=True
    )
    scaled = region.point(wide, weight, elements=big)
    mean = region.reduce(region.point(scaled, x, elements=big), elements=rows, reduced=width)
    region.point(scaled, x, mean, scale, elements=big, width=HALF, kept=True)
    return region.kernels(), big


def test_the_backward_of_a_small_norm_sums_its_weight_gradient_in_two_stages():
    kernels, big = norm_backward(ROWS, WIDTH)
    assert [kind for kind, _, _ in kernels] == [Kind.REDUCTION] * 3
    assert sum(read for _, read, _ in kernels) > 4 * big * HALF


def test_the_backward_of_a_large_norm_passes_once_over_its_input():
    kernels, big = norm_backward(16384, 1024)
    assert [kind for kind, _, _ in kernels] == [Kind.REDUCTION] * 2
    assert kernels[0][1] == pytest.approx(2 * big * HALF, rel=0.01)


def test_an_input_that_is_changed_in_place_is_written_though_nothing_reads_it_again():
    region = Region()
    x = region.given(BIG)
    region.nodes.append(FusionNode("add_", Kind.POINTWISE, BIG, (x,), (x,)))
    assert region.kernels() == [(Kind.POINTWISE, BIG * HALF, BIG * HALF)]


def test_what_the_backward_pass_keeps_is_written():
    region = Region()
    x = region.given(BIG)
    first = region.point(x, kept=True)
    region.point(first, kept=True)
    assert region.kernels() == [(Kind.POINTWISE, BIG * HALF, 2 * BIG * FULL)]


def test_a_large_op_that_is_read_by_two_kernels_is_not_computed_twice():
    region = Region()
    many = [region.given(BIG) for _ in range(7)]
    total = region.point(*many)
    region.product(region.point(total, width=HALF))
    region.reduce(total, elements=WIDTH, reduced=ROWS, inner=False, kept=True)
    kernels = region.kernels()
    assert sum(read for _, read, _ in kernels[:1]) == 7 * BIG * HALF
    assert sum(kernel[1] >= 7 * BIG * HALF for kernel in kernels) == 1


def test_a_small_op_that_is_read_by_two_kernels_is_computed_in_both():
    region = Region()
    x = region.given(BIG)
    wide = region.point(x)
    region.product(region.point(wide, width=HALF))
    region.reduce(wide, elements=WIDTH, reduced=ROWS, inner=False, kept=True)
    groups = fuse(region.nodes)
    assert sum(0 in group.nodes for group in groups) >= 2
    assert all(group.written_bytes < BIG * FULL for group in groups)


def test_kernels_of_libraries_are_never_fused_and_keep_their_order():
    region = Region()
    x = region.given(BIG)
    y = region.point(region.product(region.point(x, width=HALF)), width=HALF)
    region.op(Kind.EXTERN, [y], BIG, kept=True)
    assert [kind for kind, _, _ in region.kernels()] == [Kind.POINTWISE, Kind.TEMPLATE, Kind.POINTWISE, Kind.EXTERN]


def test_fusion_makes_no_circle():
    region = Region()
    x = region.given(BIG)
    first = region.point(x, width=HALF, kept=True)
    product = region.product(first)
    region.point(first, product, x, width=HALF, kept=True)
    assert [kind for kind, _, _ in region.kernels()] == [Kind.POINTWISE, Kind.TEMPLATE, Kind.POINTWISE]


def test_an_update_in_place_follows_every_earlier_read():
    region = Region()
    weight, gradient = region.given(BIG), region.given(BIG)
    region.product(weight)
    read = FusionNode("add_", Kind.POINTWISE, BIG, (weight, gradient), (weight,))
    late = FusionNode("mm", Kind.TEMPLATE, BIG, (weight,), (Access(99, BIG * HALF),), kept=True)
    region.nodes += [read, late]
    region.nodes[0] = FusionNode("mm", Kind.TEMPLATE, BIG, (weight,), region.nodes[0].writes, kept=True)
    assert [group.nodes for group in fuse(region.nodes)] == [(0,), (1,), (2,)]
    assert region.kernels()[1] == (Kind.POINTWISE, 2 * BIG * HALF, BIG * HALF)


def test_views_launch_nothing_and_pass_on_that_they_are_kept():
    region = Region()
    x = region.given(BIG)
    y = region.point(x, width=HALF)
    region.nodes.append(FusionNode("view", Kind.VIEW, BIG, (y,), (y,), kept=True))
    assert region.kernels() == [(Kind.POINTWISE, BIG * HALF, BIG * HALF)]


def test_what_nobody_reads_is_left_out():
    region = Region()
    region.point(region.given(BIG))
    assert region.kernels() == []


def test_slices_of_a_storage_are_told_apart_and_whole_reads_hold_them():
    region = Region()
    both = region.given(2 * BIG)
    left, right = Access(both.storage, BIG * HALF), Access(both.storage, BIG * HALF, WIDTH * HALF)
    region.point(left, right, width=HALF, kept=True)
    assert region.kernels()[0][1] == 2 * BIG * HALF
    region.point(both, left, width=HALF, kept=True)
    assert region.kernels()[0][1] == 2 * BIG * HALF


# -- the limits of compiled/inductor.yaml ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns", "mixed"),
    [
        (5120, 1024, True),  # as many elements as a kernel over rows and columns needs
        (5119, 1024, False),
        (4096, 1280, True),  # as many rows
        (4095, 1290, False),
        (6000, 3000, True),  # twice as many rows as columns
        (5999, 3000, False),
        (32768, 16384, True),  # as many columns
        (32770, 16385, False),
    ],
)
def test_sums_over_rows_and_over_columns_of_a_large_matrix_are_one_kernel(rows, columns, mixed):
    kernels, big = norm_backward(rows, columns)
    stages = 1 if columns >= 132 * 64 else 2
    assert len(kernels) == (stages if mixed else stages + 1)
    reads = [read for _, read, _ in kernels]
    assert sum(read > 1.9 * big * HALF for read in reads) == (1 if mixed else 2)


@pytest.mark.parametrize(("reads", "kernels"), [(8, 1), (9, 2)])
def test_an_op_of_at_most_8_reads_is_computed_inside_its_only_reader(reads, kernels):
    region = Region()
    total = region.point(*[region.given(BIG) for _ in range(reads)])
    region.reduce(total, elements=WIDTH, reduced=16, inner=False, kept=True)
    found = region.kernels()
    assert len(found) == kernels
    assert found[0][1] == reads * BIG * HALF
    assert found[-1][1] == (reads * BIG * HALF if kernels == 1 else BIG * FULL)


@pytest.mark.parametrize(("reads", "copies"), [(4, 2), (5, 1)])
def test_an_op_of_at_most_4_reads_is_computed_again_for_each_reader(reads, copies):
    region = Region()
    total = region.point(*[region.given(BIG) for _ in range(reads)])
    region.product(region.point(total, width=HALF))
    region.reduce(total, elements=WIDTH, reduced=16, inner=False, kept=True)
    groups = fuse(region.nodes)
    assert sum(0 in group.nodes for group in groups) == copies
    assert sum(group.read_bytes >= reads * BIG * HALF for group in groups) == copies


@pytest.mark.parametrize(("ops", "kernels"), [(64, 1), (65, 2), (128, 2), (129, 3)])
def test_a_kernel_has_at_most_64_ops_that_write(ops, kernels):
    region = Region()
    x = region.given(BIG)
    for _ in range(ops):
        x = region.point(x, width=HALF, kept=True)
    found = region.kernels()
    assert len(found) == kernels
    assert sum(written for _, _, written in found) == ops * BIG * HALF
    assert sum(read for _, read, _ in found) == kernels * BIG * HALF


@pytest.mark.parametrize(("between", "kernels"), [(63, 1), (64, 2)])
def test_kernels_far_from_each_other_that_read_the_same_stay_apart(between, kernels):
    region = Region()
    x = region.given(BIG)
    region.point(x, kept=True)
    for number in range(between):
        region.point(region.given(number + 1), elements=number + 1, kept=True)
    region.point(x, kept=True)
    assert sum(read == BIG * HALF for _, read, _ in region.kernels()) == kernels


@pytest.mark.parametrize(("elements", "kernels"), [(5, 1), (4, 2)])
def test_kernels_that_share_a_few_bytes_stay_apart(elements, kernels):
    region = Region()
    small = region.given(elements)
    for _ in range(2):
        region.point(small, region.given(BIG), width=HALF, kept=True)
    found = region.kernels()
    assert len(found) == kernels
    assert sum(read for _, read, _ in found) == 2 * BIG * HALF + kernels * elements * HALF


def test_reductions_over_other_elements_stay_apart():
    for other, kernels in (({"elements": ROW, "reduced": WIDTH}, 1), ({"elements": ROW // 2, "reduced": 2 * WIDTH}, 2)):
        region = Region()
        x = region.given(BIG)
        region.reduce(x, kept=True)
        region.reduce(x, kept=True, **other)
        assert len(region.kernels()) == kernels


def test_parts_of_a_storage_that_overlap_are_read_once_only_where_one_is_inside_another():
    region = Region()
    storage = region.given(4 * BIG).storage
    size = BIG * HALF
    parts = [Access(storage, 2 * size, size), Access(storage, size, size), Access(storage, size, 2 * size)]
    region.point(*parts, kept=True)
    assert region.kernels()[0][1] == 2 * size
    across = [Access(storage, 2 * size, size), Access(storage, size, 2 * size + 2), Access(storage, size, size - 2)]
    region = Region()
    region.point(*across, kept=True)
    assert region.kernels()[0][1] == 4 * size


def random_region(seed, size):
    chance, region = random.Random(seed), Region()
    made = [region.given(BIG) for _ in range(3)]
    for _ in range(size):
        reads = chance.sample(made[-12:], min(len(made), chance.randint(1, 3)))
        kind = chance.random()
        if kind < 0.7:
            made.append(region.point(*reads, width=HALF, kept=chance.random() < 0.1))
        elif kind < 0.85:
            region.point(region.reduce(*reads), reads[0], width=HALF, kept=True)
        else:
            made.append(region.product(*reads))
    return region


@pytest.mark.parametrize("seed", range(40))
def test_kernels_run_in_an_order_in_which_all_inputs_are_there(seed):
    region = random_region(seed, 120)
    groups = fuse(region.nodes)
    given = {a.storage for n in region.nodes for a in n.reads} - {a.storage for n in region.nodes for a in n.writes}
    there = set(given)
    for group in groups:
        computed = set(there)
        for index in group.nodes:
            node = region.nodes[index]
            assert {a.storage for a in node.reads} <= computed
            computed |= {a.storage for a in node.writes}
        there = computed
    kept = {i for i, node in enumerate(region.nodes) if node.kept}
    assert kept <= {i for group in groups for i in group.nodes}
    unfused = sum(a.size_bytes for n in region.nodes for a in (*n.reads, *n.writes))
    assert sum(group.read_bytes + group.written_bytes for group in groups) < unfused


def least_seconds_of_a_fusion(size):
    """The least of three, as a collection of garbage or a neighbour on the core may hit any single one."""
    region, took = random_region(1, size), []
    for _ in range(3):
        start = time.process_time()
        fuse(region.nodes)
        took.append(time.process_time() - start)
    return min(took)


def test_the_time_of_a_fusion_grows_with_its_ops_and_not_with_their_square():
    assert least_seconds_of_a_fusion(4800) < 8 * least_seconds_of_a_fusion(1200)


INDUCTOR = """
    import json, os, sys
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    from torch._subclasses.fake_tensor import FakeTensorMode
    from forerun.sources.trace.inside.device import cuda_module, virtual_device
    from forerun.sources.trace.inside.device.attention_choice import install
    from forerun.sources.trace.inside.device.machine import VirtualCuda
    from forerun.sources.trace.inside.recorder import Recorder

    torch.autograd.set_multithreading_enabled(False)
    recorder = Recorder(0, 1, 8)
    machine = VirtualCuda(8, lambda stream: 7, lambda event, stream: 0, lambda: 0)
    machine.install()
    recorder.current_stream = machine.stream
    cuda_module.install(machine, recorder, virtual_device.device("h100"))
    exchange = torch.cuda._exchange_device
    torch.cuda._maybe_exchange_device = lambda index: exchange(index)  # dynamo tells handlers apart by identity
    FakeTensorMode.avoid_device_init = property(lambda mode: True)
    install((9, 0))

    from torch._inductor import compile_fx, config
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from forerun.sources.trace.inside.compiled.fusion import fuse
    from forerun.sources.trace.inside.compiled.fusion_graph import fusion_nodes

    config.joint_graph_constant_folding = False  # it asks fakes for their values
    found = []

    def compare(gm, inputs, **options):
        inference, backward = bool(options.get("is_inference")), bool(options.get("is_backward"))
        compile_fx._recursive_record_original_output_strides(gm)
        view_to_reshape(gm)
        with torch.no_grad():
            mode = compile_fx.fake_tensor_prop(gm, inputs)
        with V.set_fake_mode(mode):
            compile_fx._recursive_post_grad_passes(gm, is_inference=inference)
        ours = [g.read_bytes + g.written_bytes for g in fuse(fusion_nodes(gm.graph)[0])]
        with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
            graph = GraphLowering(
                gm, example_inputs=inputs, shape_env=mode.shape_env, is_inference=inference, is_backward=backward
            )
            with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
                graph.run(*inputs)
                graph.init_wrapper_code()
                graph._update_scheduler()
                theirs = [node.get_read_write_buffers_sizes() for node in graph.scheduler.nodes]
        found.append([[n for n in ours if n], [n for n in theirs if n]])

        def run(args):
            given = list(args)
            args.clear()
            return gm(*given)

        run._boxed_call = True
        return run

    class Llama(nn.Module):
        def __init__(self, width, heads, hidden):
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
            self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
            self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
            self.down = nn.Linear(hidden, width, bias=False)

        @staticmethod
        def rotate(x, cos, sin):
            a, b = x.float().chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).type_as(x)

        def forward(self, x, cos, sin):
            batch, seq, width = x.shape
            h = self.norm1(x)
            q, k, v = (f(h).view(batch, seq, self.heads, -1) for f in (self.q, self.k, self.v))
            q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
            y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
            x = x + self.o(y.transpose(1, 2).reshape(batch, seq, width))
            h = self.norm2(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    class Gpt(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.a, self.b = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            batch, seq, width = x.shape
            parts = self.qkv(self.norm1(x)).split(width, -1)
            q, k, v = (t.view(batch, seq, self.heads, -1).transpose(1, 2) for t in parts)
            scores = (q @ k.transpose(-1, -2)) * 0.125
            y = F.dropout(F.softmax(scores, -1), 0.1) @ v
            x = x + F.dropout(self.o(y.transpose(1, 2).reshape(batch, seq, width)), 0.1)
            return x + F.dropout(self.b(F.gelu(self.a(self.norm2(x)))), 0.1)

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = (nn.Conv2d(64, 64, 3, padding=1, bias=False) for _ in range(2))
            self.norm1, self.norm2 = nn.BatchNorm2d(64), nn.BatchNorm2d(64)

        def forward(self, x):
            return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))

    def cases():
        wide = torch.float32
        for sizes, seq in (((512, 8, 1408), 256), ((4096, 32, 14336), 8192)):
            half = sizes[0] // sizes[1] // 2
            x = torch.empty(2, seq, sizes[0], requires_grad=True)
            yield Llama(*sizes), (x, torch.empty(seq, 1, half, dtype=wide), torch.empty(seq, 1, half, dtype=wide))
        yield Gpt(768, 12), (torch.empty(4, 1024, 768, requires_grad=True),)
        yield Residual(), (torch.empty(32, 64, 56, 56, requires_grad=True),)

    with FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True):
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            all_cases = list(cases())
        torch.set_default_dtype(torch.float32)
        for model, inputs in all_cases:
            compiled = torch.compile(
                model, backend=lambda gm, given: compile_fx.compile_fx(gm, given, inner_compile=compare)
            )
            compiled(*inputs).sum().backward()
    print(json.dumps(found), flush=True)
    os._exit(0)
"""
GRAPHS = [f"{model} {part}" for model in ("llama", "llama-8b", "gpt", "resnet") for part in ("forward", "backward")]


@pytest.mark.slow
def test_kernels_and_bytes_are_those_of_inductors_own_scheduler():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(INDUCTOR)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(zip(GRAPHS, json.loads(done.stdout.splitlines()[-1]), strict=True))
    for name, (ours, theirs) in found.items():
        assert len(ours) == pytest.approx(len(theirs), rel=0.1), name
        assert sum(ours) == pytest.approx(sum(theirs), rel=0.08), name
    for name in ("llama forward", "llama backward", "llama-8b forward"):
        assert sorted(found[name][0]) == sorted(found[name][1]), name
