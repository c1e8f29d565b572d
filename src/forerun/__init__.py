"""Forerun: run your training before you run it.

>>> import forerun
>>> plan = forerun.Plan(seq_len=8192, dp_shard=8, activation_checkpointing="full")
>>> forerun.predict("llama-3.1-8b", plan, "h100-sxm").fits
True
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forerun.common import former_names
from forerun.common.version import __version__

if TYPE_CHECKING:
    from forerun.common.errors import ForerunError, ImpossiblePlan, UnknownName
    from forerun.describe.cluster.storage import Storage
    from forerun.describe.cluster.types import Cluster
    from forerun.describe.model.spec import ModelSpec
    from forerun.describe.plan.plan import Plan
    from forerun.describe.plan.training_loop import TrainingLoop
    from forerun.interfaces.api import (
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
    from forerun.interfaces.experiments import Experiment

former_names.install()

_HOMES = {
    "predict": "forerun.interfaces.api",
    "search": "forerun.interfaces.api",
    "simulate": "forerun.interfaces.api",
    "sweep": "forerun.interfaces.api",
    "predict_program": "forerun.interfaces.api",
    "trace": "forerun.interfaces.api",
    "trace_module": "forerun.interfaces.api",
    "load_program": "forerun.interfaces.api",
    "load_measured": "forerun.interfaces.api",
    "load_model": "forerun.interfaces.api",
    "load_cluster": "forerun.interfaces.api",
    "Experiment": "forerun.interfaces.experiments",
    "ModelSpec": "forerun.describe.model.spec",
    "Cluster": "forerun.describe.cluster.types",
    "Plan": "forerun.describe.plan.plan",
    "Storage": "forerun.describe.cluster.storage",
    "mark_loop": "forerun.sources.trace.marks",
    "mark_step": "forerun.sources.trace.marks",
    "TrainingLoop": "forerun.describe.plan.training_loop",
    "ForerunError": "forerun.common.errors",
    "ImpossiblePlan": "forerun.common.errors",
    "UnknownName": "forerun.common.errors",
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
    "mark_loop",
    "mark_step",
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
