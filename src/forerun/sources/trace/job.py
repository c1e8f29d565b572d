"""Job: what a traced process is asked to do, and how it says what became of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from forerun.common.errors import ForerunError

_LONGEST = 600
"""characters of a failure's message that users are shown"""


@dataclass(frozen=True)
class Job:
    """One rank of one program."""

    folder: str
    """where the process leaves its recording or its failure"""
    target: str = ""
    """path of a script, or name of a module"""
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    rank: int = 0
    world_size: int = 1
    gpus_per_node: int = 8
    steps: int = 2
    """optimizer steps to run; the last one is recorded"""
    lines: bool = False
    """record source lines"""
    expert_skew: float = 0.0
    """0: routing is balanced; s: expert i is chosen in proportion to 1 / (i + 1) ** s"""
    device: str = "h100"
    alone: bool = False
    """record no other rank, whoever it sends to"""
    variables: dict[str, str] = field(default_factory=dict)
    """environment variables of the program's own"""
    title: str = ""
    """what users know the program by, if not by `target`"""

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
        """where Python's fault handler writes what the process did when it died"""
        return Path(self.folder) / f"rank{self.rank}.fault.txt"

    def environment(self) -> dict[str, str]:
        """What torchrun sets."""
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
        """The job as a file for the process to read."""
        path = Path(self.folder) / f"rank{self.rank}.job.json"
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @staticmethod
    def read(path: str | Path) -> Job:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        values["arguments"] = tuple(values["arguments"])
        return Job(**values)


@dataclass(frozen=True)
class Failure:
    """Why a traced process has no recording."""

    message: str
    operation: str = ""
    """the last operation on the device"""
    line: str = ""
    """file and line of the user's program"""
    trace: str = ""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Failure | None:
        """What the process left; None where it left nothing that can be read."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return Failure(**{key: str(value) for key, value in values.items()})
        except (OSError, ValueError, TypeError):
            return None

    def error(self, where: str) -> ForerunError:
        """The one line that a user reads."""
        at = f" at {self.line}" if self.line else ""
        operation = f" (in {self.operation})" if self.operation else ""
        return ForerunError(f"{where}: {_shortened(self.message)}{operation}{at}")


def _shortened(message: str) -> str:
    """One line, of which the beginning says most."""
    line = " ".join(message.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} [...]"
