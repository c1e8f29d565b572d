"""Kernels that torch does not know, described with `forerun.kernels`, against costs by hand."""

from __future__ import annotations

import textwrap

import pytest

from forerun import kernels
from forerun.common.errors import ForerunError
from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.counts import op_counts
from forerun.core.program.kinds import OpKind
from forerun.core.program.storage import load
from forerun.interfaces.cli.main import run
from forerun.sources.trace.opaque import load as load_rules

torch = pytest.importorskip("torch")

from forerun.sources.trace.inside.kernels.cuda_kernels import parameters_of  # noqa: E402
from forerun.sources.trace.inside.kernels.opaque_costs import kernels_of, with_named  # noqa: E402
from forerun.sources.trace.inside.kernels.triton_kernels import multiplies  # noqa: E402

ROWS, WIDTH = 128, 64
RULES = """
import torch
from forerun import kernels

@kernels.operator("mine::scan")
def scan(x, weight):
    return torch.empty_like(x)

@scan.cost
def scan_cost(x, weight):
    return kernels.Cost(flops=2 * x.numel() * weight.shape[0], unit="bf16")

@kernels.operator("absent::norm", "(Tensor x, float eps) -> (Tensor, Tensor)")
def norm(x, eps):
    return torch.empty_like(x), x.new_empty(x.shape[:-1])

@norm.cost
def norm_cost(x, eps):
    return kernels.Cost(time_us=12.5)

@kernels.extension("fast_cuda.forward")
def forward(x):
    return [torch.empty_like(x), x.new_empty(x.shape[0])]

@forward.cost
def forward_cost(x):
    return kernels.Cost(flops=10 * x.numel(), workspace_bytes=1 << 20)

@kernels.extension("fast_cuda.backward")
def backward(grad):
    return torch.empty_like(grad)

@kernels.extension("fast_cuda.update", writes=["state"])
def update(grad, state):
    return None

@kernels.operator("declared::halved")
def halved(x):
    return x.new_empty(x.shape[0] // 2)

@halved.cost
def halved_cost(x):
    return kernels.Cost()

@kernels.cuda("twice").cost
def twice(x, n):
    return kernels.Cost(flops=n, bytes_read=x.nbytes)

@kernels.cuda("fill", writes=["out"]).cost
def fill(grid, block):
    return kernels.Cost(flops=grid[0] * grid[1] * grid[2] * block[0] * block[1] * block[2])
"""
SCRIPT = """
import torch
import fast_cuda

class Fast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out, aux = fast_cuda.forward(x)
        ctx.save_for_backward(aux)
        return out

    @staticmethod
    def backward(ctx, grad):
        return fast_cuda.backward(grad)

@torch.library.custom_op("mine::scan", mutates_args=())
def scan(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("needs a GPU")

torch.library.register_autograd("mine::scan", lambda ctx, grad: (grad, None))
source = '''
// a kernel twice(float*)
extern "C" __global__ void twice(const float* __restrict__ x, float *out, int n) { }
__global__ void thrice(const float* x, float *out) { }
__global__ void fill(float *mask, float *out) { }
'''
library = torch.library.Library("declared", "DEF")
library.define("halved(Tensor x) -> Tensor")
twice = torch.cuda._compile_kernel(source, "twice", "90")
thrice = torch.cuda._compile_kernel(source, "thrice")
fill = torch.cuda._compile_kernel(source, "fill")
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scan_compiled = torch.compile(lambda x, weight: scan(x, weight) * 2, fullgraph=True)
for _ in range(3):
    x = torch.randn(128, 64, device="cuda")
    y = scan_compiled(Fast.apply(model(x)), model.weight)
    with torch.no_grad():
        torch.ops.absent.norm(y, 1e-5)
        out = torch.empty_like(x)
        twice((1,), (64,), (x, out, x.numel()))
        thrice(args=[x, out])
        fill(args=[torch.full((8,), 5.0, device="cuda"), out])
        fill((3, 2, 1), (64, 2, 1), [x, out])
        state = torch.full((8,), 5, device="cuda")
        fast_cuda.update(x, state)
        assert state.sum().item() != 40, "what a function changes is not known any more"
        assert torch.ops.declared.halved(x).shape == (64,)
    y.sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("opaque")
    for name, text in (("rules.py", RULES), ("train.py", SCRIPT)):
        (folder / name).write_text(textwrap.dedent(text), encoding="utf-8")
    out = folder / "step.program"
    assert run(["trace", str(folder / "train.py"), "--kernels", str(folder / "rules.py"), "-o", str(out)]) == 0
    return load(out)


def row(program, name):
    """The number of times that an operation of this name runs, and its row."""
    (number,) = [i for i, known in enumerate(program.ops.name) if known == name]
    return int(op_counts(program)[0][number]), program.ops.rows()[number]


@pytest.mark.slow
def test_each_kind_of_kernel_costs_what_its_rule_says(program):
    size = ROWS * WIDTH * 4
    times, scan = row(program, "mine::scan")
    assert (times, scan.kind, scan.dtype) == (1, OpKind.GEMM, "bf16")
    assert (scan.flops, scan.bytes_read, scan.bytes_written) == (2 * ROWS * WIDTH * 64, size + 64 * 64 * 4, size)
    times, norm = row(program, "absent::norm")
    assert (times, norm.kind, norm.details[0]) == (1, OpKind.DELAY, 12_500_000)
    times, forward = row(program, "fast_cuda.forward")
    assert (times, forward.flops, forward.bytes_read, forward.bytes_written) == (1, 81_920, size, size + ROWS * 4)
    assert row(program, "fast_cuda.backward")[1].bytes_read == size
    times, update = row(program, "fast_cuda.update")
    assert (times, update.bytes_read, update.bytes_written) == (1, size + 8 * 8, 8 * 8)
    assert row(program, "declared::halved")[1].bytes_written == ROWS // 2 * 4
    fills = [(one.flops, one.bytes_read, one.bytes_written) for one in program.ops.rows() if one.name == "fill"]
    assert fills == [(1, 8 * 4, size), (6 * 128, size, size)]  # a launch without a grid has one thread
    _, twice = row(program, "twice")
    assert (twice.flops, twice.bytes_read, twice.bytes_written) == (ROWS * WIDTH, size, size)


@pytest.mark.slow
def test_what_nobody_described_is_named_and_costs_its_bytes(program):
    _, thrice = row(program, "thrice")
    assert (thrice.flops, thrice.bytes_read, thrice.bytes_written) == (0, ROWS * WIDTH * 4, ROWS * WIDTH * 4)
    assert [note.partition(":")[0] for note in program.meta["notes"]] == ["CUDA kernel thrice"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("from kernels import get_kernel\nget_kernel('someone/fast-norm')", "nothing is known of it"),
        ("from torch.utils.cpp_extension import load\nload('quick', ['quick.cu'])", "compiles the extension quick"),
        ("import fast_cuda", "No module named 'fast_cuda'"),
    ],
)
def test_an_unknown_package_is_named_and_ends_the_trace(script, said, tmp_path, capsys):
    (tmp_path / "kernels.py").write_text("def get_kernel(name):\n    raise OSError('no network')\n", encoding="utf-8")
    body = textwrap.indent(script, "    ")
    path = tmp_path / "train.py"
    path.write_text(f"try:\n{body}\nexcept OSError:\n    pass\n", encoding="utf-8")
    assert run(["trace", str(path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "names", "written"),
    [
        ("__global__ void f(const float* a, float* b, int n) {}", ("a", "b", "n"), ("b",)),
        ("template <int N>\n__global__ void f(float (*x)[4], const half *__restrict__ y)", ("x", "y"), ("x",)),
        ('/* f(int) */ extern "C" __global__ __launch_bounds__(256, 2) void f(\n int64_t* const p)', ("p",), ("p",)),
        ("__global__ void f() {}", (), ()),
    ],
)
def test_the_parameters_of_a_cuda_kernel_are_read_from_its_source(source, names, written):
    found, stored = parameters_of(source, "f")
    assert (found, stored) == (names, written)


def test_a_source_without_the_kernel_is_refused():
    with pytest.raises(ForerunError, match="declares no __global__ function"):
        parameters_of("__device__ void f(float* x) {}", "f")


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (kernels.Cost(), (OpKind.MEMORY, 0, 64, 128, 1)),
        (kernels.Cost(flops=7, bytes_read=3, launches=2), (OpKind.MEMORY, 7, 3, 128, 2)),
        (kernels.Cost(flops=2e9, unit="fp8"), (OpKind.GEMM, 2e9, 64, 128, 1)),
        (kernels.Cost(time_us=3, flops=5), (OpKind.DELAY, 5, 0, 128, 1)),
    ],
)
def test_a_cost_becomes_a_row(cost, expected):
    table = OpTableBuilder()
    read, written = [torch.empty(16)], [torch.empty(32)]
    (kernel,) = kernels_of(table, "k", cost, read, written)
    made = table.build().rows()[kernel.op]
    assert (made.kind, made.flops, made.bytes_read, made.bytes_written, made.launches) == expected


@pytest.mark.parametrize(
    ("flops", "side"), [(1e-3, 1), (2, 1), (2 * 5**3, 5), (2 * 127**3, 127), (2 * 128**3, 128), (2 * 300**3, 256)]
)
def test_matrix_products_without_sizes_are_a_cube_of_as_many_flops(flops, side):
    table = OpTableBuilder()
    (kernel,) = kernels_of(table, "k", kernels.Cost(flops=flops, unit="bf16"), [torch.empty(16)], [])
    ops = table.build()
    made = ops.gemm([kernel.op])
    assert [int(one[0]) for one in (made.m, made.n, made.k)] == [side] * 3
    assert ops.flops[kernel.op] == flops


def test_a_call_that_moves_nothing_is_no_kernel():
    assert kernels_of(OpTableBuilder(), "k", kernels.Cost(), [], []) == []


def test_rules_get_the_parameters_that_they_name():
    assert with_named(lambda b: b, {"a": 1, "b": 2}) == 2
    assert with_named(lambda **every: every, {"a": 1}) == {"a": 1}
    with pytest.raises(ForerunError, match="asks for c; the kernel has the parameters a, b"):
        with_named(lambda c: c, {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: kernels.operator("scan"), "with its namespace, as in mylib::scan"),
        (lambda: kernels.extension("scan"), "with its module, as in mylib_cuda.scan"),
        (lambda: kernels.Cost(flops=-1), "no part of a cost may be negative"),
    ],
)
def test_a_wrong_description_is_refused(make, said):
    with pytest.raises(ForerunError, match=said):
        make()


def test_a_file_that_fails_is_named_with_its_line(tmp_path):
    path = tmp_path / "rules.py"
    path.write_text("x = 1\nraise ValueError('oops')\n", encoding="utf-8")
    with pytest.raises(ForerunError, match=r"--kernels .*rules\.py: ValueError: oops at .*rules\.py:2"):
        load_rules([str(path)])
    assert run(["trace", str(path), "--kernels", str(tmp_path / "none.py")]) == 2


def test_products_in_a_triton_kernel_are_seen():
    def adds(tl):
        tl.store(0, tl.load(0))

    def products(tl):
        tl.store(0, tl.dot(1, 2))

    assert not multiplies(adds)
    assert multiplies(products)
