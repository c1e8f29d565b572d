"""Question: the checked request of the page, and the arguments of its search."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from forerun.answers.search.choices import unmeasured_stacks, with_open_stacks
from forerun.common.admission import admit, read_json
from forerun.common.errors import ForerunError, UnknownName
from forerun.describe.cluster.catalog import cluster_names, load_cluster
from forerun.describe.cluster.memory_limit import limited
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.catalog import load_model, model_names
from forerun.describe.model.families import FAMILIES, WRAPPERS
from forerun.describe.model.fields import Fields
from forerun.describe.model.hub import cached_config, cached_names
from forerun.describe.model.huggingface import spec_from_config
from forerun.describe.model.inputs import MOST_IMAGES, MOST_MTP_MODULES, trained_with
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.fields import (
    FIELD_TYPES,
    FOLLOWING,
    MEANINGS,
    from_text,
    is_flag,
    is_list,
    plan_fields,
)
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import stack_names

MOST_GPUS = 1 << 17
MOST_TOKENS = 1 << 24
MOST_SEQUENCES = 1 << 20
MOST_VALUES = 16
"""values of one field in a question"""
Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class Strict(BaseModel):
    """A request whose keys are all known, and whose values have the type that they are to have."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Question(Strict):
    """The question of a search."""

    model: Name
    """name of a preset, of a model in the hub's cache, or of a dropped config.json"""
    cluster: Name
    gpus: Annotated[int, Field(ge=1, le=MOST_GPUS)]
    seq_len: Annotated[int, Field(ge=1, le=MOST_TOKENS)]
    global_batch: Annotated[int, Field(ge=1, le=MOST_SEQUENCES)]
    objective: Literal["time", "memory"] = "time"
    price: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """dollars of a GPU hour in place of the cluster's"""
    memory_limit: Annotated[float, Field(gt=0, le=1e5)] | None = None
    """GiB of a GPU to use at most"""
    images: Annotated[int, Field(ge=0, le=MOST_IMAGES)] | None = None
    """images or sounds of a sequence, for a model with a tower for them"""
    encoder_seq_len: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    """tokens of each input of an encoder"""
    freeze_encoder: bool = False
    mtp: Annotated[int, Field(ge=0, le=MOST_MTP_MODULES)] | None = None
    """modules for multi-token prediction"""
    fixed: dict[Name, Annotated[str, StringConstraints(max_length=400)]] = Field(default_factory=dict)
    """field of a plan -> its values, as on the command line: 1,2,4"""


class AboutPlan(Strict):
    """A plan of a question: its number among the plans of the search, or its fields."""

    question: Question
    row: Annotated[int, Field(ge=0)] | None = None
    plan: dict[Name, Any] | None = None


class AboutRows(Strict):
    """The plans of a question whose fields have certain values."""

    question: Question
    wanted: Annotated[str, StringConstraints(max_length=400)] = ""
    """as of --why: tp=2,pp=4"""
    status: Literal["all", "fits", "does not fit", "not simulated"] = "all"


class AboutExport(Strict):
    """A file to download."""

    kind: Literal["yaml", "csv", "launch"]
    about: AboutPlan
    tool: Name | None = None
    """tool of the launch files"""


class AboutPreset(Strict):
    """An experiment or a whole run that comes with Forerun."""

    kind: Literal["experiment", "run"]
    name: Name


class DroppedModel(Strict):
    """A config.json that is dropped on the form."""

    name: Name
    text: str


@dataclass(frozen=True)
class Asked:
    """A question with its model and cluster."""

    question: Question
    model: ModelSpec
    cluster: Cluster
    fixed: Mapping[str, Any]
    """the fields of the question alone; `searched` adds the stacks that a search is free to choose"""

    @property
    def place(self) -> tuple[ModelSpec, Cluster, int, int, int]:
        """Returns the first arguments of a search."""
        question = self.question
        return self.model, self.cluster, question.gpus, question.seq_len, question.global_batch

    @property
    def searched(self) -> dict[str, Any]:
        """Returns the fixed fields, with the stacks to try where the question leaves the framework open."""
        return with_open_stacks(self.fixed)

    @property
    def choices(self) -> tuple[str, ...]:
        """Returns the stacks that stand beside those that are ranked."""
        return () if "stack" in self.fixed else unmeasured_stacks()

    @property
    def where(self) -> Cluster:
        """Returns the cluster with the memory that the question leaves of each GPU."""
        return limited(self.cluster, self.question.memory_limit)

    def command(self) -> str:
        """Returns the `forerun plan` command that asks the same."""
        question = self.question
        words = ["forerun", "plan", question.model, "--cluster", question.cluster, "--gpus", str(question.gpus)]
        words += ["--seq-len", str(question.seq_len), "--global-batch", str(question.global_batch)]
        words += [] if question.objective == "time" else ["--objective", question.objective]
        words += [] if question.memory_limit is None else ["--memory-limit", f"{question.memory_limit:g}"]
        for name in ("mtp", "images", "encoder_seq_len"):
            value = getattr(question, name)
            words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
        words += ["--freeze-encoder"] if question.freeze_encoder else []
        for name, text in question.fixed.items():
            option = name.replace("_", "-")
            if is_flag(name) and text in ("true", "false"):
                words.append(f"--{option}" if text == "true" else f"--no-{option}")
            else:
                words += [f"--{option}", text]
        return shlex.join(words)


