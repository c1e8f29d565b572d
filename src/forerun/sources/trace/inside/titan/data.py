"""Random batches for torchtitan in place of a data set, and functions that read and set its settings."""

from __future__ import annotations

import contextlib
import difflib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from forerun.common.errors import ForerunError

_SEED = 0


class Batches:
    """Endless batches of random tokens, shaped as torchtitan's text loaders make them.

    A sequence is one document: the highest token of the vocabulary, which ends a document, is never drawn.
    """

    def __init__(self, vocabulary: int, batch: int, length: int, *, positions: bool) -> None:
        """Makes `batch` sequences of `length` tokens below `vocabulary`; with `positions` also their positions in the
        document."""
        self.vocabulary, self.batch, self.length, self.positions = vocabulary, batch, length, positions

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        generator = torch.Generator().manual_seed(_SEED)
        while True:
            shape = (self.batch, self.length + 1)
            tokens = torch.randint(0, end_of_text(self.vocabulary), shape, generator=generator)
            inputs = {"input": tokens[:, :-1].contiguous()}
            if self.positions:
                inputs["positions"] = torch.arange(self.length).repeat(self.batch, 1)
            yield inputs, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: every run has the same tokens."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing: there is nothing to load."""


def flat(
    batch: tuple[dict[str, torch.Tensor], torch.Tensor],
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Returns a batch with its sequences one after the other, in one dimension."""
    inputs, labels = batch
    return {name: values.flatten() for name, values in inputs.items()}, labels.flatten()


class NoText:
    """The tokenizer that trainers ask for where batches are tokens already."""

    vocabulary: int

    def encode(self, *_: Any, **__: Any) -> list[int]:
        """Refuses: the batches have no text."""
        raise ForerunError("torchtitan asked for the tokens of a text; traced batches are random tokens")

    def decode(self, *_: Any, **__: Any) -> str:
        """Refuses: the batches have no text."""
        raise ForerunError("torchtitan asked for the text of tokens; traced batches are random tokens")

    def get_vocab_size(self) -> int:
        return self.vocabulary


def end_of_text(vocabulary: int) -> int:
    """Returns the token that no batch contains."""
    return max(vocabulary - 1, 1)


def closest(name: str, known: Sequence[str]) -> str:
    """Returns the names close to `name`, as the end of an error message."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else f"; known: {', '.join(known)}" if known else ""


def checked(config: Any, flags: Sequence[str], what: str) -> list[str]:
    """Returns `flags` as torchtitan's command line reads them: `--section.key`, and `--section.no_key` for booleans.

    Raises:
        ForerunError: a flag is not a setting of `config`, a tree of dataclasses; the message names the nearest.
    """
    return [_checked(config, flag, what) if flag.startswith("--") else flag for flag in flags]


def _checked(config: Any, flag: str, what: str) -> str:
    path, _, value = flag[2:].partition("=")
    *sections, last = path.replace("-", "_").split(".")
    at, known = config, ""
    for part in sections:
        at, known = getattr(at, _field(at, part, known, what)), f"{known}{part}."
    if not is_dataclass(at):
        return flag  # torchtitan itself finds the owner of this setting.
    name = _field(at, last, known, what)
    switch = {"true": "", "false": "no_"}.get(value.lower()) if isinstance(getattr(at, name), bool) else None
    return flag if switch is None else f"--{known}{switch}{name}"


def _field(at: Any, name: str, known: str, what: str) -> str:
    names = [field.name for field in fields(at)] if is_dataclass(at) else [name]
    plain = name if name in names else name.removeprefix("no_")
    if plain not in names:
        raise ForerunError(f"{what}: there is no setting {known}{name}{closest(name, names)}")
    return plain


def parsed(parse: Callable[[], Any], what: str) -> Any:
    """Returns the settings that torchtitan's command line makes of its flags.

    Raises:
        ForerunError: torchtitan refuses them; the message is its own.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parse()
    except SystemExit:
        lines = (line.strip(" \t│╭╮╰╯─") for line in said.getvalue().splitlines())
        text = " ".join(line for line in lines if line and "--help" not in line)
        raise ForerunError(f"{what}: {text or 'its command line refuses the settings'}") from None
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise ForerunError(f"{what}: {error}") from error


def assign(config: Any, values: Mapping[str, object]) -> None:
    """Sets each `section.key` that `config` has."""
    for path, value in values.items():
        *sections, name = path.split(".")
        at = config
        for section in sections:
            at = getattr(at, section, None)
        if hasattr(at, name):
            setattr(at, name, value)
