"""Run in a process of its own: steps with DTensors, redistributed in eager Python, in compiled code, and by FSDP2.

python redistributions.py OUT.json
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from made_world import made_world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor


def recorded(world, step):
    """Launches of each node of host time, and the number of collectives, of the second step."""
    step()
    world.recorder.start()
    step()
    recording = world.recorder.finish(world.modules.paths, {})
    ops = recording.ops
    host = [row for row in recording.op.tolist() if ops.is_delay[row] and ops.launches[row]]
    names = [ops.name[row] for row in recording.op.tolist()]
    return {
        "host": {ops.name[row]: [int(ops.launches[row]), host.count(row)] for row in host},
        "collectives": int(ops.is_collective[recording.op].sum()),
        "names": names,
    }


def of_parameter(parameter, x):
    """A step of SimpleFSDP's kind: a sharded parameter becomes whole where it is used."""

    def step():
        whole = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])
        (x @ whole).sum().backward()
        parameter.grad = None

    return step


if __name__ == "__main__":
    world = made_world(4)
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (4,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(64, 64, device="cuda"), mesh, [Shard(0)]))
    x = torch.ones(16, 64, device="cuda")
    whole = distribute_tensor(torch.ones(64, 64, device="cuda"), mesh, [Replicate()])
    step = of_parameter(parameter, x)
    sharded = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
    for layer in (*sharded, sharded):
        fully_shard(layer, mesh=mesh)
    found = {
        "explicit": recorded(world, step),
        "operand": recorded(world, lambda: parameter.detach() + whole),
        "compiled": recorded(world, torch.compile(step)),
        "fsdp2": recorded(world, lambda: sharded(x).sum().backward()),
    }
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(found, file)
    sys.stdout.flush()
    os._exit(0)
