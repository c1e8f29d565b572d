"""Train a Llama on random tokens with FSDP2 and tensor parallelism, in plain PyTorch.

Two processes on CPUs: `torchrun --nproc-per-node 2 train.py --size debug --tp 2`.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import SIZES, Block, Llama
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="debug")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--batch", type=int, default=1, help="sequences per data-parallel rank and step")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--checkpoint", action="store_true", help="recompute each layer in backward")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def shard_layers(model: Llama, mesh: DeviceMesh) -> None:
    """Tensor and sequence parallelism of every layer, embedding and output."""
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        },
    )
    for block in model.layers.values():
        assert isinstance(block, Block)
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
                ),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w3": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            },
        )


def shard_data(model: Llama, mesh: DeviceMesh) -> None:
    """FSDP2: every layer a unit, gathered in bf16, gradients reduced in fp32."""
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model.tok_embeddings, mesh=mesh, mp_policy=precision)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard([model.norm, model.output], mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=precision)


def main() -> None:
    arguments = parse_arguments()
    device = torch.device(arguments.device, int(os.environ["LOCAL_RANK"]) if arguments.device == "cuda" else None)
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
    if arguments.device == "cuda":
        torch.cuda.set_device(device)
    data = dist.get_world_size() // arguments.tp
    mesh = init_device_mesh(arguments.device, (data, arguments.tp), mesh_dim_names=("dp_shard", "tp"))
    config = SIZES[arguments.size]
    torch.manual_seed(0)
    model = Llama(config).to(device)
    if arguments.tp > 1:
        shard_layers(model, mesh["tp"])
    if arguments.checkpoint:
        for name, block in model.layers.items():
            model.layers[name] = checkpoint_wrapper(block)
    shard_data(model, mesh["dp_shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(arguments.steps):
        tokens = torch.randint(config.vocab_size, (arguments.batch, config.seq_len + 1), device=device)
        with loss_parallel():
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}, gradient norm {norm.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
