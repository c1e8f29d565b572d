"""Forerun: run your training before you run it.

>>> import forerun
>>> plan = forerun.Plan(seq_len=8192, dp_shard=8, activation_checkpointing="full")
>>> forerun.predict("llama-3.1-8b", plan, "h100-sxm").fits
True
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.api import (
        load_cluster,
        load_measured,
        load_model,
        load_program,
        predict,
        predict_program,
        search,
        simulate,
        sweep,
        trace,
        trace_module,
    )
    from forerun.cluster.storage import Storage
    from forerun.cluster.types import Cluster
    from forerun.errors import ForerunError, ImpossiblePlan, UnknownName
    from forerun.experiments import Experiment
    from forerun.model.spec import ModelSpec
    from forerun.plan.plan import Plan
    from forerun.plan.training_loop import TrainingLoop

# The rooms `search` and `trace` and the functions of these names share their attributes. The rooms are imported here,
# once, and their names taken off again, so that no later import of one of their modules puts it over the function.
for _room in ("search", "trace"):
    import_module(f"forerun.{_room}")
    globals().pop(_room, None)

__version__ = metadata.version("forerun")

_HOMES = {
    "predict": "forerun.api",
    "search": "forerun.api",
    "simulate": "forerun.api",
    "sweep": "forerun.api",
    "predict_program": "forerun.api",
    "trace": "forerun.api",
    "trace_module": "forerun.api",
    "load_program": "forerun.api",
    "load_measured": "forerun.api",
    "load_model": "forerun.api",
    "load_cluster": "forerun.api",
    "Experiment": "forerun.experiments",
    "ModelSpec": "forerun.model.spec",
    "Cluster": "forerun.cluster.types",
    "Plan": "forerun.plan.plan",
    "Storage": "forerun.cluster.storage",
    "TrainingLoop": "forerun.plan.training_loop",
    "ForerunError": "forerun.errors",
    "ImpossiblePlan": "forerun.errors",
    "UnknownName": "forerun.errors",
}

__all__ = [
    "Cluster",
    "Experiment",
    "ForerunError",
    "ImpossiblePlan",
    "ModelSpec",
    "Plan",
    "Storage",
    "TrainingLoop",
    "UnknownName",
    "__version__",
    "load_cluster",
    "load_measured",
    "load_model",
    "load_program",
    "predict",
    "predict_program",
    "search",
    "simulate",
    "sweep",
    "trace",
    "trace_module",
]


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import forerun` and the console's help stay quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
