"""Adds to torch 2.12 and older the private functions of 2.13 that tracing calls."""

from __future__ import annotations

from importlib import import_module
from typing import Any

c10d: Any = import_module("torch.distributed.distributed_c10d")


def adapt() -> None:
    """Adds the registration of process groups."""
    c10d._register_pg_in_world = _register_group


def adapt_compiler() -> None:
    """Adds the reason for which Dynamo skips a frame."""
    types: Any = import_module("torch._dynamo.types")
    plain: Any = types.ConvertFrameReturn

    class ConvertFrameReturn(plain):
        """The result of Dynamo for a frame. It drops the reason, which torch only logs."""

        def __init__(self, *args: Any, skip_reason: str | None = None, **settings: Any) -> None:
            super().__init__(*args, **settings)

    types.ConvertFrameReturn = ConvertFrameReturn


def _register_group(
    pg: Any,
    backend_name: Any,
    store: Any,
    group_name: Any,
    backend_config: str,
    pg_tag: str | None = None,
    add_to_default_tag: bool = False,
) -> None:
    """Enters a process group in c10d's tables, as `_register_pg_in_world` does."""
    world = c10d._world
    world.pg_map[pg] = (backend_name, store)
    world.pg_names[pg] = group_name
    world.pg_backend_config[pg] = backend_config
    c10d._register_process_group(group_name, pg)
    tag = pg_tag or f"ptd:{group_name}"
    if add_to_default_tag:
        world.tags_to_pg.setdefault("", []).append(pg)
    world.tags_to_pg.setdefault(tag, []).append(pg)
    world.pg_to_tag[pg] = tag
