"""Run in a process of its own: one step of many compiled programs on the virtual device, what each was as JSON."""

import json
import sys
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from made_world import made_world
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from forerun.core.program.kinds import OpKind
from forerun.core.program.types import Category, Phase

WIDTH, HEADS, HIDDEN, VOCABULARY, LENGTH, BATCH = 256, 4, 704, 1024, 512, 2
BYTES = BATCH * LENGTH * 2
"""of one bf16 feature of all tokens"""


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


causal_attention = partial(F.scaled_dot_product_attention, is_causal=True)


def rotated(x, cosine, sine):
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


class Attention(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x, cosine, sine):
        q, k, v = (w(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = self.attend(rotated(q, cosine, sine), rotated(k, cosine, sine), v)
        return self.wo(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.norm1, self.norm2, self.attention = Norm(), Norm(), Attention(attend)
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x, cosine, sine):
        x = x + self.attention(self.norm1(x), cosine, sine)
        y = self.norm2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    def __init__(self, attend=causal_attention, breaks=False, recompute=False):
        super().__init__()
        self.breaks, self.recompute = breaks, recompute
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block(attend) for _ in range(2)])
        self.norm, self.head = Norm(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(LENGTH), 1e-4 ** torch.linspace(0, 1, WIDTH // HEADS // 2)).repeat(1, 2)
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def forward(self, tokens):
        x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            if self.breaks and i:
                torch._dynamo.graph_break()
            if self.recompute:
                x = checkpoint(layer, x, self.cosine, self.sine, use_reentrant=False)
            else:
                x = layer(x, self.cosine, self.sine)
        return self.head(self.norm(x))


def llama(**options):
    return Llama(**options).to("cuda", torch.bfloat16)


def blocks(model):
    for layer in model.layers:
        layer.compile(fullgraph=True)
    return model


def sharded(model):
    for part in (*blocks(model).layers, model):
        fully_shard(part)
    return model


def flexible(wrap):
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, device="cuda")
    return partial(wrap(flex_attention), block_mask=mask)


@torch.compile(fullgraph=True)
def not_for_dynamo(x):
    print("scaled", file=sys.stderr)
    return x * 2


class Scaled(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return not_for_dynamo(self.model(tokens))


PROGRAMS = {
    "eager": llama,
    "whole": lambda: torch.compile(llama()),
    "broken": lambda: torch.compile(llama(breaks=True)),
    "blocks": lambda: blocks(llama()),
    "graphs": lambda: torch.compile(llama(), mode="max-autotune"),
    "dynamic": lambda: torch.compile(llama(), dynamic=True),
    "recomputed blocks": lambda: blocks(llama(recompute=True)),
    "recomputed inside": lambda: torch.compile(llama(recompute=True)),
    "data parallel": lambda: torch.compile(nn.parallel.DistributedDataParallel(llama())),
    "sharded": lambda: sharded(llama()),
    "flexible": lambda: llama(attend=flexible(torch.compile)),
    "impossible": lambda: Scaled(llama()),
    "optimizer": llama,
}


def recorded_step(world, name):
    """Steps of a program, the last one recorded."""
    torch._dynamo.reset()
    model = PROGRAMS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    update = torch.compile(optimizer.step) if name == "optimizer" else optimizer.step
    world.recorder.notes.clear()
    world.recorder.fallbacks.clear()
    for last in (False, True):
        if last:
            world.recorder.start()
        tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="cuda")
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        saved = 0 if name.startswith("recomputed") else saved_bytes(loss, model)
        loss.backward()
        update()
        optimizer.zero_grad()
        del loss
    recording = world.recorder.finish(world.modules.paths, {})
    return summary(recording) | {"saved_bytes": saved}


def saved_bytes(loss, model):
    """Bytes of all that autograd keeps for the backward of `loss`, beside parameters and buffers."""
    known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"}
    sizes, seen, left = {}, set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [following for following, _ in node.next_functions]
        names = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
        values = [value for name in names for value in flat(getattr(node, name))]
        for storage in (v.untyped_storage() for v in values if isinstance(v, torch.Tensor) and v.is_cuda):
            if storage._cdata not in known:
                sizes[storage._cdata] = -(-storage.nbytes() // 512) * 512
    return sum(sizes.values())


def flat(value):
    return value if isinstance(value, (list, tuple)) else [value]


def summary(recording):
    """What a test may want to know of a recording."""
    row, category = recording.op, recording.tensor_category
    kind, flops = recording.ops.kind[row], recording.ops.flops[row]
    matmul = (kind == OpKind.GEMM) | (kind == OpKind.ATTENTION)
    names = [recording.ops.name[i] for i in row]
    return {
        "names": names,
        "modules": [recording.modules[i] for i in recording.module],
        "phases": [Phase(p).name for p in recording.phase],
        "compiled": recording.compiled.tolist(),
        "matmuls": sorted(recording.ops.flops[row][kind == OpKind.GEMM].tolist()),
        "flops": float(flops[matmul].sum()),
        "recomputed_flops": float(flops[matmul & (recording.phase == Phase.RECOMPUTE)].sum()),
        "collectives": [names[i] for i in range(len(names)) if kind[i] == OpKind.COLLECTIVE],
        "moved_bytes": float((recording.ops.bytes_read + recording.ops.bytes_written)[row].sum()),
        "activation_bytes": int(recording.tensor_bytes[category == int(Category.ACTIVATION)].sum()),
        "made_by_optimizer": sorted(
            int(size)
            for size, node in zip(recording.tensor_bytes, recording.tensor_alloc, strict=True)
            if node >= 0 and recording.phase[node] == Phase.OPTIMIZER
        ),
        "pooled_bytes": int(recording.tensor_bytes[category == int(Category.GRAPH_POOL)].sum()),
        "notes": recording.meta["notes"],
        "fallbacks": recording.meta["fallbacks"],
    }


if __name__ == "__main__":
    made = made_world(8, allow_fallback=True)
    dist.init_process_group("nccl")
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump({name: recorded_step(made, name) for name in sys.argv[2:] or PROGRAMS}, file)
