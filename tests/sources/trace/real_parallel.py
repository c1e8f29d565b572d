"""A training script with many ways of parallelism, each stepped in turn: on GPUs (NCCL) or on the CPU (gloo).

Before the step of each way an all-reduce of a size of its own is issued, `MARK` elements and one more for each way, so
that what a way did can be told from what the others did. The first optimizer that steps counts the iterations.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples" / "llama"))
from model import Block, Llama, LlamaConfig

MARK = 1001
BATCH, MICROBATCHES, WIDTH = 2, 4, 96
CONFIG = LlamaConfig(dim=128, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=320, vocab_size=512, seq_len=32)
Step = Callable[[], None]


def tokens(device: str, config: LlamaConfig = CONFIG) -> Tensor:
    return torch.randint(0, config.vocab_size, (BATCH, config.seq_len + 1), device=device)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def training(model: nn.Module, device: str, clip: bool = False) -> Step:
    """Forward, backward and AdamW on a model of tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = tokens(device)

    def step() -> None:
        loss_of(model, ids).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


# -- data parallelism --------------------------------------------------------------------------------------------


def sharded(device: str, mesh_of: Callable[[], object], **options: object) -> nn.Module:
    model = Llama(CONFIG).to(device)
    mesh = mesh_of()
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp(device: str) -> Step:
    """Layers and root sharded, whole parameters freed after forward, gradients clipped."""
    return training(sharded(device, lambda: init_device_mesh(device, (dist.get_world_size(),))), device, clip=True)


def fsdp_mixed(device: str) -> Step:
    """Parameters gathered in bfloat16 and kept until backward, gradients reduced in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    return training(sharded(device, lambda: mesh, mp_policy=policy, reshard_after_forward=False), device)


def fsdp_accumulate(device: str) -> Step:
    """Two micro batches, gradients reduced after the second."""
    model = sharded(device, lambda: init_device_mesh(device, (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ids = tokens(device)

    def step() -> None:
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            loss_of(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def hsdp(device: str) -> Step:
    """Sharded over pairs of ranks, replicated over the others."""
    mesh = init_device_mesh(device, (2, dist.get_world_size() // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return training(sharded(device, lambda: mesh), device, clip=True)


class Convolutions(nn.Module):
    """Some buckets' worth of weights, buffers, and a layer that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(3 if not i else 64, 64, 3, padding=1) for i in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(64) for _ in range(3))
        self.wide = nn.Sequential(*(nn.Linear(64 if not i else 2048, 2048) for i in range(3)), nn.Linear(2048, 10))
        self.unused = nn.Linear(64, 10)

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.relu(norm(convolution(x)))
        x = x.mean((2, 3))
        return self.wide(x) if skip else self.wide(x) + self.unused(x)


