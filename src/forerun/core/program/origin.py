"""Origin: the `meta` of a Program, with types: where the Program comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from forerun.common.errors import ForerunError
from forerun.core.program.types import Program
from forerun.describe.plan.training_loop import TrainingLoop

TRACE = "trace"
PROFILE = "profile"
_MOST_WORKSPACES = 1 << 10
_MOST_WORKSPACE_BYTES = 1 << 40


@dataclass(frozen=True, slots=True)
class MemoryStage:
    """The memory of a device at a stage before the first step."""

    name: str
    allocated_bytes: int
    peak_bytes: int
    """most bytes allocated so far (torch.cuda.max_memory_allocated)"""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The times that the ops of a profiled step took, and where."""

    device: str
    """name of Forerun's device; empty for one that is not known"""
    gpu: str
    """name of the GPU as its driver says it"""
    time_ps: tuple[int, ...]
    """of each op, -1 for those that have none"""
    group_ranks: tuple[tuple[int, ...], ...]
    """global ranks of one group for each entry of Program.groups, as they were recorded"""
    host_ops: tuple[int, ...]
    """ops that are the host's own time"""


@dataclass(frozen=True, slots=True)
class Origin:
    """The entries of a Program's `meta`; missing entries are None or empty."""

    source: str
    """`trace` for traced PyTorch, `profile` for a profiled step, else empty"""
    name: str
    world_size: int
    tokens_per_step: int | None
    """tokens of a step over all ranks"""
    samples_per_step: int | None
    """samples of a step over all ranks"""
    group_ranks: tuple[tuple[int, ...], ...] | None
    """global ranks of one group for each entry of Program.groups"""
    roles: tuple[int, ...] | None
    """a global rank of each rank class; shifted copies of these ranks fill the world"""
    data_parallel: tuple[int, ...] | None
    """indices into Program.groups of the data-parallel groups"""
    sharded: tuple[int, ...]
    """the data-parallel groups that shard parameters, gradients and optimizer state"""
    compiled_ops: tuple[int, ...]
    """indices of the ops of torch.compile'd regions"""
    joint_channels: tuple[int, ...]
    """indices of the channels of collectives that several kinds of GPUs share"""
    part_ops: tuple[int, ...]
    """index of the first op of each kind of GPUs"""
    notes: tuple[str, ...]
    """guesses of the source, one line each"""
    fallbacks: tuple[str, ...]
    """code that a traced program runs uncompiled because torch.compile failed on it, one line each"""
    source_lines: Mapping[str, tuple[str, ...]]
    """name of ops -> file:line that launches them, the most frequent first"""
    torch: str
    stack: str
    """the stack that the modules of a traced program tell; empty if none does"""
    loop: TrainingLoop
    """the periodic work of the training loop"""
    stages: tuple[MemoryStage, ...]
    """memory at the stages before the first step, in their order"""
    blas_workspaces: tuple[int, ...]
    """workspaces of cuBLAS of each rank class; none where unknown"""
    blas_workspace_bytes: int | None
    """the size that the program gives each of them; None: PyTorch's own"""
    state_tensors: int
    """number of parameter and optimizer tensors on the rank with the most; 0 if unknown"""
    recorded: Recorded | None
    """times of a profiled step"""

    @staticmethod
    def of(program: Program) -> Origin:
        """Reads the origin of `program`. Raises ForerunError for an entry of `meta` with a wrong type or value."""
        ranks, n_classes = sum([cls.n_ranks for cls in program.rank_classes]), len(program.rank_classes)
        if not program.meta:
            return _without_meta(ranks, n_classes)
        return _read(program.meta, ranks, n_classes, len(program.groups), len(program.channels), len(program.ops))


@lru_cache(maxsize=1024)
def _without_meta(n_ranks: int, n_classes: int) -> Origin:
    """Returns the origin of a Program that Forerun built from a model and a plan; every prediction asks for it."""
    return _read({}, n_ranks, n_classes, 0, 0, 0)


def _read(
    meta: Mapping[str, object], n_ranks: int, n_classes: int, n_groups: int, n_channels: int, n_ops: int
) -> Origin:
    read = _Reader(meta)
    return Origin(
        source=read.text("source"),
        name=read.text("name"),
        world_size=read.count("world_size") or n_ranks,
        tokens_per_step=read.count("tokens_per_step"),
        samples_per_step=read.count("samples_per_step"),
        group_ranks=read.group_ranks(n_groups),
        roles=read.roles(n_classes),
        data_parallel=read.numbers("data_parallel", n_groups),
        sharded=read.numbers("sharded", n_groups) or (),
        compiled_ops=read.numbers("compiled_ops", n_ops) or (),
        joint_channels=read.numbers("joint_channels", n_channels) or (),
        part_ops=read.numbers("part_ops", n_ops) or (),
        notes=read.lines("notes"),
        fallbacks=read.lines("fallbacks"),
        source_lines=read.source_lines(),
        torch=read.text("torch"),
        stack=read.text("stack"),
        loop=read.loop(),
        stages=read.stages(),
        blas_workspaces=read.numbers("blas_workspaces", _MOST_WORKSPACES) or (0,) * n_classes,
        blas_workspace_bytes=read.size("blas_workspace_bytes"),
        state_tensors=read.count("state_tensors") or 0,
        recorded=read.recorded(n_ops, n_groups),
    )


