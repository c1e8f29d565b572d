"""A training script with the structure of simple_pytorch's: SimpleFSDP, flex attention, checkpointed halves of a block,
weights made on the meta device, and two compiled functions, of which the second runs backward and the optimizer's step.

    torchrun --nproc-per-node=gpu compiled_transformer.py        # sizes are those of simple_pytorch's defaults
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "simple_fsdp"))
from simple_fsdp import MixedPrecision, data_parallel

VOCABULARY, HEAD_DIM, STEPS = 32_768, 128, 3
attend = torch.compile(flex_attention)


class Attention(nn.Module):
    def __init__(self, width, grouping):
        super().__init__()
        narrow = width // grouping
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = nn.Linear(width, narrow, bias=False), nn.Linear(width, narrow, bias=False)

    @record_function("attention")
    def forward(self, x, mask):
        q, k, v = (w(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in (self.query, self.key, self.value))
        y = attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, grouping, recompute):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, grouping)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.recompute = recompute

    def mix(self, x, mask):
        return self.attention(self.norm1(x), mask)

    def think(self, x):
        return self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    @record_function("block")
    def forward(self, x, mask):
        if not self.recompute:
            x = x + self.mix(x, mask)
            return x + self.think(x)
        x = x + checkpoint(self.mix, x, mask, use_reentrant=False)
        return x + checkpoint(self.think, x, use_reentrant=False)


class Transformer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, args.width)
        self.blocks = nn.ModuleList([Block(args.width, args.grouping, args.remat) for _ in range(args.depth)])
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, VOCABULARY, bias=False)

    def forward(self, tokens, mask):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def main(args):
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=device)
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("dp",))
    with torch.device("meta"):
        model = Transformer(args)
    precision = MixedPrecision(torch.bfloat16, torch.bfloat16)
    data_parallel(model, mesh, "fully_shard", precision, reshard_after_forward=not args.remat)
    model.to_empty(device=torch.cuda.current_device())
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    tokens = torch.randint(0, VOCABULARY, (args.batch, args.seqlen), device="cuda")
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, args.seqlen, args.seqlen)

    @record_function("forward")
    @torch.compile
    def forward(batch, mask):
        logits = model(batch, mask)
        return F.cross_entropy(logits.view(-1, VOCABULARY), tokens.view(-1))

    @record_function("backward")
    @torch.compile
    def backward(loss):
        loss.backward()
        optimizer.step()
        return loss

    for step in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        model.zero_grad(set_to_none=True)
        loss = forward(tokens, mask)
        backward(loss)
        print(f"step {step}: loss {loss.item():.2f}, {torch.cuda.max_memory_allocated() >> 20} MiB")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch", type=int, default=8)
    parser.add_argument("-s", "--seqlen", type=int, default=4096)
    parser.add_argument("-d", "--depth", type=int, default=4)
    parser.add_argument("-w", "--width", type=int, default=4096)
    parser.add_argument("-g", "--grouping", type=int, default=4)
    parser.add_argument("--no-remat", dest="remat", action="store_false")
    main(parser.parse_args())
