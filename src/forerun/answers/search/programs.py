"""rank_programs: ranks the saved Programs of a folder, the best first, and lists those that don't fit separately.

Step times compare Programs that train on the same tokens with the same GPUs. Where tokens or GPUs differ, the default
objective is tokens/s per GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.answers.analysis.memory_need import memory_need
from forerun.answers.analysis.predict_program import placed_program, predict_program, read_program, stack_of
from forerun.answers.analysis.prediction import Prediction
from forerun.answers.search.result import Objective
from forerun.answers.search.search import check_objective
from forerun.common.errors import ForerunError
from forerun.common.processes import Processes, default_workers
from forerun.common.units import GIB
from forerun.core.cost.measured import Measured
from forerun.core.network.network_file import Network
from forerun.core.program.origin import Origin
from forerun.core.program.types import Program
from forerun.describe.cluster.memory_limit import limited
from forerun.describe.cluster.types import Cluster
from forerun.describe.stacks.catalog import load_stack

SUFFIXES = (".program", ".npz")
UNKNOWN_TOKENS = "the program does not say how many tokens its step trains on"
_WORTH_A_POOL = 4
"""fewer programs than this are predicted in this process"""


@dataclass(frozen=True, slots=True)
class Fitting:
    """A Program that fits."""

    file: str
    prediction: Prediction
    tokens_per_step: int | None
    """tokens of a step over all GPUs; None if neither the Program nor the caller states them"""
    groups: Mapping[str, int]
    """number of ranks of each mesh axis, or other kind of group, in which the Program communicates"""

    def figure(self, objective: Objective) -> float | None:
        """Returns the figure that `objective` ranks by, the lowest first; None if it is not known."""
        prediction = self.prediction
        if objective == "tokens":
            rate = prediction.tokens_per_s_per_gpu
            return None if rate is None else -rate
        if objective == "cost":
            return prediction.dollars_per_billion_tokens
        return prediction.step_time_s if objective == "time" else prediction.peak_reserved_gib


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
    objective: Objective
    """the objective that orders `ranked`"""
    because: str
    """why this objective was chosen"""
    ranked: tuple[Fitting, ...]
    """the best first"""
    unranked: tuple[Fitting, ...]
    """Programs that fit but can't be ranked because the tokens of their step are unknown; the fastest first"""
    too_large: tuple[NotFitting, ...]
    """the smallest first"""
    refused: tuple[Refused, ...]

    @property
    def best(self) -> Fitting | None:
        """Returns the best Program that fits, None if none does."""
        return self.ranked[0] if self.ranked else None

    @property
    def fitting(self) -> tuple[Fitting, ...]:
        """Returns all Programs that fit."""
        return (*self.ranked, *self.unranked)

    @property
    def counts(self) -> dict[str, int]:
        """Returns the counts: considered = refused + out_of_memory + unranked + ok; unranked is left out where it is
        0."""
        lists = {"refused": self.refused, "out_of_memory": self.too_large}
        lists |= {"unranked": self.unranked} if self.unranked else {}
        lists |= {"ok": self.ranked}
        return {"considered": sum(map(len, lists.values())), **{name: len(found) for name, found in lists.items()}}

    def to_rows(self) -> list[dict[str, Any]]:
        """Returns a dict for each file: rank, file, status (ok, unranked, out_of_memory, refused), reason, figures."""
        rows = [_row(each.file, "ok", rank=rank, fitting=each) for rank, each in enumerate(self.ranked, 1)]
        rows += [_row(each.file, "unranked", reason=UNKNOWN_TOKENS, fitting=each) for each in self.unranked]
        rows += [_row(each.file, "out_of_memory", reason=each.reason, needs=each.needs_gib) for each in self.too_large]
        return rows + [_row(each.file, "refused", reason=each.reason) for each in self.refused]


