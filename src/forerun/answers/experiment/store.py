"""Stores the points of a study, one file for each point, so that an interrupted study can continue.

`points/` in the folder of a study has a JSON file for each point, named by a digest of everything that the point
depends on. A study that is started again with the same folder simulates only the missing points, and ends with the same
files as an uninterrupted one. Only one study at a time may use a folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from forerun.answers.experiment.request import Request
from forerun.common.admission import parse_json, read_text
from forerun.common.content import forerun_digest
from forerun.common.errors import ForerunError
from forerun.common.files import TEMPORARY, whole_file
from forerun.common.workers import HERE, Workers

NAME = "points"
_WORTH_A_POOL = 4
"""fewer points than this are simulated here"""
Point = TypeVar("Point")
Progress = Callable[[int, int], None]
"""called with (points done, points to do)"""


class Store(Generic[Point]):
    """The points of type `kind`, a dataclass, in a folder; without a folder nothing is kept.

    Raises ForerunError if the folder can't be made or read.
    """

    def __init__(self, kind: type[Point], folder: Path | None) -> None:
        self._kind = TypeAdapter(kind)
        self.folder = None if folder is None else folder / NAME
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(TEMPORARY):  # a study that was killed while it wrote left it
                left.unlink()
        except OSError as error:
            raise ForerunError(f"{self.folder}: can't be written: {error.strerror or error}") from None

    def known(self, key: str) -> Point | None:
        """Returns the point of that digest; None if it is not there.

        Raises ForerunError if the file can't be read, or holds something else.
        """
        if self.folder is None:
            return None
        path = self._path(key)
        if not path.exists():
            return None
        text = read_text(path)
        try:
            return self._kind.validate_python(parse_json(text, str(path))["point"])
        except (ValueError, TypeError, KeyError, ValidationError):
            raise ForerunError(f"{path}: this file is not a point of a study; remove it") from None

    def keep(self, key: str, label: str, point: Point) -> None:
        """Writes the file of a point, whole or not at all.

        Raises ForerunError if it can't be written. Earlier points stay unchanged.
        """
        if self.folder is None:
            return
        record: dict[str, Any] = {"what": label, "point": self._kind.dump_python(point, mode="json")}
        with whole_file(self._path(key)) as file:
            file.write((json.dumps(record, indent=1) + "\n").encode())

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{key}.json"


def workers_of(request: Request, workers: Workers) -> Workers:
    """Returns who simulates `request`: `workers`, or this process alone where functions of the user hear of events.

    Raises ForerunError if Ray is asked for and such functions are there.
    """
    if not request.handlers:
        return workers
    if workers.executor == "ray":
        raise ForerunError(f"{request.name}: functions that hear of events are called in this process; leave Ray out")
    return Workers(1)


def points_of(
    keys: Sequence[str],
    labels: Sequence[str],
    answer: Callable[[int], Point],
    store: Store[Point],
    progress: Progress | None = None,
    workers: Workers = HERE,
) -> list[Point]:
    """Returns a point for each of `keys`: the stored one, or else `answer(number of the key)`, which the store keeps at
    once.

    Args:
        labels: a name of each point, for people who look at its file.
        workers: who answers; by default a process for each CPU.

    Raises ForerunError as `Workers` does, or if the store can't be written; earlier points stay.
    """
    found: dict[str, Point] = {}
    missing: dict[str, int] = {}
    for number, key in enumerate(keys):
        known = store.known(key)
        if known is not None:
            found[key] = known
        else:
            missing.setdefault(key, number)
    todo, done = len(missing), 0
    with workers.answering(answer, forerun_digest, _WORTH_A_POOL, chunk=1) as processes:
        for (key, number), point in zip(missing.items(), processes.run(list(missing.values())), strict=True):
            store.keep(key, labels[number], point)
            found[key] = point
            done += 1
            if progress:
                progress(done, todo)
    return [found[key] for key in keys]