class _Reader:
    """Reads entries of `meta` and checks their types."""

    def __init__(self, meta: Mapping[str, object]) -> None:
        self._meta = meta

    def _wrong(self, key: str, expected: str) -> ForerunError:
        text = repr(self._meta[key])
        return ForerunError(f"program: meta {key!r}: expected {expected}, got {text[:60]}; trace the program again")

    def text(self, key: str) -> str:
        value = self._meta.get(key, "")
        if not isinstance(value, str):
            raise self._wrong(key, "text")
        return value

    def loop(self) -> TrainingLoop:
        value = self._meta.get("loop") or {}
        if not isinstance(value, dict):
            raise self._wrong("loop", "settings of a training loop")
        return TrainingLoop.of_settings(value)

    def count(self, key: str) -> int | None:
        value = self._meta.get(key)
        if value is not None and not (_whole(value) and value > 0):  # type: ignore[operator]
            raise self._wrong(key, "a whole number above 0")
        return value  # type: ignore[return-value]

    def size(self, key: str) -> int | None:
        value = self._meta.get(key)
        if value is not None and not (_whole(value) and 0 <= value <= _MOST_WORKSPACE_BYTES):  # type: ignore[operator]
            raise self._wrong(key, f"a whole number up to {_MOST_WORKSPACE_BYTES}")
        return value  # type: ignore[return-value]

    def numbers(self, key: str, below: int) -> tuple[int, ...] | None:
        value = self._meta.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(_whole(n) and 0 <= n < below for n in value):
            raise self._wrong(key, f"a list of whole numbers below {below}")
        return tuple(value)

    def stages(self) -> tuple[MemoryStage, ...]:
        value = self._meta.get("stages") or []
        if not isinstance(value, list) or not all(_is_stage(one) for one in value):
            raise self._wrong("stages", "a list of names, each with two numbers of bytes")
        return tuple(MemoryStage(*one) for one in value)

    def recorded(self, n_ops: int, n_groups: int) -> Recorded | None:
        key = "recorded"
        value = self._meta.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, "times and the device that they are of")
        times, ranks = value.get("time_ps"), value.get("group_ranks")
        if not isinstance(times, list) or len(times) > n_ops or not all(_whole(time) and time >= -1 for time in times):
            raise self._wrong(key, f"a device and picoseconds of at most {n_ops} ops")
        device, gpu = value.get("device"), value.get("gpu")
        if not isinstance(device, str) or not isinstance(gpu, str):
            raise self._wrong(key, "names of a device and its GPU")
        if not _are_groups(ranks, n_groups):
            raise self._wrong(key, f"{n_groups} lists of ranks")
        hosts = value.get("host_ops")
        if not isinstance(hosts, list) or not all(_whole(op) and 0 <= op < n_ops for op in hosts):
            raise self._wrong(key, f"the ops that are the host's time, below {n_ops}")
        return Recorded(device, gpu, tuple(times), tuple(map(tuple, ranks or ())), tuple(hosts))

    def source_lines(self) -> dict[str, tuple[str, ...]]:
        value = self._meta.get("source_lines") or {}
        if not isinstance(value, dict) or not all(isinstance(lines, list) for lines in value.values()):
            raise self._wrong("source_lines", "names with lists of lines")
        return {str(name): tuple(map(str, lines)) for name, lines in value.items()}

    def lines(self, key: str) -> tuple[str, ...]:
        value = self._meta.get(key, [])
        if not isinstance(value, list) or not all(isinstance(line, str) for line in value):
            raise self._wrong(key, "a list of texts")
        return tuple(value)

    def roles(self, n_classes: int) -> tuple[int, ...] | None:
        value = self._meta.get("roles")
        if value is None:
            return None
        ranks = value.get("ranks") if isinstance(value, dict) else None
        if not isinstance(ranks, list) or len(ranks) != n_classes or not all(_whole(r) and r >= 0 for r in ranks):
            raise self._wrong("roles", f"ranks of {n_classes} rank classes")
        return tuple(ranks)

    def group_ranks(self, n_groups: int) -> tuple[tuple[int, ...], ...] | None:
        key = "group_ranks"
        value = self._meta.get(key)
        if value is None:
            return None
        if not _are_groups(value, n_groups):
            raise self._wrong(key, f"{n_groups} lists of ranks")
        return tuple(tuple(sorted(set(one))) for one in value)  # type: ignore[attr-defined]


def _are_groups(value: object, n_groups: int) -> bool:
    if not isinstance(value, list) or len(value) != n_groups:
        return False
    return all(isinstance(one, list) and all(_whole(rank) and rank >= 0 for rank in one) for one in value)


def _is_stage(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 3:
        return False
    return isinstance(value[0], str) and all(_whole(size) and size >= 0 for size in value[1:])


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
