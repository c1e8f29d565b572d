"""rank_programs: the saved Programs of a folder in order of their step time, those that don't fit apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.analysis.predict_program import STACK, placed_program, predict_program, read_program
from forerun.analysis.prediction import Prediction
from forerun.analysis.reading import memory_need
from forerun.cluster.types import Cluster
from forerun.cost.measured import Measured
from forerun.errors import ForerunError
from forerun.network.network_file import Network
from forerun.plan.stack import load_stack
from forerun.processes import Processes, default_workers
from forerun.program.types import Program
from forerun.search.search import limited
from forerun.units import GIB

SUFFIXES = (".program", ".npz")
_WORTH_A_POOL = 4
"""fewer programs than this are predicted here"""


@dataclass(frozen=True, slots=True)
class Fitting:
    """A Program that fits."""

    file: str
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class NotFitting:
    """A Program that needs more memory than there is; it was not run."""

    file: str
    needs_gib: float
    cause: str
    """the largest category of memory"""
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A file that could not be predicted."""

    file: str
    reason: str


@dataclass(frozen=True)
class ProgramRanking:
    """The Programs of a folder. Every file is in exactly one of the lists."""

    folder: str
    cluster: str
    memory_limit_gib: float
    ranked: tuple[Fitting, ...]
    """the fastest first"""
    too_large: tuple[NotFitting, ...]
    """the nearest miss first"""
    refused: tuple[Refused, ...]

    @property
    def best(self) -> Fitting | None:
        """The fastest Program that fits, None where none does."""
        return self.ranked[0] if self.ranked else None

    @property
    def counts(self) -> dict[str, int]:
        """considered = refused + out_of_memory + ok."""
        lists = {"refused": self.refused, "out_of_memory": self.too_large, "ok": self.ranked}
        return {"considered": sum(map(len, lists.values())), **{name: len(found) for name, found in lists.items()}}

    def to_rows(self) -> list[dict[str, Any]]:
        """A flat dict for each file: rank, file, status (ok, out_of_memory, refused), reason, figures."""
        rows = [
            _row(each.file, "ok", rank=rank, prediction=each.prediction) for rank, each in enumerate(self.ranked, 1)
        ]
        rows += [_row(each.file, "out_of_memory", reason=each.reason, needs=each.needs_gib) for each in self.too_large]
        return rows + [_row(each.file, "refused", reason=each.reason) for each in self.refused]


def rank_programs(
    folder: str | Path,
    cluster: Cluster,
    *,
    n_gpus: int | None = None,
    memory_limit_gib: float | None = None,
    network: Network | None = None,
    measured: Measured | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ProgramRanking:
    """The Programs (`*.program`, `*.npz`) of `folder` on `cluster`, as `predict_program` sees them.

    What does not fit in memory is not run. A file that can't be read or predicted is named, the others go on.

    Raises:
        ForerunError: no such folder, no Program in it, or none that can be predicted; the memory limit is no part of
            the device's memory.
    """
    cluster, place = limited(cluster, memory_limit_gib), Path(folder)
    files = _files(place)
    task = _Task(cluster, n_gpus, network, measured)
    answers: list[Fitting | NotFitting | Refused] = []
    n_workers = default_workers() if workers is None else workers
    with Processes(task.answer, n_workers, _WORTH_A_POOL, chunk=1) as processes:
        for answer in processes.run(files):
            answers.append(answer)
            if progress:
                progress(len(answers), len(files))
    refused = [each for each in answers if isinstance(each, Refused)]
    if len(refused) == len(answers):
        raise ForerunError(f"{place}: none of {len(files)} programs can be predicted; the first: {refused[0].reason}")
    ranked = [each for each in answers if isinstance(each, Fitting)]
    too_large = [each for each in answers if isinstance(each, NotFitting)]
    return ProgramRanking(
        folder=str(folder),
        cluster=cluster.name,
        memory_limit_gib=cluster.device.memory_bytes / GIB,
        ranked=tuple(sorted(ranked, key=lambda each: each.prediction.step_time_s)),
        too_large=tuple(sorted(too_large, key=lambda each: each.needs_gib)),
        refused=tuple(refused),
    )


def _files(folder: Path) -> list[Path]:
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    except OSError as error:
        raise ForerunError(f"{folder}: can't be read: {error.strerror or error}") from None
    if not found:
        raise ForerunError(f"{folder}: no program in it (*{', *'.join(SUFFIXES)}); make some with forerun trace")
    return found


@dataclass(frozen=True)
class _Task:
    cluster: Cluster
    n_gpus: int | None
    network: Network | None
    measured: Measured | None

    def answer(self, path: Path) -> Fitting | NotFitting | Refused:
        try:
            program = read_program(path)
            missed = self._does_not_fit(path.name, program)
            if missed is not None:
                return missed
            simulation = predict_program(
                program, self.cluster, n_gpus=self.n_gpus, network=self.network, measured=self.measured
            )
        except ForerunError as error:
            return Refused(path.name, str(error))
        return Fitting(path.name, simulation.prediction)

    def _does_not_fit(self, file: str, program: Program) -> NotFitting | None:
        need = memory_need(placed_program(program, self.cluster, self.n_gpus), self.cluster, load_stack(STACK))
        if need.held.fits:
            return None
        fullest = need.profiles[need.worst]
        parts = fullest.by_category
        cause = max(parts, key=lambda name: parts[name])
        limit = self.cluster.device.memory_bytes
        beside = "" if need.held.peak_bytes > limit else " beside CUDA and NCCL"
        reason = (
            f"needs {need.held.peak_bytes / GIB:.1f} GiB{beside} at {fullest.rank_class},"
            f" {limit / GIB:.1f} available: {cause} {parts[cause] / GIB:.1f}"
        )
        return NotFitting(file, need.held.peak_bytes / GIB, cause, reason)


_FIGURES = (
    *("step_time_s", "tokens_per_s_per_gpu", "mfu", "hfu", "peak_allocated_gib", "peak_reserved_gib"),
    *("exposed_comm_s", "bubble_s", "bottleneck", "dollars_per_billion_tokens"),
)


def _row(
    file: str,
    status: str,
    *,
    rank: int | None = None,
    reason: str = "",
    needs: float | None = None,
    prediction: Prediction | None = None,
) -> dict[str, Any]:
    row: dict[str, Any] = {"rank": rank, "file": file, "status": status, "reason": reason}
    row |= {name: None if prediction is None else getattr(prediction, name) for name in _FIGURES}
    return row | ({} if needs is None else {"peak_reserved_gib": needs})
