"""Job: the task of a traced process, and the report of how it ended."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from forerun.common.errors import ForerunError

_COLOUR = re.compile("\x1b\\[[0-9;]*[A-Za-z]")
_RELEASE = re.compile(r"(\d+)\.(\d+)(\.|$)")
_LONGEST = 600
"""The most characters of a failure's message that a user sees."""


@dataclass(frozen=True)
class Job:
    """The task of one rank of one program."""

    folder: str
    """The folder for the recording or the failure."""
    target: str = ""
    """The path of a script, or the name of a module."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    rank: int = 0
    world_size: int = 1
    gpus_per_node: int = 8
    steps: int = 2
    """The optimizer steps to run; the last one is recorded."""
    lines: bool = False
    """Whether to record source lines."""
    expert_skew: float = 0.0
    """0: routing is balanced; s: expert i is chosen in proportion to 1 / (i + 1) ** s."""
    device: str = "h100"
    dynamo: str = ""
    """The release of torch that determines the graph breaks and the recomputation of selective checkpoints, such as
    '2.9'; '' is the installed one.
    """
    alone: bool = False
    """Whether to record no other rank, even where this one sends to others."""
    working_folder: str = ""
    """The folder that the program runs in; '' is that of this process."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of the program."""
    allow_fallback: bool = False
    """Whether code on which torch.compile fails may run uncompiled."""
    kernels: tuple[str, ...] = ()
    """The files that describe kernels which torch does not know."""
    tokens_per_step: int | None = None
    """The tokens of a step over all ranks, where the user says them."""
    title: str = ""
    """The name that users know the program by, if it is not `target`."""

    @property
    def name(self) -> str:
        return self.title or self.target

    @property
    def local_rank(self) -> int:
        return self.rank % self.gpus_per_node

    @property
    def recording(self) -> Path:
        return Path(self.folder) / f"rank{self.rank}.npz"

    @property
    def failure(self) -> Path:
        return Path(self.folder) / f"rank{self.rank}.failure.json"

    @property
    def last_place(self) -> Path:
        """Returns the file to which Python's fault handler writes the stack when the process dies."""
        return Path(self.folder) / f"rank{self.rank}.fault.txt"

    def environment(self) -> dict[str, str]:
        """Returns the environment variables that torchrun sets."""
        local_size = min(self.gpus_per_node, self.world_size)
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(local_size),
            "GROUP_RANK": str(self.rank // self.gpus_per_node),
            "GROUP_WORLD_SIZE": str(-(-self.world_size // self.gpus_per_node)),
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "forerun",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": "1",
            **self.variables,
        }

    def write(self) -> Path:
        """Writes the job to a file for the process to read."""
        path = Path(self.folder) / f"rank{self.rank}.job.json"
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @staticmethod
    def read(path: str | Path) -> Job:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        values |= {name: tuple(values[name]) for name in ("arguments", "kernels")}
        return Job(**values)


@dataclass(frozen=True)
class Failure:
    """The reason why a traced process has no recording."""

    message: str
    operation: str = ""
    """The operation on the device that failed; empty where the program itself did."""
    line: str = ""
    """File and line of the user's program."""
    trace: str = ""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Failure | None:
        """Returns the failure in a file; None if there is none that can be read."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return Failure(**{key: str(value) for key, value in values.items()})
        except (OSError, ValueError, TypeError):
            return None

    def error(self, where: str) -> ForerunError:
        """Returns the one-line error that a user reads."""
        at = f" at {self.line}" if self.line else ""
        operation = f" (in {self.operation})" if self.operation else ""
        return ForerunError(f"{where}: {_shortened(self.message)}{operation}{at}")


def release(version: str) -> tuple[int, int]:
    """Returns major and minor number of a version of torch, such as '2.9' or '2.13.0+cpu'.

    Raises:
        ForerunError: it is not a version.
    """
    found = _RELEASE.match(version)
    if found is None:
        raise ForerunError(f"{version!r} is not a release of torch; give one such as 2.9")
    return int(found[1]), int(found[2])


def _shortened(message: str) -> str:
    """Returns the message on one line, cut at its end, without the colours of a terminal."""
    line = " ".join(_COLOUR.sub("", message).split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} [...]"
