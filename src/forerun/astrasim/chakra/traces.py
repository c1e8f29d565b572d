"""Finds the trace files of a run, one for each rank, by prefix, in a folder or in a tar file."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, BinaryIO, TypeVar, cast

from forerun.astrasim.chakra.columns import new_cache
from forerun.astrasim.chakra.framing import chunks
from forerun.astrasim.chakra.reader import read_rank_from
from forerun.astrasim.chakra.trace import RankTrace
from forerun.common.admission import opened, unreadable
from forerun.common.errors import ForerunError

_NAME = re.compile(
    r"(?P<prefix>.*?)(?:\.(?P<rank>0|[1-9]\d{0,8}|ALL_RANKS)|_rank(?P<only>0))\.(?:et|json)(?:\.gz|\.zst)?", re.S
)
_ALL = "ALL_RANKS"
_EXPECTED = "expected files <prefix>.<rank>.et or .json, which .gz or .zst may follow"
_ARCHIVES = ("et.tar.zst", "et.tar.gz", "et.tar")
_TAR = re.compile(r".*\.(?:tar(?:\.\w+)?|tgz)", re.S)
_HASHED_BYTES = 1 << 26
"""members of a tar file up to this size are kept to see whether they repeat"""
_CHUNK = 1 << 20
Item = TypeVar("Item")


class Traces:
    """The traces of `n_ranks` ranks, read on first use. Ranks with equal files share one RankTrace."""

    def __init__(self, place: str, names: bool, tensors: bool, lenient: bool = False) -> None:
        self.place = place
        self.n_ranks = 0
        self._options = names, tensors, new_cache(tensors), lenient
        self._paths: dict[int, Path] = {}
        self._read: dict[int, RankTrace] = {}
        self._by_content: dict[bytes, RankTrace] = {}

    def __len__(self) -> int:
        return self.n_ranks

    @property
    def available(self) -> Sequence[int]:
        """Returns the ranks that have a trace: all, or rank 0 alone."""
        return sorted(self._paths.keys() | self._read.keys())

    def __getitem__(self, rank: int) -> RankTrace:
        """Returns the trace of `rank`. Raises ForerunError as `read_rank` does, and for a rank without a trace."""
        if rank not in self._read:
            if rank not in self._paths:
                raise ForerunError(f"{self.place}: no trace of rank {rank}")
            self._read[rank] = self._from_file(self._paths[rank])
        return self._read[rank]

    def _from_file(self, path: Path) -> RankTrace:
        with opened(path) as file:
            digest = hashlib.blake2b()
            while piece := file.read(_CHUNK):
                digest.update(piece)
            file.seek(0)
            return self._shared(digest.digest(), file, str(path))

    def _shared(self, content: bytes, file: BinaryIO, place: str) -> RankTrace:
        if content not in self._by_content:
            self._by_content[content] = read_rank_from(file, place, *self._options)
        return self._by_content[content]

    def add_files(self, files: Mapping[int, Path], n_ranks: int) -> None:
        """Adds the trace files of some of `n_ranks` ranks."""
        self._paths, self.n_ranks = dict(files), n_ranks

    def add_archive(self, path: Path, n_ranks: int | None) -> None:
        """Adds the traces of a tar file, which it reads once from begin to end. Raises ForerunError."""
        found: dict[str, RankTrace] = {}
        with opened(path) as file:
            stream = cast(IO[bytes], _Pieces(chunks(file, str(path))))
            try:
                with tarfile.open(fileobj=stream, mode="r|") as archive:
                    for member in archive:
                        name = Path(member.name).name
                        if member.isfile() and _NAME.fullmatch(name):
                            if name in found:
                                raise ForerunError(f"{path}: it holds {name} twice; remove one")
                            found[name] = self._from_member(archive, member, f"{path}: {member.name}")
            except (tarfile.TarError, EOFError, OSError, OverflowError) as error:
                raise ForerunError(f"{path}: damaged tar file ({error}); write it again") from None
        self._read = _by_rank(found, str(path), n_ranks)
        self.n_ranks = _count(self._read, found, str(path), n_ranks)

    def _from_member(self, archive: tarfile.TarFile, member: tarfile.TarInfo, place: str) -> RankTrace:
        file = cast(BinaryIO, archive.extractfile(member))
        head = file.read(_HASHED_BYTES + 1)
        if len(head) <= _HASHED_BYTES:
            return self._shared(hashlib.blake2b(head).digest(), io.BytesIO(head), place)
        pieces = chain([head], iter(lambda: file.read(_CHUNK), b""))
        return read_rank_from(cast(BinaryIO, _Pieces(pieces)), place, *self._options)


class _Pieces(io.RawIOBase):
    """A file made of pieces of bytes."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        wanted: list[bytes | memoryview] = []
        while size:
            if not self._left:
                piece = next(self._pieces, None)
                if piece is None:
                    break
                self._left = memoryview(piece)
            part = self._left[:size] if size > 0 else self._left
            self._left = self._left[len(part) :]
            wanted.append(part)
            size -= len(part) if size > 0 else 0
        return b"".join(wanted)


