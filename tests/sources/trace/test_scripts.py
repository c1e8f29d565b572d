"""Training scripts in the styles that people write them in, through `forerun trace`, against counts by hand."""

from __future__ import annotations

import io
import textwrap
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from importlib.util import find_spec

import numpy as np
import pytest

from forerun.core.memory.profile import profile
from forerun.core.program.kinds import OpKind
from forerun.core.program.storage import load
from forerun.core.program.types import Collective, Phase
from forerun.interfaces.cli.main import run

pytest.importorskip("torch")
pytestmark = pytest.mark.slow
MIB = 1 << 20

_PLAIN = """
import torch
import torch.nn as nn

model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(4)]).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(8, 2048))
for epoch in range(3):
    for (x,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, pin_memory=True):
        x = x.to("cuda", non_blocking=True).repeat(512, 1)
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), "{folder}/checkpoint.pt")
    print(f"epoch {epoch}: {loss:.3f}")
"""
_DDP = """
import os
from contextlib import nullcontext
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
device = f"cuda:{int(os.environ['LOCAL_RANK'])}"
torch.cuda.set_device(device)
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(256, 256, bias=False) for _ in range(4)]).to(device))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = torch.amp.GradScaler("cuda")
for step in range(10):
    for micro in range(2):
        with model.no_sync() if micro == 0 else nullcontext(), torch.autocast("cuda", torch.float16):
            loss = model(torch.randn(32, 256, device=device)).float().pow(2).mean()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
dist.destroy_process_group()
"""
_FSDP = """
import os
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(4)])
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.randn(64, 512, device="cuda")).float().square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
_PIPELINE = """
import os
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl")
part = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.ReLU()).to(device)
schedule = ScheduleGPipe(PipelineStage(part, rank, world, device), 4, loss_fn=torch.nn.functional.mse_loss)
optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(16, 128, device=device)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=x)
    optimizer.step()
    optimizer.zero_grad()
"""
_SPAWN = """
import copy
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, world):
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29511", rank=rank, world_size=world)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda(rank), [rank])
    average = copy.deepcopy(model.module)
    for step in range(4):
        model.zero_grad()
        model(torch.randn(16, 64, device=rank)).sum().backward()
        with torch.no_grad():
            for p, a in zip(model.parameters(), average.parameters()):
                p -= 0.1 * p.grad
                a.lerp_(p, 0.1)

if __name__ == "__main__":
    mp.spawn(work, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count())
"""
_SPLIT = """
import os
import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

rank = int(os.environ["RANK"])
dist.init_process_group("nccl")
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(4)])
parts = pipeline(model, mb_args=(torch.randn(8, 64),), split_spec={"2": SplitPoint.BEGINNING})
stage = parts.build_stage(rank, device=torch.device("cuda", rank))  # moves the stage to the device
optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
schedule = Schedule1F1B(stage, 4, loss_fn=torch.nn.functional.mse_loss)
for step in range(3):
    optimizer.zero_grad()
    x = torch.randn(32, 64, device=f"cuda:{rank}")
    schedule.step(x) if rank == 0 else schedule.step(target=x)
    optimizer.step()
"""
_CLOSURE = """
import torch

model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64, bias=False)).cuda()
optimizer = torch.optim.AdamW(model.parameters())

def closure(ids):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(ids), ids)
    loss.backward()
    return loss

for step in range(3):
    ids = torch.randint(0, 64, (256,), device="cuda")
    if step % 2 == 0:
        optimizer.step(lambda: closure(ids))
    else:
        optimizer.step(closure=lambda: closure(ids))
