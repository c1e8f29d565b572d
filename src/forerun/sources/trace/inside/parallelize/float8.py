"""Converts linear layers to float8 with torchao."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn

from forerun.common.errors import ForerunError
from forerun.describe.plan.plan import Plan

_MULTIPLE = 16
"""float8 matrix products need sizes that 16 divides."""
_RECIPES = ("tensorwise", "rowwise")


def to_float8(model: nn.Module, head: nn.Module | None, plan: Plan) -> None:
    """Converts the linear layers of `model` except its `head` to float8, as torchtitan does.

    Raises:
        ForerunError: torchao is not installed, or has no such recipe.
    """
    recipe = "tensorwise" if plan.fp8_recipe == "none" else plan.fp8_recipe
    if recipe not in _RECIPES:
        raise ForerunError(f"plan: fp8_recipe {recipe} has no counterpart in torchao; known: {', '.join(_RECIPES)}")
    if plan.fp8_all_gather and recipe != "tensorwise":
        raise ForerunError(f"plan: fp8_all_gather needs fp8_recipe tensorwise in torchao, not {recipe}")
    try:
        float8: Any = import_module("torchao.float8")
    except ImportError as error:
        raise ForerunError(f"precision fp8: {error}; tracing it needs torchao (pip install torchao)") from error
    if recipe == "tensorwise":
        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=plan.fp8_all_gather)
    else:
        config = float8.Float8LinearConfig.from_recipe_name(recipe)

    def chosen(module: nn.Module, _: str) -> bool:
        sizes = getattr(module, "weight", None)
        return module is not head and sizes is not None and all(size % _MULTIPLE == 0 for size in sizes.shape)

    float8.convert_to_float8_training(model, config=config, module_filter_fn=chosen)


def after_step(model: nn.Module, plan: Plan) -> None:
    """Computes the scales of all weights at once, before they are gathered in float8."""
    if plan.precision == "fp8" and plan.fp8_all_gather:
        import_module("torchao.float8").precompute_float8_dynamic_scale_for_fsdp(model)
