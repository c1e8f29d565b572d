"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from forerun.common.errors import ForerunError


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file beside `path` that takes its place when the block ends, and is removed if the block fails.

    Raises:
        ForerunError: the file can't be written.
    """
    target = Path(path)
    temporary = Path(f"{target.parent / ('.' + target.name)}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(target)
    except OSError as error:
        raise ForerunError(f"{target}: can't be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
