"""The plans that a search finds fastest, each as a run of its own: which of them trains soonest is another question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, cast

from forerun.answers.goodput.description import RunEntry
from forerun.answers.goodput.examples import described
from forerun.answers.goodput.read import run_of
from forerun.answers.goodput.request import RunRequest
from forerun.answers.goodput.study import RunStudy
from forerun.answers.search.search import search
from forerun.common.errors import ForerunError
from forerun.common.yaml_files import check
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan


def best_plans(
    source: str, number: int, executor: str = "local", ray_address: str | None = None
) -> tuple[RunRequest, ...]:
    """Returns the run of a file under each of the `number` fastest plans of a search on its GPUs, the fastest first.

    The plan's fields in the file stay as they are, and the search varies the others.

    Raises ForerunError where the file has no plan with a global batch, or as `load_run` and `search` do.
    """
    data, place = described(source)
    entry = check(RunEntry, dict(data), place)
    if entry.plan is None or entry.plan.global_batch is None or "seq_len" not in entry.plan.fields:
        raise ForerunError(f"{place}: a search of plans needs plan, with global_batch and the field seq_len")
    fixed = {name: value for name, value in entry.plan.fields.items() if name != "seq_len"}
    found = search(
        load_model(entry.plan.model),
        load_cluster(entry.plan.cluster),
        entry.gpus,
        entry.plan.fields["seq_len"],
        entry.plan.global_batch,
        fixed=fixed,
        keep=number,
        executor=cast(Literal["local", "ray"], executor),
        ray_address=ray_address,
    )
    plans = [each.own_plan() for each in found.top(number)]
    names = [
        f"{i}. {plan.describe()}, micro batch {plan.micro_batch}, recomputes {plan.activation_checkpointing}"
        for i, plan in enumerate(plans, 1)
    ]
    return tuple(
        run_of(_under(data, plan) | {"name": name}, f"{place}: plan {name}")
        for name, plan in zip(names, plans, strict=True)
    )


def about_slower_plans(plans: Sequence[RunStudy], best: RunStudy, asked: int) -> str:
    """Returns a sentence that says whether a plan whose step is slower than those of `plans` may train sooner.

    No run goes faster than its steps without any disturbance. So no plan of fewer tokens a second in its steps than
    `best` makes in the median run can be better.

    Args:
        plans: runs under the `asked` fastest plans, the fastest first, or under all that fit where those are fewer.
    """
    if len(plans) < asked:
        return "These are all plans that fit."
    slowest = plans[-1].request.phases[0]
    least = best.tokens.p50 / best.wall_s.p50
    if slowest.tokens_per_step / slowest.step_s <= least:
        return "No plan with a slower step trains sooner: undisturbed it makes fewer tokens than the best one."
    return (
        f"A plan with a slower step, of up to {slowest.tokens_per_step / least:.4g} s, may train sooner; --plans with a"
        " larger number looks at more."
    )


def _under(data: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Returns a run without alternatives under a plan."""
    own = {key: value for key, value in data.items() if key != "alternatives"}
    given = {field.name: getattr(plan, field.name) for field in fields(plan) if field.init}
    return own | {"plan": {**own["plan"], "fields": given}}