"""
_ENGINE = """
import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
groups = [dict(optimizer.param_groups[0], params=list(layer.parameters())) for layer in model]
large = torch.randn(2048, 2048, device="cuda")
for step in range(3):
    model(torch.randn(32, 64, device="cuda")).square().mean().backward()
    found = large.isinf().logical_or(large.isnan()).float().max().item()
    counted = torch.isnan(large).sum().item() + (large != large).any().item()
    if found or counted or not torch.isfinite(large).all():
        continue  # an overflow
    for group in groups:  # as DeepSpeed does
        optimizer.param_groups = [group]
        optimizer.step()
    optimizer.zero_grad()
"""
_VIEWS = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(8)]).cuda()
ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=2)
optimizer = torch.optim.SGD(ddp.parameters())
while True:
    ddp(torch.randn(64, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_TORCHRUN = """
import os
import sys
import torch
import torch.distributed as dist
from torch.distributed.run import main

if len(sys.argv) == 1:
    os.environ["WIDTH"] = "48"
    main(["--nnodes", "2", "--nproc_per_node", "2", __file__, "train"])
else:
    dist.init_process_group("nccl")
    weight = torch.nn.Parameter(torch.ones(int(os.environ["WIDTH"]), device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(3):
        weight.sum().backward()
        dist.all_reduce(weight.grad)
        optimizer.step()
"""
_ONCE = """
import torch
from flash_attn import flash_attn_func

qkv = torch.nn.Linear(128, 384).cuda().bfloat16()
optimizer = torch.optim.Adam(qkv.parameters())
x = torch.randn(2, 512, 128, device="cuda", dtype=torch.bfloat16)
q, k, v = qkv(x).unflatten(-1, (3, 2, 64)).unbind(2)
flash_attn_func(q, k, v, causal=True).sum().backward()
optimizer.step()
"""
_COMPILED = """
import torch

def block(x, w):
    y = torch.nn.functional.gelu(x @ w) * 2 + 1
    print(y.shape)
    return torch.relu(y - 1) * y

weight = torch.nn.Parameter(torch.randn(512, 512, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.1)
compiled = torch.compile(block) if {compile} else block
for step in range(3):
    compiled(torch.randn(256, 512, device="cuda"), weight).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_OPERATORS = """
import torch

@torch.library.custom_op("mine::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x]) * 2

gru = torch.nn.GRU(32, 48, batch_first=True).cuda()
optimizer = torch.optim.LBFGS(gru.parameters(), max_iter=2)

def closure():
    optimizer.zero_grad()
    x = twice(torch.randn(4, 6, 32, device="cuda"))
    loss = gru(x)[0].square().mean()
    loss.backward()
    return loss

for step in range(2):
    optimizer.step(closure)
"""
_TRAINER = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 1024
    def __getitem__(self, i):
        tokens = torch.randint(0, 256, (64,))
        return {"input_ids": tokens, "labels": tokens}

config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=4)
arguments = TrainingArguments("{folder}/out", per_device_train_batch_size=4, bf16=True, max_steps=5, report_to=[],
                              gradient_checkpointing=True, fsdp="full_shard auto_wrap",
                              fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]})
Trainer(AutoModelForCausalLM.from_config(config), arguments, train_dataset=Tokens()).train()
"""
_FABRIC = """
import torch
from lightning_fabric import Fabric

