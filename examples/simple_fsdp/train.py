"""Train a small Llama on random tokens with SimpleFSDP.

One process: `python train.py`. Two: `torchrun --nproc-per-node 2 train.py --mode fully_shard`.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import Llama, ModelConfig
from simple_fsdp import PLACEMENTS, MixedPrecision, data_parallel
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=list(PLACEMENTS), default="fully_shard")
    parser.add_argument("--shard-size", type=int, help="ranks that share one copy in hybrid_shard; default: one node's")
    parser.add_argument("--no-reshard", action="store_true", help="keep gathered weights until backward")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, help="key and value heads; default: as many as heads")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--tied", action="store_true", help="share the embedding's weight with the output")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--param-dtype", choices=list(DTYPES), help="dtype of gathered weights; default: as stored")
    parser.add_argument("--reduce-dtype", choices=list(DTYPES), help="dtype of gradient reductions")
    parser.add_argument("--checkpoint", choices=["none", "full", "selective"], default="none")
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="compile the whole model")
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


def make_config(args: argparse.Namespace) -> ModelConfig:
    return ModelConfig(
        vocab=args.vocab,
        layers=args.layers,
        dim=args.dim,
        heads=args.heads,
        kv_heads=args.kv_heads or args.heads,
        seq_len=args.seq_len,
        tied=args.tied,
        checkpoint=args.checkpoint,
    )


def now(device: torch.device) -> float:
    """Seconds, after all that was given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def train(args: argparse.Namespace, device: torch.device) -> None:
    mesh = make_mesh(device.type, args.mode, args.shard_size)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    with device:
        model = Llama(make_config(args))
    precision = MixedPrecision(DTYPES.get(args.param_dtype), DTYPES.get(args.reduce_dtype))
    data_parallel(model, mesh, args.mode, precision, reshard_after_forward=not args.no_reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    if args.compile:
        model.compile(backend=args.compile, fullgraph=True)

    torch.manual_seed(1 + rank)
    begin = now(device)
    for step in range(args.steps):
        tokens = torch.randint(args.vocab, (args.batch, args.seq_len + 1), device=device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
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
