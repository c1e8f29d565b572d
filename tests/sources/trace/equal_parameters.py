"""Run in a process of its own: steps of compiled optimizers, each traced with folding and without it."""

import gc
import json
import sys
from pathlib import Path

import torch
import torch._inductor.compile_fx
import torch.nn.functional as F
from torch import nn, optim

sys.path.insert(0, str(Path(__file__).parent))

from equal_blocks import described, different
from made_world import made_world

WIDTH, LAYERS, VOCABULARY = 32, 6, 128


class Layers(nn.Module):
    """Layers with parameters of several shapes and dtypes, some of them tied."""

    def __init__(self, tied=False, halves=False, growing=False):
        super().__init__()
        widths = [WIDTH + 8 * number if growing else 2 * WIDTH for number in range(LAYERS)]
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.up = nn.ModuleList(nn.Linear(WIDTH, width) for width in widths)
        self.down = nn.ModuleList(nn.Linear(width, WIDTH) for width in widths)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in widths)
        if tied:
            self.head.weight = self.embedding.weight
            self.down[1].weight = self.down[0].weight
        if halves:
            self.down.bfloat16()

    def forward(self, tokens):
        x = self.embedding(tokens)
        for up, down, norm in zip(self.up, self.down, self.norms, strict=True):
            x = x + down(F.gelu(up(norm(x))).to(down.weight.dtype)).to(x.dtype)
        return self.head(x)


class Normalized(optim.Optimizer):
    """Its step divides all gradients by one norm."""

    @torch.no_grad()
    def step(self):
        parameters = self.param_groups[0]["params"]
        gradients = [p.grad for p in parameters]
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        torch._foreach_div_(gradients, norm)
        torch._foreach_add_(parameters, gradients, alpha=-0.1)


class Lion(optim.Optimizer):
    """An optimizer of the program's own, parameter by parameter."""

    def __init__(self, parameters, lr=1e-3):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                p.add_(torch.sign(0.9 * state["m"] + 0.1 * p.grad), alpha=-group["lr"])
                state["m"].lerp_(p.grad, 0.01)


def in_groups(model):
    """Matrices with weight decay, vectors without."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 1e-2}]


def plain(model):
    return model.parameters()


def clipped(model, optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


ADAM = {"foreach": True, "capturable": True}
PROGRAMS = {  # model, parameters, optimizer, what is compiled
    "AdamW": ({}, plain, lambda p: optim.AdamW(p, foreach=True), None),
    "AdamW, loop": ({}, plain, lambda p: optim.AdamW(p, foreach=False), None),
    "AdamW, fused": ({}, plain, lambda p: optim.AdamW(p, fused=True), None),
    "AdamW, tied": ({"tied": True}, plain, optim.AdamW, None),
    "AdamW, two dtypes": ({"halves": True}, plain, optim.AdamW, None),
    "AdamW, unlike shapes": ({"growing": True}, plain, optim.AdamW, None),
    "AdamW, groups": ({}, in_groups, optim.AdamW, None),
    "AdamW, learning rate in a tensor": ({}, plain, lambda p: optim.AdamW(p, lr=torch.tensor(1e-3), **ADAM), None),
    "AdamW, its learning rate on the device": (
        {"tied": True, "halves": True},
        in_groups,
        lambda p: optim.AdamW(p, lr=torch.tensor(1e-3, device="cuda"), **ADAM),
        None,
    ),
    "Adam, amsgrad": ({"tied": True}, plain, lambda p: optim.Adam(p, amsgrad=True, maximize=True), None),
    "SGD": ({}, plain, lambda p: optim.SGD(p, lr=0.1, foreach=True), None),
    "SGD, momentum": ({"halves": True}, in_groups, lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), None),
    "SGD, loop": ({}, plain, lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=False), None),
    "RMSprop": ({"growing": True}, plain, lambda p: optim.RMSprop(p, momentum=0.9, centered=True), None),
    "Adagrad": ({}, plain, optim.Adagrad, None),
    "NAdam": ({}, plain, optim.NAdam, None),
    "Adamax": ({}, in_groups, optim.Adamax, None),
    "an optimizer of its own": ({"tied": True}, in_groups, Lion, None),
    "clipping": ({}, plain, optim.AdamW, clipped),
    "one norm": ({}, plain, lambda p: Normalized(p, {}), None),
}


def recorded(world, folding, name, folds):
    """What a step with a compiled optimizer is, and how many graphs were widened."""
    torch._dynamo.reset()
    gc.collect()
    made = []
    narrow, widen = folding.narrowed, folding.Widened
    folding.Widened = lambda *args: made.append(widen(*args)) or made[-1]
    if not folds:
        folding.narrowed = lambda gm: None
    try:
        how, parameters, optimizer_of, update = PROGRAMS[name]
        model = Layers(**how).cuda()
        optimizer = optimizer_of(parameters(model))
        run = torch.compile(optimizer.step if update is None else update)
        for last in (False, True):
            if last:
                world.recorder.start()
            tokens = torch.zeros(4, 64, dtype=torch.long, device="cuda")
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            run() if update is None else run(model, optimizer)
            optimizer.zero_grad()
            del loss
    finally:
        folding.narrowed, folding.Widened = narrow, widen
    return described(world.recorder.finish(world.modules.paths, {})), len(made)


if __name__ == "__main__":
    made = made_world(1)
    torch.compile(lambda: None)
    from forerun.sources.trace.inside.compiled import folding

    results = {}
    for program in sys.argv[2:] or PROGRAMS:
        (whole, _), (folded, graphs) = (recorded(made, folding, program, folds) for folds in (False, True))
        results[program] = {"kernels": len(whole["op"]), "graphs": graphs, "different": different(whole, folded)}
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(results, file)
