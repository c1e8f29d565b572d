"""Run in a process of its own: what Dynamo captures of many compiled programs, with the tracer or without it.

    python captured_regions.py OUT.json traced|plain

Without the tracer tensors are on the CPU and graphs run as they are.
"""

import io
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

TRACED = sys.argv[2] == "traced"
DEVICE, BACKEND = ("cuda", "inductor") if TRACED else ("cpu", "eager")
WIDTH, BATCH, STEPS = 64, 8, 3


def compiled(function, **options):
    return torch.compile(function, backend=BACKEND, **options)


class Block(nn.Module):
    def __init__(self, breaks=False, recompute=False):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.breaks, self.recompute = breaks, recompute

    def inner(self, x):
        if self.breaks:
            torch._dynamo.graph_break()
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x):
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x))


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.blocks = nn.ModuleList([Block(**options) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Descent(torch.optim.Optimizer):
    """An optimizer of one's own, which has none of the graph breaks of torch's."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def made(model=None, optimizer=torch.optim.AdamW, **settings):
    model = (model or Model()).to(DEVICE)
    if not settings and optimizer is not Descent:
        settings = {"foreach": True}  # what torch chooses on a GPU
    return model, optimizer(model.parameters(), lr=1e-3, **settings)


def batch():
    return torch.ones(BATCH, WIDTH, device=DEVICE)


def forward_only():
    model, optimizer = made()
    fast = compiled(model)

    def step():
        fast(batch()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def update_inside(**settings):
    """Forward compiled, and backward with the optimizer's step compiled."""
    model, optimizer = made(**settings)

    @record_function("forward")
    @compiled
    def forward(x):
        return model(x)

    @record_function("backward")
    @compiled
    def backward(loss):
        loss.backward()
        optimizer.step()
        return loss

    def step():
        optimizer.zero_grad(set_to_none=True)
        backward(forward(batch()))

    return step


def whole_step(wrap=lambda model: model, **settings):
    """One function that does all, compiled."""
    model, optimizer = made(**settings)
    model = wrap(model)

    @compiled
    def step(x):
        loss = model(x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return lambda: step(batch())


def optimizer_alone(**settings):
    model, optimizer = made(**settings)
    update = compiled(optimizer.step)

    def step():
        model(batch()).backward()
        update()
        optimizer.zero_grad()

    return step


def with_scheduler():
    model, optimizer = made()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)

    @compiled
    def step(x):
        model(x).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    return lambda: step(batch())


def with_hooks():
    model, optimizer = made()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    model.blocks[0].register_forward_hook(lambda _module, _args, out: out * 1.0)
    model.blocks[1].up.weight.register_hook(lambda grad: grad * 1.0)

    @compiled
    def step(x):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return lambda: step(batch())


def closure():
    """As accelerate and Lightning do it: the optimizer calls what trains."""
    model, optimizer = made(optimizer=torch.optim.SGD)

    def train():
        optimizer.zero_grad()
        loss = model(batch())
        loss.backward()
        return loss

    @compiled
    def step():
        return optimizer.step(train)

    return step


def own_function():
    model, optimizer = made()

    @compiled
    def step(x):
        Doubled.apply(model(Doubled.apply(x))).backward()
        optimizer.step()
        optimizer.zero_grad()

    return lambda: step(batch())


def asks_for_values():
    model, optimizer = made()

    @compiled
    def step(x):
        loss = model(x)
        loss.backward()
        value = loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return value

    return lambda: step(batch())


def saves():
    model, optimizer = made()

    @compiled
    def step(x):
        loss = model(x)
        torch.save({"step": 1}, io.BytesIO())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return lambda: step(batch())


def reduces():
    model, optimizer = made()

    @compiled
    def step(x):
        loss = model(x)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()

    return lambda: step(batch())


def sharded():
    model, _ = made()
    for block in model.blocks:
        block.compile(backend=BACKEND)
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    @compiled
    def backward(loss):
        loss.backward()
        optimizer.step()

    def step():
        backward(model(batch()))
        optimizer.zero_grad()

    return step


def replicated(model):
    return nn.parallel.DistributedDataParallel(model)


PROGRAMS = {
    "forward only": forward_only,
    "fused update inside": lambda: update_inside(fused=True),
    "multi-tensor update inside": lambda: update_inside(foreach=True),
    "plain update inside": lambda: update_inside(optimizer=torch.optim.SGD, foreach=False),
    "own update inside": lambda: update_inside(optimizer=Descent),
    "whole step": whole_step,
    "whole step, breaks": lambda: whole_step(model=Model(breaks=True)),
    "whole step, recomputed": lambda: whole_step(model=Model(recompute=True)),
    "whole step, recomputed with breaks": lambda: whole_step(model=Model(recompute=True, breaks=True)),
    "whole step, replicated": lambda: whole_step(replicated, fused=True),
    "optimizer alone": lambda: optimizer_alone(foreach=True),
    "fused optimizer alone": lambda: optimizer_alone(fused=True),
    "scheduler": with_scheduler,
    "hooks": with_hooks,
    "closure": closure,
    "own function": own_function,
    "values": asks_for_values,
    "saves": saves,
    "reduces": reduces,
    "sharded": sharded,
}


def captured(build):
    """What Dynamo captured in some steps of a program."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    step = build()
    for _ in range(STEPS):
        step()
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "operations": counters["stats"]["calls_captured"],
        "breaks": sum(counters["graph_break"].values()),
    }


class Engine(torch._C._ImperativeEngine):
    """Autograd's engine, where Dynamo doesn't watch: as on a GPU, whose backward has a thread of its own."""

    @torch._dynamo.disable
    def run_backward(self, *args, **kwargs):
        return super().run_backward(*args, **kwargs)


if __name__ == "__main__":
    if TRACED:
        from made_world import made_world

        world = made_world(1)
        dist.init_process_group("nccl")
    else:
        torch.autograd.variable.Variable._execution_engine = Engine()
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    names = sys.argv[3:] or PROGRAMS
    found = {name: captured(PROGRAMS[name]) for name in names}
    if TRACED:
        found["notes"] = list(world.recorder.notes)
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(found, file)
    sys.stdout.flush()
    os._exit(0)
