"""Steps of random models, traced eagerly, as AOTAutograd's graphs, and compiled by Inductor, in one process of its own.

python random_steps.py 10000 --compiled 100 --seed 3 prints what is violated, with the seed of the model, and exits with
1 then. With --out FILE it writes the summaries of the steps and checks nothing.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent))

from made_recordings import peak_bytes
from made_world import made_world
from random_models import model_and_input
from step_properties import WAYS, violations

from forerun.core.memory.profile import profile
from forerun.core.program.kinds import OpKind
from forerun.core.program.types import Category, Phase
from forerun.describe.plan.rules import DTYPE_BYTES
from forerun.sources.trace.recording import Recording, load_recording, save_recording
from forerun.sources.trace.to_program import to_program

RANKS = 4
BACKENDS = {"eager": "", "aot": "aot_eager", "inductor": "inductor"}
ELEMENT_BYTES = DTYPE_BYTES | {"fp64": 8}
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")


def recorded(world, seed, how):
    """What the second step of a random model did. torch's own counter counts the products of an eager first step."""
    torch._dynamo.reset()
    model, x, autocast = model_and_input(seed)
    run = torch.compile(model, backend=BACKENDS[how]) if BACKENDS[how] else model
    counter = None if BACKENDS[how] or splits_channels(model) else FlopCounterMode(display=False)
    for last in (False, True):
        if last:
            world.recorder.start()
        with contextlib.nullcontext() if last or counter is None else counter:
            with torch.autocast("cuda", autocast, enabled=autocast is not None):
                loss = run(x)
            loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
    counted = None if counter is None else counter.get_flop_counts().get("Global", {})
    del loss
    tokens = x.numel() if model.vocabulary else 0
    return summary(world.recorder.finish(world.modules.paths, {}), counted, tokens)


def splits_channels(model):
    """Whether a convolution has groups, which torch's counter counts whole in its backward pass."""
    return any(getattr(module, "groups", 1) > 1 for module in model.modules() if isinstance(module, torch.nn.Conv1d))


def summary(recording, counted, tokens):
    op, ops, phase = recording.op, recording.ops, recording.phase
    again = phase == Phase.RECOMPUTE
    flops = ops.flops[op] * np.isin(ops.kind[op], (OpKind.GEMM, OpKind.ATTENTION))
    communicates = ops.kind[op] == OpKind.COLLECTIVE
    messages = zip(ops.collective[op], ops.bytes_comm[op], strict=True)
    once = communicates & ~again
    columns = (ops.flops, ops.bytes_read, ops.bytes_written, ops.bytes_comm, recording.tensor_bytes)
    return {
        "flops": {Phase(p).name: float(flops[phase == p].sum()) for p in set(phase.tolist())},
        "products": float((ops.flops[op] * (ops.kind[op] == OpKind.GEMM)).sum()),
        "counted": None if counted is None else sum(float(n) for f, n in counted.items() if f.__name__ in PRODUCTS),
        "messages": sorted([int(kind), float(size)] for (kind, size), one in zip(messages, once, strict=True) if one),
        "saved_bytes": int(recording.tensor_bytes[recording.tensor_category == Category.ACTIVATION].sum()),
        "beside_bytes": masks_and_statistics_bytes(ops, op, tokens),
        "least": float(min(column.min(initial=0) for column in columns)),
        "in_order": in_order(recording),
        "comes_back": comes_back(recording),
        "recording": totals(ops, np.bincount(op, minlength=len(ops)), peak_bytes(recording)),
        "program": of_program(to_program([recording])),
    }


def masks_and_statistics_bytes(ops, op, tokens):
    """What compiled code may save beside results: a byte for each element of a ReLU, and of each row of a softmax the
    largest logit and the sum, in fp32 or wider. torch's partitioner counts what a fused kernel makes twice, so it may
    save the mask beside the result."""
    relus = [row for row in op.tolist() if ops.name[row] == "relu"]
    masks = sum(block(ops.bytes_written[row] / ELEMENT_BYTES[ops.dtype[row]]) for row in relus)
    softmaxes = [ELEMENT_BYTES[ops.dtype[row]] for row in op.tolist() if ops.name[row] == "_log_softmax"]
    return masks + 2 * block(max((4, *softmaxes)) * tokens)


def block(size_bytes):
    return -(-int(size_bytes) // 512) * 512


def totals(ops, count, peak):
    """FLOPs and bytes of collectives of all nodes, and the peak of memory."""
    return [float(round(float((column * count).sum()))) for column in (ops.flops, ops.bytes_comm)] + [float(peak)]


def of_program(program):
    (ranks,) = program.rank_classes
    count = sum(np.bincount(program.blocks[block].op, minlength=len(program.ops)) for block in ranks.block)
    return totals(program.ops, count, profile(program)[0].peak_bytes)


def in_order(recording):
    """Whether tensors are freed after they are made, and nodes wait for earlier ones."""
    alloc, free, n = recording.tensor_alloc, recording.tensor_free, len(recording)
    waiter = np.repeat(np.arange(n), np.diff(recording.wait_ptr))
    lives = (free < 0) | (free >= alloc)
    return bool(lives.all() and (alloc < n).all() and (free < n).all() and (recording.wait < waiter).all())


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


def steps(world, eager, compiled, first):
    """Yields the seed of each model, and the summary of its step in each way."""
    for seed in range(first, first + eager):
        yield seed, {way: recorded(world, seed, way) for way in (WAYS if seed < first + compiled else WAYS[:1])}


def report(found):
    """Prints what is violated as it is found, and returns whether anything is."""
    kinds, number = Counter(), 0
    for seed, ways in found:
        number += 1
        for problem in violations(ways):
            kinds[problem.split(" ")[1]] += 1
            print(f"{seed}: {problem}", flush=True)
        if number % 100 == 0:
            print(f"{number} programs, {sum(kinds.values())} violations", flush=True)
    print(f"{number} programs; {sum(kinds.values())} violations {dict(kinds) or ''}")
    return bool(kinds)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int, nargs="?", default=200)
    parser.add_argument("--compiled", type=int, default=0, help="how many of them also run in the two other ways")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first model; each next one is one more")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    world = made_world(RANKS)
    dist.init_process_group("nccl")
    found = steps(world, given.number, given.compiled, given.seed)
    if given.out is not None:
        written = {"steps": [ways for _, ways in found], "notes": list(world.recorder.notes)}
        given.out.write_text(json.dumps(written), encoding="utf-8")
        return 0
    code = int(report(found))
    print(*(f"note: {note}" for note in world.recorder.notes), sep="\n", end="")
    return code


if __name__ == "__main__":
    result = main()
    sys.stdout.flush()
    os._exit(result)
