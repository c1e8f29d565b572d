"""Run in a process of its own: steps of random models, eager, as AOTAutograd's graphs, and compiled by Inductor.

python random_steps.py OUT.json EAGER COMPILED: how many run eagerly, and how many of these also in the two other ways.
"""

import json
import os
import random
import sys
import tempfile
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.utils.checkpoint import checkpoint

from forerun.core.program.kinds import OpKind
from forerun.core.program.types import Category, Phase
from forerun.sources.trace.inside.world import World
from forerun.sources.trace.job import Job
from forerun.sources.trace.recording import Recording, load_recording, save_recording

RANKS = 4
BACKENDS = {"eager": "", "aot": "aot_eager", "inductor": "inductor"}


class Mixer(nn.Module):
    """Products around a function of each element."""

    def __init__(self, width, draw):
        super().__init__()
        hidden = 8 * draw.randint(1, 64)
        self.up, self.down = nn.Linear(width, hidden, bias=draw.random() < 0.5), nn.Linear(hidden, width)
        self.function = draw.choice((F.gelu, F.silu, F.relu, torch.tanh))

    def forward(self, x):
        return self.down(self.function(self.up(x)))


class Attention(nn.Module):
    """Attention of two heads."""

    def __init__(self, width, draw):
        super().__init__()
        self.qkv, self.causal = nn.Linear(width, 3 * width, bias=False), draw.random() < 0.5

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)


class Gathered(nn.Module):
    """A product of all ranks' samples, whose sum over the ranks is scattered again."""

    def __init__(self, width, draw):
        super().__init__()
        self.product = nn.Linear(width, width, bias=draw.random() < 0.5)

    def forward(self, x):
        whole = all_gather_tensor_autograd(x.contiguous(), 0, dist.group.WORLD)
        return reduce_scatter_tensor_autograd(self.product(whole), "sum", 0, dist.group.WORLD)


class Layer(nn.Module):
    def __init__(self, width, draw):
        super().__init__()
        self.norm = draw.choice((nn.LayerNorm, nn.RMSNorm))(width)
        self.inner = draw.choice((Mixer, Mixer, Attention, Gathered))(width, draw)
        self.residual, self.recomputed = draw.random() < 0.7, draw.random() < 0.3

    def forward(self, x):
        y = checkpoint(self._inside, x, use_reentrant=False) if self.recomputed else self._inside(x)
        return x + y if self.residual else y

    def _inside(self, x):
        return self.inner(self.norm(x))


def model_and_input(seed):
    """The same random model and input for each way to run it."""
    draw = random.Random(seed)
    width, dtype = 32 * draw.randint(1, 16), draw.choice((torch.bfloat16, torch.float32))
    model = nn.Sequential(*[Layer(width, draw) for _ in range(draw.randint(1, 4))]).to("cuda", dtype)
    return model, torch.ones(draw.randint(1, 8), 16 * draw.randint(1, 32), width, device="cuda", dtype=dtype)


def recorded(world, seed, how):
    """What the second step of a random model did."""
    torch._dynamo.reset()
    model, x = model_and_input(seed)
    run = torch.compile(model, backend=BACKENDS[how]) if BACKENDS[how] else model
    for last in (False, True):
        if last:
            world.recorder.start()
        run(x).float().square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None
    return summary(world.recorder.finish(world.modules.paths, {}))


def summary(recording):
    op, ops, phase = recording.op, recording.ops, recording.phase
    again = phase == Phase.RECOMPUTE
    flops = ops.flops[op] * np.isin(ops.kind[op], (OpKind.GEMM, OpKind.ATTENTION))
    communicates = ops.kind[op] == OpKind.COLLECTIVE
    messages = zip(ops.collective[op], ops.bytes_comm[op], strict=True)
    once = communicates & ~again
    columns = (ops.flops, ops.bytes_read, ops.bytes_written, ops.bytes_comm, recording.tensor_bytes)
    return {
        "flops": {Phase(p).name: float(flops[phase == p].sum()) for p in set(phase.tolist())},
        "messages": sorted([int(kind), float(size)] for (kind, size), one in zip(messages, once, strict=True) if one),
        "saved_bytes": int(recording.tensor_bytes[recording.tensor_category == Category.ACTIVATION].sum()),
        "least": float(min(column.min(initial=0) for column in columns)),
        "comes_back": comes_back(recording),
    }


def comes_back(recording):
    """Whether a recording read back equals the one written."""
    with tempfile.TemporaryDirectory() as folder:
        save_recording(recording, Path(folder) / "step.npz")
        loaded = load_recording(Path(folder) / "step.npz")
    for field in fields(Recording):
        one, other = getattr(recording, field.name), getattr(loaded, field.name)
        if field.name == "ops":
            same = one.rows() == other.rows()
        elif isinstance(one, np.ndarray):
            same = one.dtype == other.dtype and np.array_equal(one, other)
        else:
            same = json.loads(json.dumps(one)) == json.loads(json.dumps(other))
        if not same:
            return False
    return True


if __name__ == "__main__":
    made = World(Job(folder=".", world_size=RANKS, steps=1 << 30))
    dist.init_process_group("nccl")
    eager, compiled = map(int, sys.argv[2:4])
    found = []
    for seed in range(eager):
        found.append({how: recorded(made, seed, how) for how in (BACKENDS if seed < compiled else ["eager"])})
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump({"steps": found, "notes": list(made.recorder.notes)}, file)
    sys.stdout.flush()
    os._exit(0)
