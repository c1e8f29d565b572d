"""Run in a process of its own: graphs of models with many blocks, captured whole and made of those of five blocks."""

import json
import sys
from types import SimpleNamespace

import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from forerun.sources.trace.inside.compiled import folding
from forerun.sources.trace.inside.compiled.repeats import NotEqual, described, find_repeats

COUNT, WIDTH = 9, 8


class Block(nn.Module):
    """x + scale * f(x), with parameters of its own."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x, shared):
        if self.kind == "normed":
            y = nn.functional.layer_norm(x, (WIDTH,)) @ self.weight + self.bias
            return x + torch.sigmoid(y)
        if self.kind == "shared":
            return torch.tanh(x @ self.weight * shared + self.bias)
        if self.kind == "constants":
            return torch.relu(x @ self.weight + self.bias + torch.arange(WIDTH, dtype=torch.float32))
        if self.kind == "factors":
            return x + (x @ self.weight) * torch.arange(WIDTH, dtype=torch.float32) + self.bias
        if self.kind == "turned":
            y = (x @ self.weight).view(2, 2, WIDTH).transpose(0, 1)
            return x + (torch.exp(y) * self.bias).transpose(0, 1).reshape(4, WIDTH)
        if self.kind == "split":
            y, z = torch.sigmoid(x @ self.weight).chunk(2, -1)
            return x * torch.cat([z, y], -1) + self.bias
        return torch.relu(x @ self.weight + self.bias)


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(COUNT))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x, shared):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, shared)
        return self.last(x)


def captured(gm, inputs):
    """Forward and backward graph, the number of the forward graph's results, and the fake arguments."""
    found = []

    def partition(joint, joint_inputs, **settings):
        made = min_cut_rematerialization_partition(joint, joint_inputs, **settings)
        found.extend([*made, settings["num_fwd_outputs"], list(joint_inputs[0])])
        return made

    def boxed(graph, _):
        return make_boxed_func(graph)

    aot_autograd(fw_compiler=boxed, bw_compiler=boxed, partition_fn=partition)(gm, inputs)
    return found


def lines(gm):
    """The nodes of a graph: what each does to which others, and the kind of its value."""
    number = {node: i for i, node in enumerate(gm.graph.nodes)}
    memory = {}

    def place(node):
        value = node.meta.get("val")
        own = node.op == "placeholder" and isinstance(value, torch.Tensor)
        return memory.setdefault(value.untyped_storage()._cdata, len(memory)) if own else ""

    def module(node):
        if node.op == "placeholder":
            return ""
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {"": ""}
        return list(stack.values())[-1]

    return [
        f"{node.op} {node.target if node.op == 'call_function' else ''} "
        f"{torch.fx.node.map_arg((node.args, node.kwargs), lambda one: '%' + str(number[one]))} "
        f"{described(node.meta.get('val'))} {place(node)} {module(node)}"
        for node in gm.graph.nodes
    ]


def graphs(kind):
    """The nodes of forward and backward graph of all blocks: captured whole, and made of five (None: not told)."""
    found = {}

    def backend(gm, inputs):
        forward, backward, _, arguments = captured(gm, inputs)
        repeats = find_repeats(gm)
        places = [repeats.owned.get(node) for node in gm.graph.nodes if node.op == "placeholder"]
        shorter, positions = repeats.shortened(gm)
        short = folding._Short(repeats, places, positions)
        short.forward, short.backward, short.returned, _ = captured(shorter, [inputs[i] for i in positions])
        metadata = SimpleNamespace(num_mutated_inp_runtime_indices=0, tokens={})
        found["whole"] = [lines(forward), lines(backward)]
        try:
            found["made"] = [*map(lines, folding._lengthened(short, arguments, metadata)[:2])]
        except NotEqual:
            found["made"] = None
        return gm.forward

    torch._dynamo.reset()
    torch.compile(Model(kind), backend=backend, fullgraph=True)(torch.randn(4, WIDTH), torch.randn(4, WIDTH))
    return found


if __name__ == "__main__":
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump({kind: graphs(kind) for kind in sys.argv[2:]}, file)
