"""Shown: the base class of answers in notebooks, with rows, an HTML table and a picture.

Packages below `interfaces` define the rows of their answers, but not how to draw them. `interfaces/notebook.py`
registers that with `looks_like`.
"""

from __future__ import annotations

import base64
import html
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from forerun.common.errors import ForerunError
from forerun.common.files import whole_file

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class Picture:
    """A picture as the bytes of a PNG file. A notebook shows it; `save` writes it."""

    png: bytes
    about: str
    """a description of the picture in words, for readers who can't see it"""

    def __repr__(self) -> str:
        return f"Picture({self.about!r}, {len(self.png):,} bytes)"

    def _repr_html_(self) -> str:
        """Returns the picture for a notebook, with its words."""
        data = base64.b64encode(self.png).decode()
        about = html.escape(self.about, quote=True)
        return f'<img alt="{about}" style="max-width: 100%" src="data:image/png;base64,{data}">'

    def _repr_png_(self) -> bytes:
        """Returns the picture for readers of notebooks that show no HTML."""
        return self.png

    def save(self, path: str | Path) -> Path:
        """Writes the PNG file and returns its path. Raises ForerunError if the file can't be written."""
        with whole_file(path) as file:
            file.write(self.png)
        return Path(path)


class _Look(NamedTuple):
    table: Callable[[Any], str]
    picture: Callable[[Any], Picture]


_LOOKS: dict[type, _Look] = {}


def looks_like(kind: type, table: Callable[[Any], str], picture: Callable[[Any], Picture]) -> None:
    """Registers how a class of answers is shown: `table` returns HTML, `picture` returns a Picture."""
    _LOOKS[kind] = _Look(table, picture)


class Shown(ABC):
    """An answer with rows and a picture, which a notebook shows as a table."""

    @abstractmethod
    def to_rows(self) -> list[dict[str, Any]]:
        """Returns the figures as flat dicts; units are in the keys."""

    def to_dataframe(self) -> pandas.DataFrame:
        """Returns `to_rows` as a pandas DataFrame. Raises ForerunError if pandas is not installed."""
        return dataframe(self.to_rows())

    def plot(self) -> Picture:
        """Returns the main picture of this answer. Raises ForerunError if matplotlib is not installed."""
        return _LOOKS[type(self)].picture(self)

    def _repr_html_(self) -> str | None:
        """Returns a table for a notebook."""
        look = _LOOKS.get(type(self))
        return None if look is None else look.table(self)


def dataframe(rows: Sequence[dict[str, Any]]) -> pandas.DataFrame:
    """Returns the rows as a pandas DataFrame. Raises ForerunError if pandas is not installed."""
    try:
        import pandas
    except ImportError:
        raise ForerunError("to_dataframe needs pandas: pip install 'forerun[data]', or use to_rows()") from None
    return pandas.DataFrame(rows)