def rank_programs(
    folder: str | Path,
    cluster: Cluster,
    *,
    n_gpus: int | None = None,
    objective: Objective | None = None,
    tokens_per_step: int | None = None,
    memory_limit_gib: float | None = None,
    network: Network | None = None,
    measured: Measured | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ProgramRanking:
    """Ranks the Programs (`*.program`, `*.npz`) of `folder` on `cluster` by their predictions (`predict_program`).

    Programs that do not fit in memory are not run. A file that can't be read or predicted is listed as refused.

    Args:
        n_gpus: ranks to run all of them on; unless given, their own numbers of ranks.
        objective: rank by least step time, most tokens/s per GPU, least dollars per token, or least reserved memory.
            Unless given, step time where all Programs that fit train on the same number of tokens with the same
            number of GPUs, else tokens/s per GPU.
        tokens_per_step: tokens of a step over all GPUs, for the Programs that do not state them.
        memory_limit_gib: memory of a GPU to use at most; unless given, all of it.
        network, measured: the arguments of `predict_program`.
        workers: number of processes; unless given, one for each CPU.
        progress: called with the number of Programs that are done and the number of all.

    Raises ForerunError if the folder is missing, has no Program, or has none that can be predicted; the memory limit is
    not between 0 and the device's memory; the objective is unknown, or is cost on a cluster without a price.
    """
    cluster, place = limited(cluster, memory_limit_gib), Path(folder)
    if objective is not None:
        check_objective(objective, cluster)
    files = _files(place)
    task = _Task(cluster, n_gpus, network, measured, tokens_per_step)
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
    fits = [each for each in answers if isinstance(each, Fitting)]
    chosen, because = _objective_of(fits) if objective is None else (objective, "as asked")
    ranked = [each for each in fits if each.figure(chosen) is not None]
    unranked = [each for each in fits if each.figure(chosen) is None]
    too_large = [each for each in answers if isinstance(each, NotFitting)]
    return ProgramRanking(
        folder=str(folder),
        cluster=cluster.name,
        memory_limit_gib=cluster.device.memory_bytes / GIB,
        objective=chosen,
        because=because,
        ranked=tuple(sorted(ranked, key=lambda each: each.figure(chosen) or 0.0)),
        unranked=tuple(sorted(unranked, key=lambda each: each.prediction.step_time_s)),
        too_large=tuple(sorted(too_large, key=lambda each: each.needs_gib)),
        refused=tuple(refused),
    )


def _objective_of(fits: Sequence[Fitting]) -> tuple[Objective, str]:
    """Returns the default objective for Programs, and the reason for it."""
    if not fits:
        return "time", "nothing fits"
    sizes = {each.prediction.n_gpus for each in fits}
    told = {each.tokens_per_step for each in fits if each.tokens_per_step is not None}
    silent = sum(each.tokens_per_step is None for each in fits)
    if silent == len(fits):
        return "time", "no program says how many tokens its step trains on"
    if len(sizes) == len(told) == 1 and not silent:
        return "time", f"every step trains on {min(told):,} tokens with {min(sizes):,} GPUs"
    reasons = [f"the steps train on {min(told):,} to {max(told):,} tokens"] if len(told) > 1 else []
    reasons += [f"the programs run on {min(sizes):,} to {max(sizes):,} GPUs"] if len(sizes) > 1 else []
    reasons += [f"the tokens of {silent:,} of {len(fits):,} programs are unknown"] if silent else []
    return "tokens", ", ".join(reasons)


def _files(folder: Path) -> list[Path]:
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    except OSError as error:
        raise ForerunError(f"{folder}: can't be read: {error.strerror or error}") from None
    if not found:
        raise ForerunError(f"{folder}: it has no Program (*{', *'.join(SUFFIXES)}); make one with forerun trace")
    return found


@dataclass(frozen=True)
class _Task:
    cluster: Cluster
    n_gpus: int | None
    network: Network | None
    measured: Measured | None
    tokens_per_step: int | None

    def answer(self, path: Path) -> Fitting | NotFitting | Refused:
        try:
            program = read_program(path)
            placed = placed_program(program, self.cluster, self.n_gpus)
            missed = self._does_not_fit(path.name, placed)
            if missed is not None:
                return missed
            tokens = Origin.of(placed).tokens_per_step or self.tokens_per_step
            simulation = predict_program(
                program,
                self.cluster,
                n_gpus=self.n_gpus,
                network=self.network,
                measured=self.measured,
                tokens_per_step=tokens,
            )
        except ForerunError as error:
            return Refused(path.name, str(error))
        return Fitting(path.name, simulation.prediction, tokens, _groups(placed))

    def _does_not_fit(self, file: str, placed: Program) -> NotFitting | None:
        need = memory_need(placed, self.cluster, load_stack(stack_of(placed)))
        if need.held.fits:
            return None
        fullest = need.profiles[need.worst]
        parts = fullest.by_category
        cause = max(parts, key=lambda name: parts[name])
        limit = self.cluster.device.memory_bytes
        beside = "" if need.held.peak_bytes > limit else " beside CUDA and NCCL"
        reason = (
            f"needs {need.held.peak_bytes / GIB:.1f} of {limit / GIB:.1f} GiB{beside} on"
            f" {fullest.rank_class}; the largest part is {cause} with {parts[cause] / GIB:.1f}"
        )
        return NotFitting(file, need.held.peak_bytes / GIB, cause, reason)


def _groups(program: Program) -> dict[str, int]:
    """Returns the ranks of each kind of group in which the Program communicates, without groups of one rank."""
    used = program.ops.group[program.ops.is_communication]
    groups = [program.groups[number] for number in sorted({int(number) for number in used if number >= 0})]
    return {group.axis: group.size for group in groups if group.size > 1}


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
    fitting: Fitting | None = None,
) -> dict[str, Any]:
    prediction = None if fitting is None else fitting.prediction
    row: dict[str, Any] = {"rank": rank, "file": file, "status": status, "reason": reason}
    row["n_gpus"] = None if prediction is None else prediction.n_gpus
    row["tokens_per_step"] = None if fitting is None else fitting.tokens_per_step
    row |= {name: None if prediction is None else getattr(prediction, name) for name in _FIGURES}
    return row | ({} if needs is None else {"peak_reserved_gib": needs})
