"""What has been found before: outcomes by what they depend on, in a file that survives a break."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from forerun.astra.replay import Machine
from forerun.dse.definition import Exploration
from forerun.dse.evaluate import Failed, Figures, Outcome
from forerun.dse.space import Point
from forerun.errors import ForerunError

NAME = "points.sqlite"
_FORMAT = 1
"""goes up when a point's figures mean something else, or are computed in another way"""


def keys_of(exploration: Exploration) -> list[str]:
    """Key of each point: a digest of all that its outcome depends on, names left out."""
    machines = {name: _text(_machine(machine)) for name, machine in exploration.machines.items()}
    sizes = {name: _text([load.is_first, dict(load.sizes)]) for name, load in exploration.workloads.items()}
    return [_key(point, sizes, machines, exploration.issue_order) for point in exploration.points]


def _key(point: Point, sizes: dict[str, str], machines: dict[str, str], order: str) -> str:
    parts = [str(_FORMAT), order, sizes[point.workload], machines[point.system], _text(asdict(point.strategy))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _machine(machine: Machine) -> list[Any]:
    network = [asdict(dim) for dim in machine.network.dims]
    return [machine.system.model_dump(mode="json"), network, machine.network.gib, asdict(machine.memory)]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


class Store:
    """The outcomes in a folder. A context manager.

    Raises ForerunError where the file can't be read or written, or is no store.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        try:
            self._base = sqlite3.connect(self.path)
            self._base.execute("CREATE TABLE IF NOT EXISTS outcome (key TEXT PRIMARY KEY, record TEXT NOT NULL)")
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._base.close()

    def known(self) -> dict[str, Outcome]:
        """Every outcome."""
        try:
            rows = self._base.execute("SELECT key, record FROM outcome").fetchall()
            return {key: _outcome(json.loads(record)) for key, record in rows}
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise self._unusable(error) from None

    def add(self, outcomes: Iterable[tuple[str, Outcome]]) -> None:
        """Keep outcomes, all or none of them."""
        records = [(key, json.dumps(asdict(outcome))) for key, outcome in outcomes]
        try:
            with self._base:
                self._base.executemany("INSERT OR REPLACE INTO outcome VALUES (?, ?)", records)
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def _unusable(self, error: Exception) -> ForerunError:
        return ForerunError(f"{self.path}: can't be used ({error}); choose another folder, or remove the file")


def _outcome(record: dict[str, Any]) -> Outcome:
    return Failed(**record) if "reason" in record else Figures(**record)
