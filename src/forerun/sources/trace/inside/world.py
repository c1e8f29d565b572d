"""World: sets up a process to behave as one rank of a training run on GPUs."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from forerun.common.errors import ForerunError
from forerun.sources.trace import opaque
from forerun.sources.trace.inside import effects, older_checkpoints, patches
from forerun.sources.trace.inside.compiled import install as compile
from forerun.sources.trace.inside.device import (
    cuda_module,
    device_kernels,
    flash_attention,
    kernel_hub,
    storages,
    tensor_types,
)
from forerun.sources.trace.inside.device.attention_choice import install as install_attention
from forerun.sources.trace.inside.device.machine import VirtualCuda
from forerun.sources.trace.inside.device.virtual_device import device as device_named
from forerun.sources.trace.inside.kernels import cuda_kernels, extensions, shapes, triton_kernels
from forerun.sources.trace.inside.kernels.opaque_calls import Launches
from forerun.sources.trace.inside.missing import led_by, reason
from forerun.sources.trace.inside.mode import VirtualMode, operation_of
from forerun.sources.trace.inside.modules import Modules
from forerun.sources.trace.inside.processes import Processes, TraceEnded
from forerun.sources.trace.inside.ranks import ddp, mpi, process_group, redistribution
from forerun.sources.trace.inside.recorder import Event, Recorder
from forerun.sources.trace.inside.refusal import Refusal
from forerun.sources.trace.inside.sizes import MOST_DEVICES
from forerun.sources.trace.inside.steps import StepRecorded, Steps
from forerun.sources.trace.inside.torch_versions import adapters
from forerun.sources.trace.inside.torch_versions.supported import untested
from forerun.sources.trace.inside.values import Oracle, known_value, set_value
from forerun.sources.trace.job import Failure, Job
from forerun.sources.trace.recording import save_recording
from forerun.sources.trace.remains import is_users


def _use_one_thread() -> None:
    """Limits torch to one thread, which also renews its thread pool: in a forked process the threads of autograd's
    engine would race to do that, and abort."""
    torch.set_num_threads(1)


class World:
    """The traced environment of this process. It can't be undone."""

    def __init__(self, job: Job) -> None:
        adapters.adapt()
        self.job = job
        os.environ.update(job.environment())
        _use_one_thread()
        os.register_at_fork(after_in_child=_use_one_thread)
        torch.autograd.set_multithreading_enabled(False)
        self.recorder = Recorder(job.rank, job.world_size, job.gpus_per_node, job.lines)
        if untested():
            self.recorder.note(untested())
        self._events: list[Event] = []
        self.machine = VirtualCuda(min(job.gpus_per_node, job.world_size), self._record, self._block, self._sync)
        self.machine.install()
        self.machine.set_index(job.local_rank)
        self.recorder.current_stream = self.machine.stream
        device = device_named(job.device)
        self.recorder.memory.most_bytes = MOST_DEVICES * device.total_memory
        cuda_module.install(self.machine, self.recorder, device)
        tensor_types.install()
        device_kernels.install()
        shapes.install()
        install_attention(device.capability)
        process_group.install(self.recorder, known_value, set_value)
        mpi.install(job.rank, job.world_size, job.gpus_per_node)
        self.oracle = Oracle(job.expert_skew)
        self.mode = VirtualMode(self.recorder, self.oracle, process_group.handle)
        patches.install(self.mode, self.recorder)
        storages.install(self.mode)
        older_checkpoints.install(job.dynamo)
        ddp.install(self.recorder)
        redistribution.install(self.recorder)
        effects.install(self.recorder, job.local_rank, Path(job.folder) / f"rank{job.rank}.bin", device.name)
        flash_attention.install(self.recorder)
        self._describe_kernels()
        self.modules = Modules()
        self.recorder.module_of_node = self.modules.current
        self.recorder.module_depth = lambda: len(self.modules.stack)
        compile.install(self.mode, self.recorder, self.modules, job.allow_fallback, job.dynamo)
        meta: dict[str, Any] = {"name": job.title or os.path.basename(job.target) or "program"}
        meta["tokens_per_step"] = job.tokens_per_step
        self.steps = Steps(self.recorder, self.modules, job.steps, meta)
        self.oracle.on_write = self.steps.wrote
        self.processes = Processes(self.recorder, self._run_process)
        self.processes.install()
        self.mode.__enter__()

    def _describe_kernels(self) -> None:
        """Lets the program run kernels that torch does not know."""
        launches = Launches(self.mode, self.recorder)
        triton_kernels.install(launches)
        cuda_kernels.install(launches)
        opaque.load(self.job.kernels)
        extensions.install(launches)
        kernel_hub.install(launches, self.recorder)

    # -- what C++ does with streams ---------------------------------------------------------------------------

    def _record(self, stream: int) -> int:
        self._events.append(self.recorder.record_event(stream))
        return len(self._events)

    def _block(self, event: int, stream: int) -> int:
        self.recorder.wait_event(self._events[event - 1], stream)
        return 0

    def _sync(self) -> int:
        self.recorder.host_waits()
        return 0

    # -- how it ends ------------------------------------------------------------------------------------------

    def run(self, program: Any) -> int:
        """Calls `program`, saves its recording or its failure in the job's folder, and returns the process's exit
        code."""
        failure = None
        try:
            program()
            self.processes.join()
        except (StepRecorded, TraceEnded):
            pass
        except BaseException as error:
            failure = self._reason(error)
        self.processes.end()
        if self._save(failure is None):
            return 0
        if failure is None and not self.job.failure.exists():
            failure = Failure(self._too_few_steps())
        if failure is not None:
            failure.write(self.job.failure)
        return 1

    def _run_process(self, run: Callable[[], None]) -> bool:
        """Does the same for what a process of the program runs, if the program did not train before it started the
        process. Returns whether the step was recorded."""
        if self.steps.done:
            run()
            return False
        try:
            run()
        except StepRecorded:
            pass
        except BaseException as error:
            failure = self._reason(error)
            if failure is not None:
                failure.write(self.job.failure)
            raise
        return self._save(True)

    def _save(self, without_failure: bool) -> bool:
        """Saves the recording, and returns whether there is one, of this process or of one that the program started."""
        recording = self.steps.recording or (self.steps.unlike if without_failure else None)
        if recording is None and without_failure and self.steps.done == 1:
            recording = self.steps.only_step
            if recording is not None:
                recording.meta["notes"].append("the program ran only one step, which includes work that is done once")
        if recording is not None:
            save_recording(recording, self.job.recording)
        return self.job.recording.exists()

    def _reason(self, error: BaseException) -> Failure | None:
        """Returns why the program ended with `error`; None if it may end so."""
        if isinstance(error, SystemExit):
            if error.code in (None, 0):
                return None
            return self._failure(
                error, f"the program exited with {error.code!r} before its step was recorded{led_by(error)}"
            )
        if isinstance(error, KeyboardInterrupt):
            return Failure("interrupted")
        if isinstance(error, (ForerunError, Refusal)):
            return self._failure(error, str(error), getattr(error, "line", ""))
        return self._failure(error, reason(error))

    def _too_few_steps(self) -> str:
        done = self.steps.done
        said = (
            f"the program ended after {done} optimizer step{'s' * (done != 1)}; step {self.job.steps} was to be"
            " recorded (--steps)"
        )
        if done:
            return said
        if self.recorder.starts_processes:
            return (
                f"{said}; no process that it started recorded the step either; without an optimizer of torch's,"
                " forerun.mark_step() ends a step"
            )
        return f"{said}; without an optimizer of torch's, forerun.mark_step() ends a step"

    def _failure(self, error: BaseException, message: str, known: str = "") -> Failure:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f"{f.filename}:{f.lineno}" for f in frames if is_users(f.filename)]
        if isinstance(error, SyntaxError) and error.filename and is_users(error.filename):
            own.append(f"{error.filename}:{error.lineno}")
        line = known or (own[-1] if own else "")
        text = "".join(traceback.format_exception(error))
        return Failure(message, operation_of(error), line, text)


def leave(code: int) -> None:
    """Ends the process at once, without the program's exit handlers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
