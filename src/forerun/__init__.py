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
    from forerun.describe.model.inputs import with_inputs
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
    from forerun.interfaces.jobs import Jobs
    from forerun.interfaces.watch import StepWatch, hugging_face_callback, lightning_callback, watch_torchtitan
    from forerun.interfaces.whole_runs import Run
    from forerun.sources.trace import opaque as kernels

former_names.install()

_OFFERED = {
    "forerun.interfaces.api": (
        *("predict", "search", "simulate", "sweep", "predict_program", "trace", "trace_module"),
        *("load_program", "load_measured", "load_model", "load_cluster"),
    ),
    "forerun.interfaces.experiments": ("Experiment",),
    "forerun.interfaces.whole_runs": ("Run",),
    "forerun.interfaces.jobs": ("Jobs",),
    "forerun.interfaces.watch": ("StepWatch", "hugging_face_callback", "lightning_callback", "watch_torchtitan"),
    "forerun.describe.model.inputs": ("with_inputs",),
    "forerun.describe.model.spec": ("ModelSpec",),
    "forerun.describe.cluster.types": ("Cluster",),
    "forerun.describe.plan.plan": ("Plan",),
    "forerun.describe.cluster.storage": ("Storage",),
    "forerun.sources.trace.marks": ("mark_loop", "mark_stage", "mark_step"),
    "forerun.describe.plan.training_loop": ("TrainingLoop",),
    "forerun.common.errors": ("ForerunError", "ImpossiblePlan", "UnknownName"),
}
_HOMES = {name: module for module, names in _OFFERED.items() for name in names}

__all__ = [
    "Cluster",
    "Experiment",
    "ForerunError",
    "ImpossiblePlan",
    "Jobs",
    "ModelSpec",
    "Plan",
    "Run",
    "StepWatch",
    "Storage",
    "TrainingLoop",
    "UnknownName",
    "__version__",
    "hugging_face_callback",
    "kernels",
    "lightning_callback",
    "load_cluster",
    "load_measured",
    "load_model",
    "load_program",
    "mark_loop",
    "mark_stage",
    "mark_step",
    "predict",
    "predict_program",
    "search",
    "simulate",
    "sweep",
    "trace",
    "trace_module",
    "watch_torchtitan",
    "with_inputs",
]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that `import forerun` and `forerun --help` are fast."""
    if name == "kernels":
        return import_module("forerun.sources.trace.opaque")
    if name not in _HOMES:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
