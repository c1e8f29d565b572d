"""The layouts of device meshes, whose class torch 2.10 builds in another way than newer releases."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._mesh_layout import _MeshLayout


def ranks_of_dimension(layout: Any, rank_map: torch.Tensor) -> torch.Tensor:
    """Returns the ranks of each group of one dimension of a mesh, (groups, members)."""
    mesh: Any = _MeshLayout
    whole = layout.nest() if hasattr(layout, "nest") else mesh([layout])
    ranks: torch.Tensor = whole.remap_to_tensor(rank_map)
    return ranks
