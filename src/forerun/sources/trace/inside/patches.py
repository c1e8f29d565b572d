"""Patches functions of torch that assume tensors with data. Each patch names the failure that it prevents.

The patches are only applied in a traced process, and are tested with torch 2.13.
"""

# mypy: disable-error-code="assignment, attr-defined, method-assign"
# This module replaces functions of torch, which torch's types don't allow.
from __future__ import annotations

import copy
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils
from torch.utils.data import DataLoader

from forerun.sources.trace.inside import list_operators, subclasses
from forerun.sources.trace.inside.mode import VirtualMode
from forerun.sources.trace.inside.recorder import Recorder
from forerun.sources.trace.inside.subclasses import CLASS, fake_class
from forerun.sources.trace.inside.unseen import stand_in
from forerun.sources.trace.inside.values import KNOWN, share_value

_REAL = (torch.Tensor, torch.nn.Parameter)
_libraries: list[Any] = []
"""What is registered with torch, which a library's deletion would undo."""
_FIRST_ADDRESS = 1 << 44
_BLOCK_BYTES = 512
"""The alignment of the caching allocator."""


def install(mode: VirtualMode, recorder: Recorder) -> None:
    """Applies all patches."""
    subclasses.install(mode)
    _fake_parameters(mode)
    _swap_without_weakrefs()
    _data_of_another_kind(mode)
    _deep_copies()
    _multi_tensor_kernels()
    list_operators.install()
    _storages(recorder)
    _addresses()
    _quiet_propagation(recorder)
    _data_loaders()
    _threads(mode)
    _values(mode)
    _absent_operators(recorder)
    _seen_as_real()
    _stages_of_pipelines()
    _grouped_products()


def _fake_parameters(mode: VirtualMode) -> None:
    """Makes parameters fake on every device: `Module.to` could not replace a real parameter by a fake one and keep its
    identity, which tied weights and optimizers need."""
    make = torch.nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if type(data) in _REAL and data.device.type == "cpu":
            data = mode.as_fake(data)
        if CLASS in vars(type(data)):
            data = data.detach()
        made = make(cls, data, requires_grad)
        if isinstance(made, FakeTensor) and not isinstance(made, cls):  # torch keeps the class of the data alone.
            made.__class__ = fake_class(cls)
        return made

    torch.nn.Parameter.__new__ = new
    plain = FakeTensor.__new__

    def new_fake(cls: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
        """Makes a parameter for `type(parameter)(data, **parameter.__dict__)`, by which programs move parameters to
        meta."""
        own = vars(cls).get(CLASS)
        if own is not None:
            return own(first, *args, **kwargs)
        if isinstance(first, torch.Tensor):
            return torch.nn.Parameter(first, kwargs.get("requires_grad", first.requires_grad))
        return plain(cls, first, *args, **kwargs)

    FakeTensor.__new__ = new_fake


def _swap_without_weakrefs() -> None:
    """Prevents `_apply(): Couldn't swap Linear.weight`: the fake mode keeps weak references to the tensors that it
    made. The class of a parameter and the attributes that the program has set on it stay, as where `_apply` sets the
    data of a plain one. A parameter that a graph refers to, as `weight_norm` leaves it, can't be swapped, and gets the
    data of the other one."""
    torch.utils.weakref = SimpleNamespace(getweakrefs=lambda _: [])
    swap = torch.utils.swap_tensors

    def swap_tensors(one: Any, other: Any) -> None:
        # A parameter that DDP refers to can't be swapped, and need not be where `to` changes nothing.
        if _same_memory(one, other):
            return
        if isinstance(one, FakeTensor) and isinstance(other, FakeTensor) and one._use_count() > 1:
            one.data = other
            return
        keeps_class = CLASS in vars(type(one)) and type(other) is FakeTensor
        alike = keeps_class or type(one) is type(other)
        own = vars(one).keys() - vars(other).keys() - {KNOWN} if alike else ()
        swap(one, other)
        if keeps_class:
            one.__class__, other.__class__ = type(other), type(one)
        for name in own:
            vars(one)[name] = vars(other).pop(name)

    torch.utils.swap_tensors = stand_in(swap, swap_tensors)


def _same_memory(one: Any, other: Any) -> bool:
    if not (isinstance(one, FakeTensor) and isinstance(other, FakeTensor)):
        return False
    storages = [t.untyped_storage()._cdata for t in (one, other)]
    views = [(t.dtype, t.fake_device, t.shape, t.stride(), t.storage_offset()) for t in (one, other)]
    return storages[0] == storages[1] and views[0] == views[1]


def _data_of_another_kind(mode: VirtualMode) -> None:
    """Lets `tensor.data = other` change the device of a fake tensor, which torch leaves as it was, and exchange a real
    tensor for a fake one, which fails with `incompatible tensor type`."""
    plain: Any = torch.Tensor.data

    def data(self: Any, other: Any) -> None:
        fake = isinstance(self, FakeTensor)
        if fake and type(other) in _REAL and other.device.type == "cpu":
            other = mode.as_fake(other)
        if fake == isinstance(other, FakeTensor):
            plain.__set__(self, other)
            if fake:
                self.fake_device = other.fake_device
                share_value(self, other)
            return
        made = other.detach()
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        torch.utils.swap_tensors(self, made.requires_grad_(self.requires_grad))

    torch.Tensor.data = property(plain.__get__, data)


def _deep_copies() -> None:
    """Copies tensors without their fake mode and without the data of their storage."""

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user support the deepcopy protocol at the moment"
            )
        with torch.no_grad():
            made: Any = self.clone()
        if CLASS in vars(type(self)):
            made.__class__ = type(self)
        made.requires_grad_(self.requires_grad)
        memo[id(self)] = made
        made.grad = copy.deepcopy(self.grad, memo)
        for name, value in self.__dict__.items():
            if name not in made.__dict__:
                made.__dict__[name] = copy.deepcopy(value, memo)
        return made

    FakeTensor.__deepcopy__ = deepcopy


