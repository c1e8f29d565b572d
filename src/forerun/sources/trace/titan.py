"""Makes torchtitan's own trainer the program that is traced.

torchtitan is no part of Forerun and is never imported here: the traced process runs its Trainer
(`forerun.sources.trace.inside.titan.trainer`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from forerun.common.errors import ForerunError
from forerun.sources.trace.job import Job

SUPPORTED = ("0.2.2", "0.3.0")
"""The versions of torchtitan whose trainer was traced."""
AFTER = "after 0.3"
"""What a checkout after the last of these versions is called; its main branch of August 2026 was traced."""
_PATH = "PYTHONPATH"
_PROGRAM = "forerun.sources.trace.inside.titan.trainer"


def installed_version() -> str:
    """Returns the version of torchtitan that is installed or on PYTHONPATH: one of those supported, or `AFTER`.

    Raises:
        ForerunError: torchtitan is not there, or its version is not supported.
    """
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        checkout = _of_checkout()
        if checkout:
            return checkout
        raise ForerunError(
            f"--torchtitan: torchtitan is not installed here; supported: {', '.join(SUPPORTED)} (pip install --no-deps"
            f" torchtitan=={SUPPORTED[0]}, which leaves torch as it is)"
        ) from None
    if found.partition("+")[0] not in SUPPORTED:
        raise ForerunError(f"--torchtitan: torchtitan {found} can't be traced; supported: {', '.join(SUPPORTED)}")
    return found


def _of_checkout() -> str:
    """Returns the supported version that a checkout on PYTHONPATH has the structure of, "" where there is none.

    The version file of a checkout names the release before, so it does not tell.
    """
    found = find_spec("torchtitan")
    if found is None or not found.submodule_search_locations:
        return ""
    folder = Path(next(iter(found.submodule_search_locations)))
    if not (folder / "train.py").is_file():
        return ""
    if (folder / "protocols" / "train_spec.py").is_file():
        return SUPPORTED[0]
    return SUPPORTED[1] if (folder / "components" / "dataloader.py").is_file() else AFTER


def flags_of(overrides: Sequence[str]) -> tuple[str, ...]:
    """Returns settings `section.key=value` as torchtitan's own flags.

    Raises:
        ForerunError: one is not of that form.
    """
    for one in overrides:
        name, equals, _ = one.partition("=")
        if not equals or not all(part.isidentifier() for part in name.split(".")):
            raise ForerunError(
                f"--override {one}: is not section.key=value, as in --override parallelism.tensor_parallel_degree=8"
            )
    return tuple(f"--{one}" for one in overrides)


def torchtitan_job(job: Job, arguments: Sequence[str], overrides: Sequence[str]) -> Job:
    """Returns `job` as a run of torchtitan's Trainer.

    `job.target` is torchtitan's module (llama3, ...), `arguments` its configuration's name (llama3_8b, ...) and
    torchtitan's own flags; `overrides` are settings `section.key=value`, which come before those flags.

    Raises:
        ForerunError: torchtitan is missing or of another version, no configuration is named, or a setting is wrong.
    """
    if not arguments or arguments[0].startswith("-"):
        raise ForerunError(
            "--torchtitan: name a module and a configuration of torchtitan's, as in --torchtitan llama3 llama3_8b"
        )
    flags = flags_of(overrides)
    installed_version()
    return trainer_job(job, (arguments[0], *flags, *arguments[1:]))


def trainer_job(job: Job, arguments: Sequence[str], folder: str = "") -> Job:
    """Returns `job` as a run of the Trainer of the torchtitan in `folder`, '' for the one that Python finds.

    `job.target` is torchtitan's module, `arguments` are its configuration's name and its own flags.
    """
    paths = filter(None, (folder, job.variables.get(_PATH) or os.environ.get(_PATH)))
    variables = job.variables | {_PATH: os.pathsep.join(paths)} if folder else job.variables
    return replace(
        job,
        target=_PROGRAM,
        is_module=True,
        arguments=(job.target, *arguments),
        title=f"torchtitan {arguments[0]}",
        variables=variables,
    )