def replicated(device: str, skip: bool = False, micro_batches: int = 1, **options: object) -> Step:
    model = DistributedDataParallel(Convolutions().to(device), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images = torch.rand(2, 3, 8, 8, device=device)

    def step() -> None:
        for number in range(micro_batches):
            model.require_backward_grad_sync = number == micro_batches - 1
            model(images, skip).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp(device: str) -> Step:
    """Default buckets, buffers broadcast."""
    return replicated(device)


def ddp_buckets(device: str) -> Step:
    """Small buckets that gradients are views of, two micro batches."""
    return replicated(device, micro_batches=2, bucket_cap_mb=4, gradient_as_bucket_view=True, broadcast_buffers=False)


def ddp_unused(device: str) -> Step:
    """Some parameters take no part in the loss."""
    return replicated(device, skip=True, find_unused_parameters=True)


def zero1(device: str) -> Step:
    """Optimizer state sharded by torch's own ZeRO-1, parameters broadcast."""
    model = DistributedDataParallel(Stack().to(device))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
    inputs = torch.rand(BATCH, WIDTH, device=device)

    def step() -> None:
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp1(device: str) -> Step:
    """The first FullyShardedDataParallel."""
    model = FullyShardedDataParallel(
        Llama(CONFIG).to(device),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device(device) if device == "cpu" else torch.cuda.current_device(),
        use_orig_params=True,
    )
    return training(model, device)


def by_hand(device: str) -> Step:
    """Calls of torch.distributed, with and without a gradient."""
    size, rank = dist.get_world_size(), dist.get_rank()
    parameter = nn.Parameter(torch.rand(size * 16, 8, device=device))
    optimizer = torch.optim.SGD([parameter], lr=1e-3)
    group = dist.new_group(list(range(size)))

    def step() -> None:
        even = [16] * size
        moved = functional.all_to_all_single_autograd(parameter, even, even, group)
        functional.all_gather_tensor_autograd(moved, 0, group).sum().backward()
        part, parts = torch.rand(16, device=device), [torch.rand(16, device=device) for _ in range(size)]
        dist.all_gather(parts, part)
        dist.reduce(part, 0)
        dist.broadcast(part, src=size - 1)
        dist.gather(part, parts if not rank else None, dst=0)
        dist.scatter(part, parts if not rank else None, src=0)
        dist.reduce_scatter_tensor(part, torch.cat(parts))
        dist.all_reduce(part, op=dist.ReduceOp.MAX, async_op=True).wait()
        whole = torch.rand(16 * size, device=device, dtype=torch.bfloat16)
        dist.all_gather_into_tensor(whole, torch.rand(16, device=device).bfloat16(), group=group)
        dist.all_to_all_single(torch.empty_like(whole), whole)
        if rank:
            dist.recv(part, rank - 1)
        if rank < size - 1:
            dist.send(part, rank + 1)
        dist.barrier()
        optimizer.step()
        optimizer.zero_grad()

    return step


# -- tensor parallelism ------------------------------------------------------------------------------------------


def tensor_parallel(model: nn.Module, mesh: object) -> nn.Module:
    """Llama over a 1-D mesh: sequence parallel norms, logits sharded over the vocabulary."""
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for layer in model.layers.values():
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        names = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
        parallelize_module(layer, mesh, plan | {name: ColwiseParallel() for name in names})
    return model


def tensor_training(model: nn.Module, device: str) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = tokens(device)

    def step() -> None:
        with loss_parallel():
            logits = model(ids[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def tp(device: str) -> Step:
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    return tensor_training(tensor_parallel(Llama(CONFIG).to(device), mesh), device)


def fsdp_tp(device: str) -> Step:
    """Sharded over two, tensor parallel over the others."""
    mesh = init_device_mesh(device, (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(Llama(CONFIG).to(device), mesh["tp"])
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    return tensor_training(fully_shard(model, mesh=mesh["dp"]), device)


# -- pipelines ---------------------------------------------------------------------------------------------------


class Stack(nn.Sequential):
    """Layers of a pipeline stage."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def pipeline(
    device: str, schedule: type, static: bool, virtual: int = 1, mesh: object = None, wrap: Callable | None = None
) -> Step:
    group = mesh.get_group() if mesh is not None else dist.group.WORLD
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    stages, modules = [], []
    for number in range(rank, size * virtual, size):
        module = Stack().to(device)
        modules.append(wrap(module) if wrap is not None else module)
        shapes = {}
        if static:
            example = torch.rand(BATCH, WIDTH, device=device, requires_grad=number > 0)
            shapes = {"input_args": example, "output_args": example.detach().requires_grad_()}
        stages.append(PipelineStage(modules[-1], number, size * virtual, device, group=group, **shapes))
    runs = schedule(stages if virtual > 1 else stages[0], MICROBATCHES, loss_fn=F.mse_loss)
    optimizer = torch.optim.Adam([p for module in modules for p in module.parameters()], lr=1e-3)
    inputs = torch.rand(BATCH * MICROBATCHES, WIDTH, device=device)

    def step() -> None:
        first, last = rank == 0, rank == size - 1
        runs.step(*([inputs] if first else []), **({"target": inputs} if last else {}))
        optimizer.step()
        optimizer.zero_grad()

    return step


def gpipe(device: str) -> Step:
    return pipeline(device, ScheduleGPipe, static=True)


def one_f_one_b(device: str) -> Step:
    return pipeline(device, Schedule1F1B, static=True)


def dynamic(device: str) -> Step:
    """1F1B with shapes that stages tell each other."""
    return pipeline(device, Schedule1F1B, static=False)


def interleaved(device: str) -> Step:
    """Two stages on each rank."""
    return pipeline(device, ScheduleInterleaved1F1B, static=True, virtual=2)


def pp_fsdp(device: str) -> Step:
    """1F1B over two, sharded over the others."""
    mesh = init_device_mesh(device, (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    wrap = lambda module: fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)  # noqa: E731
    return pipeline(device, Schedule1F1B, static=True, mesh=mesh["pp"], wrap=wrap)


WAYS: dict[str, Callable[[str], Step]] = {
    way.__name__: way
    for way in (
        fsdp,
        fsdp_mixed,
        fsdp_accumulate,
        ddp,
        ddp_buckets,
        ddp_unused,
        tp,
        gpipe,
        one_f_one_b,
        dynamic,
        interleaved,
        zero1,
        fsdp1,
        by_hand,
        hsdp,
        fsdp_tp,
        pp_fsdp,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--iterations", type=int, default=10)
    options = parser.parse_args()
    device = options.device
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)
    names = options.ways.split(",")
    steps = [WAYS[name](device) for name in names]
    clock = torch.optim.SGD([nn.Parameter(torch.zeros(1, device=device))])
    clock.step()
    for _ in range(options.iterations):
        for name, step in zip(names, steps, strict=True):
            dist.all_reduce(torch.zeros(MARK + list(WAYS).index(name), device=device))
            step()
        clock.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
