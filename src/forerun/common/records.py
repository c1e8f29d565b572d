"""Records by key in one SQLite file, which keeps the results of an interrupted command."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from forerun.common.admission import parse_json, refuse_special
from forerun.common.errors import ForerunError

if TYPE_CHECKING:
    from typing_extensions import Self

_PATIENCE_S = 60.0
"""how long a process waits while another one writes"""
_ASKED_AT_ONCE = 500
"""keys in one query; every version of SQLite takes 999"""


class Records:
    """JSON records in a table of the file `path`, which is created if it is missing. A context manager.

    Records survive when the process is killed. Processes of one machine may share a file; the first record of a key
    stays. While the file is open, and after a kill, SQLite keeps recent records in `path`-wal beside it.

    Raises ForerunError if the file can't be read or written, or holds other tables.
    """

    def __init__(self, path: Path, table: str) -> None:
        self.path = path
        self._table = table
        if path.exists():
            refuse_special(path.stat(), path)
        try:
            self._base = sqlite3.connect(path, timeout=_PATIENCE_S)
            try:
                self._prepare()
            except BaseException:
                self._base.close()
                raise
        except sqlite3.Error as error:
            raise self.unusable(error) from None

    def _prepare(self) -> None:
        tables = {name for (name,) in self._base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables - {self._table}:
            raise self.unusable(f"it holds the tables {', '.join(sorted(tables))} instead of {self._table}")
        with suppress(sqlite3.OperationalError):  # another process holds it, or the disk has no WAL: the default works
            self._base.execute("PRAGMA journal_mode = WAL")
        self._base.execute("PRAGMA synchronous = NORMAL")  # with WAL a power cut can't damage the file
        self._base.execute(f"CREATE TABLE IF NOT EXISTS {self._table} (key TEXT PRIMARY KEY, record TEXT NOT NULL)")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._base.close()

    def all(self) -> dict[str, Any]:
        """Returns all records by key."""
        return self._read(f"SELECT key, record FROM {self._table}", ())

    def of(self, keys: Sequence[str]) -> dict[str, Any]:
        """Returns the records of `keys`; keys without a record are left out."""
        found: dict[str, Any] = {}
        for first in range(0, len(keys), _ASKED_AT_ONCE):
            some = keys[first : first + _ASKED_AT_ONCE]
            marks = ", ".join("?" * len(some))
            found |= self._read(f"SELECT key, record FROM {self._table} WHERE key IN ({marks})", some)
        return found

    def add(self, records: Iterable[tuple[str, Any]]) -> None:
        """Adds records of new keys: all of them, or none if it fails."""
        rows = [(key, json.dumps(record)) for key, record in records]
        try:
            with self._base:
                self._base.executemany(f"INSERT OR IGNORE INTO {self._table} VALUES (?, ?)", rows)
        except sqlite3.Error as error:
            raise self.unusable(error) from None

    def unusable(self, why: object) -> ForerunError:
        """Returns the error that says why the file can't be used."""
        return ForerunError(f"{self.path}: can't be used ({why}); choose another folder, or remove the file")

    def _read(self, query: str, values: Sequence[str]) -> dict[str, Any]:
        try:
            return {key: parse_json(record, key) for key, record in self._base.execute(query, values)}
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise self.unusable(error) from None