def _multi_tensor_kernels() -> None:
    """Lets optimizers use multi-tensor kernels, which they don't for tensor types that they don't know."""
    for types in (torch_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if FakeTensor not in types:
            types.append(FakeTensor)


def _storages(recorder: Recorder) -> None:
    """Records the resizing of storages, by which FSDP frees and allocates without an operation."""
    resize = torch.UntypedStorage.resize_

    def resize_(self: Any, size: int) -> Any:
        answer = resize(self, size)
        if recorder.memory.follows(self):
            recorder.memory.allocated(self, size)
        return answer

    torch.UntypedStorage.resize_ = resize_


def _addresses() -> None:
    """Gives fake tensors addresses: all are at 0, and programs identify tied weights and optimizer state by address."""
    plain: Any = torch.UntypedStorage.data_ptr
    known: dict[int, tuple[int, Any]] = {}
    following = _FIRST_ADDRESS

    def of_storage(storage: Any) -> int:
        nonlocal following
        if storage.device.type != "meta":  # The storages of fakes are on meta.
            return int(plain(storage))
        if not storage.nbytes():
            return 0
        key = storage._cdata
        if key not in known:
            known[key] = following, weakref.ref(storage, lambda _: known.pop(key, None))
            following += -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
        return known[key][0]

    def of_tensor(tensor: Any) -> int:
        address = of_storage(tensor.untyped_storage())
        return address + tensor.storage_offset() * tensor.element_size() if address else 0

    torch.UntypedStorage.data_ptr = of_storage
    FakeTensor.data_ptr = of_tensor


def _quiet_propagation(recorder: Recorder) -> None:
    """Records nothing while DTensor finds output shapes by running operations on fakes of the unsharded tensors."""
    for name in ("_propagate_tensor_meta_non_cached", "propagate_op_sharding_non_cached"):
        if hasattr(ShardingPropagator, name):
            setattr(ShardingPropagator, name, _paused(recorder, getattr(ShardingPropagator, name)))


def _paused(recorder: Recorder, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder.paused += 1
        try:
            return function(*args, **kwargs)
        finally:
            recorder.paused -= 1

    return call


def _data_loaders() -> None:
    """Loads data in this process, because workers can't hand tensors to a traced process."""
    make = DataLoader.__init__
    signature = inspect.signature(make)
    here = {
        "num_workers": 0,
        "pin_memory": False,
        "prefetch_factor": None,
        "multiprocessing_context": None,
        "persistent_workers": False,
        "timeout": 0,
    }

    @functools.wraps(make)
    def init(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.arguments.update(here)
        make(*bound.args, **bound.kwargs)

    DataLoader.__init__ = stand_in(make, init)


def _threads(mode: VirtualMode) -> None:
    """Enters the mode in new threads: a mode holds for one thread, and transformers moves weights to the device in
    several."""
    bootstrap = threading.Thread._bootstrap_inner

    def start(self: threading.Thread) -> None:
        torch.autograd.set_multithreading_enabled(False)
        with mode:
            bootstrap(self)

    threading.Thread._bootstrap_inner = start


def _absent_operators(recorder: Recorder) -> None:
    """Lets packages describe the fake versions of operators that don't exist.

    A package built for CUDA can't load its compiled part without a GPU's libraries, and then fails with `operator
    torchvision::nms does not exist`. Only calling such an operator is an error here.
    """
    register = torch.library.Library._register_fake

    @functools.wraps(register)
    def register_fake(self: Any, op_name: str, fn: Any, _stacklevel: int = 1, **settings: Any) -> Any:
        try:
            return register(self, op_name, fn, _stacklevel + 1, **settings)
        except RuntimeError as error:
            if "does not exist" not in str(error):
                raise
            recorder.note(f"{self.ns}::{op_name} is not there: the compiled part of its package could not be loaded")
            return None

    torch.library.Library._register_fake = register_fake


class _NoTensor:
    """A class that no tensor is an instance of."""


def _seen_as_real() -> None:
    """Hides that tensors are fake: only torch itself gets the class under its public name.

    Programs skip code that would read data if tensors are `torch._subclasses.FakeTensor`s; transformers then builds
    whole attention masks.
    """
    package: Any = torch._subclasses
    del package.FakeTensor

    def found(name: str) -> Any:
        if name != "FakeTensor":
            raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")
        asks = str(sys._getframe(1).f_globals.get("__name__"))
        return FakeTensor if asks.partition(".")[0] in ("torch", "torchao") else _NoTensor

    package.__getattr__ = found


def _stages_of_pipelines() -> None:
    """Lets a pipeline stage move its module to the device, which it leaves where it is if a parameter is fake."""
    import_module("torch.distributed.pipelining.stage").FakeTensor = _NoTensor


def _grouped_products() -> None:
    """Prevents `Expected inputs of BF16 type` of grouped products: CUDA computes other dtypes group by group."""
    registrations: Any = import_module("torch._meta_registrations")
    describe = registrations._meta_grouped_mm_common

    @functools.wraps(describe)
    def common(mat_a: Any, mat_b: Any, scale_a: Any = None, scale_b: Any = None, *args: Any, **kwargs: Any) -> Any:
        if scale_a is not None or mat_a.dtype != mat_b.dtype or mat_a.dtype == torch.bfloat16:
            return describe(mat_a, mat_b, scale_a, scale_b, *args, **kwargs)
        narrow = (mat.to(torch.bfloat16) for mat in (mat_a, mat_b))
        out_dtype = kwargs.pop("out_dtype", None)
        return describe(*narrow, scale_a, scale_b, *args, **kwargs).to(out_dtype or mat_a.dtype)

    registrations._meta_grouped_mm_common = common


def _values(mode: VirtualMode) -> None:
    """Lets `tolist`, `numpy`, formatting and `torch.tensor` of a list of tensors work, which read memory that fake
    tensors don't have. The last one reads scalars where no dispatch mode is active."""
    for name in ("tolist", "numpy", "__array__"):
        setattr(torch.Tensor, name, _on_host(mode, getattr(torch.Tensor, name)))

    def as_text(self: Any, form: str) -> str:
        if self.dim():
            return object.__format__(self, form)
        try:
            return format(self.item(), form)
        except DataDependentOutputException:  # A tensor of torch.compile, which a log of a graph prints, has no value.
            return object.__format__(self, form)

    FakeTensor.__format__ = as_text
    library: Any = torch.library.Library("aten", "IMPL")
    library.impl("_local_scalar_dense", mode.scalar, "CUDA")
    _libraries.append(library)


def _on_host(mode: VirtualMode, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, FakeTensor):
            if self.fake_device.type == "cuda" and method.__name__ != "tolist":
                raise TypeError(f"can't convert {self.device} device type tensor to numpy; use Tensor.cpu() first")
            self = mode.oracle.on_host(self)
        return method(self, *args, **kwargs)

    return call
