"""Counts the data of a step: the tokens that embeddings look up, and the samples that modules get."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from forerun.sources.trace.inside.module_tree import parameters_in

_FIELD = 3
"""The dimensions from which on an input of real numbers is an image, a sound or a latent of each sample."""
_MOST_CHANNELS = 4
"""The channels of an image at most."""


class Workload:
    """The tokens and samples of one step of one rank."""

    def __init__(self) -> None:
        self._trains: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()
        self.clear()

    def clear(self) -> None:
        """Begins a step."""
        self._looked_up: dict[Hashable, int] = {}
        self._shapes: dict[Hashable, tuple[int, ...]] = {}
        self._trained: dict[tuple[int, ...], int] = {}
        self._given: dict[int, int] = {}
        self._field: bool | None = None
        self.evaluates = False
        """Whether a module that is trained ran without gradients."""

    def looked_up(self, weight: Hashable, n_tokens: int, shape: tuple[int, ...] = ()) -> None:
        """Counts a lookup of `n_tokens` rows of an embedding; `weight` stands for its matrix, of a shape."""
        self._looked_up[weight] = self._looked_up.get(weight, 0) + n_tokens
        self._shapes[weight] = shape

    def trained(self, shape: tuple[int, ...], n_tokens: int) -> None:
        """Counts lookups that have a gradient, of embeddings of one shape."""
        self._trained[shape] = self._trained.get(shape, 0) + n_tokens

    def given(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Counts the samples of a call of an outermost module."""
        tensor, samples = _batch([*args, *kwargs.values()])
        if tensor is None or not self._is_trained(module):
            return
        if self._field is None:
            self._field = tensor.is_floating_point() and tensor.dim() >= _FIELD
        self._given[id(module)] = self._given.get(id(module), 0) + samples

    def evaluated(self, module: torch.nn.Module) -> None:
        """Notes a call of an outermost module without gradients."""
        self.evaluates = self.evaluates or self._is_trained(module)

    def _is_trained(self, module: torch.nn.Module) -> bool:
        known = self._trains.get(module)
        if known is None:
            known = self._trains[module] = any(one.requires_grad for one in parameters_in(module))
        return known

    @property
    def tokens(self) -> int:
        """Returns the most tokens that one embedding looked up, without those that have no gradient where others have
        one: texts that the program generates. 0 if the program is given images, sounds or latents."""
        if self._field or not self._looked_up:
            return 0
        weight, tokens = max(self._looked_up.items(), key=lambda one: one[1])
        return min(tokens, self._trained.get(self._shapes[weight], tokens))

    @property
    def samples(self) -> int:
        """Returns the fewest samples that an outermost module was given: a discriminator sees a batch several times."""
        return min(self._given.values(), default=0)


def _is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == _FIELD and value.shape[0] <= _MOST_CHANNELS


def _batch(values: Iterable[Any]) -> tuple[torch.Tensor | None, int]:
    """Returns the first tensor of a call's arguments, and how many samples they hold. A list of images has one for each
    sample, as detectors get them; other lists are the parts of a batch, such as inputs and labels."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim():
            return value, int(value.shape[0])
        if isinstance(value, Mapping):
            tensor, samples = _batch(value.values())
            if tensor is not None:
                return tensor, samples
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            return value[0], len(value) if all(map(_is_image, value)) or not value[0].dim() else int(value[0].shape[0])
    return None, 0
