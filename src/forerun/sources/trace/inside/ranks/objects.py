"""Object collectives: every peer is taken to hold the same object, except where a peer's own process can be asked.

Objects are pickled as torch pickles them, so they arrive as copies. With NCCL torch sends the bytes as device tensors:
two collectives (sizes, then data), and the host waits for both.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from forerun.common.errors import ForerunError
from forerun.core.program.types import Collective
from forerun.sources.trace.inside.ranks.transport import Transport, no_peer
from forerun.sources.trace.inside.unseen import rebind

_SIZE_BYTES = 8


def install() -> None:
    """Replaces torch's object collectives by the functions of this module."""
    made = (all_gather_object, gather_object, broadcast_object_list, scatter_object_list)
    rebind({id(getattr(c10d, f.__name__)): f for f in (*made, send_object_list, recv_object_list)})


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Fills the list with copies of `obj`, one for each peer."""
    group = c10d._group_or_default_group(group)
    data = pickle.dumps(obj)
    _record(group, "all_gather_object", Collective.ALL_GATHER, group.size() * _SIZE_BYTES, group.size() * len(data))
    object_list[: group.size()] = [pickle.loads(data) for _ in range(group.size())]


def gather_object(
    obj: Any, object_gather_list: Any = None, dst: int | None = None, group: Any = None, group_dst: int | None = None
) -> None:
    """Fills the receiver's list with copies of its own object, one for each peer."""
    group = c10d._group_or_default_group(group)
    receiver = c10d._canonicalize_group_rank(group, 0 if dst is None and group_dst is None else dst, group_dst)
    data = pickle.dumps(obj)
    _record(group, "gather_object", Collective.ALL_GATHER, group.size() * _SIZE_BYTES, group.size() * len(data))
    if group.rank() == receiver:
        c10d._validate_output_list_for_rank(group.rank(), receiver, object_gather_list)
        object_gather_list[: group.size()] = [pickle.loads(data) for _ in range(group.size())]


def broadcast_object_list(
    object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None, group_src: int | None = None
) -> None:
    """Fetches the source's objects if its process can be asked and the list holds only None; else leaves the list as it
    is."""
    group = c10d._group_or_default_group(group)
    source = c10d._canonicalize_group_rank(group, 0 if src is None and group_src is None else src, group_src)
    count = len(object_list)
    if group.rank() == source:
        data = pickle.dumps(list(object_list))
        _post(group, data)
    else:
        key = _key_for_all(group, False, source)
        empty = all(one is None for one in object_list)
        data = _fetch(group, source, key, "broadcast_object_list") if empty else pickle.dumps(list(object_list))
        object_list[:] = pickle.loads(data)
    _record(group, "broadcast_object_list", Collective.BROADCAST, count * _SIZE_BYTES, len(data), device)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Any = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
) -> None:
    """Fetches this rank's part of the source's list."""
    group = c10d._group_or_default_group(group)
    source = c10d._canonicalize_group_rank(group, 0 if src is None and group_src is None else src, group_src)
    if group.rank() == source:
        if scatter_object_input_list is None:
            raise ValueError("source rank must provide non-None scatter_object_input_list")
        data = pickle.dumps(list(scatter_object_input_list))
        _post(group, data)
    else:
        data = _fetch(group, source, _key_for_all(group, False, source), "scatter_object_list")
    parts = pickle.loads(data)
    _record(group, "scatter_object_list", Collective.BROADCAST, _SIZE_BYTES, len(data))
    scatter_object_output_list[0] = parts[group.rank()]


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Any = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Sends copies of the objects to the peer's process."""
    group = c10d._group_or_default_group(group)
    peer = c10d._canonicalize_group_rank(group, dst, group_dst)
    c10d._check_not_self_rank(group, peer, "destination")
    data = pickle.dumps(list(object_list))
    _record_message(True, group, peer, (len(object_list), len(data)), device, use_batch)
    mailbox = Transport.mailbox
    if mailbox is None:
        raise ForerunError(no_peer("send_object_list", group.ranks[peer]))
    mailbox.send(group.ranks[peer], "objects/" + group.next_key(True, peer, _OBJECTS), data)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    """Waits for the objects of the peer's process, and returns its rank."""
    group = c10d._group_or_default_group(group)
    if src is None and group_src is None:
        raise ForerunError("recv_object_list from any source: name the source rank to trace it")
    peer = c10d._canonicalize_group_rank(group, src, group_src)
    c10d._check_not_self_rank(group, peer, "source")
    mailbox = Transport.mailbox
    if mailbox is None:
        raise ForerunError(no_peer("recv_object_list", group.ranks[peer]))
    data = mailbox.receive(group.ranks[peer], "objects/" + group.next_key(False, peer, _OBJECTS))
    _record_message(False, group, peer, (len(object_list), len(data)), device, use_batch)
    object_list[:] = pickle.loads(data)
    return int(group.ranks[peer])


_OBJECTS, _FOR_ALL = -1, -2
"""Message tags of objects."""
_EVERYBODY = -1
"""The destination of a message that any rank may ask for."""


def _key_for_all(group: Any, posts: bool, source: int) -> str:
    return "all/" + str(group.next_key(posts, source, _FOR_ALL))


def _post(group: Any, data: bytes) -> None:
    """Leaves data for every member of the group that asks for it."""
    key = _key_for_all(group, True, group.rank())
    if Transport.mailbox is not None:
        Transport.mailbox.send(_EVERYBODY, key, data)


def _fetch(group: Any, source: int, key: str, operation: str) -> bytes:
    """Returns the data that the source left for all members."""
    if Transport.mailbox is None:
        raise ForerunError(no_peer(operation, group.ranks[source]))
    return Transport.mailbox.receive(group.ranks[source], key)


def _on_device(group: Any, device: Any) -> bool:
    return torch.device(device or c10d._get_object_coll_device(group)).type == "cuda"


def _record(group: Any, name: str, kind: Collective, sizes: int, nbytes: int, device: Any = None) -> None:
    if not _on_device(group, device):
        return
    recorder = Transport.recorder
    for amount, dtype in ((sizes, "int64"), (nbytes, "uint8")):
        recorder.host_waits(group.record(name, kind, amount, dtype, False))


def _record_message(sends: bool, group: Any, peer: int, sizes: tuple[int, int], device: Any, batched: bool) -> None:
    if not _on_device(group, device):
        return
    count, nbytes = sizes
    recorder = Transport.recorder
    for amount, dtype in ((count * _SIZE_BYTES, "int64"), (nbytes, "uint8")):
        event = group.transfer(sends, amount, dtype, peer, batched)
        recorder.wait_event(event)
        if not sends:
            recorder.host_waits(event)
