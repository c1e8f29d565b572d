"""Runs torchtitan's Trainer in a traced process: `python -m THIS_MODULE MODULE CONFIG [FLAGS]`.

Model, parallelisation, optimizer, loss and training loop are torchtitan's own. Inputs from elsewhere are replaced
through torchtitan's extension points: tokens are random (`data.py`), and nothing is loaded or logged. A step is one
call of the trainer's `train_step`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from forerun.common.errors import ForerunError
from forerun.sources.trace.inside.missing import reason
from forerun.sources.trace.marks import mark_step
from forerun.sources.trace.titan import AFTER, installed_version

_REGISTRY = "forerun.sources.trace.inside.titan.registry"
_ADAPTERS = {"0.2": "forerun.sources.trace.inside.titan.flags", "0.3": _REGISTRY, AFTER: _REGISTRY}
"""The module whose `trainer(module, config, flags)` builds a trainer, by version."""


def main(arguments: Sequence[str]) -> None:
    """Runs the training that `arguments` (module, configuration, flags) name.

    Raises: ForerunError: torchtitan lacks a package, or does not know a name.
    """
    module, config, *flags = arguments
    found = installed_version()
    adapter = _ADAPTERS[".".join(found.split(".")[:2])]
    try:
        build = import_module(adapter).trainer
    except ImportError as error:
        raise ForerunError(
            f"torchtitan {found} can't be imported: {reason(error)}; install the packages that its pyproject.toml lists"
        ) from error
    trainer = build(module, config, flags)
    trainer.train_step = marked(trainer.train_step)
    trainer.train()


def marked(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `train_step` with a mark at its end."""

    def step(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        mark_step()
        return result

    return step


if __name__ == "__main__":
    main(sys.argv[1:])