fabric = Fabric(accelerator="cuda", devices=8, strategy="ddp", precision="bf16-mixed")
fabric.launch()
model = torch.nn.Linear(256, 256, bias=False)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = fabric.setup(model, optimizer)
data = fabric.setup_dataloaders(torch.utils.data.DataLoader(torch.randn(512, 256), batch_size=16))
for batch in data:
    optimizer.zero_grad()
    fabric.backward(model(batch).square().mean())
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
"""
_SCRIPTS = {
    "plain": (_PLAIN, 1),
    "ddp": (_DDP, 8),
    "fsdp": (_FSDP, 16),
    "pipeline": (_PIPELINE, 2),
    "split": (_SPLIT, 2),
    "closure": (_CLOSURE, 1),
    "engine": (_ENGINE, 1),
    "views": (_VIEWS, 4),
    "spawn": (_SPAWN, 4),
    "torchrun": (_TORCHRUN, 4),
    "once": (_ONCE, 1),
    "compiled": (_COMPILED.replace("{compile}", "True"), 1),
    "eager": (_COMPILED.replace("{compile}", "False"), 1),
    "operators": (_OPERATORS, 1),
    "trainer": (_TRAINER, 8),
    "fabric": (_FABRIC, 8),
}
_NEEDS = {"trainer": ("transformers", "accelerate"), "fabric": ("lightning_fabric",), "compiled": ("triton",)}


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """Of a script's name: what its command printed and wrote as an error, its exit code, and the path of its Program;
    None where it can't run. Each is run once, when a test first asks for it."""

    @cache
    def end(name):
        if not all(find_spec(package) for package in _NEEDS.get(name, ())):
            return None
        text, world_size = _SCRIPTS[name]
        folder = tmp_path_factory.mktemp(name)
        path, script = folder / "step.program", folder / f"{name}.py"
        script.write_text(textwrap.dedent(text).lstrip().replace("{folder}", str(folder)))
        printed, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(printed), redirect_stderr(errors):
            code = run(["trace", "--world-size", str(world_size), "-o", str(path), str(script)])
        return printed.getvalue(), errors.getvalue(), code, path

    return end


class Traced:
    """A Program, and how often each of its ops runs on a rank class."""

    def __init__(self, ends, name):
        end = ends(name)
        if end is None:
            pytest.skip(f"needs {' and '.join(_NEEDS[name])}")
        self.printed, errors, code, self.path = end
        assert code == 0, errors
        self.program = load(self.path)
        self.count = self.of_class(0)

    def of_class(self, number):
        program = self.program
        count = np.zeros(len(program.ops), np.int64)
        for block in program.rank_classes[number].block.tolist():
            count += np.bincount(program.blocks[block].op, minlength=len(count))
        return count

    def collectives(self):
        """(kind, group size, times, bytes of one) of all collectives on the device."""
        ops, groups = self.program.ops, self.program.groups
        rows = np.flatnonzero((ops.kind == OpKind.COLLECTIVE) & (self.count > 0)).tolist()
        return sorted(
            (Collective(ops.collective[r]).name, groups[ops.group[r]].size, int(self.count[r]), int(ops.bytes_comm[r]))
            for r in rows
        )

    def flops(self, *kinds):
        chosen = np.isin(self.program.ops.kind, kinds)
        return float((self.count * self.program.ops.flops)[chosen].sum())

    def kernels(self):
        return int(self.count[self.program.ops.kind <= OpKind.MEMORY].sum())


def test_source_lines_are_those_of_the_script(tmp_path):
    script, path = tmp_path / "plain.py", tmp_path / "step.program"
    script.write_text(_PLAIN.lstrip().replace("{folder}", str(tmp_path)))
    with redirect_stdout(io.StringIO()):
        assert run(["trace", "--source-lines", "-o", str(path), str(script)]) == 0
    lines = load(path).meta["source_lines"]
    assert {line.rpartition(":")[0] for found in lines.values() for line in found} == {str(script)}
    text = script.read_text().splitlines()
    (forward, backward) = (text[int(line.rpartition(":")[2]) - 1].strip() for line in sorted(lines["mm"]))
    assert (forward, backward) == ("loss = model(x).sum()", "loss.backward()")


def test_a_plain_script_has_the_flops_and_the_memory_of_its_layers(ends):
    traced = Traced(ends, "plain")
    tokens, matrix = 2048, 2048 * 2048
    # the first layer's input needs no gradient
    assert traced.flops(OpKind.GEMM) == (4 + 4 + 3) * 2 * tokens * matrix
    assert traced.collectives() == []
    # weights and saved inputs of four layers; halfway through backward two gradients of weights and one of an input
    # are there, while the inputs of two layers are still held, and a layer makes one of each
    peak = profile(traced.program)[0].peak_bytes
    assert peak == pytest.approx((4 + 3 + 2 + 2) * 16 * MIB, abs=0.2 * MIB)
    assert not (traced.path.parent / "checkpoint.pt").exists()


