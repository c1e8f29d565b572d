"""Explores: simulates the points that are not known yet, stores them and writes the tables.

The outcome of a point is stored by a digest of everything that it depends on.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forerun.astrasim.astra.replay import Machine
from forerun.astrasim.astra.statistics import RankStatistics
from forerun.astrasim.dse.definition import Exploration
from forerun.astrasim.dse.evaluate import Evaluator, Failed, Figures, Outcome
from forerun.astrasim.dse.result import Explored, results_by_pair
from forerun.astrasim.dse.space import Point
from forerun.astrasim.dse.tables import (
    CSV_NAME,
    PARQUET_NAME,
    metrics_name,
    parquet_is_possible,
    write_csv,
    write_metrics,
    write_parquet,
)
from forerun.astrasim.dse.terms import Communication, Terms
from forerun.common.content import forerun_digest
from forerun.common.errors import ForerunError
from forerun.common.files import make_folder
from forerun.common.records import Records
from forerun.common.workers import HERE, AnswersTasks, Workers

_WORTH_A_POOL = 8
"""this process simulates fewer points than this itself"""
_CHUNK = 2
"""points that a worker gets at once; some take a thousand times as long as others"""
_KEPT_EVERY_S = 1.0
"""seconds of work that a broken-off run loses at most"""

Pool = AbstractContextManager[AnswersTasks[Point, Outcome]]
Progress = Callable[[int, int], None]
"""is called with (points done, points to do)"""


def explore(
    exploration: Exploration, folder: str | Path, workers: Workers = HERE, progress: Progress | None = None
) -> Explored:
    """Simulates the points that `folder` doesn't hold yet, and writes the results of all points there.

    `workers` simulate them. It writes results.csv, a JSON file for each pair and, if pyarrow is installed,
    results.parquet. Points that can't be simulated are rows with an error. If the run is broken
    off, simulated points are kept.

    Raises ForerunError if two pairs have the same file name, the folder can't be written, or as `Workers` does.
    """
    folder = Path(folder)
    names = {pair: metrics_name(*pair) for pair in exploration.pairs}
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice:
        raise ForerunError(f"two pairs of workload and system would both be written as {twice[0]}; rename one")
    pool = workers.answering(evaluator_of(exploration).outcome, forerun_digest, _WORTH_A_POOL, _CHUNK)
    make_folder(folder)
    with Store(folder) as store:
        keys = keys_of(exploration)
        known = store.known(keys)
        missing = {key: point for key, point in zip(keys, exploration.points, strict=True) if key not in known}
        start = time.perf_counter()
        found = _simulate(missing, store, pool, progress) if missing else {}
        seconds = time.perf_counter() - start
    outcomes = known | found
    pairs = results_by_pair(exploration, [outcomes[key] for key in keys])
    explored = Explored(pairs, len(missing), len(keys) - len(missing), seconds)
    write_csv(folder / CSV_NAME, explored.rows)
    if parquet_is_possible():
        write_parquet(folder / PARQUET_NAME, explored.rows)
    for pair in explored.pairs:
        write_metrics(folder / names[pair.workload, pair.system], pair)
    return explored


def _simulate(missing: dict[str, Point], store: Store, pool: Pool, progress: Progress | None) -> dict[str, Outcome]:
    """Returns outcomes by key. Points whose traces share a structure follow each other, so it is made once."""
    missing = dict(sorted(missing.items(), key=lambda item: _structure(item[1])))
    found: dict[str, Outcome] = {}
    fresh: list[tuple[str, Outcome]] = []
    kept_at = time.perf_counter()
    try:
        with pool as answers:
            for key, outcome in zip(missing, answers.run(list(missing.values())), strict=True):
                found[key] = outcome
                fresh.append((key, outcome))
                if time.perf_counter() - kept_at > _KEPT_EVERY_S:
                    store.keep(fresh)
                    fresh, kept_at = [], time.perf_counter()
                if progress:
                    progress(len(found), len(missing))
    finally:
        store.keep(fresh)
    return found


def _structure(point: Point) -> tuple[object, ...]:
    """Returns everything that the structure of a point's traces depends on."""
    split = point.strategy
    several = [degree > 1 for degree in (split.dp, split.tp, split.sp, split.ep)]
    return point.workload, split.pp, split.weight_sharded, split.activation_recompute, several


def evaluator_of(exploration: Exploration) -> Evaluator:
    """Returns the evaluator of an exploration's points."""
    return Evaluator(exploration.workloads, exploration.machines, exploration.issue_order)


NAME = "points.sqlite"
_TABLE = "outcome"
_FORMAT = 2
"""increases when the meaning or the computation of a point's figures changes"""


def keys_of(exploration: Exploration) -> list[str]:
    """Returns the key of each point: a digest of everything that its outcome depends on, without names."""
    machines = {name: _text(_machine(machine)) for name, machine in exploration.machines.items()}
    sizes = {name: _text([load.is_first_generation, dict(load.sizes)]) for name, load in exploration.workloads.items()}
    return [_key(point, sizes, machines, exploration.issue_order) for point in exploration.points]


def _key(point: Point, sizes: dict[str, str], machines: dict[str, str], order: str) -> str:
    parts = [str(_FORMAT), order, sizes[point.workload], machines[point.system], _text(asdict(point.strategy))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _machine(machine: Machine) -> list[Any]:
    network = [asdict(dim) for dim in machine.network.dims]
    own = ["own group algorithms"] if machine.own_group_algorithms else []  # so that earlier records keep their keys
    return [machine.system.model_dump(mode="json"), network, machine.network.gib, asdict(machine.memory), *own]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


class Store(Records):
    """The outcomes in a folder. A context manager.

    Raises ForerunError if the file can't be read or written, or is not a store.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / NAME, _TABLE)

    def known(self, keys: Iterable[str]) -> dict[str, Outcome]:
        """Returns the known outcomes of these keys; records of earlier formats have other keys."""
        wanted = set(keys)
        try:
            return {key: _outcome(record) for key, record in self.all().items() if key in wanted}
        except (TypeError, KeyError) as error:
            raise self.unusable(error) from None

    def keep(self, outcomes: Iterable[tuple[str, Outcome]]) -> None:
        """Adds outcomes: all of them, or none if it fails."""
        self.add((key, asdict(outcome)) for key, outcome in outcomes)


def _outcome(record: dict[str, Any]) -> Outcome:
    if "reason" in record:
        return Failed(**record)
    terms = dict(record["terms"])
    communication = tuple(Communication(**one) for one in terms.pop("communication"))
    rank_0 = RankStatistics(**record["rank_0"])
    return Figures(**{**record, "terms": Terms(**terms, communication=communication), "rank_0": rank_0})
