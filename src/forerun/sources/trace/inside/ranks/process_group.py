"""VirtualGroup: a process group of any size in one process, which records collectives and sends nothing.

Every backend name creates one. Each method of `ProcessGroup` that a program, torch's Python or its C++ (DDP's Reducer)
calls is overridden, so that a collective on device tensors is one recorded node:

* its bytes are the full buffer (nccl-tests): an all-gather's output, a reduce-scatter's or an all-to-all's whole input;
* `async_op=False` runs on the current stream, `async_op=True` on the group's own stream, and `Work.wait` makes the
  current stream wait for it (torch 2.13, ProcessGroupNCCL.cpp, `collective`);
* a barrier is an all-reduce of one float, and the host waits.

Where data is real or known, a collective's result is computed as if every peer held the same data (`symmetric.py`).
Sends and receives (`point_to_point.py`) exchange it with the peer's process. Collectives on CPU tensors are not
recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from forerun.core.program.types import Collective
from forerun.sources.trace.inside.kernels.tensors import dtype_name
from forerun.sources.trace.inside.ranks import functional, groups, objects, stores
from forerun.sources.trace.inside.ranks.mailbox import Mailbox
from forerun.sources.trace.inside.ranks.point_to_point import MessagingGroup, tensor_list
from forerun.sources.trace.inside.ranks.symmetric import Values, own_chunk, reduced
from forerun.sources.trace.inside.ranks.transport import Transport
from forerun.sources.trace.inside.ranks.work import Work
from forerun.sources.trace.inside.recorder import Event, Recorder

handle = functional.handle
Answer = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


def install(
    recorder: Recorder,
    known_value: Callable[[Any], Any] | None = None,
    set_value: Callable[[Any, Any], None] | None = None,
    mailbox: Mailbox | None = None,
) -> None:
    """Makes torch.distributed create virtual groups. Without `mailbox`, the environment's is used if there is one.

    `known_value(tensor)` returns the real data of a fake tensor or None; `set_value(fake, real)` makes it known.
    """
    Transport.recorder = recorder
    Transport.values = Values(known_value, set_value)
    Transport.mailbox = mailbox or Mailbox.from_environment(recorder.rank)
    groups.install(VirtualGroup)
    stores.install()
    objects.install()


class _Backend:
    """The object that `_get_backend` returns."""

    supports_splitting = supports_coalescing = True
    supports_time_estimate = False

    def __init__(self, group: VirtualGroup, name: str, options: Any) -> None:
        self._group, self._name, self.options = group, name, options

    def name(self) -> str:
        return self._name

    def rank(self) -> int:
        return int(self._group.rank())

    def size(self) -> int:
        return int(self._group.size())

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Does nothing."""

    _set_sequence_number_for_group = eager_connect_single_device = perform_nocolor_split = _nothing
    _set_default_timeout = abort = shutdown = _nothing

    def comm_split_count(self) -> int:
        return 0

    def get_error(self) -> Any:
        return None


