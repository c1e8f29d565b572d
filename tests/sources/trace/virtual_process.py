"""Runs a few lines of a program in a process that traces, and hands back what they put into `result`."""

from __future__ import annotations

import json
import os
import runpy
import textwrap
from importlib import import_module

from warm_process import fork, wait

_BEFORE = """
import json, os, sys, time, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch import nn
from forerun.common.errors import ForerunError
from forerun.core.program.types import OpRow
from forerun.sources.trace.inside import patches
from forerun.sources.trace.inside.device import cuda_module, virtual_device
from forerun.sources.trace.inside.ranks import ddp, process_group
from forerun.sources.trace.inside.device.machine import VirtualCuda
from forerun.sources.trace.inside.mode import VirtualMode
from forerun.sources.trace.inside.recorder import Recorder
from forerun.sources.trace.inside.values import Oracle, known_value, set_value

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.autograd.set_multithreading_enabled(False)
recorder = Recorder(rank, world, 8)
events = []
def _record(stream):
    events.append(recorder.record_event(stream))
    return len(events)
def _block(event, stream):
    recorder.wait_event(events[event - 1], stream)
    return 0
def _sync():
    recorder.host_waits()
    return 0
machine = VirtualCuda(8, _record, _block, _sync)
machine.install()
recorder.current_stream = machine.stream
cuda_module.install(machine, recorder, virtual_device.device())
process_group.install(recorder, known_value, set_value)
mode = VirtualMode(recorder, Oracle(), process_group.handle)
patches.install(mode, recorder)
ddp.install(recorder)

def nodes(*names):
    "Name, stream, waited-for nodes, bytes, group, dtype, peer of the nodes since recorder.start()."
    rows = list(recorder.ops._index)
    groups = list(recorder.groups)
    found = []
    for i, node in enumerate(recorder._nodes):
        op = OpRow(*rows[node[0]])
        if not names or op.name in names:
            group = groups[op.group] if op.group >= 0 else ""
            found.append([op.name, node[1], list(recorder._waits[i]), op.bytes_comm, group, op.dtype, node[4], i])
    return found

def fails(call, kind=Exception):
    try:
        call()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return ""

result = {}
mode.__enter__()
"""
_AFTER = """
mode.__exit__(None, None, None)
with open(os.environ["RESULT"], "w") as file:
    json.dump(result, file)
sys.stdout.flush()
os._exit(0)
"""


def run_virtual(body: str, folder, rank: int = 0, world_size: int = 8, timeout_s: float = 120) -> dict:
    """`result` after `body` (Python source) ran on rank `rank` of `world_size`."""
    program, printed, result = (folder / name for name in ("program.py", "printed.txt", "result.json"))
    program.write_text(_BEFORE + textwrap.dedent(body) + _AFTER)
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % 8),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "no-such-host.invalid",
        "MASTER_PORT": "1",
        "RESULT": str(result),
    }

    def run() -> None:
        os.environ.pop("FORERUN_MAILBOX", None)
        import_module("torch").set_num_threads(1)
        runpy.run_path(str(program), run_name="__main__")

    with printed.open("wb") as sink:
        code = wait(fork(run, sink.fileno(), environment), timeout_s)
    assert code == 0, printed.read_text()[-4000:]
    return json.loads(result.read_text())
