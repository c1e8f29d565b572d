"""Writing generated traces as STAGE does: a file a rank, and the communicator groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

from forerun.astrasim.chakra.trace import CommGroups, RankTrace
from forerun.astrasim.chakra.writer import write_rank
from forerun.common.errors import ForerunError
from forerun.common.files import whole_file

RANK = "%d"
"""what a rank's number replaces in a file name"""


class Generated(Protocol):
    """The traces of all ranks, of either generation."""

    @property
    def groups(self) -> CommGroups: ...

    def __len__(self) -> int: ...

    def rank(self, rank: int, names: bool = False) -> RankTrace: ...


def trace_name(output_name: str) -> str:
    """The file name of every rank's trace, with %d for the rank."""
    return output_name if RANK in output_name else f"{output_name}.{RANK}.et"


def write_traces(traces: Generated, folder: Path, output_name: str, comm_group_file: str) -> None:
    """Write `<output_name>.<rank>.et` (or, where `output_name` holds %d, that with the rank for it) and the groups.

    Files are compressed where their names end in .gz or .zst. The folder is made where it is not there.

    Raises:
        ForerunError: a file can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ForerunError(f"{folder}: can't be made: {error.strerror or error}") from None
    with whole_file(folder / comm_group_file) as file:
        file.write(json.dumps(traces.groups).encode())
    name = trace_name(output_name)
    for rank in range(len(traces)):
        write_rank(folder / name.replace(RANK, str(rank)), traces.rank(rank, names=True))
