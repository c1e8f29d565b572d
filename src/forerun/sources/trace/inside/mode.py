"""VirtualMode: the dispatch mode under which a traced program runs. It records every operation on the virtual device.

Tensors on 'cuda' are fake: they have shapes, strides and dtypes, and no data. So are parameters on every device and
large tensors on the CPU, so that a model of any size fits. Small CPU tensors stay real: data loaders, random numbers
and bookkeeping run as always.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, UnsupportedOperatorException
from torch.utils._python_dispatch import TorchDispatchMode

from forerun.sources.trace.inside import nested, sparse
from forerun.sources.trace.inside.device.device_kernels import OWN_KERNELS
from forerun.sources.trace.inside.kernels.rules import describe
from forerun.sources.trace.inside.kernels.shapes import tried_on_cpu
from forerun.sources.trace.inside.recorder import Recorder
from forerun.sources.trace.inside.subclasses import as_others, is_of_program
from forerun.sources.trace.inside.values import Oracle, known_value, set_value

aten = torch.ops.aten
_LARGEST_REAL = 1 << 22
"""The largest tensor, in elements, that a program makes on the CPU and that is real."""
_INDICES = (torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64)
_DEVICE = torch.ops.prim.device.default
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_AROUND_OPERATORS = ("cplib", "xformers_flash")
"""The namespaces of operators that wrap others: collectives of context parallelism with flex attention, attention."""
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_COPIES = (aten._to_copy.default, aten.copy_.default)
_OPERATION = "_forerun_operation"
"""The attribute of an exception that holds the name of the operation that raised it."""
Handler = Callable[..., tuple[bool, Any]]
_EMPTY, _ZEROS, _ONES, _FULL = torch.empty, torch.zeros, torch.ones, torch.full
_CONSTRUCTORS = {"empty": _EMPTY, "zeros": _ZEROS, "ones": _ONES, "full": _FULL}


@contextmanager
def torchs_own_constructors() -> Iterator[None]:
    """Restores `torch.empty` and similar functions for a while, if the program has replaced them.

    Programs replace these functions while they build a model, to put it on a device. torch calls them itself to find
    the shapes of fake tensors, which it does not do with real ones.
    """
    programs = {name: getattr(torch, name) for name in _CONSTRUCTORS}
    for name, own in _CONSTRUCTORS.items():
        setattr(torch, name, own)
    try:
        yield
    finally:
        for name, replaced in programs.items():
            setattr(torch, name, replaced)


class VirtualMode(TorchDispatchMode):
    """The mode under which a traced program runs from its first line on."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __init__(self, recorder: Recorder, oracle: Oracle, communication: Handler) -> None:
        """Makes the mode. `communication(func, args, kwargs, recorder)` executes collectives that are called as
        operators."""
        super().__init__()
        FakeTensorMode.avoid_device_init = property(lambda _: True)  # type: ignore[assignment]
        torch._C._set_only_lift_cpu_tensors(True)
        self.fake = _fakes()
        nested.install(self.fake)
        self.recorder, self.oracle, self._communication = recorder, oracle, communication
        self._lock = threading.RLock()

    # -- which world an operation belongs to ------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self._lock:  # Threads of the program share the fake tensors.
            if torch.empty is _EMPTY and torch.zeros is _ZEROS and torch.ones is _ONES and torch.full is _FULL:
                return self._dispatch(func, types, args, kwargs)
            with torchs_own_constructors():
                return self._dispatch(func, types, args, kwargs)

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(_FAKE) not in (None, self.fake):
            return func(*args, **kwargs)  # Another fake mode is active, to find shapes.
        for cls in types:
            if cls not in _PLAIN and not issubclass(cls, FakeTensor):
                return NotImplemented
        tensors = _tensors(args, kwargs)
        fakes = [t for t in tensors if isinstance(t, FakeTensor)]
        if fakes:
            foreign = next((t for t in fakes if t.fake_mode is not self.fake), None)
            if foreign is not None:
                with foreign.fake_mode:
                    return func(*args, **kwargs)
            return self._on_fakes(func, types, tensors, args, kwargs)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            return self._on_fakes(func, types, tensors, args, kwargs)
        if not tensors and (device is None or torch.device(device).type == "cpu") and _large(func, args, kwargs):
            return self._on_fakes(func, types, tensors, args, kwargs)
        return func(*args, **kwargs)

    def _on_fakes(self, func: Any, types: Any, tensors: Any, args: Any, kwargs: Any) -> Any:
        if any(map(is_of_program, tensors)):
            args, kwargs = as_others((args, kwargs))
            tensors = _tensors(args, kwargs)
        try:
            return self._execute(func, types, tensors, args, kwargs)
        except Exception as error:
            vars(error).setdefault(_OPERATION, str(func))
            raise

    def _execute(self, func: Any, types: Any, tensors: Any, args: Any, kwargs: Any) -> Any:
        if sparse.concerns(func, tensors, args):
            return sparse.run(self, func, args, kwargs)
        if _is_composite(func):  # torch decomposes it itself unless autograd's keys are off.
            with self:
                return func.decompose(*args, **kwargs)
        body = _unfused_flex(func) if not self.recorder.compiled else None
        body = body or _body(func)
        if body is not None:
            with self:
                return body(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self.scalar(args[0])
        handled, out = self._communication(func, args, kwargs, self.recorder)
        if handled:
            self.seen(out)
            return out
        if func is aten.embedding.default:
            self.recorder.looked_up(args[0], args[1].numel())
        if func is aten.embedding_dense_backward.default:
            self.recorder.trained((args[2], args[0].shape[-1]), args[1].numel())
        if func in _COPIES:
            handled, out = self._to_host(func, args, kwargs)
            if handled:
                return out
        real = self.oracle.shape_of(func, args, kwargs)
        if real is not None:
            out = self._like(real, args[0].device)
            self._record(func, args, kwargs, out, tensors)
            return out
        if func is aten.equal.default:
            self._record(func, args, kwargs, None, tensors)
            return self.oracle.equal(*args)
        if func is aten.allclose.default:
            return self._all_close(*args, **kwargs)
        given = args
        if func is aten.index.Tensor or func is aten.index_put_.default or func is aten.index_put.default:
            # A mask on the host becomes indices there, one on the device within the operator.
            of_host = [i for index in args[1] for i in ([index] if _on_device(index) else self._index(index))]
            given = (args[0], of_host, *args[2:])
            args = (args[0], [i for index in of_host for i in self._index(index)], *args[2:])
        out = self._run(func, types, args, kwargs)
        if tensors and not isinstance(tensors[0], FakeTensor) and out is not None and _writes_first(func):
            out = tensors[0]
        self._record(func, given, kwargs, out, tensors)
        self.oracle.follow(func, tensors, args, kwargs, out)
        return out

    def _all_close(self, *args: Any, **kwargs: Any) -> bool:
        """Runs `torch.allclose` as torch composes it, and returns True where its value is unknown, as `torch.equal`."""
        with self:
            close = aten.isclose.default(*args, **kwargs).all()
            read = bool(close.item())
        return read or known_value(close) is None

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):
            with self.fake:
                return func(*args, **kwargs)
        try:
            return self.fake.dispatch(func, types, args, kwargs)
        except UnsupportedOperatorException:
            if _writes_first(func):  # Fused SGD has no fake version and needs none.
                return args[0] if func._schema.returns else None
            return self._like(_shapes(tried_on_cpu(func, args, kwargs)), args[0].device)

    # -- recording ---------------------------------------------------------------------------------------------

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any, tensors: Any) -> None:
        recorder = self.recorder
        if recorder.paused:
            return
        node = -1
        if recorder.recording and (_on_device(out) or any(t.device.type == "cuda" for t in tensors)):
            for kernel in describe(recorder.ops, func, args, kwargs, out):
                number = recorder.node(kernel.op, sync=kernel.sync)
                node = number if node < 0 else node
                if kernel.workspace_bytes:
                    recorder.memory.workspace(kernel.workspace_bytes, number)
                if kernel.guessed:
                    recorder.note(f"no rule for {func}: it costs the bytes that it reads and writes")
        self.seen(out, node)

    def seen(self, out: Any, node: int = -1) -> None:
        """Records the memory of device tensors that kernel `node` made (-1: it begins before the next kernel)."""
        if isinstance(out, torch.Tensor):
            if isinstance(out, FakeTensor) and out.fake_device.type == "cuda":
                storage = out.untyped_storage()
                if not self.recorder.memory.follows(storage):
                    self.recorder.memory.allocated(storage, storage.nbytes(), node)
        elif isinstance(out, (list, tuple)):
            for one in out:
                self.seen(one, node)

    def scalar(self, tensor: torch.Tensor) -> Any:
        """Records that the host reads a scalar, and returns its value or the oracle's."""
        if tensor.device.type == "cuda":
            for kernel in describe(self.recorder.ops, aten._local_scalar_dense.default, (tensor,), {}, None):
                self.recorder.node(kernel.op, sync=kernel.sync)
        return self.oracle.scalar(tensor)

    # -- where data would be needed ----------------------------------------------------------------------------

    def _to_host(self, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Makes small tensors real when they are copied to the host: with their known values, or the oracle's."""
        if func is aten.copy_.default:
            target, source = args[:2]
            if isinstance(target, FakeTensor) or not isinstance(source, FakeTensor):
                return False, None
            self._record(func, args, kwargs, target, [source])
            target.copy_(self.oracle.on_host(source).expand(target.shape))
            return True, target
        source, device = args[0], kwargs.get("device")
        host = device is not None and torch.device(device).type == "cpu" and source.device.type == "cuda"
        if not host or source.numel() > _LARGEST_REAL:
            return False, None
        out = self.oracle.on_host(source).to(kwargs.get("dtype") or source.dtype)
        self._record(func, args, kwargs, out, [source])
        return True, out

    def _index(self, index: Any) -> list[Any]:
        """Returns a boolean mask as the indices that it selects, one tensor per dimension, and other indices as they
        are."""
        if not isinstance(index, torch.Tensor) or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        real = self.oracle.shape_of(aten.nonzero.default, (index,), {})
        assert isinstance(real, torch.Tensor)
        return [self._like(real[:, d].contiguous(), index.device) for d in range(index.dim())]

    def _like(self, real: Any, device: torch.device) -> Any:
        """Returns fake tensors on `device` with the shapes of `real` ones (or meta ones) and the values of real
        ones."""
        if isinstance(real, (list, tuple)):
            return tuple(self._like(r, device) for r in real)
        if not isinstance(real, torch.Tensor):
            return real
        with self.fake:
            fake = torch.empty(real.shape, dtype=real.dtype, device=device)
        if real.device.type == "cpu":
            set_value(fake, real)
        return fake

    def as_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a fake tensor on the same device that knows its value if it is small."""
        fake: torch.Tensor = self.fake.from_tensor(tensor, static_shapes=True)
        set_value(fake, tensor)
        return fake


def operation_of(error: BaseException) -> str:
    """Returns the name of the operation on fake tensors that raised `error`, or the error that led to it; empty where
    the program itself failed."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if _OPERATION in vars(cause):
            return str(vars(cause)[_OPERATION])
        cause = cause.__cause__ or cause.__context__
    return ""


def _fakes() -> Any:
    """Returns a fake mode without torch's own constants, which it would compute on a device that has no kernels.

    Copies of tensors share the mode. Its class must be torch's own, which higher-order operators check.
    """
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)
    mode.may_turn_const = lambda _tensor: False
    mode.allow_fallback_kernels = False
    FakeTensorMode.__deepcopy__ = lambda self, _memo: self  # type: ignore[attr-defined]
    return mode


