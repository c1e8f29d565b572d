"""Train a small Llama, transformer or MLP on random tokens, with SimpleFSDP or alone.

One process: `python train.py`. Two: `torchrun --nproc-per-node 2 train.py --mode fully_shard`.
"""

import argparse
import contextlib
import importlib
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import Llama, ModelConfig
from simple_fsdp import PLACEMENTS, MixedPrecision, data_parallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformer import ATTENTION, REMAT, Transformer, TransformerConfig, causal_mask

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["llama", "transformer", "mlp"], default="llama")
    parser.add_argument("--mode", choices=["none", *PLACEMENTS], default="fully_shard", help="none: each rank alone")
    parser.add_argument("--shard-size", type=int, help="ranks that share one copy in hybrid_shard; default: one node's")
    parser.add_argument("--shard-at-least", type=int, default=0, help="bytes below which a parameter is replicated")
    parser.add_argument("--no-reshard", action="store_true", help="keep gathered weights until backward")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, help="key and value heads; default: as many as heads")
    parser.add_argument("--grouping", type=int, default=1, help="of transformer: query heads per key and value head")
    parser.add_argument("--grow", type=int, default=4, help="of transformer and mlp: feed-forward width over dim")
    parser.add_argument("--attention", choices=ATTENTION[:2], default="sdpa", help="of transformer")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--tied", action="store_true", help="share the embedding's weight with the output")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--param-dtype", choices=list(DTYPES), help="dtype of gathered weights; default: as stored")
    parser.add_argument("--reduce-dtype", choices=list(DTYPES), help="dtype of gradient reductions")
    parser.add_argument("--autocast", choices=list(DTYPES), help="dtype of autocast in the forward pass")
    parser.add_argument("--checkpoint", choices=["none", "full", "selective"], default="none", help="of llama")
    parser.add_argument("--remat", choices=REMAT, default="none", help="of transformer: halves of a block to run again")
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="compile the whole model")
    parser.add_argument(
        "--compile-step",
        nargs="?",
        const="inductor",
        metavar="BACKEND",
        help="compile model and loss in one function, backward pass and optimizer in another",
    )
    parser.add_argument("--fused", action="store_true", help="let the optimizer update all parameters in one kernel")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def start(device_type: str) -> torch.device:
    """Join the job that torchrun started, or be the only rank of one, and return this rank's device."""
    backend = "nccl" if device_type == "cuda" else "gloo"
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def make_mesh(device_type: str, mode: str, shard_size: int | None) -> DeviceMesh:
    """All ranks in one dimension, or for hybrid_shard groups of `shard_size` neighbours."""
    world = dist.get_world_size()
    if mode != "hybrid_shard":
        return init_device_mesh(device_type, (world,), mesh_dim_names=("dp",))
    shard_size = shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % shard_size:
        raise SystemExit(f"--shard-size {shard_size} does not divide the {world} ranks")
    return init_device_mesh(device_type, (world // shard_size, shard_size), mesh_dim_names=("replicate", "shard"))


def make_model(args: argparse.Namespace) -> nn.Module:
    """The model that the arguments describe, on the current device."""
    if args.model != "llama":
        attention = args.attention if args.model == "transformer" else "none"
        shape = (args.vocab, args.layers, args.dim, args.grow, args.grouping)
        return Transformer(TransformerConfig(*shape, attention=attention, remat=args.remat))
    config = ModelConfig(
        vocab=args.vocab,
        layers=args.layers,
        dim=args.dim,
        heads=args.heads,
        kv_heads=args.kv_heads or args.heads,
        seq_len=args.seq_len,
        tied=args.tied,
        checkpoint=args.checkpoint,
    )
    return Llama(config)


def step_functions(
    args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], None]]:
    """The two halves of a step: from tokens to loss, and backward pass with the optimizer."""
    mask: Any = ()
    if args.model == "transformer" and args.attention == "flex":
        mask = (causal_mask(args.seq_len, device),)
    dtype = DTYPES.get(args.autocast, torch.float32)

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype, enabled=args.autocast is not None):
            logits = model(tokens[:, :-1], *mask)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def update(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()

    if args.compile_step:
        return torch.compile(forward, backend=args.compile_step), torch.compile(update, backend=args.compile_step)
    return forward, update


def note_memory(stage: str) -> None:
    """Notes the memory at a stage where Forerun is installed; the script needs it for nothing else."""
    with contextlib.suppress(ImportError):
        importlib.import_module("forerun").mark_stage(stage)


def now(device: torch.device) -> float:
    """Seconds, after all that was given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    with device:
        model = make_model(args)
    note_memory("model made")
    if args.mode != "none":
        mesh = make_mesh(device.type, args.mode, args.shard_size)
        precision = MixedPrecision(DTYPES.get(args.param_dtype), DTYPES.get(args.reduce_dtype))
        data_parallel(model, mesh, args.mode, precision, not args.no_reshard, args.shard_at_least)
    note_memory("data parallel")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=args.fused or None)
    if args.compile:
        model.compile(backend=args.compile, fullgraph=True)
    forward, update = step_functions(args, model, optimizer, device)

    torch.manual_seed(1 + rank)
    begin = now(device)
    for step in range(args.steps):
        tokens = torch.randint(args.vocab, (args.batch, args.seq_len + 1), device=device)
        loss = forward(tokens)
        update(loss)
        optimizer.zero_grad()
        mean_loss = loss.detach()
        dist.all_reduce(mean_loss, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(f"step {step}: loss {mean_loss.item():.4f}", flush=True)
        if step == 0 and args.steps > 1:
            begin = now(device)  # the first step warms up and compiles
    timed_steps = max(1, args.steps - 1)
    tokens_per_s = timed_steps * args.batch * args.seq_len * world / (now(device) - begin)
    if rank == 0:
        print(f"{tokens_per_s:,.0f} tokens/s on {world} rank(s)")


def main() -> None:
    args = parse_arguments()
    device = start(args.device)
    try:
        train(args, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
