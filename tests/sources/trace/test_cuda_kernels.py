"""CUDA kernels that a program compiles itself: what their sources say, and where a launch runs."""

import pytest
from virtual_process import run_virtual

from forerun.common.errors import ForerunError

pytest.importorskip("torch", reason="tracing needs torch")
SOURCE = """
__device__ float helper(float x) { return x; }
// __global__ void commented(int *gone) {}
/* __global__ void commented(
   int *gone) {} */
extern "C" __global__ void __launch_bounds__(256) scale(
    const float* __restrict__ x, float const *y, float* out, int n) {
    out[0] = helper(x[0]);
}
template <typename T, int N> __global__ void wide(const T (&x)[4], T *out, float (*table)[8], int n = 3);
__global__ void sizes(const int n, float weights[], const float more[16], float *const end) {}
__global__ void nothing() {}
"""


@pytest.mark.parametrize(
    ("name", "parameters", "written"),
    [
        ("scale", ("x", "y", "out", "n"), ("out",)),
        ("wide<float, 4>", ("x", "out", "table", "n"), ("out", "table")),
        ("sizes", ("n", "weights", "more", "end"), ("weights", "end")),
        ("nothing", (), ()),
    ],
)
def test_a_source_says_the_parameters_and_which_a_kernel_may_write(name, parameters, written):
    from forerun.sources.trace.inside.kernels.cuda_kernels import parameters_of

    assert parameters_of(SOURCE, name) == (parameters, written)


@pytest.mark.parametrize("name", ["helper", "commented", "absent", "scal"])
def test_a_kernel_that_the_source_lacks_is_named(name):
    from forerun.sources.trace.inside.kernels.cuda_kernels import parameters_of

    with pytest.raises(ForerunError, match=f"the source of CUDA kernel {name} declares no __global__ function"):
        parameters_of(SOURCE, name)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_virtual(
        f"SOURCE = {SOURCE!r}\n"
        + """
from forerun.sources.trace.inside.kernels import cuda_kernels
from forerun.sources.trace.opaque import Cost
from forerun.sources.trace.inside.kernels.opaque_calls import Launches
cuda_kernels.install(Launches(mode, recorder))
scale = torch.cuda._compile_kernel(SOURCE, "scale")
x, y, out = (torch.ones(64, device="cuda") for _ in range(3))
side = torch.cuda.Stream()
recorder.start()
scale((1, 1, 1), (64, 1, 1), (x, y, out, 64))
scale((1, 1, 1), (64, 1, 1), (x, y, out, 64), 0, side)
scale(args=[x, y, out, 64], stream=side)
scale.set_shared_memory_config(1 << 16)
table = recorder.ops.build()
result["launches"] = [[row[0], row[1] - side.stream_id * (row[1] > 0), int(table.bytes_read[node[0]]),
                       int(table.bytes_written[node[0]])] for row, node in zip(nodes(), recorder._nodes)]
result["streams"] = [row[1] > 0 for row in nodes()]
result["notes"] = list(recorder.notes)
result["known"] = [known_value(one) is not None for one in (x, y, out)]
recorder.start()
cost = Cost(bytes_read=64, bytes_written=64, workspace_bytes=1000)
number = Launches(mode, recorder).record("described", cost, [x], [out])
result["workspace"] = [[row.size, row.alloc, row.free] for row in recorder.memory.of_step() if row.alloc >= 0]
result["number"] = number
before = recorder.n_nodes
recorder.paused += 1
fresh = torch.ones(64, device="cuda")
scale(args=[x, y, fresh, 64])
recorder.paused -= 1
result["paused"] = [recorder.n_nodes - before, known_value(fresh) is None]
""",
        tmp_path_factory.mktemp("kernels"),
    )


def test_a_launch_runs_on_the_stream_that_it_names_and_costs_its_bytes(answers):
    assert answers["launches"] == [["scale", 0, 512, 256]] * 3
    assert answers["streams"] == [False, True, True]
    (note,) = answers["notes"]
    assert note == "CUDA kernel scale: it costs the bytes that it reads and writes; describe it with --kernels"


def test_a_workspace_lives_as_long_as_its_kernel_runs(answers):
    assert answers["workspace"] == [[1024, 0, 0]]
    assert answers["number"] == 0


def test_what_a_kernel_may_write_is_not_known_any_more(answers):
    assert answers["known"] == [True, True, False]
    assert answers["paused"] == [0, True]
