"""The question of a search from a recipe: its model, GPUs and batch, and every field that a search does not choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.answers.search.standing import CHOSEN, unchosen_fields
from forerun.common.errors import ForerunError, ImpossiblePlan
from forerun.describe.model.catalog import load_model
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.complete import REST, complete_plan
from forerun.describe.plan.plan import Plan
from forerun.describe.recipe.read import read_recipe
from forerun.describe.recipe.recipe import Recipe


@dataclass(frozen=True)
class RecipeQuestion:
    """Holds the values that a search takes from a recipe if no option gives them."""

    model: ModelSpec
    seq_len: int
    gpus: int
    batch: int
    fixed: dict[str, Any]
    """fields of plans that are as in the recipe"""
    plan: Plan | None
    """the recipe's own plan; None if options ask about another run"""


def recipe_question(
    path: Path,
    model: str | None,
    options: Mapping[str, Any],
    seq_len: int | None,
    gpus: int | None,
    batch: int | None,
) -> RecipeQuestion:
    """Returns the question of the recipe at `path`. The other arguments override the recipe.

    `options` are fields of plans.

    Raises ForerunError for a recipe that can't be read, or says too little.
    """
    recipe = read_recipe(path)
    spec = recipe.named_model() if model is None else recipe.noted(load_model(model))
    is_same_run = not (seq_len or gpus or batch)
    own = None if gpus else _own_plan(recipe, is_same_run)  # other lengths and batches leave its GPUs as they are
    seq_len = seq_len or recipe.values.get("seq_len")
    if seq_len is None:
        raise ForerunError(f"{recipe.place}: does not say how long a sequence is; give --seq-len")
    gpus, batch = gpus or _gpus(recipe, own), batch or _batch(recipe, own)
    kept = {name: value for name, value in recipe.values.items() if name not in CHOSEN and name not in options}
    stack = options.get("stack", recipe.values.get("stack"))
    stated = {"stack": stack} if isinstance(stack, str) else {}
    base = Plan(**(kept | stated | {"seq_len": seq_len}))
    fixed = {name: value for name, value in unchosen_fields(base).items() if name not in options}
    is_own = own is not None and is_same_run and all(getattr(own, name) == value for name, value in options.items())
    return RecipeQuestion(spec, seq_len, gpus, batch, {**fixed, **options}, own if is_own else None)


def _own_plan(recipe: Recipe, is_asked_about: bool) -> Plan | None:
    """Returns the plan that the recipe trains with, or None if it leaves GPUs or batch open.

    Raises ImpossiblePlan for one that can't run, if it is asked about.
    """
    if recipe.gpus is None and REST in (recipe.values.get("dp_shard"), recipe.values.get("dp_replicate")):
        return None
    values, batch, gpus = recipe.under({}, None, None)
    try:
        return complete_plan(values, n_gpus=gpus, global_batch=batch)
    except ForerunError as error:
        if is_asked_about and isinstance(error, ImpossiblePlan):
            raise
        return None


def _gpus(recipe: Recipe, own: Plan | None) -> int:
    found = recipe.gpus or (None if own is None else own.world_size)
    if found is None:
        raise ForerunError(f"{recipe.place}: does not say on how many GPUs it runs; give --gpus")
    return found


def _batch(recipe: Recipe, own: Plan | None) -> int:
    found = (None if own is None else own.global_batch) or recipe.global_batch
    if found is None:
        raise ForerunError(f"{recipe.place}: does not say how many sequences a step has; give --global-batch")
    return found