def checked(model: type[Strict], data: object) -> Any:
    """Returns `data` as a request. Raises ForerunError, which names the key, for a wrong request."""
    admit(data, "the request")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the request"
        raise ForerunError(f"{key}: {first['msg'][0].lower()}{first['msg'][1:]}") from None


def asked(question: Question, dropped: Mapping[str, ModelSpec]) -> Asked:
    """Returns the question with its model and cluster; `dropped` are the models that the server keeps.

    No name is taken for a path. Raises ForerunError, which names the key.
    """
    if question.cluster not in cluster_names():
        raise UnknownName("cluster", question.cluster, cluster_names())
    cluster = load_cluster(question.cluster)
    if question.price is not None:
        cluster = replace(cluster, price_per_gpu_hour=question.price)
    inputs = question.mtp, question.images, question.encoder_seq_len, question.freeze_encoder
    model = trained_with(_model(question.model, dropped), *inputs)
    made = Asked(question, model, cluster, _fixed(question.fixed))
    assert made.where
    return made


def _model(name: str, dropped: Mapping[str, ModelSpec]) -> ModelSpec:
    if name in dropped:
        return dropped[name]
    if name in cached_names():
        config = cached_config(name)
        assert config is not None
        return config_model(read_json(config), name, name.rpartition("/")[2])
    if name.lower() not in model_names():
        raise UnknownName("model", name, model_names(), "the list of presets")
    return load_model(name)


def config_model(config: Any, place: str, name: str) -> ModelSpec:
    """Returns the model of a config.json. Errors call the file `place`.

    Raises ForerunError for any other file, and for a family that Forerun doesn't know. The command line builds such
    models with transformers, which runs code.
    """
    if not isinstance(config, dict):
        raise ForerunError(f"{place}: not a JSON object; give the config.json of a model")
    if "model_type" not in config:
        raise ForerunError(f"{place}: model_type is missing; give the config.json of a model")
    kind = config["model_type"]
    if kind not in FAMILIES and kind not in WRAPPERS:
        raise ForerunError(f"{place}: model_type {kind!r} needs transformers; use forerun plan, which builds it")
    return spec_from_config(Fields(config, place), name)


def _fixed(texts: Mapping[str, str]) -> dict[str, Any]:
    """Returns the fixed fields of a plan from their texts."""
    values: dict[str, Any] = {}
    for name, text in texts.items():
        if name not in MEANINGS or name in FOLLOWING:
            raise UnknownName("field of a plan", name, [each for each in MEANINGS if each not in FOLLOWING])
        parts = [text] if is_list(name) else [part.strip() for part in text.split(",")]
        if len(parts) > MOST_VALUES:
            raise ForerunError(f"{name}: {len(parts)} values; a question takes at most {MOST_VALUES}")
        found = [from_text(name, part) for part in parts]
        values[name] = found[0] if len(found) == 1 else found
        for stack in found if name == "stack" else ():
            if stack not in stack_names():
                raise UnknownName("stack", str(stack), stack_names())
    return values


def wanted_fields(text: str) -> dict[str, object]:
    """Returns the fields of a filter, such as tp=2,pp=4. Raises ForerunError for an unknown field or a wrong value."""
    found: dict[str, object] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, equals, value = part.partition("=")
        field = name.strip().replace("-", "_")
        if not equals:
            raise ForerunError(f"{part}: expected a field and its value, such as tp=2")
        if field not in FIELD_TYPES:
            raise UnknownName("field of a plan", field, list(FIELD_TYPES))
        found[field] = from_text(field, value.strip())
    return found


def plan_of(fields: Mapping[str, Any], asked: Asked) -> Plan:
    """Returns the plan of the fields that the page sends back. Raises ForerunError for a wrong field."""
    values: dict[str, Any] = dict(plan_fields(fields, "plan"))
    if values.get("stack") not in (None, *stack_names()):
        raise UnknownName("stack", str(values["stack"]), stack_names())
    plan = Plan(**{"seq_len": asked.question.seq_len, **values})
    if plan.world_size != asked.question.gpus or plan.global_batch != asked.question.global_batch:
        raise ForerunError("plan: its GPUs or its global batch are not those of the question")
    return plan
