"""Run in a process of its own: steps of random size, up to 2**40 bytes a tensor, eager and with all of it compiled.

python random_sizes.py OUT.json COUNT
"""

import json
import os
import random
import sys

import torch
from made_world import made_world

from forerun.core.program.kinds import OpKind

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
BORDERS = (1 << 31, 1 << 32, 1 << 33, 1 << 40)
"""bytes at which 32 bits wrap around, and the most that is drawn"""


def sizes(draw, largest, element_bytes):
    """A batch, and rows and columns of a weight: one tensor has `largest` bytes, or nearly so."""
    batch, rows = (1 << draw.randint(4, 9) for _ in range(2))
    return batch, rows, max(16, int(largest / max(batch, rows) / element_bytes))


def step_of(batch, rows, columns, dtype, wrap):
    """One step whose tensors have known sizes: no two operations of it become one kernel."""
    weight = torch.nn.Parameter(torch.empty(rows, columns, device="cuda", dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9, fused=True)
    ones = torch.ones(batch, columns, device="cuda", dtype=dtype)
    x = torch.ones(batch, rows, device="cuda", dtype=dtype)

    @wrap
    def forward():
        return x @ weight

    @wrap
    def backward(y):
        y.backward(ones)
        optimizer.step()

    def step():
        optimizer.zero_grad()
        backward(forward())

    return step


def recorded(world, sizes, dtype, wrap):
    """What the second step allocates and moves."""
    torch._dynamo.reset()
    step = step_of(*sizes, dtype, wrap)
    step()
    world.recorder.start()
    step()
    recording = world.recorder.finish(world.modules.paths, {})
    row = recording.op
    products = recording.ops.kind[row] == OpKind.GEMM
    columns = (recording.ops.flops, recording.ops.bytes_read, recording.ops.bytes_written)
    return {
        "tensors": sorted(recording.tensor_bytes.tolist()),
        "products": sorted([float(column[i]) for column in columns] for i in row[products]),
        "peak": world.recorder.memory.peak_bytes,
    }


if __name__ == "__main__":
    world = made_world(1)
    recorded(world, (1, 1, 1), torch.float32, torch.compile)  # the tracer keeps the optimizer that steps first
    draw = random.Random(0)
    found = []
    wanted = [*BORDERS, *(2 ** draw.uniform(14, 40) for _ in range(int(sys.argv[2]) - len(BORDERS)))]
    for largest in wanted:
        dtype = draw.choice(DTYPES)
        shape = sizes(draw, largest, dtype.itemsize)
        one = {"shape": shape, "element_bytes": dtype.itemsize}
        for how, wrap in (("eager", lambda function: function), ("compiled", torch.compile)):
            one[how] = recorded(world, shape, dtype, wrap)
        found.append(one)
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump({"steps": found, "notes": list(world.recorder.notes)}, file)
    sys.stdout.flush()
    os._exit(0)
