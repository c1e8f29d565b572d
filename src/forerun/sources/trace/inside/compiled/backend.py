"""The backend of torch.compile under the tracer: it takes the graphs that Inductor would generate code for.

Importing this module imports Dynamo and Inductor, which takes a second, so `install.py` imports it when the program
first compiles something.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config
from torch.utils._python_dispatch import _disable_current_modes

from forerun.sources.trace.inside.compiled import dynamo, older_dynamo, optimizers, padding
from forerun.sources.trace.inside.compiled.folding import Folding
from forerun.sources.trace.inside.compiled.graph import CompiledGraph
from forerun.sources.trace.inside.compiled.places import Places
from forerun.sources.trace.inside.compiled.recomputation import label
from forerun.sources.trace.inside.compiled.unfinished_inputs import refuse_unfinished
from forerun.sources.trace.inside.mode import VirtualMode
from forerun.sources.trace.inside.modules import Modules
from forerun.sources.trace.inside.recorder import Recorder
from forerun.sources.trace.inside.torch_versions.adapters import adapt_compiler
from forerun.sources.trace.inside.torch_versions.graph_passes import skip_unchanged_nodes

# These modules have type Any, because this module replaces their functions.
inductor: Any = importlib.import_module("torch._inductor.compile_fx")
_async_compile: Any = importlib.import_module("torch._inductor.async_compile")
_constant_folding: Any = importlib.import_module("torch._inductor.constant_folding")
_joint_graph: Any = importlib.import_module("torch._inductor.fx_passes.joint_graph")
_virtualized: Any = importlib.import_module("torch._inductor.virtualized")
_partitioners: Any = importlib.import_module("torch._functorch.partitioners")
_debugging: Any = importlib.import_module("torch._dynamo.backends.debugging")
_dynamo_errors: Any = importlib.import_module("torch._dynamo.exc")
_dynamo_utils: Any = importlib.import_module("torch._dynamo.utils")
_dynamo_modules: Any = importlib.import_module("torch._dynamo.variables.nn_module")


class Backend:
    """Replaces Inductor's `compile_fx` and `compile_fx_inner`, through which every way of calling Inductor goes."""

    def __init__(
        self, mode: VirtualMode, recorder: Recorder, modules: Modules, failed: dynamo.Failed, release: str = ""
    ) -> None:
        self.mode, self.recorder = mode, recorder
        self.places = Places(modules)
        self._failed = failed
        adapt_compiler()
        skip_unchanged_nodes()
        dynamo.install(failed)
        padding.install()
        if older_dynamo.install(release):
            recorder.note(f"torch.compile: graphs break where Dynamo of torch {release} breaks them")
        _async_compile.AsyncCompile.wakeup = staticmethod(lambda: None)  # Nothing is compiled, so no worker processes.
        _partitioners.functionalize_rng_ops = _same_random_numbers
        self._folding = Folding()
        self._compile_fx = inductor.compile_fx
        self._compile_fx.__defaults__ = (self.compile_graph, *self._compile_fx.__defaults__[1:])
        inductor.compile_fx = self.compile
        optimizers.install(self._within_mode)
        folder = _constant_folding.ConstantFolder
        folder.run = self._within_mode(folder.run)
        folder = _joint_graph.UniformValueConstantFolder
        folder.__init__ = self._within_mode(folder.__init__)
        for module in (_dynamo_utils, _dynamo_modules):
            module.unpatched_nn_module_call = torch.nn.Module.__call__
        inductor.compile_fx_inner = self.compile_graph
        self._run_eagerly = _debugging.boxed_nop
        _debugging.boxed_nop = self.label_recomputation

    def compile(self, gm: Any, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Compiles a graph as `compile_fx` does. Where torch fails on it, returns the graph itself, to be run operator
        by operator."""
        refuse_unfinished(inputs)
        kept = copy.deepcopy(gm.graph) if isinstance(gm, torch.fx.GraphModule) else None
        self.recorder.paused += 1
        try:
            with torch._functorch.config.patch(enable_autograd_cache=False):
                made: Callable[..., Any] = self._folding.compile(
                    gm, inputs, lambda graph, given: self._compile_fx(graph, given, *args, **kwargs)
                )
            return made
        except (_dynamo_errors.RestartAnalysis, _dynamo_errors.SkipFrame):
            raise
        except Exception as error:
            if kept is None:
                raise
            self._failed("a graph", error, "")
            return self._eager(torch.fx.GraphModule(gm, kept))
        finally:
            self.recorder.paused -= 1

    def compile_graph(self, gm: Any, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        """Replaces `compile_fx_inner`: returns a callable that runs a graph of aten operators and empties its list of
        arguments."""
        backward = bool(kwargs.get("is_backward"))
        cudagraphs = kwargs.get("cudagraphs")
        pooled = cudagraphs is not None and bool(getattr(cudagraphs, "value", cudagraphs))
        if pooled:
            self.recorder.note("cuda_graphs: compiled with CUDA graphs")
        self.recorder.paused += 1
        try:
            with _disable_current_modes():
                gm = self._passes(gm, inputs, bool(kwargs.get("is_inference")))
                wide = self._folding.widened(gm)
                run = CompiledGraph(
                    gm if wide is None else wide.gm,
                    self.mode,
                    self.recorder,
                    self.places,
                    backward,
                    _donated(backward),
                    pooled,
                )
                return run if wide is None else wide.called(run)
        finally:
            self.recorder.paused -= 1

    def label_recomputation(self, gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Replaces `boxed_nop`, which runs AOTAutograd's graphs operator by operator (backend `aot_eager`)."""
        label(gm, self._recomputing)
        run: Callable[..., Any] = self._run_eagerly(gm, inputs)
        return run

    def _recomputing(self, recomputing: bool) -> None:
        self.recorder.recomputing = recomputing

    def _within_mode(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function` wrapped to run under the tracing mode.

        torch leaves all modes for constant folding and for making the state of optimizers, and both make tensors on the
        device.
        """

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.mode:
                return function(*args, **kwargs)

        return call

    def _passes(self, gm: Any, inputs: Sequence[Any], is_inference: bool) -> Any:
        """Returns the graph after the passes that Inductor runs right before it lowers a graph."""
        kept = copy.deepcopy(gm.graph)
        try:
            inductor.view_to_reshape(gm)
            with torch.no_grad():
                fake_mode = inductor.fake_tensor_prop(gm, inputs)
            with _virtualized.V.set_fake_mode(fake_mode):
                inductor._recursive_post_grad_passes(gm, is_inference=is_inference)
        except Exception as error:
            self._failed("Inductor's passes over a graph", error, "")
            return torch.fx.GraphModule(gm, kept)
        return gm

    def _eager(self, gm: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.recorder.compiled += 1
            try:
                return gm(*args)
            finally:
                self.recorder.compiled -= 1

        return run


def _same_random_numbers(joint: Any, forward: Any, backward: Any, _: int) -> tuple[Any, Any]:
    """Leaves both graphs as they are. torch would hand the state of the device's generator to recomputed random
    operators, and the virtual device has a generator of the CPU."""
    return forward, backward


def _donated(backward: bool) -> frozenset[int]:
    """Returns the positions of the arguments whose memory a backward graph may reuse."""
    context = torch._guards.TracingContext.try_get()
    if not backward or context is None or context.fw_metadata is None:
        return frozenset()
    return frozenset(context.fw_metadata.bw_donated_idxs or ())
