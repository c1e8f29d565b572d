"""Traces each configuration of a file to a Program, several at once, and keeps Programs that are already there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pydantic

from forerun.common.admission import read_bytes
from forerun.common.errors import ForerunError
from forerun.common.processes import available_cpus
from forerun.common.yaml_files import read_yaml
from forerun.core.program.storage import load
from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits
from forerun.sources.trace.record import trace_job, write_program

SUFFIX = ".program"


class _Entry(pydantic.BaseModel):
    """One configuration of a file. The command line gives the settings that it leaves out."""

    model_config = pydantic.ConfigDict(extra="forbid")

    world_size: int | None = pydantic.Field(default=None, ge=1)
    gpus_per_node: int | None = pydantic.Field(default=None, ge=1)
    args: list[str | int | float] = []
    env: dict[str, str | int | float] = {}


_Name = Annotated[str, pydantic.Field(pattern=r"^[\w.+=-]+$")]
_FILE = pydantic.TypeAdapter(dict[_Name, _Entry])


@dataclass(frozen=True)
class Configuration:
    """A name and the job to trace for it."""

    name: str
    job: Job

    @property
    def key(self) -> str:
        """Returns a digest that is equal for jobs that give the same Program; it includes the script's text."""
        values = asdict(self.job) | {"folder": ""}
        script = Path(self.job.target)
        text = read_bytes(script) if not self.job.is_module and script.is_file() else b""
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode() + text).hexdigest()


def read_configurations(path: Path, job: Job) -> list[Configuration]:
    """Reads a YAML mapping from names to configurations, which add arguments and environment to those of `job`.

    Raises:
        ForerunError: the file can't be read, is empty, or an entry is wrong.
    """
    try:
        entries = _FILE.validate_python(read_yaml(path))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ForerunError(f"{path}: {place}: {first['msg']}") from None
    if not entries:
        raise ForerunError(f"{path}: names no configuration")
    return [
        Configuration(
            name,
            replace(
                job,
                world_size=entry.world_size or job.world_size,
                gpus_per_node=entry.gpus_per_node or job.gpus_per_node,
                arguments=(*job.arguments, *map(str, entry.args)),
                variables=job.variables | {key: str(value) for key, value in entry.env.items()},
            ),
        )
        for name, entry in entries.items()
    ]


def trace_all(
    configurations: Sequence[Configuration],
    folder: Path,
    limits: Limits,
    workers: int | None,
    advance: Callable[[int, int], None],
) -> list[tuple[str, str]]:
    """Writes `folder`/NAME.program for each configuration that is not there, and returns the names and reasons of those
    that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    failed: list[tuple[str, str]] = []
    with ThreadPoolExecutor(workers or available_cpus()) as pool:
        tasks = {pool.submit(_trace, one, folder, limits): one for one in configurations}
        for done, task in enumerate(as_completed(tasks), start=1):
            error = task.exception()
            if isinstance(error, ForerunError):
                failed.append((tasks[task].name, str(error)))
            elif error is not None:
                raise error
            advance(done, len(configurations))
    return sorted(failed)


def _trace(configuration: Configuration, folder: Path, limits: Limits) -> None:
    path = folder / f"{configuration.name}{SUFFIX}"
    if path.is_file() and _key_of(path) == configuration.key:
        return
    program, _ = trace_job(configuration.job, limits)
    meta: dict[str, Any] = {**program.meta, "name": configuration.name, "key": configuration.key}
    write_program(replace(program, meta=meta), path)


def _key_of(path: Path) -> object:
    try:
        return load(path).meta.get("key")
    except ForerunError:
        return None
