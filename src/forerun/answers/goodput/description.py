"""The sections and keys of a file that describes a whole run; units are in the names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from forerun.answers.goodput.request import Scope
from forerun.common.yaml_files import Entry

Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(ge=1e-12)]
"""a time that is more than nothing: a picosecond, the least that an event takes"""
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
_MOST_GPUS = 10_000_000
"""a run on more would be a list of failures"""
_LARGE = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def _number(value: object) -> object:
    """Returns the number of a text such as 15.6T, 300B or 15.6e12, which YAML reads as text; all else as it is."""
    if not isinstance(value, str):
        return value
    digits, factor = (value[:-1], _LARGE[value[-1].upper()]) if value[-1:].upper() in _LARGE else (value, 1.0)
    try:
        return float(digits) * factor
    except ValueError:
        return value


WeibullShape = Annotated[float, Field(ge=0.1)]
"""of components with a smaller one nearly all fail at once, and the others never"""
Slowing = Annotated[float, Field(ge=1)]
Large = Annotated[float, BeforeValidator(_number), Field(gt=0)]
Component = Literal["gpu", "node", "job"]


class KindEntry(Entry):
    """Failures of one cause. One of mtbf_hours (of one component) and per_1000_days (of 1,000 components).

    Components are GPUs, nodes or the job, or `number` of something else, such as switches, cables or storage servers.
    """

    mtbf_hours: Positive | None = None
    per_1000_days: NotNegative | None = None
    of: Component = "node"
    number: AtLeastOne | None = None
    shape: WeibullShape = 1.0
    scope: Scope = "node"
    nodes: Count = 1
    repair_hours: NotNegative | None = None
    hang_share: Share = 0.0
    found_after_hours: NotNegative = 0.0


class LemonsEntry(Entry):
    """Nodes that fail `times` as often as others, until they are taken out after `evict_after` failures."""

    share: Share
    times: Positive
    evict_after: AtLeastOne = 2


class FailuresEntry(Entry):
    """The section lists the failures: a preset's causes times `rate`, and the user's own causes."""

    preset: str | None = None
    rate: NotNegative = 1.0
    kinds: dict[str, KindEntry] = Field(default_factory=dict)
    lemons: LemonsEntry | None = None


class SlowEntry(Entry):
    """Periods in which one node or link slows all steps: by a factor, or as the plan's step tells.

    With a plan, a GPU may take kernel_slowdown times as long for its kernels, and links link_slowdown times.
    """

    per_1000_node_days: NotNegative
    factor: Slowing | None = None
    kernel_slowdown: Slowing = 1.0
    link_slowdown: Slowing = 1.0
    hours: Positive


class LevelEntry(Entry):
    """A further kind of checkpoint, written at every n-th save of the one before."""

    name: str
    every: AtLeastOne = 1
    blocking_s: NotNegative
    persist_s: NotNegative = 0.0
    load_s: NotNegative
    survives: Scope = "domain"
    drag: NotNegative = 0.0


class StateEntry(Entry):
    """Describes the contents of a checkpoint if no plan gives them: parameters in `weights`, fp32 copies, optimizer
    states.
    """

    parameters: Large
    weights: str = "bf16"
    optimizer: str = "adamw"
    moments: str = "fp32"
    host_link_of: str = "h100-sxm"


class CheckpointEntry(Entry):
    """Describes how often the run saves, and the cost of a save.

    Missing seconds follow from the plan, or from `state`. With `network: shared` a save shares the bandwidth of the
    training network. Otherwise saves have a network of their own.
    """

    every_minutes: Positive | Literal["best"] = "best"
    mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
    storage: str | None = None
    blocking_s: NotNegative | None = None
    persist_s: NotNegative | None = None
    load_s: NotNegative | None = None
    survives: Scope = "domain"
    drag: NotNegative | None = None
    network: Literal["own", "shared"] = "own"
    state: StateEntry | None = None
    levels: list[LevelEntry] = Field(default_factory=list)


class RecoveryEntry(Entry):
    """Seconds of the stages from a failure to the next step. Missing keys have a default with a source."""

    crash_detect_s: NotNegative | None = None
    hang_detect_s: NotNegative | None = None
    restart_s: NotNegative | None = None
    communicators_s: NotNegative | None = None
    warmup_s: NotNegative | None = None
    start_s: NotNegative | None = None


class SparesEntry(Entry):
    """Nodes that stand by. `replace_hours` gets further ones from elsewhere; without it the run waits for a repair."""

    nodes: Count
    swap_s: NotNegative | None = None
    replace_hours: NotNegative | None = None


class ElasticEntry(Entry):
    """Training goes on with fewer replicas while nodes are missing, on batches of the same size.

    A plan gives the replicas (dp_replicate) and the time of a step with fewer of them. Under FSDP alone replicas are
    the smallest sets of whole nodes with whole ranks of data parallelism. Each set holds a part of the state (`state:
    shards`).
    """

    replicas: Annotated[int, Field(ge=2)] | None = None
    least_replicas: AtLeastOne = 1
    resize_s: NotNegative
    step_factors: list[Positive] = Field(default_factory=list)
    state: Literal["whole", "shards"] | None = None


class MaintenanceEntry(Entry):
    """Planned stops of the whole run."""

    every_days: Positive
    hours: Positive


class StepEntry(Entry):
    """A step that is known: its seconds and the tokens of its batch."""

    seconds: Seconds
    tokens: Large


class PhaseEntry(Entry):
    """A part of the run whose steps differ, by its share of the tokens."""

    share: Annotated[float, Field(gt=0, le=1)]
    step: StepEntry | None = None
    seq_len: AtLeastOne | None = None
    global_batch: AtLeastOne | None = None


class PlanEntry(Entry):
    """A plan to predict: model, cluster, global batch (sequences), and fields of forerun.Plan.

    compress_gradients is a method as of `forerun predict --compress-gradients`, outer_steps one as of `--outer-steps`.
    """

    model: str
    cluster: str
    global_batch: AtLeastOne | None = None
    compress_gradients: str | None = None
    outer_steps: str | None = None
    fields: dict[str, Any] = Field(default_factory=dict)


class RunEntry(Entry):
    """The whole file."""

    page = "docs/goodput.md"

    name: str = "run"
    gpus: Annotated[int, Field(ge=1, le=_MOST_GPUS)]
    gpus_per_node: AtLeastOne | None = None
    step: StepEntry | None = None
    plan: PlanEntry | None = None
    tokens: Large | None = None
    days: Positive | None = None
    schedule: list[PhaseEntry] = Field(default_factory=list)
    failures: FailuresEntry = FailuresEntry(preset="llama-3")
    slow: dict[str, SlowEntry] = Field(default_factory=dict)
    checkpoint: CheckpointEntry = CheckpointEntry()
    recovery: RecoveryEntry = RecoveryEntry()
    spares: SparesEntry | None = None
    elastic: ElasticEntry | None = None
    maintenance: MaintenanceEntry | None = None
    alternatives: dict[str, dict[str, Any]] = Field(default_factory=dict)
    dollars_per_gpu_hour: NotNegative | None = None
    gpu_power_w: NotNegative | None = None
