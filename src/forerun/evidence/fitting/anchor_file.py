"""Reads a file of a user's own measured steps: for each the fields of its plan and its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from forerun.answers.analysis.setup import Setup
from forerun.common.errors import ForerunError
from forerun.common.yaml_files import read_yaml
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.types import Cluster, KernelRates
from forerun.describe.model.catalog import load_any
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.complete import LAYERED, complete_plan
from forerun.describe.plan.fields import plan_fields
from forerun.evidence.fitting.anchor import Anchor, anchored, anchored_rates, far_off

_MEASURED = ("step_time_s", "tokens_per_s_per_gpu")
_RUN = ("model", "cluster", "gpus", "global_batch")
ANCHORS = "anchors"
RATES = "rates"
_NAMES = tuple(one.name for one in fields(KernelRates))


def anchored_by_file(path: Path, model: ModelSpec | LayeredModel, cluster: Cluster, stack: str | None) -> Cluster:
    """Returns `cluster` with the rates that the measured steps in `path` make most probable.

    The file holds one step, or a list of steps under `anchors`. A step has the fields of a plan file and one of
    step_time_s and tokens_per_s_per_gpu; gpus and global_batch complete its plan. It also names its model, cluster and
    stack where they differ from the arguments. A step that states its `rates` is taken at its word.

    Raises:
        ForerunError: The file is wrong, or a step ran on another device. The message names the step and the key.
        ImpossiblePlan: The plan of a step cannot run.
    """
    data = read_yaml(path)
    if RATES in data:
        return _with_rates(data, path, cluster)
    entries: Any = data.pop(ANCHORS) if ANCHORS in data else [data]
    if not isinstance(entries, list) or not entries or (data and entries != [data]):
        raise ForerunError(f"{path}: expected the keys of one step, or nothing but {ANCHORS}, a list of steps")
    places = [f"{path}: {ANCHORS}[{i}]" if len(entries) > 1 else str(path) for i in range(len(entries))]
    anchors = [_anchor(entry, place, model, cluster, stack) for entry, place in zip(entries, places, strict=True)]
    doubts = tuple(line for anchor, place in zip(anchors, places, strict=True) for line in far_off(anchor, place))
    return replace(anchored(cluster, anchored_rates(anchors)), doubts=doubts)


def with_stated_rates(path: Path, cluster: Cluster) -> Cluster:
    """Returns `cluster` with the factors on its rates that the file states under `rates`.

    Raises ForerunError if the file is wrong, states none, or is of another device.
    """
    data = read_yaml(path)
    if RATES not in data:
        raise ForerunError(
            f"{path}: a saved program can't be corrected by a measured step, only by {RATES}; forerun profile compare"
            " --anchor-out writes them"
        )
    return _with_rates(data, path, cluster)


def _with_rates(data: Mapping[Any, Any], path: Path, cluster: Cluster) -> Cluster:
    given = data[RATES]
    if not isinstance(given, Mapping) or not given:
        raise ForerunError(f"{path}: {RATES}: expected factors by name, which are {', '.join(_NAMES)}")
    unknown = next((name for name in given if name not in _NAMES), None)
    if unknown is not None:
        raise ForerunError(f"{path}: {RATES}: unknown rate {unknown!r}; known: {', '.join(_NAMES)}")
    where = load_cluster(_text(f"{path}: cluster", data["cluster"])) if "cluster" in data else cluster
    if where.device.name != cluster.device.name:
        raise ForerunError(f"{path}: its rates are of {where.device.name}, so they can't correct {cluster.device.name}")
    factors = {str(name): _positive(f"{path}: {RATES}: {name}", value) for name, value in given.items()}
    return anchored(cluster, KernelRates(**factors))


def _anchor(entry: Any, place: str, model: ModelSpec | LayeredModel, cluster: Cluster, stack: str | None) -> Anchor:
    if not isinstance(entry, Mapping):
        raise ForerunError(f"{place}: expected the fields of a plan and a measured time, got {entry!r:.60}")
    own = {str(key): value for key, value in entry.items()}
    measured = {name: _positive(f"{place}: {name}", own.pop(name)) for name in _MEASURED if name in own}
    if len(measured) != 1:
        raise ForerunError(f"{place}: give one of {' and '.join(_MEASURED)}")
    run = {name: own.pop(name) for name in _RUN if name in own}
    spec = load_any(_text(f"{place}: model", run["model"])) if "model" in run else model
    where = load_cluster(_text(f"{place}: cluster", run["cluster"])) if "cluster" in run else cluster
    if where.device.name != cluster.device.name:
        raise ForerunError(
            f"{place}: the step ran on {where.device.name}, so it can't correct {cluster.device.name}; leave it out"
        )
    values = dict(plan_fields(own, place))
    if stack is not None:
        values.setdefault("stack", stack)
    if isinstance(spec, LayeredModel):
        values = {**LAYERED, **values}
    counts = {name: _count(f"{place}: {name}", run[name]) for name in ("gpus", "global_batch") if name in run}
    try:
        plan = complete_plan(values, n_gpus=counts.get("gpus"), global_batch=counts.get("global_batch"))
    except ForerunError as error:
        raise type(error)(f"{place}: {error}") from None
    time_s = measured.get("step_time_s")
    if time_s is None:
        time_s = plan.global_batch * plan.seq_len / plan.world_size / measured["tokens_per_s_per_gpu"]
    return Anchor(Setup(spec, plan, where), time_s)


def _positive(place: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ForerunError(f"{place}: expected a number above 0, got {value!r}")
    return float(value)


def _count(place: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ForerunError(f"{place}: expected a whole number above 0, got {value!r}")
    return value


def _text(place: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ForerunError(f"{place}: expected a name or a file, got {value!r}")
    return value
