"""Writes generated traces as STAGE does: a file for each rank, and the communicator groups."""

from __future__ import annotations

import json
from pathlib import Path

from forerun.astrasim.chakra.writer import write_rank
from forerun.astrasim.stage.generated import GeneratedTraces
from forerun.common.files import make_folder, whole_file

RANK = "%d"
"""the part of a file name that the number of a rank replaces"""


def trace_name(output_name: str) -> str:
    """Returns the file name of every rank's trace, with %d for the rank."""
    return output_name if RANK in output_name else f"{output_name}.{RANK}.et"


def write_traces(traces: GeneratedTraces, folder: Path, output_name: str, comm_group_file: str) -> None:
    """Writes `<output_name>.<rank>.et` (or `output_name` with the rank in place of %d) and the groups to a folder.

    Files are compressed if their names end in .gz or .zst. The folder is made if it is missing.

    Raises ForerunError if a file can't be written.
    """
    make_folder(folder)
    with whole_file(folder / comm_group_file) as file:
        file.write(json.dumps(traces.groups).encode())
    name = trace_name(output_name)
    for rank in range(len(traces)):
        write_rank(folder / name.replace(RANK, str(rank)), traces.rank(rank, names=True))
