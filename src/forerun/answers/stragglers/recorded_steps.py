"""RecordedSteps: when each operation of a job ran, by step and replica, as a Parquet file records it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from forerun.answers.stragglers.kinds import KINDS
from forerun.common.errors import ForerunError

Times: TypeAlias = npt.NDArray[np.float64]
Whole: TypeAlias = npt.NDArray[np.int64]
_TIMES = ("start_ts", "duration")
_OF_NO_CHUNK = ("mc", "gmc")
"""columns that may be empty"""
_WHOLE = ("dp_rank", "stage", "rank", "step", "seq_id", *_OF_NO_CHUNK)


class Operation(NamedTuple):
    """An operation of every step, on the rank of one stage in each replica."""

    kind: str
    number: int
    """of its kind and stage, in the order of start"""
    stage: int

    def __str__(self) -> str:
        return f"{self.kind} {self.number} of stage {self.stage}"


@dataclass(frozen=True)
class RecordedSteps:
    """A job's operations; times are seconds since the start of the step, of [operation, step, replica]."""

    name: str
    operations: tuple[Operation, ...]
    steps: tuple[int, ...]
    """numbers of the steps"""
    ranks: Whole
    """the rank of [stage, replica]"""
    chunks: tuple[int, ...]
    """of each operation: the part of its stage's layers that it works on; -1 if it is none's"""
    model_chunks: tuple[int, ...]
    """of each operation: the same part, counted over the whole model"""
    start_s: Times
    duration_s: Times
    notes: tuple[str, ...] = ()

    @property
    def stages(self) -> int:
        """Returns the stages of the pipeline."""
        return len(self.ranks)

    @property
    def replicas(self) -> int:
        """Returns data-parallel replicas."""
        return int(self.ranks.shape[1])

    @property
    def step_s(self) -> Times:
        """Returns the seconds from the first start to the last end of each step."""
        return np.asarray((self.start_s + self.duration_s).max(axis=(0, 2)) - self.start_s.min(axis=(0, 2)))


def read_steps(path: str | Path) -> RecordedSteps:
    """Reads the steps of a Parquet file with a row for each operation.

    It omits a step that lacks operations of the other steps, and adds a note. Raises ForerunError, which names the file
    and the error.
    """
    whole, times, kinds = _read(Path(path))
    operations, of_operation = _operations(kinds, whole["seq_id"], whole["stage"])
    steps, of_step = np.unique(whole["step"], return_inverse=True)
    replicas, of_replica = np.unique(whole["dp_rank"], return_inverse=True)
    at, shape = (of_operation, of_step, of_replica), (len(operations), len(steps), len(replicas))
    most = int(np.bincount(of_step).max())
    if most < len(operations) * len(replicas):
        raise ForerunError(
            f"{path}: no step has each operation once on each replica: the largest has {most:,} rows,"
            f" and there are {len(operations):,} distinct operations and {len(replicas):,} replicas"
        )
    number = np.zeros(shape, dtype=np.int64)
    np.add.at(number, at, 1)
    complete = (number == 1).all(axis=(0, 2))
    if not complete.any():
        operation, step, replica = (int(each[0]) for each in np.nonzero(number != 1))
        raise ForerunError(
            f"{path}: no step has each operation once on each replica; step {steps[step]} has {operations[operation]}"
            f" {number[operation, step, replica]} times on dp_rank {replicas[replica]}"
        )
    start_s, duration_s = np.zeros(shape), np.zeros(shape)
    start_s[at], duration_s[at] = times["start_ts"], times["duration"]
    start_s, duration_s = start_s[:, complete], duration_s[:, complete]
    first = np.unique(of_operation, return_index=True)[1]
    ranks = np.zeros((int(whole["stage"].max()) + 1, len(replicas)), dtype=np.int64)
    ranks[whole["stage"], of_replica] = whole["rank"]
    left_out = int((~complete).sum())
    return RecordedSteps(
        name=Path(path).stem,
        operations=operations,
        steps=tuple(steps[complete].tolist()),
        ranks=ranks,
        chunks=tuple(whole["mc"][first].tolist()),
        model_chunks=tuple(whole["gmc"][first].tolist()),
        start_s=start_s - start_s.min(axis=(0, 2))[:, None],
        duration_s=duration_s,
        notes=(f"{left_out:,} of {len(steps):,} steps lack operations and are left out.",) if left_out else (),
    )


def _operations(kinds: Sequence[str], numbers: Whole, stages: Whole) -> tuple[tuple[Operation, ...], Whole]:
    """Returns the distinct operations in order, and the place of each row's among them."""
    rows = [Operation(*row) for row in zip(kinds, numbers.tolist(), stages.tolist(), strict=True)]
    operations = tuple(sorted(set(rows)))
    place = {operation: i for i, operation in enumerate(operations)}
    return operations, np.array([place[row] for row in rows])


def _read(path: Path) -> tuple[dict[str, Whole], dict[str, Times], list[str]]:
    """Returns the columns of whole numbers, those of times, and the kinds of operations."""
    columns = _columns(path)
    kinds = columns["optype"].tolist()
    unknown = sorted({str(kind) for kind in kinds} - set(KINDS))
    if unknown:
        raise ForerunError(f"{path}: column optype: unknown kind {unknown[0]!r}; known: {', '.join(KINDS)}")
    try:
        times = {name: columns[name].astype(np.float64) for name in _TIMES}
        whole = {name: columns[name].astype(np.int64) for name in _WHOLE}
    except (TypeError, ValueError) as error:
        raise ForerunError(f"{path}: a column has no numbers: {' '.join(str(error).split())}") from None
    for name, values in times.items():
        if not np.isfinite(values).all() or (name == "duration" and (values < 0).any()):
            raise ForerunError(f"{path}: column {name} has values that are no times in seconds")
    stages = set(whole["stage"].tolist())
    if stages != set(range(len(stages))):
        raise ForerunError(f"{path}: column stage has {len(stages)} stages, which should be 0 to {len(stages) - 1}")
    return whole, times, kinds


def _columns(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    if find_spec("pyarrow") is None:
        raise ForerunError(f"{path}: reading Parquet needs pyarrow: pip install 'forerun[data]'")
    import pyarrow
    import pyarrow.parquet

    if not path.exists():
        raise ForerunError(f"{path}: can't be read: there is no such file; check the path")
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise ForerunError(f"{path}: can't be read as Parquet: {' '.join(str(error).split())[:200]}") from None
    names = ("optype", *_TIMES, *_WHOLE)
    for name in names:
        if name not in table.column_names:
            raise ForerunError(f"{path}: no column {name}; a trace of operations has {', '.join(names)}")
        if table.column(name).null_count and name not in _OF_NO_CHUNK:
            raise ForerunError(f"{path}: column {name} has empty cells")
    if not table.num_rows:
        raise ForerunError(f"{path}: the trace has no operations")
    try:
        return {
            name: (table.column(name).fill_null(-1) if name in _OF_NO_CHUNK else table.column(name)).to_numpy()
            for name in names
        }
    except pyarrow.ArrowException as error:
        raise ForerunError(f"{path}: a column has no numbers: {' '.join(str(error).split())[:200]}") from None
