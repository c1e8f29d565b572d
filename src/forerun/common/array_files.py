"""Reads saved arrays: a zip of numpy's .npy files with a JSON header. Sizes are checked before any is unpacked."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from forerun.common.admission import decoded, opened, parse_json
from forerun.common.errors import ForerunError

Arrays = Mapping[str, npt.NDArray[np.generic]]
HEADER = "header"
_MOST_UNPACKED_BYTES = 1 << 29
"""of all arrays of a file; ten million nodes of a Program take 230 MB"""
_MOST_HEADER_BYTES = 1 << 26
_MOST_MEMBERS = 1000
_NPY = ".npy"
_NUMBERS = "biuf"
"""kinds of numpy's dtypes that are read"""
_DAMAGE = (ValueError, EOFError, RuntimeError, KeyError, SyntaxError, TokenError, zipfile.BadZipFile, zlib.error)
"""errors of `zipfile` and of numpy's parser of headers"""


def read_arrays(path: str | Path, what: str) -> tuple[dict[str, Any], Arrays]:
    """Returns the JSON header and the arrays of a file, by name. Errors call the file `what`, such as "a recording".

    Raises ForerunError if the file can't be read, is no such file, is damaged, holds other arrays than of numbers, or
    takes more memory than it may.
    """
    with ExitStack() as stack:
        file = stack.enter_context(opened(path, _MOST_UNPACKED_BYTES))
        try:
            archive = stack.enter_context(zipfile.ZipFile(file))
            members = archive.infolist()
            _refuse_bombs(members, str(path))
            arrays = {member.filename.removesuffix(_NPY): _array(archive, member) for member in members}
        except ForerunError:
            raise
        except (*_DAMAGE, OSError) as error:
            raise ForerunError(
                f"{path}: damaged or not {what} ({type(error).__name__}); write it again with forerun trace"
            ) from None
    header = arrays.pop(HEADER, None)
    if header is None or header.ndim != 1 or header.dtype != np.uint8:
        raise ForerunError(f"{path}: not {what}: it has no header; write it again with forerun trace")
    data = parse_json(decoded(header.tobytes(), f"{path}, header"), f"{path}, header")
    if not isinstance(data, dict):
        raise ForerunError(f"{path}: not {what}: its header is no JSON object; write it again with forerun trace")
    return data, arrays


def _refuse_bombs(members: list[zipfile.ZipInfo], place: str) -> None:
    """Raises ForerunError for too many members or bytes in them; `zipfile` unpacks no more bytes than members claim."""
    if len(members) > _MOST_MEMBERS or len({member.filename for member in members}) < len(members):
        raise ForerunError(f"{place}: has {len(members)} members; at most {_MOST_MEMBERS} of different names are read")
    unpacked = sum(member.file_size for member in members)
    if unpacked > _MOST_UNPACKED_BYTES:
        raise ForerunError(f"{place}: unpacks to {unpacked:,} bytes; at most {_MOST_UNPACKED_BYTES:,} are read")


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> npt.NDArray[np.generic]:
    """Returns an array of numbers. Raises one of _DAMAGE if it is something else, or of another size than it claims."""
    with archive.open(member) as file:
        stream = cast(BinaryIO, file)
        version = np.lib.format.read_magic(stream)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, by_columns, dtype = read_header[version](stream)
        n_bytes = prod(shape) * dtype.itemsize
        if dtype.kind not in _NUMBERS or dtype.hasobject or min(shape, default=0) < 0 or n_bytes > member.file_size:
            raise ValueError("no array of numbers of that size")
        content = stream.read(n_bytes)
        if len(content) < n_bytes or stream.read(1):
            raise ValueError("an array has another size than it claims")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if by_columns else "C")
