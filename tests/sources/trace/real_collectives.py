"""Runs a training script for real and writes down the collectives of its steps, from the second on.

    python real_collectives.py FOLDER STEP SCRIPT ARGS

A dispatch mode sees every collective that torch gives to its process groups, DTensor's, FSDP's and those of DDP's C++
alike. Torch's own flight recorder counts in gloo itself; both counts are written, so that none can go missing.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import ProcessGroup, _resolve_process_group, get_process_group_ranks
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "barrier": "barrier",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
}
NOTHING = {"wait_tensor", "_wrap_tensor_autograd"}
FULL_OUTPUT = {"all_gather"}
"""kinds whose bytes are those of what comes out"""
FLIGHTS = 20000


class Stop(BaseException):
    """The step is written."""


class Collectives(TorchDispatchMode):
    """Lists what process groups are given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict] = []
        self.on = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(cls, (DTensor, AsyncCollectiveTensor)) for cls in types):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.on and func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            name = func._schema.name.split("::")[1]
            if name not in NOTHING and not any(issubclass(cls, FakeTensor) for cls in types):
                self.rows.append(self.row(name, func, args, kwargs, out))
        return out

    def row(self, name, func, args, kwargs, out):
        named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        group = next(v for k, v in named.items() if k in ("process_group", "group_name"))
        group = _resolve_process_group(group) if isinstance(group, str) else ProcessGroup.unbox(group)
        ranks = get_process_group_ranks(group)
        kind = KINDS[name]
        first, copies = args[0], 1
        if kind in ("gather", "scatter"):  # of equal parts, whole at one rank only
            first, copies = args[kind == "gather"], len(ranks)
        elif func.namespace == "c10d":
            first = args[0] if kind in (*FULL_OUTPUT, "send", "recv") else (tensors_of(args[1]) or args[0])
        elif kind in FULL_OUTPUT:
            first = out
        tensors = tensors_of(first)
        peer = next((v for k, v in named.items() if k in ("dst", "src")), None) if kind in ("send", "recv") else None
        return {
            "kind": kind,
            "bytes": sum(t.numel() * t.element_size() for t in tensors) * copies,
            "dtype": str(tensors[0].dtype).removeprefix("torch."),
            "ranks": ranks,
            "peer": -1 if peer is None else ranks[peer],
        }


def tensors_of(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors_of(v)] if isinstance(value, (list, tuple)) else []


def flights() -> int:
    """How many collectives gloo ran so far, by its own count; it counts no sends and receives."""
    dumped = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True))
    return len(dumped.get("entries", []))


def main() -> None:
    out, step = Path(sys.argv[1]), int(sys.argv[2])
    sys.argv = sys.argv[3:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    torch.set_num_threads(1)
    mode = Collectives()
    state = {"first": None, "done": 0, "flights": 0}
    steps: dict[int, dict] = {}

    def stepped(optimizer, _args, _kwargs) -> None:
        state["first"] = state["first"] or optimizer
        if optimizer is not state["first"]:
            return
        state["done"] += 1
        counted = flights()
        if mode.on:
            steps[state["done"]] = {"rows": mode.rows, "flights": counted - state["flights"]}
        if state["done"] == step:
            (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(steps), encoding="utf-8")
            raise Stop
        mode.on, mode.rows, state["flights"] = True, [], counted

    register_optimizer_step_post_hook(stepped)
    try:
        with mode:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except Stop:
        pass
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
