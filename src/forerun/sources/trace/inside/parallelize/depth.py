"""Finds the repeated layers of a model by structure, and removes some of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_LONGEST_PERIOD = 16
_PLAIN = (bool, int, float, str, type(None))


class PassThrough(nn.Module):
    """Replaces a part of the model that a stage lacks: it returns its first input."""

    def forward(self, first: Any, *_: Any, **__: Any) -> Any:
        return first


@dataclass(frozen=True)
class Run:
    """Children `first` to `first + period * repeats` of `container`: the same `period` layers, `repeats` times."""

    path: str
    """The path of the container in the model."""
    container: nn.Module
    first: int
    period: int
    repeats: int

    @property
    def n_layers(self) -> int:
        return self.period * self.repeats


def repeated_layers(model: nn.Module) -> Run | None:
    """Returns the run that repeats the most parameters; None if no container repeats anything."""
    runs = [run for path, container in containers(model) if (run := _best_run(path, container)) is not None]
    return max(runs, key=lambda run: (run.n_layers - run.period) * _size(run), default=None)


def containers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the outermost ModuleLists, ModuleDicts and Sequentials with at least two layers of one class."""
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if inside and (path + ".").startswith(inside):
            continue
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and _repeats_a_class(module):
            inside = (*inside, path + "." if path else "")
            yield path, module


def _repeats_a_class(container: nn.Module) -> bool:
    classes = [type(child) for child in container.children() if _composed(child)]
    return len(set(classes)) < len(classes)


def _composed(module: nn.Module) -> bool:
    """Returns whether `module` has parameters and children: a layer rather than a single operation."""
    return next(module.children(), None) is not None and next(module.parameters(), None) is not None


def _size(run: Run) -> int:
    children = list(run.container.children())[run.first : run.first + run.period]
    return sum(p.numel() for child in children for p in child.parameters())


def _best_run(path: str, container: nn.Module) -> Run | None:
    kinds = _kinds(container)
    best: tuple[int, int, int, int] | None = None
    for period in range(1, min(_LONGEST_PERIOD, len(kinds) // 2) + 1):
        start = 0
        while start + 2 * period <= len(kinds):
            end = start + period
            while end < len(kinds) and kinds[end] == kinds[end - period]:
                end += 1
            repeats = (end - start) // period
            key = (repeats * period - period, -period, start, repeats)
            if repeats > 1 and (best is None or key[:2] > best[:2]):
                best = key
            start = max(start + 1, end - period + 1)
    if best is None:
        return None
    return Run(path, container, best[2], -best[1], best[3])


def _kinds(container: nn.Module) -> list[int]:
    """Returns a number for each child, equal for children of equal structure."""
    children = list(container.children())
    plain = [dict(_attributes(child)) for child in children]
    numbering = _numbering(plain)
    known: dict[Any, int] = {}
    kinds = []
    for child, values in zip(children, plain, strict=True):
        attributes = tuple(sorted((k, repr(v)) for k, v in values.items() if k not in numbering))
        kinds.append(known.setdefault((_structure(child), attributes), len(known)))
    return kinds


def _structure(module: nn.Module) -> tuple[Any, ...]:
    parts = []
    for path, child in module.named_modules():
        own = tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in child.named_parameters(recurse=False))
        buffers = tuple((n, tuple(b.shape), b.dtype) for n, b in child.named_buffers(recurse=False))
        parts.append((path, type(child), own, buffers))
    return tuple(parts)


def _attributes(module: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yields the plain attributes of a module and of all modules below it, by (path, name)."""
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if isinstance(value, _PLAIN) and name != "training":
                yield (path, name), value


def _numbering(plain: list[dict[tuple[str, str], Any]]) -> set[tuple[str, str]]:
    """Returns the attributes that only number the children: they grow by one from each child to the next."""
    found = set()
    for key in {key for values in plain for key in values}:
        numbers = [(i, values[key]) for i, values in enumerate(plain) if key in values]
        whole = all(type(value) is int for _, value in numbers)
        if len(numbers) > 1 and whole and len({value - i for i, value in numbers}) == 1:
            found.add(key)
    return found


def keep_repeats(run: Run, repeats: int) -> None:
    """Keeps `repeats` repetitions of the run in the model, in place. The layers behind them move up."""
    container = run.container
    names = list(container._modules)
    children = list(container.children())
    removed = (run.repeats - repeats) * run.period
    stop = run.first + repeats * run.period
    numbering = _numbering([dict(_attributes(child)) for child in children])
    kept = children[:stop] + children[stop + removed :]
    numbered = names == [str(i) for i in range(len(names))]
    kept_names = names[: len(kept)] if numbered else names[:stop] + names[stop + removed :]
    for child in kept[stop:]:
        for path, name in numbering:
            part = child.get_submodule(path)
            if name in vars(part):
                setattr(part, name, getattr(part, name) - removed)
    container._modules = dict(zip(kept_names, kept, strict=True))


def layer_containers(model: nn.Module) -> list[nn.Module]:
    """Returns the containers of a whole model's layers. Call it before removing layers."""
    return [container for _, container in containers(model)]


def blocks(layers: Sequence[nn.Module]) -> list[tuple[nn.Module, str]]:
    """Returns (container, name) of every layer in `layers`. Checkpointing, compilation and FSDP2 treat these one by
    one."""
    return [
        (container, name)
        for container in layers
        for name, child in container.named_children()
        if next(child.parameters(), None) is not None
    ]


def on_meta(factory: Any) -> nn.Module:
    """Returns the model of `factory`, built on the meta device."""
    with torch.device("meta"):
        model: nn.Module = factory()
    return model