def find_traces(prefix: str | Path, n_ranks: int | None = None) -> list[Path]:
    """Finds the files `<prefix>.<rank>.et`, which .gz or .zst may follow, of all ranks, or of `n_ranks` ranks.

    Raises ForerunError if there is none, a rank is missing, or a rank has two files.
    """
    start = Path(prefix)
    files = {path.name: path for path in _listed(start.parent) if _prefix(path.name) == start.name}
    by_rank = _by_rank(files, str(prefix), n_ranks)
    count = _count(by_rank, (), str(prefix), n_ranks)
    return [by_rank[rank] for rank in range(count)]


def trace_files(traces: str | Path | Sequence[str | Path], n_ranks: int | None = None) -> tuple[dict[int, Path], bool]:
    """Returns trace files by rank, and whether they are a whole run: a prefix or a folder, as in `open_traces`.

    The rank of a single file is the number in its name, or its place in the list if the names don't tell ranks apart.

    Raises ForerunError if there is none, a rank is missing or has two files, a folder holds several runs, or a file is
    a tar file.
    """
    if not isinstance(traces, (str, Path)) or Path(traces).is_file():
        files = [Path(traces)] if isinstance(traces, (str, Path)) else [Path(path) for path in traces]
        if packed := next((path for path in files if _TAR.fullmatch(path.name)), None):
            raise ForerunError(f"{packed}: is a tar file; unpack it (tar xf) and name the traces that it holds")
        said = [match["rank"] or match["only"] for path in files if (match := _NAME.fullmatch(path.name))]
        if _ALL in said or len(set(said)) < len(files):
            return dict(enumerate(files)), False
        return {int(rank): path for rank, path in zip(said, files, strict=True)}, False
    place = Path(traces)
    if place.is_dir():
        place = place / "et" if (place / "et").is_dir() else place
        place = place / _only_prefix(place)
    return dict(enumerate(find_traces(place, n_ranks))), True


def open_traces(
    path: str | Path, n_ranks: int | None = None, names: bool = False, tensors: bool = True, lenient: bool = False
) -> Traces:
    """Opens the traces at `path`: a prefix, a tar file, a folder of traces, or a folder with one of these called `et`.

    A file `<prefix>.ALL_RANKS.et` is the trace of every rank, and `<prefix>_rank0.et` is that of rank 0 alone. `names`,
    `tensors` and `lenient` are those of `read_rank`.

    Raises ForerunError if there is no trace, a rank is missing or has two, a folder holds two runs, or a tar file is
    damaged.
    """
    place = Path(path)
    traces = Traces(str(path), names, tensors, lenient)
    if place.is_dir():
        inside = [place / name for name in _ARCHIVES if (place / name).is_file()]
        if (place / "et").is_dir():
            place = place / "et"
        elif inside:
            place = inside[0]
    if place.is_file():
        traces.add_archive(place, n_ranks)
        return traces
    start = place / _only_prefix(place) if place.is_dir() else place
    by_name = {file.name: file for file in _listed(start.parent) if _prefix(file.name) == start.name}
    by_rank = _by_rank(by_name, str(start), n_ranks)
    traces.add_files(by_rank, _count(by_rank, by_name, str(start), n_ranks))
    return traces


def _only_prefix(folder: Path) -> str:
    prefixes = sorted({prefix for file in _listed(folder) if (prefix := _prefix(file.name)) is not None})
    if len(prefixes) > 1:
        raise ForerunError(f"{folder}: traces of several runs ({', '.join(prefixes[:4])}); give the prefix of one")
    if not prefixes:
        raise ForerunError(f"{folder}: no traces; {_EXPECTED}")
    return prefixes[0]


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (OSError, ValueError) as error:
        raise unreadable(folder, error) from None


def _prefix(name: str) -> str | None:
    match = _NAME.fullmatch(name)
    return match["prefix"] if match else None


def _by_rank(found: Mapping[str, Item], place: str, n_ranks: int | None) -> dict[int, Item]:
    """Returns the entries of `found`, which are by file name, by rank. The file of all ranks counts for each."""
    by_rank: dict[int, Item] = {}
    for name, item in found.items():
        match = _NAME.fullmatch(name)
        said = match["rank"] or match["only"] if match else ""
        if said == _ALL:
            if n_ranks is None:
                raise ForerunError(f"{place}: {name} is the trace of all ranks; say how many ranks there are")
            ranks = range(n_ranks)
        else:
            ranks = range(int(said), int(said) + 1)
        for rank in ranks:
            if rank in by_rank:
                raise ForerunError(f"{place}: two traces of rank {rank}; remove one")
            by_rank[rank] = item
    return by_rank


def _count(by_rank: Mapping[int, object], names: Iterable[str], place: str, n_ranks: int | None) -> int:
    """Returns the number of ranks. Raises ForerunError if the trace of one is missing."""
    if not by_rank:
        raise ForerunError(f"{place}: no traces; {_EXPECTED}")
    only_first = any((match := _NAME.fullmatch(name)) and match["only"] for name in names)
    count = n_ranks or (1 if only_first else max(by_rank) + 1)
    missing = next((rank for rank in range(count) if rank not in by_rank), None)
    if missing is not None and not (only_first and 0 in by_rank):
        raise ForerunError(
            f"{place}: rank {missing} has no trace, but {len(by_rank)} others have; ranks are 0 to {count - 1}"
        )
    return count