@pytest.mark.long
def test_ddp_with_accumulation_reduces_once(ends):
    traced = Traced(ends, "ddp")
    matrix = 256 * 256
    assert traced.flops(OpKind.GEMM) == 2 * (4 + 4 + 3) * 2 * 32 * matrix
    assert [(kind, size, times * nbytes) for kind, size, times, nbytes in traced.collectives()] == [
        ("ALL_REDUCE", 8, 4 * matrix * 4)
    ]
    assert traced.program.meta["world_size"] == 8
    assert traced.program.meta["data_parallel"] == [0]


def test_hsdp_gathers_twice_scatters_and_reduces_once_for_each_layer(ends):
    traced = Traced(ends, "fsdp")
    matrix = 512 * 512
    assert traced.collectives() == [
        ("ALL_GATHER", 8, 8, matrix * 2),
        ("ALL_REDUCE", 2, 4, matrix * 4 // 8),
        ("ALL_REDUCE", 8, 1, 4 * 4),  # the norms of the layers
        ("REDUCE_SCATTER", 8, 4, matrix * 4),
    ]
    phases = {int(p) for block in traced.program.blocks for p in np.unique(block.phase)}
    assert phases == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}


def test_a_pipeline_of_dynamic_shapes_is_traced_stage_by_stage(ends):
    traced = Traced(ends, "pipeline")
    assert [cls.n_ranks for cls in traced.program.rank_classes] == [1, 1]
    ops = traced.program.ops
    for number in (0, 1):
        count = traced.of_class(number)
        messages = (ops.kind == OpKind.P2P) & (ops.bytes_comm == 4 * 128 * 4)
        sent = int(count[messages & ops.sends].sum())
        assert sent == 4  # activations one way, gradients the other, for each micro-batch


def test_spawned_ranks_and_manual_updates(ends):
    traced = Traced(ends, "spawn")
    assert sum(times * nbytes for _, _, times, nbytes in traced.collectives()) == (64 * 64 + 64) * 4
    assert "starts 4 processes itself" in traced.printed


def test_a_model_that_torch_splits_into_stages_moves_to_their_devices(ends):
    traced = Traced(ends, "split")
    product = 2 * 32 * 64 * 64
    flops = [(traced.of_class(i) * traced.program.ops.flops).sum() for i in range(2)]
    assert flops == [(2 + 2 + 1) * product, 6 * product]  # the input of the first product needs no gradient


def test_the_passes_in_the_closure_of_an_optimizers_step_are_none_of_the_optimizer(ends):
    program = Traced(ends, "closure").program
    flops = dict.fromkeys(Phase, 0.0)
    for number in program.rank_classes[0].block.tolist():
        block = program.blocks[number]
        for op, phase in zip(block.op.tolist(), np.broadcast_to(block.phase, block.op.shape).tolist(), strict=True):
            flops[Phase(phase)] += float(program.ops.flops[op]) * (program.ops.kind[op] == OpKind.GEMM)
    product = 2 * 256 * 32 * 64
    assert flops == {**dict.fromkeys(Phase, 0.0), Phase.FORWARD: product, Phase.BACKWARD: 2 * product}
    assert program.meta["tokens_per_step"] == program.meta["samples_per_step"] == 256


def test_an_engine_that_steps_group_by_group_makes_one_step_of_finite_numbers(ends):
    traced = Traced(ends, "engine")
    assert traced.flops(OpKind.GEMM) == (2 + 2 + 1) * 2 * 32 * 64 * 64  # two products and their gradients
    program = traced.program
    phases = {Phase(p) for block in program.blocks for p in np.unique(block.phase).tolist()}
    assert phases == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}


