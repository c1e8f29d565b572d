"""Names of nodes and tensors, as STAGE writes them."""

from __future__ import annotations

from forerun.astrasim.stage.first_generation.members import Form
from forerun.astrasim.stage.first_generation.nodes import SUFFIX
from forerun.astrasim.stage.first_generation.skeleton import ModelSkeleton, Places, StageSkeleton
from forerun.core.program.types import I32

_REVISED = {Form.OWN: "{}@0", Form.UPDATED: "{}@1", Form.RECEIVED: "shadow_{}@0"}


def node_names(model: ModelSkeleton, stage: StageSkeleton) -> tuple[str, ...]:
    """Returns the name of every row, such as `stack_3_mha_q@0_COMP`."""
    ids = _ids(model, stage.places, stage.position, stage.name)
    return tuple(name + SUFFIX[role] for name, role in zip(ids, stage.role.tolist(), strict=True))


def tensor_names(model: ModelSkeleton, stage: StageSkeleton) -> tuple[str, ...]:
    """Returns the name of every tensor with its local shape, such as `in_emb_w@0Din,Dmodel/tp`."""
    tensors = stage.tensors
    ids = _ids(model, tensors.places, tensors.position, tensors.name)
    return tuple(name + model.shapes[number] for name, number in zip(ids, tensors.name.tolist(), strict=True))


def _ids(model: ModelSkeleton, places: Places, positions: I32, names: I32) -> list[str]:
    blocks = ["in_emb", *(f"stack_{layer}" for layer in range(model.layers)), "out_emb"]
    forms = [_REVISED[form] for form in Form]
    rows = zip(places.form.tolist(), positions.tolist(), names.tolist(), strict=True)
    return [forms[form].format(f"{blocks[position]}_{model.names[name]}") for form, position, name in rows]
