"""The sends and receives of a process group: each records a node, and its data reaches the peer through the mailbox.

The messages of a batch run on the group's stream; others have one stream per pair of ranks, unless the group is bound
to a device (torch 2.13, ProcessGroupNCCL.cpp, `pointToPoint`, "eager initialization mode").
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from forerun.common.errors import ForerunError
from forerun.sources.trace.inside.kernels.tensors import dtype_name
from forerun.sources.trace.inside.ranks.transport import Transport, no_peer
from forerun.sources.trace.inside.ranks.work import Work
from forerun.sources.trace.inside.recorder import Event

_dist: Any = dist
_ProcessGroup: Any = _dist.ProcessGroup
_SMALL = 1 << 12
"""The largest integer message on the device, in elements, whose data is delivered, because the program may branch on
it."""


class MessagingGroup(_ProcessGroup):
    """A process group that sends and receives. `ranks` are its global ranks, `rank` is this process's place in them."""

    def __init__(self, rank: int, ranks: Sequence[int], label: str) -> None:
        super().__init__(rank, len(ranks))
        self.ranks, self.label = tuple(ranks), label
        self.rank_, self.size_ = rank, len(ranks)
        self._batch: list[tuple[bool, torch.Tensor, int, int]] | None = None
        self._batch_works: list[Work] = []
        self._sequence: dict[tuple[int, int, int], int] = {}
        self._key = zlib.crc32(b",".join(b"%d" % r for r in self.ranks))
        """A number for the group that all its members compute alike."""

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Work:
        return self._message(True, tensor_list(tensors)[0], peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Work:
        return self._message(False, tensor_list(tensors)[0], peer, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receives from the next rank of the group, because the first sender is not known."""
        Transport.recorder.note("a receive from any source is traced as one from the next rank of its group")
        return self.recv(tensors, (self.rank_ + 1) % self.size_, tag)

    def _start_coalescing(self, device: Any = None) -> None:
        self._batch, self._batch_works = [], []

    def _end_coalescing(self, device: Any = None) -> Work:
        batch, works = self._batch or [], self._batch_works
        self._batch = None
        ordered = sorted(batch, key=lambda message: not message[0])
        ends = {id(m): self._recorded(*m[:3], batched=True) for m in batch}
        done = [self._deliver(*m, ends[id(m)]) for m in ordered] + works
        events = [w.event for w in done if w.event is not None]
        nodes: dict[int, int] = {}
        for event in events:
            for stream, node in event.nodes.items():
                nodes[stream] = max(node, nodes.get(stream, -1))
        merged = Event(nodes, events[0].step) if events else None

        def finish() -> None:
            for work in done:
                work.wait()

        return Work(merged, [t for w in done for t in w.result()], finish)

    def join_batch(self, work: Work) -> None:
        """Makes the end of the open batch, if there is one, wait for `work`."""
        if self._batch is not None:
            self._batch_works.append(work)

    def _message(self, sends: bool, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        if self._batch is not None:
            self._batch.append((sends, tensor, peer, tag))
            return Work(None, [tensor])
        return self._deliver(sends, tensor, peer, tag, self._recorded(sends, tensor, peer, batched=False))

    def transfer(self, sends: bool, nbytes: int, dtype: str, peer: int, batched: bool = False) -> Event:
        """Records a message to or from member `peer` of the group."""
        label, ranks = self.label, self.ranks
        if not batched and self.bound_device_id is None and self.size_ > 2:
            low, high = sorted((self.rank_, peer))
            label, ranks = f"p2p {label} {low}-{high}", (ranks[low], ranks[high])
        return Transport.recorder.transfer(sends, label, ranks, self.ranks[peer], nbytes, dtype, True)

    def _recorded(self, sends: bool, tensor: torch.Tensor, peer: int, batched: bool) -> Event | None:
        if tensor.device.type != "cuda":
            return None
        return self.transfer(sends, tensor.numel() * tensor.element_size(), dtype_name(tensor), peer, batched)

    def _deliver(self, sends: bool, tensor: torch.Tensor, peer: int, tag: int, event: Event | None) -> Work:
        """Exchanges the data with the peer's process where it is real or the program may branch on it."""
        fake = isinstance(tensor, FakeTensor)
        steers = tensor.numel() <= _SMALL and not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
        if fake and not (steers and tensor.device.type == "cuda"):
            return Work(event, [tensor])
        mailbox = Transport.mailbox
        if mailbox is None:
            if not fake:
                raise ForerunError(no_peer("send" if sends else "recv", self.ranks[peer]))
            return Work(event, [tensor])
        key = self.next_key(sends, peer, tag)
        if sends:
            mailbox.send(self.ranks[peer], key, _payload(Transport.values.of(tensor)))
            return Work(event, [tensor])

        def fetch() -> None:
            data = mailbox.receive(self.ranks[peer], key)
            with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
                value = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(tensor.dtype) if data else None
                Transport.values.put(tensor, value)

        work = Work(event, [tensor], fetch)
        work.source = peer
        return work

    def next_key(self, sends: bool, peer: int, tag: int) -> str:
        """Returns the name of the next message to or from `peer`, which both sides compute alike."""
        counted = (int(sends), peer, tag)
        number = self._sequence[counted] = self._sequence.get(counted, -1) + 1
        return f"{self._key:x}/{self.size_}/{tag}/{number}"


def _payload(value: torch.Tensor | None) -> bytes:
    """Returns the bytes of a tensor; empty if its data is not known."""
    if value is None:
        return b""
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        return bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def tensor_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
