"""torchtitan 0.3 and the commits after it: configurations by name from its registry, settings by flags."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torchtitan
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ConfigManager

from forerun.common.errors import ForerunError
from forerun.sources.trace.inside.missing import absent
from forerun.sources.trace.inside.titan.data import Batches, NoText, assign, checked, end_of_text, flat, parsed
from forerun.sources.trace.inside.titan.loop import loop_of
from forerun.sources.trace.marks import mark_loop

_LOADERS = ("torchtitan.components.dataloader", "torchtitan.components.data.loader")
"""The module of torchtitan 0.3 that has its loaders, and that of the commits after it."""
_loaders: Any = import_module(next(filter(find_spec, _LOADERS)))

_OFF = {
    "checkpoint.enable": False,
    "checkpoint.create_seed_checkpoint": False,
    "profiler.enable_profiling": False,
    "profiler.enable_memory_snapshot": False,
    "metrics.enable_tensorboard": False,
    "metrics.enable_wandb": False,
    "validator.enable": False,
    "comm.trace_buf_size": 0,
    "comm.mode": "default",
    "debug.save_config_file": None,
    "debug.enable_structured_logging": False,
}
_OTHER_DEFAULTS = ("--training.disable_cuda_graphs", "--parallelism.spmd_backend=partial_dtensor")
"""CUDA graphs are off, because they hide the launches that are recorded and pipelines refuse them. The backend
spmd_types is replaced, because it shards plain parameters over a mesh of all dimensions, which FSDP of torch 2.13
refuses (`all parameters must be DTensors on the full SPMD mesh`)."""

_MODELS = ("torchtitan.models", "torchtitan.experiments")
"""The packages in which torchtitan looks for a model."""
_MISSING = object()


class Tokenizer(NoText, BaseTokenizer):
    """A tokenizer that knows the size of the vocabulary and which token ends a text."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        vocabulary: int = 0

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()
        self.vocabulary = config.vocabulary
        self.eos_id = end_of_text(config.vocabulary)


class Loader(Batches, _loaders.BaseDataLoader):
    """Random tokens as one of torchtitan's loaders. Those after 0.3 have the sequences of a batch in one dimension."""

    @dataclass(kw_only=True, slots=True)
    class Config(_loaders.BaseDataLoader.Config):
        vocabulary: int = 0

    def __init__(self, config: Config, **sizes: Any) -> None:
        self._flat = "num_tokens_per_batch" in sizes
        if self._flat:
            tokens = int(sizes["num_tokens_per_batch"])
            length = min(int(sizes["max_context_length"]), tokens)
            batch = tokens // length
        else:
            batch, length = int(sizes["local_batch_size"]), int(sizes["seq_len"])
        super().__init__(config.vocabulary, batch, length, positions=True)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        batches = super().__iter__()
        return map(flat, batches) if self._flat else batches


def trainer(module: str, config: str, flags: Sequence[str]) -> Any:
    """Returns the trainer of a configuration.

    Raises:
        ForerunError: torchtitan does not know the model, the configuration or a setting.
    """
    what = f"torchtitan {getattr(torchtitan, '__version__', 'of a checkout')}"
    settings = parse(what, module, config, flags)
    vocabulary = getattr(getattr(settings.model_spec, "model", None), "vocab_size", None)
    if not vocabulary:
        raise ForerunError(f"{what}: {module} {config} is not a model of tokens")
    settings.tokenizer = Tokenizer.Config(vocabulary=vocabulary)
    settings.dataloader = Loader.Config(vocabulary=vocabulary)
    mark_loop(loop_of(settings, "profiler"))
    assign(settings, _OFF)
    _timeouts()
    return settings.build()


def parse(what: str, module: str, config: str, flags: Sequence[str]) -> Any:
    """Returns torchtitan's settings: the configuration's, overridden by the flags.

    Raises:
        ForerunError: the configuration or a setting is not known.
    """
    own = ["--module", module, "--config", config]
    known = parsed(lambda: _imported(module, ConfigManager()._load_config, own)[0], what)
    every = [*own, *filter(partial(_has, known), _OTHER_DEFAULTS), *checked(known, flags, what)]
    return parsed(lambda: ConfigManager().parse_args(every), what)


def _imported(module: str, load: Callable[[Sequence[str]], Any], own: Sequence[str]) -> Any:
    """Returns `load(own)`. torchtitan takes every failed import of a model for a model that it does not have.

    Raises:
        ImportError: names the package that the model imports and that is missing.
    """
    try:
        return load(own)
    except ImportError as error:
        cause = absent((f"{package}.{module}.config_registry" for package in _MODELS), "torchtitan")
        raise cause or error from None


def _has(config: Any, flag: str) -> bool:
    """Returns whether `config` has the setting of a flag `--section.key`."""
    for name in flag.removeprefix("--").partition("=")[0].split("."):
        config = getattr(config, name, _MISSING)
    return config is not _MISSING


def _timeouts() -> None:
    """Adds a function that torchtitan 0.3 expects and torch 2.13 lacks. Nothing times out in a trace."""
    distributed: Any = torch.distributed
    if not hasattr(distributed, "set_timeout"):
        distributed.set_timeout = lambda *_, **__: None
