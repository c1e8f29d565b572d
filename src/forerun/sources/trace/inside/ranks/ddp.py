"""DistributedDataParallel on the virtual device, with torch's own Reducer in C++.

After the first backward pass the Reducer sorts gradients into buckets in the order in which they became ready. It takes
that order from rank 0: the indices are copied to the device, broadcast, and copied back, and their values have to
survive that.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from forerun.core.program.types import Category
from forerun.sources.trace.inside.device import sync_batch_norm
from forerun.sources.trace.inside.device.cuda_module import built_for_cuda
from forerun.sources.trace.inside.ranks.transport import Transport
from forerun.sources.trace.inside.recorder import Recorder
from forerun.sources.trace.inside.unseen import stand_in

_ONE_BUCKET = (
    "DistributedDataParallel with a static graph reduces all gradients at once until the third step, which --steps 3"
    " records"
)
_dist: Any = dist


_Mode: Any = TorchDispatchMode


class _CopiesAreKnown(_Mode):
    """A mode under which a device tensor knows the value that is copied into it from the host."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and isinstance(args[0], FakeTensor):
            source = args[1]
            if not isinstance(source, FakeTensor):
                Transport.values.put(args[0], source)
        return out


def install(recorder: Recorder) -> None:
    """Makes DistributedDataParallel work on the virtual device. What it does only once in a run is no part of a
    step."""
    sync_batch_norm.install()
    rebuild = _dist.Reducer._rebuild_buckets

    class Logger(_dist.Logger):
        """A logger without run-time statistics, which need a timer that only a CUDA build has."""

        def set_runtime_stats_and_log(self) -> None:
            """Does nothing: nothing was measured."""

    def rebuild_buckets(reducer: Any) -> bool:
        with recorder.beforehand(Category.GRADIENT), _CopiesAreKnown():
            rebuilt = bool(rebuild(reducer))
        if rebuilt:
            recorder.notes.pop(_ONE_BUCKET, None)
        return rebuilt

    def builtin_hook(ddp: Any, kind: Any) -> None:
        compresses = kind == _dist.BuiltinCommHookType.FP16_COMPRESS
        hook = default_hooks.fp16_compress_hook if compresses else default_hooks.allreduce_hook
        ddp.register_comm_hook(ddp.process_group, hook)

    if built_for_cuda():  # Its timer makes real events from the Reducer's second forward pass on.
        _dist.Reducer.prepare_for_forward = lambda _reducer: None
    _dist.Logger = Logger
    # The hooks in C++ need futures that only C++ makes. Python's hooks issue the same collectives.
    wrapper: Any = DistributedDataParallel
    wrapper._register_builtin_comm_hook = builtin_hook
    prepare = wrapper._ddp_init_helper

    def prepared(ddp: Any, *args: Any, **kwargs: Any) -> None:
        recorder.averages.setdefault(ddp.process_group.label)
        prepare(ddp, *args, **kwargs)

    be_static = wrapper._set_static_graph

    def static(ddp: Any) -> None:
        recorder.note(_ONE_BUCKET)
        be_static(ddp)

    wrapper._ddp_init_helper = stand_in(prepare, prepared)
    wrapper._set_static_graph = stand_in(be_static, static)
    _dist.Reducer._rebuild_buckets = rebuild_buckets
