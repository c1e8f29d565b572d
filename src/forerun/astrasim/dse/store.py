"""Outcomes of points in a file, by a digest of everything that they depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forerun.astrasim.astra.replay import Machine
from forerun.astrasim.astra.statistics import RankStatistics
from forerun.astrasim.dse.definition import Exploration
from forerun.astrasim.dse.evaluate import Failed, Figures, Outcome
from forerun.astrasim.dse.space import Point
from forerun.astrasim.dse.terms import Communication, Terms
from forerun.common.records import Records

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
    return [machine.system.model_dump(mode="json"), network, machine.network.gib, asdict(machine.memory)]


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
