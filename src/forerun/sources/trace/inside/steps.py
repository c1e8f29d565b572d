"""Finds the step to record: from the end of one optimizer step to the end of another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from forerun.core.program.types import Category, Phase
from forerun.sources.trace import marks
from forerun.sources.trace.inside.imports import Imported
from forerun.sources.trace.inside.module_tree import buffers_in, parameters_in
from forerun.sources.trace.inside.modules import Modules
from forerun.sources.trace.inside.recorder import Recorder
from forerun.sources.trace.inside.sparse import dense_parts
from forerun.sources.trace.inside.stages import FIRST_FORWARD, Stages
from forerun.sources.trace.inside.turns import MOST_TURNS, Optimizers, Turns
from forerun.sources.trace.inside.unseen import in_place_of
from forerun.sources.trace.purpose import data_parallel, distinct_ranks
from forerun.sources.trace.recording import Recording

_EVALUATES = "the recorded step runs the model without gradients too (evaluation?); --steps N records another one"

_IRREGULAR = "the steps of the program's optimizers show no repeating sequence; its last steps are recorded"

_NO_PASS = -1


class StepRecorded(BaseException):
    """Ends the program once its step is recorded. It is no exception that a program would catch."""


class Steps:
    """Counts steps, and records number `wanted` (from 1). A step is the shortest repeating sequence of steps of the
    program's optimizers.

    The marks of a program (`forerun.mark_step`) take precedence: from the first mark on, optimizers don't count. Where
    none of torch's optimizers steps, a step ends when a forward begins after a backward pass and a change of
    parameters.
    """

    def __init__(self, recorder: Recorder, modules: Modules, wanted: int, meta: dict[str, Any]) -> None:
        self.recorder, self.modules, self.wanted, self.meta = recorder, modules, wanted, meta
        self.done = 0
        self.recording: Recording | None = None
        self.only_step: Recording | None = None
        """The first step, for a program that ends with it."""
        self.unlike: Recording | None = None
        """The last step that is unlike the one before it, for a program that ends with it."""
        self.updates = 0
        """How often an optimizer has updated parameters after a backward pass."""
        self._marked = False
        self._backward_passes: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._optimizers, self._turns = Optimizers(), Turns()
        self._turns_left = 0
        _follow_optimizers(self._before, self._after, self._outside)
        recorder.update_begins, recorder.update_ends = self._before, self._after
        self._updated = False
        self._begins = True
        modules.at_forward = self._forward
        modules.at_root = self._given
        marks.listeners.append(self._user_mark)
        self.stages = Stages()
        self._imported = Imported()
        recorder.start()

    def _forward(self) -> None:
        """Leaves everything before the first forward with gradients out of the first step."""
        if not torch.is_grad_enabled():
            return
        self.stages.note(FIRST_FORWARD)
        if self.updates or self._marked:
            self.modules.at_forward = None
        elif self._updated:
            self._updated = False
            self.mark_step()
        elif not self.modules.backward_seen and self._begins:
            self._begins = False
            self.recorder.start()

    def _given(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Counts the samples of a forward pass with gradients, and notes one without."""
        recorder = self.recorder
        if not recorder.recording or recorder.paused or recorder.phase() != Phase.FORWARD:
            return
        if torch.is_grad_enabled():
            recorder.workload.given(module, args, kwargs)
        else:
            recorder.workload.evaluated(module)

    def wrote(self, tensors: Sequence[torch.Tensor]) -> None:
        """Notes that an operation wrote to `tensors`: the program may update its parameters itself. What a forward
        pass writes, such as normalized weights, is no update."""
        if self.updates or self._updated or not self.modules.backward_seen or self.modules.stack:
            return
        if torch._C._current_graph_task_id() == -1:
            storages = {part.untyped_storage()._cdata for t in tensors for part in _parts(t)}
            self._updated = any(
                parameter.untyped_storage()._cdata in storages
                for root in self.modules.roots
                for parameter in parameters_in(root)
            )

    def _before(self, optimizer: Any) -> None:
        self.recorder.in_optimizer += 1
        self._mark(optimizer)

    def _outside(self, closure: Any) -> Any:
        """Returns the closure of an optimizer's step, whose forward and backward pass are no work of the optimizer."""
        if not callable(closure):
            return closure
        capturing = torch.compiler.is_dynamo_compiling

        def call(*args: Any, **kwargs: Any) -> Any:
            if capturing():
                return closure(*args, **kwargs)
            inside, self.recorder.in_optimizer = self.recorder.in_optimizer, 0
            try:
                return closure(*args, **kwargs)
            finally:
                self.recorder.in_optimizer = inside

        own = closure if isinstance(closure, FunctionType) else type(closure).__call__
        own = getattr(closure, "__func__", own)
        return in_place_of(own, call, shares_code=True) if isinstance(own, FunctionType) else call

    def _after(self, optimizer: Any) -> None:
        self.recorder.in_optimizer -= 1
        self._mark(optimizer)
        if not self._follows_backward(optimizer):
            return
        self.updates += 1
        if self._turns.stepped(self._optimizers.number_of(optimizer)) and not self._marked:
            self._turn_ends()

    def _follows_backward(self, optimizer: Any) -> bool:
        """Returns whether gradients were computed since the last step of `optimizer`, for a program that ever computes
        any: DeepSpeed lets an optimizer step once for each of its groups."""
        before = self._backward_passes.get(optimizer, _NO_PASS)
        self._backward_passes[optimizer] = self.recorder.backward_pass
        return self.recorder.backward_pass != before or before == _NO_PASS

    def _turn_ends(self) -> None:
        """Ends the step to record at the end of a turn, once turns repeat and all optimizers have stepped."""
        self.done = len(self._turns.all)
        if self._turns_left:
            self._turns_left -= 1
            if not self._turns_left:
                self._end()
            return
        waiting, period = self._optimizers.waiting(), self._turns.period()
        enough = self.done >= MOST_TURNS
        if self.done >= self.wanted and (enough or not waiting):
            if period == 1 or self.wanted == 1 or (enough and not period):
                self._end(_remarks(waiting, self.wanted > 1 and not period))
            self._turns_left = period
        if self.done >= self.wanted and not self._turns_left:
            self.unlike = self._finish(_remarks(waiting, not period))
        if self.done == 1:
            self.only_step = self._finish()
        if self.done >= self.wanted - 1:
            self._begin()

    def _user_mark(self) -> None:
        if not self._marked:
            self._marked, self.done = True, 0
        self.mark_step()

    def mark_step(self) -> None:
        """Ends a step."""
        self.done += 1
        if self.done >= self.wanted:
            self._end()
        if self.done == 1:
            self.only_step = self._finish()
        if self.done == self.wanted - 1:
            self._begin()

    def _begin(self) -> None:
        self.modules.forget_sequence()
        self.recorder.start()

    def _end(self, remarks: Sequence[str] = ()) -> None:
        if self.recording is None:
            self.recording = self._finish(remarks)
        raise StepRecorded

    def _finish(self, remarks: Sequence[str] = ()) -> Recording:
        for root in self.modules.roots:
            for tensor in (*parameters_in(root), *buffers_in(root)):
                self._category(tensor, Category.PARAMETER)
        work = self.recorder.workload
        if work.evaluates:
            self.recorder.note(_EVALUATES)
        self._note_ranks()
        meta = self.meta | {
            "tokens": work.tokens or None,
            "samples": work.samples or None,
            "loop": marks.loop.settings(),
            "stages": self.stages.found,
            "imported": self._imported.names(),
            "blas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
        }
        recording = self.recorder.finish(self.modules.paths, meta)
        names, sharded = data_parallel(recording)
        size = distinct_ranks(recording, names)
        recording.meta["notes"].extend(remarks)
        recording.meta.update(data_parallel=names, sharded=sharded, data_parallel_size=size)
        return recording

    def _note_ranks(self) -> None:
        """Notes that the program trains with fewer ranks than the run has, for example because its launcher tells it
        how many there are in another way than torchrun."""
        ranks = self.recorder.world_size
        if not dist.is_initialized():
            if ranks > 1:
                self.recorder.note(f"the program makes no process group: each of the {ranks} ranks trains alone")
        elif dist.get_world_size() != ranks:
            own = dist.get_world_size()
            ending = "s" * (own != 1)
            self.recorder.note(f"the program makes a process group of {own} rank{ending}; --world-size says {ranks}")

    def _mark(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._category(parameter, Category.PARAMETER)
                if parameter.grad is not None:
                    self._category(parameter.grad, Category.GRADIENT)
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    self._category(value, Category.OPTIMIZER)

    def _category(self, tensor: torch.Tensor, category: Category) -> None:
        for part in _parts(tensor):
            if part.device.type == "cuda":
                self.recorder.memory.mark(part.untyped_storage(), category)


def _remarks(waiting: Sequence[Any], irregular: bool) -> list[str]:
    """Returns what a step of several optimizers leaves out."""
    said = [
        f"an optimizer ({type(one).__name__} of {sum(len(group['params']) for group in one.param_groups)} tensors) did"
        " not step yet: its steps are not in the recorded step"
        for one in waiting
    ]
    return [*said, _IRREGULAR] if irregular else said


def _parts(tensor: Any) -> list[torch.Tensor]:
    """Returns the plain tensors that a DTensor, another wrapper of tensors or a sparse tensor consists of."""
    if not is_traceable_wrapper_subclass(tensor):
        return dense_parts(tensor)
    inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [part for one in inner if isinstance(one, torch.Tensor) for part in _parts(one)]


def _follow_optimizers(
    before: Callable[[Any], None], after: Callable[[Any], None], outside: Callable[[Any], Any]
) -> None:
    """Calls `before(optimizer)` and `after(optimizer)` around each step, and gives it `outside(closure)`. torch's hooks
    would do the same, but torch.compile would see them."""
    optimizer_class: Any = torch.optim.Optimizer
    with_hooks = optimizer_class.profile_hook_step
    capturing = torch.compiler.is_dynamo_compiling

    def followed(step: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if capturing():
                return step(self, *args, **kwargs)
            before(self)
            if args:
                args = (outside(args[0]), *args[1:])
            if "closure" in kwargs:
                kwargs["closure"] = outside(kwargs["closure"])
            out = step(self, *args, **kwargs)
            after(self)
            return out

        return in_place_of(step, call)

    optimizer_class.profile_hook_step = staticmethod(lambda step: followed(with_hooks(step)))
    for cls in _subclasses(optimizer_class):
        step = vars(cls).get("step")
        if getattr(step, "hooked", False):  # An optimizer was made before tracing began.
            cls.step = followed(step)


def _subclasses(cls: Any) -> Iterator[Any]:
    for below in cls.__subclasses__():
        yield below
        yield from _subclasses(below)