def _shapes(real: Any) -> Any:
    """Returns real tensors without their data."""
    if isinstance(real, (list, tuple)):
        return tuple(map(_shapes, real))
    return real.to("meta") if isinstance(real, torch.Tensor) else real


@cache
def _is_composite(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload) or func in OWN_KERNELS:
        return False
    return func.has_kernel_for_dispatch_key(_COMPOSITE)


@cache
def _body(func: Any) -> Callable[..., Any] | None:
    """Returns the Python function behind an operator if it has to run instead of the operator's fake version. torch and
    xformers have operators around collectives and attention, which a fake version would hide. Programs define operators
    without a fake version.
    """
    if not isinstance(func, torch._ops.OpOverload):
        return None
    definition: Any = OPDEFS.get(func._schema.name)
    if definition is None or (func.namespace not in _AROUND_OPERATORS and definition._abstract_fn is not None):
        return None
    return definition._backend_fns.get("cuda", definition._init_fn)


def _unfused_flex(func: Any) -> Callable[..., Any] | None:
    """Returns the function that flex attention runs outside compiled code: unfused operations on all scores in fp32."""
    if not isinstance(func, torch._ops.HigherOrderOperator):
        return None
    flex = importlib.import_module("torch._higher_order_ops.flex_attention")
    bodies = {flex.flex_attention: flex.sdpa_dense, flex.flex_attention_backward: flex.sdpa_dense_backward}
    return bodies.get(func)


def _writes_first(func: Any) -> bool:
    name = func._schema.name if hasattr(func, "_schema") else ""
    return bool(name.endswith("_")) and not name.endswith("__")


def _on_device(out: Any) -> bool:
    if isinstance(out, torch.Tensor):
        return out.device.type == "cuda"
    return isinstance(out, (list, tuple)) and any(_on_device(one) for one in out)


def _tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [v for v in value if isinstance(v, torch.Tensor)]
    return found


def _large(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether a factory makes a large tensor; its first argument that is a list of numbers is the size.

    An empty tensor of indices is a buffer into which the program reads its data, and not large.
    """
    if func is aten.empty.memory_format and kwargs.get("dtype") in _INDICES:
        return False
    for value in (*args, kwargs.get("size", ())):
        if isinstance(value, (list, tuple, torch.Size)) and value and all(type(v) is int for v in value):
            return prod(value) > _LARGEST_REAL
    return bool(args) and type(args[0]) is int and args[0] > _LARGEST_REAL
