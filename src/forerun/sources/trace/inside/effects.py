"""Stops a traced program from acting outside its process: it writes no checkpoints and starts no other ranks."""

# mypy: disable-error-code="assignment, attr-defined, method-assign"
# This module replaces functions of torch, which torch's types don't allow.
from __future__ import annotations

import importlib.util
import multiprocessing.context
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
import torch.multiprocessing
from torch._subclasses.fake_tensor import FakeTensor

from forerun.common.errors import ForerunError
from forerun.sources.trace.inside.recorder import Recorder
from forerun.sources.trace.inside.script import run_main
from forerun.sources.trace.inside.unseen import rebind

_SMI = "nvidia-smi"


def install(recorder: Recorder, local_rank: int, folder: Path | None = None, device: str = "") -> None:
    """Gives calls that act outside the process no effect.

    The programs that a machine with GPUs called `device` has are put into `folder`.
    """
    if folder is not None and shutil.which(_SMI) is None:
        _system_management(folder, device)
    os.environ.setdefault("WANDB_MODE", "disabled")  # A traced run doesn't belong in the user's account.
    _checkpoints(recorder)
    _processes(recorder, local_rank)
    _one_device()
    FakeTensor.__reduce_ex__ = _description


def _system_management(folder: Path, device: str) -> None:
    """Puts a program `nvidia-smi`, which training scripts run for their logs, on the path."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / _SMI
    program.write_text(f"#!/bin/sh\necho 'GPU 0: {device} (traced, not there)'\n", encoding="utf-8")
    program.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), str(folder)])


def _checkpoints(recorder: Recorder) -> None:
    """Writes no checkpoints: fake weights have no values and must not overwrite real ones."""
    save = torch.save
    distributed: Any = torch.distributed.checkpoint

    def save_elsewhere(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(f, (str, os.PathLike)):  # The program writes to a buffer.
            return save(obj, f, *args, **kwargs)
        return recorder.note("checkpoints are not written while a program is traced")

    def no_save(*_: Any, **__: Any) -> None:
        recorder.note("checkpoints are not written while a program is traced")

    def no_async_save(*_: Any, **__: Any) -> Future[None]:
        no_save()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    new: dict[int, Any] = {id(save): save_elsewhere, id(distributed.async_save): no_async_save}
    new[id(distributed.save)] = no_save
    rebind(new)
    if importlib.util.find_spec("safetensors") is not None:
        module: Any = importlib.import_module("safetensors.torch")
        module.save_file = module.save_model = no_save


def _processes(recorder: Recorder, local_rank: int) -> None:
    """Makes this process one of the ranks that a script starts on its node itself, and forks its other processes.

    A process that starts afresh would import the script without Forerun's CUDA and its stand-ins, and fail.
    """

    def start(fn: Callable[..., Any], args: Sequence[Any] = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        index = min(local_rank, nprocs - 1)
        recorder.note(f"the program starts {nprocs} processes itself; number {index} of them is traced")
        fn(index, *args)

    module: Any = torch.multiprocessing
    rebind({id(module.spawn): start, id(module.start_processes): start})
    contexts: Any = multiprocessing.context
    for method in ("spawn", "forkserver"):
        contexts._concrete_contexts[method] = contexts._concrete_contexts["fork"]
    _launchers(recorder, local_rank)


def _launchers(recorder: Recorder, local_rank: int) -> None:
    """Makes this process one of the ranks that torchrun starts, or a program that calls it as accelerate does."""
    launcher: Any = importlib.import_module("torch.distributed.launcher.api")

    def launch(self: Any, *args: Any) -> dict[int, Any]:
        config, program = self._config, self._entrypoint
        started = config.max_nodes * config.nproc_per_node
        if started != recorder.world_size:
            raise ForerunError(f"torchrun starts {started} processes; trace it with --world-size {started}")
        recorder.note(f"torchrun starts {started} processes; number {local_rank} of a node is traced")
        if callable(program):
            return {local_rank: program(*args)}
        line = [one for one in map(str, args) if one != "-u"]
        if Path(str(program)).name != Path(sys.executable).name or not line:
            raise ForerunError(f"torchrun starts {program!r}, which is no Python script; trace the script that it runs")
        is_module = line[0] == "-m"
        target, *arguments = line[1:] if is_module else line
        run_main(target, arguments, is_module)
        return {}

    launcher.elastic_launch.__call__ = launch


def _one_device() -> None:
    """Lets DataParallel run on the single GPU that a process has."""
    core: Any = torch._C

    def scatter(tensor: torch.Tensor, devices: Sequence[int], *_: Any) -> list[torch.Tensor]:
        if len(devices) > 1:
            raise ForerunError(
                f"DataParallel over {len(devices)} GPUs of one process can't be traced; use DistributedDataParallel"
            )
        return [tensor.to(torch.device("cuda", devices[0]))]

    core._scatter = scatter


def _description(self: Any, _protocol: Any) -> Any:
    """Pickles a fake tensor as its shape, strides, dtype and device, without data."""
    return _of_description, (tuple(self.shape), self.stride(), self.dtype, str(self.device), self.requires_grad)


def _of_description(shape: Any, stride: Any, dtype: Any, device: str, requires_grad: bool) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device, requires_grad=requires_grad)
