"""Key-value stores of a program without peers: one dictionary per address, no sockets and no files.

A counter counts as if every rank had added the same amount, and a key that is waited for counts as set. The value of a
key that only another rank sets can't be read.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from forerun.common.errors import ForerunError
from forerun.sources.trace.inside.unseen import rebind

_dist: Any = dist
_StoreBase: Any = _dist.Store
_contents: dict[Any, dict[str, bytes]] = {}
_numbers = itertools.count()
_alive: list[Any] = []  # torch's PrefixStore holds the C++ part alone, which can't answer once the Python part is gone


def install() -> None:
    """Replaces torch's stores by those of this module."""
    old = {id(getattr(dist, name)): made for name, made in _STORES.items() if hasattr(dist, name)}
    rebind(old)


class _Store(_StoreBase):
    def __init__(self, place: Any) -> None:
        super().__init__()
        self._data = _contents.setdefault(place, {})
        self._timeout = timedelta(seconds=300)
        self._place = place
        _alive.append(self)

    def set(self, key: str, value: Any) -> None:
        self._data[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        found = self._data.get(key)
        if found is None:
            raise ForerunError(
                f"store.get({key!r}): only another rank sets this key, and ranks share no store in a trace"
            )
        return found

    def add(self, key: str, amount: int) -> int:
        value = int(self._data.get(key, b"0")) + amount * int(os.environ.get("WORLD_SIZE", "1"))
        self._data[key] = b"%d" % value
        return value

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        wanted = expected.encode() if isinstance(expected, str) else bytes(expected)
        held = self._data.get(key)
        if (held is None and not wanted) or held == wanted:
            self.set(key, desired)
        return self._data.get(key, wanted)

    def append(self, key: str, value: Any) -> None:
        self._data[key] = self._data.get(key, b"") + (value.encode() if isinstance(value, str) else bytes(value))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return True

    def wait(self, keys: Any, timeout: Any = None) -> None:
        """Returns at once: peers count as having set all keys."""

    def barrier(self, *_: Any, **__: Any) -> None:
        """Returns at once: peers count as being there."""

    def delete_key(self, key: str) -> bool:
        return self._data.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._data)

    def list_keys(self) -> list[str]:
        return list(self._data)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> _Store:
        return _Store(self._place)


class TCPStore(_Store):
    """A store whose contents all stores of one address share."""

    def __init__(self, host_name: str, port: int = 0, *_: Any, **__: Any) -> None:
        super().__init__((host_name, port))
        self.host, self.port = host_name, port


class FileStore(_Store):
    """A store whose contents all stores of one path share."""

    def __init__(self, file_name: str, *_: Any, **__: Any) -> None:
        super().__init__(str(file_name))
        self.path = str(file_name)


class HashStore(_Store):
    """A store with contents of its own."""

    def __init__(self) -> None:
        super().__init__(next(_numbers))


_STORES: dict[str, Callable[..., Any]] = {"TCPStore": TCPStore, "FileStore": FileStore, "HashStore": HashStore}
