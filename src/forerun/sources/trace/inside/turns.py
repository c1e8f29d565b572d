"""Finds the shortest repeating sequence of optimizer steps, which is a step of a program with several optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

MOST_TURNS = 8
"""How many turns are looked at for a repetition, and for a first step of an optimizer that has not stepped."""


class Turns:
    """Divides the steps of all optimizers into turns.

    A turn ends with each step of one optimizer: of all that step, the one whose first step comes last. So a GAN whose
    discriminator steps five times for each step of its generator has turns of six steps. Turns of unlike steps
    alternate where that optimizer itself steps at irregular distances.
    """

    def __init__(self) -> None:
        self.all: list[tuple[int, ...]] = []
        """The turns so far. Everything before the last optimizer's first step is one turn."""
        self._steps: list[int] = []
        self._turn: list[int] = []
        self._seen: set[int] = set()
        self._last = -1

    def stepped(self, optimizer: int) -> bool:
        """Notes a step, and returns whether it ends a turn."""
        self._steps.append(optimizer)
        self._turn.append(optimizer)
        if optimizer not in self._seen:
            self._seen.add(optimizer)
            self._last = optimizer
            self.all, self._turn = [tuple(self._steps)], []
        elif optimizer == self._last:
            self.all.append(tuple(self._turn))
            self._turn = []
        else:
            return False
        return True

    def period(self) -> int:
        """Returns the least number of turns that the last turns repeat, 0 if they repeat none."""
        longest = len(self.all) // 2
        return next((n for n in range(1, longest + 1) if self.all[-n:] == self.all[-2 * n : -n]), 0)


class Optimizers:
    """The optimizers that the program makes and those that step."""

    def __init__(self) -> None:
        self._made: WeakSet[Any] = WeakSet()
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._next = itertools.count()
        optimizer_class: Any = torch.optim.Optimizer
        patch = optimizer_class._patch_step_function

        def made(optimizer: Any) -> None:
            self._made.add(optimizer)
            patch(optimizer)

        optimizer_class._patch_step_function = made

    def number_of(self, optimizer: Any) -> int:
        """Returns the number of an optimizer that steps."""
        if optimizer not in self._numbers:
            self._numbers[optimizer] = next(self._next)
        return self._numbers[optimizer]

    def waiting(self) -> list[Any]:
        """Returns the optimizers that have not stepped and have parameters that no optimizer has updated."""
        updated = {id(parameter) for optimizer in self._numbers for parameter in _parameters(optimizer)}
        others = [one for one in self._made if one not in self._numbers]
        return [one for one in others if any(id(p) not in updated and p.requires_grad for p in _parameters(one))]


def _parameters(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]
