"""Writing files that appear whole or not at all, and that replace nothing but plain files."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from forerun.common.errors import ForerunError

TEMPORARY = ".forerun-*.tmp"
"""the names of files that a killed process may leave behind"""


def make_folder(path: str | Path) -> Path:
    """Makes a folder, and those around it, unless it is there. Raises ForerunError if that fails."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ForerunError(f"{path}: can't be made a folder: {getattr(error, 'strerror', None) or error}") from None
    return Path(path)


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """Opens a file whose content is at `path` when the block ends; if the block fails, nothing changes there.

    A temporary file beside a plain file takes its place. A link stays, and its target is written. A target that can't
    be replaced without a loss (a device, a pipe, a file of another user or with further names) is written in place,
    after the block.

    Raises ForerunError if the file can't be written.
    """
    with whole_files() as files, files.open(path) as file:
        yield file


@contextmanager
def whole_files() -> Iterator[WholeFiles]:
    """Opens files that appear when the block ends: all of them, or none if the block fails."""
    files = WholeFiles()
    try:
        yield files
        files.appear()
    finally:
        files.remove_temporaries()


class WholeFiles:
    """Files that appear together: each is written to a temporary file of an unpredictable name first."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Path, Path, int | None]] = []
        """temporary file, requested file, and the mode of the new file (None: written in place)"""

    @contextmanager
    def open(self, path: str | Path, executable: bool = False) -> Iterator[BinaryIO]:
        """Opens the temporary file of `path`. Raises ForerunError as `whole_file`."""
        try:
            temporary = self._temporary(Path(path), executable)
            with temporary.open("wb") as file:
                yield file
        except OSError as error:
            raise _unwritable(path, error) from error

    def _temporary(self, path: Path, executable: bool) -> Path:
        try:
            target, mode = _place_of(path)
        except ValueError as error:
            raise error if isinstance(error, ForerunError) else _unwritable(path, error) from None
        number, name = tempfile.mkstemp(prefix=".forerun-", suffix=".tmp", dir=None if mode is None else target.parent)
        os.close(number)
        self._waiting.append((Path(name), target, None if mode is None else mode | 0o111 * executable))
        return Path(name)

    def appear(self) -> None:
        """Puts every file in its place. Raises ForerunError if one can't be written."""
        for temporary, target, mode in self._waiting:
            try:
                if mode is None:
                    with temporary.open("rb") as source, target.open("wb") as file:
                        shutil.copyfileobj(source, file)
                else:
                    temporary.chmod(mode)
                    temporary.replace(target)
            except OSError as error:
                raise _unwritable(target, error) from error

    def remove_temporaries(self) -> None:
        """Removes the temporary files that are left."""
        for temporary, _, _ in self._waiting:
            with suppress(OSError):
                temporary.unlink()


def _place_of(path: Path) -> tuple[Path, int | None]:
    """Returns the path and the mode of the new file. Returns `path` and None if the file is written in place."""
    try:
        about = path.stat()
    except FileNotFoundError:
        umask = os.umask(0)
        os.umask(umask)
        return Path(os.path.realpath(path)), 0o666 & ~umask
    if stat.S_ISDIR(about.st_mode):
        raise ForerunError(f"{path}: can't be written: it is a folder")
    if not os.access(path, os.W_OK):
        raise ForerunError(f"{path}: can't be written: it is write-protected, or another user's")
    own = not hasattr(os, "geteuid") or about.st_uid == os.geteuid()
    replaced = stat.S_ISREG(about.st_mode) and own and about.st_nlink == 1
    return (Path(os.path.realpath(path)), stat.S_IMODE(about.st_mode)) if replaced else (path, None)


def _unwritable(path: str | Path, error: Exception) -> ForerunError:
    return ForerunError(f"{path}: can't be written: {getattr(error, 'strerror', None) or error}")