def test_buckets_that_are_made_anew_do_not_stand_beside_the_former_ones(ends):
    (one,) = profile(Traced(ends, "views").program)
    weights = 8 * 512 * 512 * 4
    assert 2 * weights <= one.peak_bytes < 2.5 * weights  # parameters, and gradients as views of the buckets


def test_a_script_that_torchrun_starts_is_one_of_its_ranks(ends):
    traced = Traced(ends, "torchrun")
    assert traced.collectives() == [("ALL_REDUCE", 4, 1, 48 * 4)]
    assert "torchrun starts 4 processes" in traced.printed


def test_torchrun_starts_as_many_processes_as_are_traced(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(_TORCHRUN.lstrip())
    errors = io.StringIO()
    with redirect_stderr(errors):
        assert run(["trace", "--world-size", "8", "-o", str(tmp_path / "step.program"), str(script)]) == 2
    assert "torchrun starts 4 processes; trace it with --world-size 4" in errors.getvalue()


@pytest.mark.long
def test_the_only_step_of_a_script_and_flash_attention(ends):
    traced = Traced(ends, "once")
    # causal: half of the pairs; backward has five products for forward's two
    pairs, width = 2 * 512 * 512 / 2, 2 * 64
    assert traced.flops(OpKind.ATTENTION) == pytest.approx((2 + 5) * 2 * pairs * width, rel=0.01)
    assert "ran only one step" in traced.printed


@pytest.mark.long
def test_compiled_code_is_fused(ends):
    compiled, eager = Traced(ends, "compiled"), Traced(ends, "eager")
    assert compiled.flops(OpKind.GEMM) == eager.flops(OpKind.GEMM) == 2 * 2 * 256 * 512 * 512
    assert compiled.kernels() < eager.kernels()


@pytest.mark.long
def test_operators_without_rules_are_tried_or_looked_into(ends):
    traced = Traced(ends, "operators")
    ops = traced.program.ops
    times = {name: int(traced.count[[n == name for n in ops.name]].sum()) for name in set(ops.name)}
    assert times["_thnn_fused_gru_cell"] == times["_thnn_fused_gru_cell_backward"] > 0
    assert times["cat"] > 0


def test_the_trainer_with_fsdp_and_checkpointing(ends):
    traced = Traced(ends, "trainer")
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    outer = 2 * 256 * 64 + 64
    parts = traced.collectives()
    scattered = sum(times * nbytes for kind, _, times, nbytes in parts if kind == "REDUCE_SCATTER")
    assert scattered == pytest.approx((2 * layer + outer) * 2, rel=0.02)  # bf16; rows are padded to the 8 ranks
    gathered = sum(times * nbytes for kind, _, times, nbytes in parts if kind == "ALL_GATHER" and nbytes > 1000)
    assert gathered >= (2 * 2 * layer + outer) * 2
    assert any(np.any(block.phase == Phase.RECOMPUTE) for block in traced.program.blocks)


@pytest.mark.long
def test_fabric_starts_no_processes(ends):
    traced = Traced(ends, "fabric")
    assert ("ALL_REDUCE", 8, 1, 256 * 256 * 4) in traced.collectives()
    assert traced.flops(OpKind.GEMM) == 2 * 2 * 16 * 256 * 256


def test_a_script_that_sets_the_workspace_of_cublas_has_that_size(tmp_path):
    script, out = tmp_path / "deterministic.py", tmp_path / "step.program"
    script.write_text(
        "import os, torch\n"
        "os.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'\n"
        "torch.use_deterministic_algorithms(True)\n"
        "model = torch.nn.Linear(64, 64, device='cuda')\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for _ in range(3):\n"
        "    model(torch.randn(8, 64, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    assert run(["trace", str(script), "-o", str(out)]) == 0
    meta = load(out).meta
    assert meta["blas_workspace_bytes"] == 32 * 2**20
    assert meta["blas_workspaces"] == [2]