class VirtualGroup(MessagingGroup):
    """One process group. `ranks` are its global ranks, `rank` is this process's position among them."""

    def __init__(
        self, rank: int, ranks: Sequence[int], label: str, backends: dict[str, str], store: Any, options: Any = None
    ) -> None:
        super().__init__(int(rank), [int(r) for r in ranks], label)  # Programs count ranks with numpy.
        self._store = store
        self.backends = backends
        """The name of the backend for each device type."""
        self._options = options
        self._name = self._desc = ""

    # -- what a group is --------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        names = list(self.backends.values())
        return "nccl" if "nccl" in names else names[0]

    name = getBackendName

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    setGroupName = _set_group_name

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_desc(self, description: str) -> None:
        self._desc = description

    def getGroupDesc(self) -> str:
        return self._desc

    setGroupDesc = _set_group_desc

    @property
    def group_desc(self) -> str:
        return self._desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in self.backends if name in ("cpu", "cuda")]

    def _get_backend(self, device: Any) -> Any:
        kind = torch.device(device).type
        if kind not in self.backends:
            raise RuntimeError(f"No backend type associated with device type {kind}")
        return _Backend(self, self.backends[kind], self._options)

    def get_group_store(self) -> Any:
        return self._store

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: Any = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> VirtualGroup | None:
        """Returns the group of these ranks (numbers within this group); None if this process is not one of them."""
        if self.rank_ not in ranks:
            return None
        members = [self.ranks[r] for r in ranks]
        kinds = self.backends if device_types is None else {d.type: self.backends[d.type] for d in device_types}
        made = VirtualGroup(list(ranks).index(self.rank_), members, groups.label(group_desc), kinds, self._store, opts)
        made._set_group_name(group_name or made.label)
        made._set_group_desc(group_desc or "undefined")
        return made

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Does nothing."""

    set_timeout = abort = shutdown = _set_sequence_number_for_group = _nothing
    _enable_collectives_timing = _wait_for_pending_works = _register_on_completion_hook = _nothing

    def _has_hooks(self) -> bool:
        return False

    def _get_sequence_number_for_group(self) -> int:
        return 0

    # -- how a collective is recorded -----------------------------------------------------------------------------

    def collect(
        self,
        kind: Collective,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        answer: Answer,
        opts: Any = None,
        *,
        sized: Sequence[torch.Tensor] | None = None,
        name: str = "",
    ) -> Work:
        """Records a collective that moves the bytes of `sized` (by default the inputs), and fills `outputs` with
        `answer(values of inputs)` where the data is known."""
        event = None
        moved = inputs if sized is None else sized
        if any(t.device.type == "cuda" for t in moved):
            nbytes = sum(t.numel() * t.element_size() for t in moved)
            event = self.record(name or kind.name.lower(), kind, nbytes, dtype_name(*moved), _asynchronous(opts))
        Transport.values.settle(inputs, outputs, answer)
        work = Work(event, outputs)
        self.join_batch(work)
        return work

    def record(self, name: str, kind: Collective, nbytes: float, dtype: str, asynchronous: bool) -> Event:
        """Records a collective and returns the event of its end."""
        return Transport.recorder.collective(name, int(kind), self.label, self.ranks, nbytes, dtype, asynchronous)

    def reduction(self, op: Any) -> Answer:
        """Returns the function that reduces values over all members by `op` (a ReduceOp)."""
        return lambda values: [reduced(v, op, self.size_) for v in values]

    def reduction_of_own_chunk(self, op: Any) -> Answer:
        """Returns the function that reduces this member's chunk of each value."""
        return lambda values: [reduced(v.flatten().chunk(self.size_)[self.rank_], op, self.size_) for v in values]

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        tensors = tensor_list(tensors)
        return self.collect(Collective.ALL_REDUCE, tensors, tensors, self.reduction(_reduce_op(opts)), opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        tensors = tensor_list(tensors)
        here = opts is None or opts.rootRank == self.rank_
        answer = self.reduction(_reduce_op(opts)) if here else _same
        return self.collect(Collective.BROADCAST, tensors, tensors, answer, opts, name="reduce")

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        tensors = tensor_list(tensors)
        return self.collect(Collective.BROADCAST, tensors, tensors, _same, opts)

    def allgather(self, output_lists: Any, tensors: Any, opts: Any = None) -> Work:
        outputs = [t for one in output_lists for t in one]

        def answer(values: list[torch.Tensor]) -> list[torch.Tensor]:
            return [_fit(v, t) for v, one in zip(values, output_lists, strict=True) for t in one]

        return self.collect(Collective.ALL_GATHER, tensor_list(tensors), outputs, answer, opts, sized=outputs)

    def allgather_coalesced(self, output_lists: Any, tensors: Any, opts: Any = None) -> Work:
        by_tensor = [list(outputs) for outputs in zip(*output_lists, strict=True)]
        return self.allgather(by_tensor, tensors, opts)

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> Work:
        return self.allgather_into_tensor_coalesced([output], [tensor], opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> Work:
        def answer(values: list[torch.Tensor]) -> list[torch.Tensor]:
            return [v.flatten().repeat(self.size_) for v in values]

        return self.collect(Collective.ALL_GATHER, tensors, outputs, answer, opts, sized=outputs)

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(self, output_lists: Any, tensors: Any, opts: Any = None) -> Work:
        tensors, outputs = tensor_list(tensors), [t for one in output_lists for t in one]
        moved = outputs or tensors * self.size_
        return self.collect(Collective.ALL_GATHER, tensors, outputs, _copies(outputs), opts, sized=moved, name="gather")

    def scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> Work:
        outputs, inputs = tensor_list(outputs), [t for one in input_lists for t in one]
        mine = [inputs[self.rank_]] if inputs else outputs
        moved = inputs or outputs * self.size_
        return self.collect(Collective.ALL_GATHER, mine, outputs, _same, opts, sized=moved, name="scatter")

    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> Work:
        mine, moved = [one[self.rank_] for one in input_lists], [t for one in input_lists for t in one]
        answer = self.reduction(_reduce_op(opts))
        return self.collect(Collective.REDUCE_SCATTER, mine, tensor_list(outputs), answer, opts, sized=moved)

    def _reduce_scatter_base(self, output: Any, tensor: Any, opts: Any = None) -> Work:
        return self.reduce_scatter_tensor_coalesced([output], [tensor], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, tensors: Any, opts: Any = None) -> Work:
        answer = self.reduction_of_own_chunk(_reduce_op(opts))
        return self.collect(Collective.REDUCE_SCATTER, tensors, outputs, answer, opts)

    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall(self, outputs: Any, tensors: Any, opts: Any = None) -> Work:
        outputs, tensors = list(outputs), list(tensors)
        mine = [tensors[self.rank_]]
        return self.collect(Collective.ALL_TO_ALL, mine, outputs, _copies(outputs), opts, sized=tensors)

    def alltoall_base(
        self, output: Any, tensor: Any, output_splits: Any = (), input_splits: Any = (), opts: Any = None
    ) -> Work:
        def answer(values: list[torch.Tensor]) -> list[torch.Tensor]:
            sizes = self.splits(tensor, input_splits), self.splits(output, output_splits)
            return [own_chunk(values[0], sizes[0], self.rank_, sizes[1])]

        return self.collect(Collective.ALL_TO_ALL, [tensor], [output], answer, opts)

    all_to_all_single = alltoall_base

    def splits(self, tensor: torch.Tensor, sizes: Sequence[int]) -> list[int]:
        """Returns the rows of `tensor` for each member: `sizes`, or equal shares if it is empty."""
        return list(sizes) or [tensor.shape[0] // self.size_] * self.size_

    def barrier(self, opts: Any = None) -> Work:
        device = getattr(opts, "device", None)
        if "cuda" not in self.backends or (device is not None and device.type == "cpu"):
            return Work(None, [])
        event = self.record("barrier", Collective.ALL_REDUCE, 4, "fp32", _asynchronous(opts))
        return Work(event, [], lambda: Transport.recorder.host_waits(event))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Does nothing: it runs on the host."""


def _same(values: list[torch.Tensor]) -> list[torch.Tensor]:
    return values


def _fit(value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Repeats or cuts `value` to the size of `target`."""
    flat, count = value.flatten(), target.numel()
    if flat.numel() != count:
        flat = flat.repeat(-(-count // max(1, flat.numel())))[:count] if flat.numel() else flat.new_zeros(count)
    return flat


def _copies(outputs: Sequence[torch.Tensor]) -> Answer:
    """Returns the function that gives every output the first value, repeated or cut to its size."""
    return lambda values: [_fit(values[0], t) for t in outputs]


def _reduce_op(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def _asynchronous(opts: Any) -> bool:
    return bool(getattr(opts, "asyncOp", True))
