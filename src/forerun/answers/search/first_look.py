"""first_look: a few plans that are likely to be good, predicted before any bound of their space is known.

Computing the bounds of all plans takes a second, and a user who watches a search wants to see plans at once. Little
model parallelism, little recomputation and compiled kernels are good guesses on most clusters. The search then finds
the true best plans.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from forerun.answers.analysis.predict import predict
from forerun.answers.analysis.prediction import Prediction
from forerun.answers.search.outcome import Rows
from forerun.answers.search.space_table import SpaceTable
from forerun.common.errors import ForerunError
from forerun.core.cost.measured import Measured
from forerun.core.network.network_file import Network
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.spec import ModelSpec

_RECOMPUTED = {"none": 0, "selective": 1, "full": 2}
"""order of the kinds of activation checkpointing, the least recomputation first"""


def first_look(
    model: ModelSpec,
    cluster: Cluster,
    table: SpaceTable,
    most: int = 12,
    network: Network | None = None,
    measured: Measured | None = None,
) -> Iterator[Prediction]:
    """Yields the predictions of at most `most` plans of `table`, each of another mesh or with other recomputation.

    Plans that the simulation refuses are left out. Nothing says that one of the plans fits.
    """
    for row in _likely(table)[:most].tolist():
        try:
            yield predict(model, table.plan(row), cluster, network, measured)
        except ForerunError:
            continue


def _likely(table: SpaceTable) -> Rows:
    """Returns one row for each model parallelism and recomputation, the least of both first."""
    plans = table.rows(slice(None))
    again = sum(((plans.activation_checkpointing == value) * cost for value, cost in _RECOMPUTED.items()), start=0)
    keys = (-plans.zero_stage, 1 - 1 * plans.compile, again, plans.tp * plans.cp * plans.pp)
    sharded, eager, again, degree = (np.broadcast_to(key, len(table)) for key in keys)
    order = np.lexsort((sharded, eager, again, degree))
    _, first = np.unique(np.stack([degree[order], again[order]]), axis=1, return_index=True)
    rows: Rows = order[np.sort(first)]
    return rows
