"""torchtitan 0.2: models by name and flavor, settings by flags or a TOML file.

The settings of torchtitan's configuration files are read from its installation where the files are there (a checkout).
Wheels lack them; then `recipes.yaml` has the few settings that shape the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torchtitan
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.protocols import train_spec
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec
from torchtitan.train import Trainer

from forerun.common.errors import ForerunError
from forerun.sources.trace.inside.data_files import read_data
from forerun.sources.trace.inside.titan.data import Batches, NoText, assign, checked, closest, end_of_text, parsed
from forerun.sources.trace.inside.titan.loop import loop_of
from forerun.sources.trace.marks import mark_loop

_OFF = {
    "checkpoint.enable": False,
    "checkpoint.create_seed_checkpoint": False,
    "profiling.enable_profiling": False,
    "profiling.enable_memory_snapshot": False,
    "metrics.enable_tensorboard": False,
    "metrics.enable_wandb": False,
    "validation.enable": False,
    "comm.trace_buf_size": 0,
    "comm.mode": "default",
    "job.save_config_file": None,
}


class Tokenizer(NoText, BaseTokenizer):
    """A tokenizer that knows the size of the vocabulary and which token ends a text."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.eos_id = end_of_text(vocabulary)


class Loader(Batches, BaseDataLoader):
    """Random tokens as one of torchtitan's loaders."""


def trainer(module: str, config: str, flags: Sequence[str]) -> Trainer:
    """Returns the trainer of a configuration.

    Raises:
        ForerunError: torchtitan does not know the model, the configuration or a setting.
    """
    what = f"torchtitan {getattr(torchtitan, '__version__', 'of a checkout')}"
    job_config = settings(what, module, config, flags)
    spec = _spec(what, job_config.model.name)
    mark_loop(loop_of(job_config, "profiling"))
    assign(job_config, _OFF)
    _register(job_config.model.name, without_data(what, spec, job_config))
    return Trainer(job_config)


def settings(what: str, module: str, config: str, flags: Sequence[str]) -> JobConfig:
    """Returns torchtitan's settings: its own defaults, overridden by the configuration's, overridden by the flags.

    Raises:
        ForerunError: the configuration or a setting is not known.
    """
    given = any(flag.replace("-", "_").startswith("__job.config_file") for flag in flags)
    own = [] if given else _own_flags(what, module, config)
    every = checked(JobConfig(), [*own, *flags], what)
    result: JobConfig = parsed(lambda: ConfigManager().parse_args(every), what)
    return result


def _own_flags(what: str, module: str, config: str) -> list[str]:
    short = module.rpartition(".")[2]
    file = Path(torchtitan.__file__).parent / "models" / short / "train_configs" / f"{config}.toml"
    if file.is_file():
        return [f"--job.config_file={file}"]
    flavor = flavor_of(what, short, config, list(_spec(what, module).model_args))
    recipe = read_data("titan/recipes.yaml")["settings"].get(config, {})
    return [f"--model.name={module}", f"--model.flavor={flavor}", *(f"--{key}={recipe[key]}" for key in recipe)]


def flavor_of(what: str, module: str, config: str, flavors: Sequence[str]) -> str:
    """Returns the flavor that a configuration's name (`llama3_8b`) means.

    Raises:
        ForerunError: the model has no such flavor.
    """
    wanted = _plain(config.removeprefix(f"{module}_"))
    for flavor in flavors:
        if _plain(flavor) == wanted:
            return flavor
    names = [f"{module}_{flavor.lower()}" for flavor in flavors]
    raise ForerunError(f"{what}: {module} has no configuration {config}{closest(config, names)}")


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _spec(what: str, model: str) -> TrainSpec:
    try:
        return get_train_spec(model)
    except (ValueError, ImportError) as error:
        raise ForerunError(f"{what}: model {model}: {error}") from error


def _register(name: str, spec: TrainSpec) -> None:
    """Puts `spec` in place of that of the model `name`."""
    module: Any = train_spec
    if hasattr(module, "_train_specs"):  # to 2025-09; then register_train_spec takes the name too
        module._train_specs[name] = spec
    else:
        module.register_train_spec(name, spec)


def without_data(what: str, spec: TrainSpec, job_config: JobConfig) -> TrainSpec:
    """Returns `spec` with random tokens for its data.

    Raises:
        ForerunError: the model's input is not tokens.
    """
    args: Mapping[str, Any] = spec.model_args
    vocabulary = getattr(args.get(job_config.model.flavor), "vocab_size", None)
    if not vocabulary:
        raise ForerunError(f"{what}: {job_config.model.name} {job_config.model.flavor} is not a model of tokens")

    def loader(**_: Any) -> Loader:
        training = job_config.training
        return Loader(vocabulary, training.local_batch_size, training.seq_len, positions=False)

    return replace(
        spec,
        build_tokenizer_fn=lambda _: Tokenizer(vocabulary),
        build_dataloader_fn=loader,
        build_validator_fn=None,
    )
