"""Residual networks traced in PyTorch and written from their layers: the same work, messages and memory."""

from dataclasses import replace
from functools import cache

import pytest

torch = pytest.importorskip("torch")

from torch_resnet import NETWORKS  # noqa: E402

from forerun.core.cost.op_costs import durations_ps  # noqa: E402
from forerun.core.memory.profile import profile  # noqa: E402
from forerun.core.program.counts import op_counts  # noqa: E402
from forerun.core.program.kinds import OpKind  # noqa: E402
from forerun.core.program.types import Collective, Phase  # noqa: E402
from forerun.describe.cluster.catalog import load_cluster  # noqa: E402
from forerun.describe.cluster.types import KernelRates  # noqa: E402
from forerun.describe.model.convolutional import load_convolutional  # noqa: E402
from forerun.describe.plan.plan import Plan  # noqa: E402
from forerun.describe.stacks.catalog import load_stack  # noqa: E402
from forerun.sources.symbolic.build import build  # noqa: E402
from forerun.sources.trace.module import trace_module  # noqa: E402

pytestmark = pytest.mark.slow

BATCH = 32
CLUSTER = load_cluster("a100")
MODES = {
    "one GPU": ("resnet50", False, {}),
    "one GPU, autocast": ("resnet50", True, {}),
    "DDP": ("resnet18", False, {"dp_replicate": 8}),
    "DDP, autocast": ("resnet50", True, {"dp_replicate": 8}),
    "DDP, accumulating": ("resnet18", True, {"dp_replicate": 4, "n_microbatches": 3}),
}
"""network, whether products run in fp16 under torch.autocast, fields of the plan"""
LATER = ("one GPU", "DDP, autocast")
"""modes of the long tests, whose parts the others have"""
EVERY_MODE = pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.long) if mode in LATER else mode for mode in MODES]
)


@cache
def both(mode):
    """(traced, from layers) Program of one mode."""
    name, autocast, fields = MODES[mode]
    p = Plan(
        seq_len=1,
        micro_batch=BATCH,
        zero_stage=0,
        stack="pytorch-vision",
        optimizer="sgd",
        optimizer_impl="foreach",
        precision="fp32",
        **fields,
    )
    images = torch.empty(BATCH, 3, 224, 224, device="meta").to(memory_format=torch.channels_last)
    traced = trace_module(
        lambda: NETWORKS[name](autocast=torch.float16 if autocast else None),
        images,
        p,
        target=torch.empty(BATCH, dtype=torch.int64, device="meta"),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        fold=False,
    )
    stack = replace(load_stack(p.stack), blas_workspaces=0)  # a trace counts them, and a prediction adds them
    made = build(load_convolutional(name), replace(p, precision="fp16") if autocast else p, CLUSTER, stack)
    return traced, made


def total(program, column, kind, phases=(Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE)):
    counts = op_counts(program, phases)[0] * (program.ops.kind == kind)
    return float((counts * column).sum())


def moved(program):
    """Bytes by kind of collective, but for the reductions of single numbers."""
    ops, out = program.ops, {}
    for i, count in enumerate(op_counts(program)[0].tolist()):
        if count and ops.kind[i] == OpKind.COLLECTIVE and ops.bytes_comm[i] > 64:
            name = Collective(ops.collective[i]).name
            out[name] = out.get(name, 0.0) + count * float(ops.bytes_comm[i])
    return out


@EVERY_MODE
def test_products_are_the_same(mode):
    traced, made = both(mode)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for name in ("flops", "bytes_read", "bytes_written"):
            one, other = (total(p, getattr(p.ops, name), OpKind.GEMM, (phase,)) for p in (traced, made))
            assert one == pytest.approx(other, rel=0 if name == "flops" else 1e-3), (phase, name)


@EVERY_MODE
def test_memory_bound_kernels_move_the_same_but_for_buckets(mode):
    """Backward, DDP copies gradients into buckets and out again, which Programs of plans leave out: 16 bytes each."""
    traced, made = both(mode)
    name, _, fields = MODES[mode]
    copies = 16 * load_convolutional(name).parameter_count if "dp_replicate" in fields else 0
    for phase, extra in ((Phase.FORWARD, 0), (Phase.BACKWARD, copies)):
        one, other = (total(p, p.ops.bytes_read + p.ops.bytes_written, OpKind.MEMORY, (phase,)) for p in (traced, made))
        assert one - extra == pytest.approx(other, rel=0.002), phase


@EVERY_MODE
def test_collectives_move_the_same_bytes(mode):
    traced, made = both(mode)
    assert moved(traced) == moved(made)


@EVERY_MODE
def test_peaks_are_the_same(mode):
    traced, made = both(mode)
    one, other = (profile(program)[0].peak_bytes for program in (traced, made))
    assert one == pytest.approx(other, rel=0.01)


def test_products_take_the_same_time():
    times = []
    for program in both("one GPU, autocast"):
        spent, _ = durations_ps(program.ops, program.groups, CLUSTER, KernelRates())
        times.append(total(program, spent, OpKind.GEMM))
    assert times[0] == pytest.approx(times[1], rel=1e-3)
