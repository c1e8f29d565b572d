"""Makes torch.distributed create virtual groups for every backend, and gives them readable names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import device_mesh
from torch.utils._python_dispatch import _disable_current_modes

from forerun.sources.trace.inside.ranks.transport import Transport
from forerun.sources.trace.inside.torch_versions.meshes import ranks_of_dimension
from forerun.sources.trace.inside.unseen import rebind, stand_in

_dist: Any = dist
_labels: dict[str, int] = {}


def install(group: Any) -> None:
    """Makes init_process_group, new_group, split_group and DeviceMesh create groups of the class `group`
    (VirtualGroup)."""
    module: Any = c10d

    def helper(  # noqa: PLR0913 - the parameters of torch's own function
        group_size: int,
        group_rank: int | None,
        global_ranks_in_group: Sequence[int],
        backend: Any,
        store: Any,
        group_name: Any,
        backend_options: Any = None,
        timeout: Any = None,
        pg_tag: Any = None,
        device_id: Any = None,
        group_desc: str | None = None,
        **_newer: Any,
    ) -> Any:
        """Replaces `_new_process_group_helper`. A group without this rank is not created. What newer versions of torch
        pass besides (2.14: `enable_reconfigure`) changes nothing here."""
        if global_ranks_in_group and group_rank is None:
            return dist.GroupMember.NON_GROUP_MEMBER, None
        if pg_tag not in (None, ""):
            known = c10d._find_pg_by_ranks_and_tag(pg_tag, list(global_ranks_in_group))
            if known:
                return known, c10d._world.pg_map[known][1]
        if not global_ranks_in_group:
            Transport.recorder.joined(int(group_rank or 0), group_size)
            _labels.clear()
        config = c10d.BackendConfig(backend)
        prefixed = _dist.PrefixStore(f"{group_name}/", store)
        members = list(global_ranks_in_group) or list(range(group_size))
        kinds = {kind: str(name) for kind, name in config.get_device_backend_map().items()}
        made = group(group_rank, members, label(group_desc), kinds, prefixed, backend_options)
        if device_id is not None and device_id.type != "cpu":
            made.bound_device_id = device_id
        made._set_group_name(group_name)
        made._set_group_desc(group_desc or "undefined")
        tag = {"add_to_default_tag": True} if pg_tag in (None, "") else {"pg_tag": f"user:{pg_tag}"}
        module._register_pg_in_world(
            made, backend_name=backend, store=prefixed, group_name=group_name, backend_config=str(config), **tag
        )
        return made, prefixed

    batch = c10d.batch_isend_irecv
    module._new_process_group_helper = helper
    module._NCCL_AVAILABLE = True
    module.default_pg_nccl_timeout = timedelta(minutes=10)
    rebind({id(batch): _batch_isend_irecv})
    if not hasattr(c10d, "ProcessGroupNCCL"):
        distributed: Any = dist
        module.ProcessGroupNCCL = distributed.ProcessGroupNCCL = _ProcessGroupNCCL
    rebind({id(device_mesh.init_device_mesh): _with_data(device_mesh.init_device_mesh)})
    mesh: Any = device_mesh.DeviceMesh
    mesh._init_one_process_group = staticmethod(_group_of_dimension)
    for name in ("__init__", "__getitem__", "_flatten", "_unflatten"):
        setattr(mesh, name, stand_in(getattr(mesh, name), _with_data(getattr(mesh, name))))


class _ProcessGroupNCCL:
    """The class that a build without NCCL lacks, with the options that programs set."""

    class Options:
        """Options that are kept and have no effect."""

        def __init__(self, is_high_priority_stream: bool = False, **settings: Any) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace()
            self._timeout = c10d.default_pg_timeout
            self.__dict__.update(settings)


def _with_data(method: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a method of DeviceMesh on real tensors: a mesh computes with tensors of ranks, whose values it needs."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        real = [_real(one) for one in args]
        with _disable_current_modes():
            return method(*real, **{name: _real(one) for name, one in kwargs.items()})

    return call


def _real(value: Any) -> Any:
    known = Transport.values.of(value) if isinstance(value, FakeTensor) else None
    return value if known is None else known


def _group_of_dimension(layout: Any, rank_map: torch.Tensor, name: str, override: Any) -> Any:
    """Replaces DeviceMesh._init_one_process_group, which goes through the groups of all ranks to make its own."""
    backend, options = override
    world = dist.get_world_size()
    if layout.numel() == world and override == (None, None):
        default = c10d._get_default_group()
        on_host = torch.cuda.is_available() and dist.get_backend(default) == "gloo"
        wide = dist.new_group(range(world), backend=backend, group_desc="mesh_default") if on_host else default
        return wide.group_name
    table = ranks_of_dimension(layout, rank_map)
    rows = (table == dist.get_rank()).any(dim=1).nonzero().flatten().tolist()
    if not rows:
        return None
    if len(rows) > 1:
        raise RuntimeError(f"rank {dist.get_rank()} is in {len(rows)} groups of mesh dimension {name}")
    made = dist.new_group(
        table[rows[0]].tolist(),
        timeout=options._timeout if options else None,
        backend=backend,
        pg_options=options,
        group_desc=f"mesh_{name}",
    )
    return made.group_name


def _batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
    """Replaces batch_isend_irecv, which batches only for groups of torch's own class."""
    c10d._check_p2p_op_list(p2p_op_list)
    group: Any = p2p_op_list[0].group or c10d._get_default_group()
    group._start_coalescing()
    for message in p2p_op_list:
        peer = {"group_dst" if message.op is c10d.isend else "group_src": message.group_peer}
        message.op(message.tensor, group=message.group, tag=message.tag, **peer)
    return [group._end_coalescing()]


def label(description: str | None) -> str:
    """Returns a unique readable name for a group: its mesh dimension, "world", or "group"."""
    text = description or ""
    if text in ("default_pg", "mesh_default"):
        base = "world"
    else:
        base = text.removeprefix("mesh_") if text.startswith("mesh_") else "group"
    _labels[base] = number = _labels.get(base, 0) + 1
    return base if number == 1 else f"{base}#{number}"
