"""The ranks of published plans as a table and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from forerun.describe.plan.plan import Plan
from forerun.evidence.validation.ranks import PLACES, Rank


def ranks_record(ranks: Sequence[Rank]) -> dict[str, Any]:
    """Returns the ranks as plain data."""
    rows = [
        {
            "id": each.row.id,
            "model": each.row.model,
            "gpu": each.row.gpu,
            "n_gpus": each.row.n_gpus,
            "global_batch": each.row.global_batch_seqs,
            "stack": each.plan.stack,
            "rank": each.standing.rank,
            "behind": each.standing.behind,
            "is_near": each.is_near,
            "fits": each.standing.prediction.fits,
            "plan": _words(each),
            "best": each.best.describe(),
        }
        for each in ranks
    ]
    return {"ranks": rows}


def print_ranks(ranks: Sequence[Rank], console: Console) -> None:
    """Prints where each published plan stands, and how many are near the best."""
    table = Table(box=None, pad_edge=False)
    for heading, justify in (("rank", "right"), ("behind", "right"), ("run", "left"), ("its plan", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    table.add_column("the best plan")
    for each in ranks:
        rank = str(each.standing.rank) if each.standing.rank <= PLACES else f"over {PLACES}"
        table.add_row(rank, f"{each.standing.behind:+.1%}", each.row.id, _words(each), _of(each.best))
    console.print(table)
    near = sum(each.is_near for each in ranks)
    console.print(f"{near} of {len(ranks)} plans are among the first {PLACES} or within 3 % of the best")


def _words(each: Rank) -> str:
    return _of(each.plan) + ("" if each.standing.prediction.fits else " (does not fit)")


def _of(plan: Plan) -> str:
    schedule = f" {plan.pp_schedule}x{plan.virtual_stages}" if plan.pp > 1 else ""
    return f"{plan.describe()}{schedule} mb={plan.micro_batch} AC={plan.activation_checkpointing}"
