"""Run in a process of its own: steps of compiled models with many blocks, each traced with folding and without it."""

import gc
import json
import sys
from dataclasses import fields
from functools import partial

import numpy as np
import torch
import torch._inductor.compile_fx
import torch.nn.functional as F
from made_world import made_world
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 64, 2, 256, 128, 2


class Block(nn.Module):
    """A block as GPT-2 has it."""

    def __init__(self, hidden=256, bias=True, norm=nn.LayerNorm, dropout=0.0, scale=1.0):
        super().__init__()
        self.norm1, self.norm2, self.scale, self.dropout = norm(WIDTH), norm(WIDTH), scale, dropout
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=bias)
        self.up, self.down = nn.Linear(WIDTH, hidden, bias=bias), nn.Linear(hidden, WIDTH, bias=bias)

    def forward(self, x, turned=None):
        q, k, v = (a.unflatten(-1, (HEADS, -1)).transpose(1, 2) for a in self.qkv(self.norm1(x)).chunk(3, -1))
        if turned is not None:
            q, k = q * turned, k * turned
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(y), self.dropout)
        return x + self.scale * self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, blocks, turned=False, flow="chain"):
        super().__init__()
        self.flow = flow
        self.embedding, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("turned", torch.ones(LENGTH, WIDTH // HEADS) if turned else None)

    def forward(self, tokens):
        x, earlier = self.embedding(tokens), []
        for number, block in enumerate(self.blocks):
            if self.flow == "skips" and number >= len(self.blocks) // 2:
                x = x + earlier[len(self.blocks) - 1 - number]
            x = checkpoint(block, x, use_reentrant=False) if self.flow == "recomputed" else block(x, self.turned)
            earlier.append(x)
        out = self.head(self.norm(x))
        return out + sum(each.mean() for each in earlier) if self.flow == "hidden states" else out


RMS = partial(nn.RMSNorm, eps=1e-5)
PROGRAMS = {
    "gpt": lambda: Model(Block() for _ in range(9)),
    "llama": lambda: Model([Block(bias=False, norm=RMS) for _ in range(8)], turned=True),
    "two kinds": lambda: Model(Block(hidden) for _ in range(8) for hidden in (256, 192)),
    "recomputed": lambda: Model([Block() for _ in range(8)], flow="recomputed"),
    "one block again and again": lambda: Model([Block()] * 8),
    "few": lambda: Model(Block() for _ in range(5)),
    "scaled": lambda: Model(Block(scale=1 / number) for number in range(2, 10)),
    "skips": lambda: Model([Block() for _ in range(8)], flow="skips"),
    "hidden states": lambda: Model([Block() for _ in range(8)], flow="hidden states"),
    "dropout": lambda: Model(Block(dropout=0.1) for _ in range(8)),
}


def recorded(world, folding, name, folds):
    """What a compiled step is, and how many of its graphs were folded."""
    torch._dynamo.reset()
    gc.collect()
    made = []
    find, lengthen = folding.find_repeats, folding._lengthened
    folding._lengthened = lambda *args: made.append(lengthen(*args)) or made[-1]
    if not folds:
        folding.find_repeats = lambda gm: None
    try:
        model = PROGRAMS[name]().cuda()
        compiled = torch.compile(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for last in (False, True):
            if last:
                world.recorder.start()
            tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="cuda")
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(compiled(tokens).flatten(0, 1).float(), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
    finally:
        folding.find_repeats, folding._lengthened = find, lengthen
    return described(world.recorder.finish(world.modules.paths, {})), len(made)


def described(recording):
    """The columns of a recording, with the names of modules, without tensors that were there before and stay: the model
    that was traced before may be among them."""
    columns = {field.name: getattr(recording, field.name) for field in fields(recording)}
    columns = {name: value for name, value in columns.items() if isinstance(value, np.ndarray)}
    used = (recording.tensor_alloc >= 0) | (recording.tensor_free >= 0)
    found = {
        name: value[used].tolist() if name.startswith("tensor_") else value.tolist() for name, value in columns.items()
    }
    return found | {"module": [recording.modules[number] for number in recording.module]}


def different(one, other):
    """The columns that differ, and the first places where they do."""
    places = {
        name: [i for i, pair in enumerate(zip(one[name], other[name], strict=False)) if pair[0] != pair[1]][:5]
        for name in one
        if one[name] != other[name]
    }
    return {name: [[i, one[name][i], other[name][i]] for i in found] for name, found in places.items()}


if __name__ == "__main__":
    made = made_world(1)
    torch.compile(lambda: None)
    from forerun.sources.trace.inside.compiled import folding

    results = {}
    for program in sys.argv[2:]:
        (whole, _), (folded, graphs) = (recorded(made, folding, program, folds) for folds in (False, True))
        results[program] = {"kernels": len(whole["op"]), "graphs": graphs, "different": different(whole, folded)}
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(results, file)
