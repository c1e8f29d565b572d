"""The flags of STAGE's first generation."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from forerun.common.admission import read_json
from forerun.common.errors import ForerunError, UnknownName, at

_MOST = 1 << 31
_TRUE, _FALSE = ("true", "t", "1", "yes", "y"), ("false", "f", "0", "no", "n")


@dataclass(frozen=True, slots=True)
class StageArgs:
    """The flags of STAGE's first generation, with its defaults.

    Degrees need not divide sizes: local sizes are then fractions, which are truncated when they are written.

    Raises ForerunError if a flag is not a whole number of at least 1, or there are more pipeline stages than layers and
    embeddings.
    """

    dp: int = 1
    tp: int = 1
    sp: int = 1
    """sequence parallelism: tokens, and keys in attention, are split over ranks"""
    pp: int = 1
    weight_sharded: bool = False
    """whether weights are split over dp and sp too, and gathered before use"""
    activation_recompute: bool = False
    din: int = 51200
    dout: int = 25600
    dmodel: int = 25600
    dff: int = 102400
    batch: int = 1024
    seq: int = 1024
    head: int = 1024
    num_stacks: int = 32

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "num_stacks" else 1
            if field.type == "int" and not least <= value < _MOST:
                raise ForerunError(f"--{field.name} {value}: give a whole number of at least {least}, below 2^31")
        if self.pp > self.num_stacks + 2:
            raise ForerunError(
                f"--pp {self.pp} with --num_stacks {self.num_stacks}: some pipeline stages would have nothing to do; "
                f"use --pp {self.num_stacks + 2} at most (layers and two embeddings)"
            )

    @property
    def degrees(self) -> dict[str, int]:
        """Ranks in each spatial dimension; the first dimension varies fastest with the rank."""
        return {"dp": self.dp, "tp": self.tp, "sp": self.sp}

    @property
    def ranks_a_stage(self) -> int:
        return self.dp * self.tp * self.sp

    @property
    def n_ranks(self) -> int:
        return self.pp * self.ranks_a_stage


def load_stage_args(path: str | Path) -> StageArgs:
    """Reads flags from a JSON file `{"dp": 2, "num_stacks": 4, ...}`; missing flags have STAGE's defaults.

    Raises ForerunError if the file can't be read or is not a JSON object, a flag is unknown, or a value is wrong.
    """
    data = read_json(path)
    if not isinstance(data, dict):
        raise ForerunError(f"{path}: expected a JSON object of flags")
    known = {field.name: field.type for field in fields(StageArgs)}
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name not in known:
            raise UnknownName(f"flag in {path}", name, list(known))
        values[name] = truth(value, f"{path}: {name}") if known[name] == "bool" else _whole(value, f"{path}: {name}")
    with at(str(path)):
        return StageArgs(**values)


def truth(value: object, place: str) -> bool:
    """Reads a truth value as STAGE's flags do. Raises ForerunError, naming `place`."""
    text = str(value).lower()
    if text not in _TRUE + _FALSE:
        raise ForerunError(f"{place}: {value!r} is neither true nor false")
    return text in _TRUE


def _whole(value: object, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ForerunError(f"{place}: expected a whole number, got {json.dumps(value)[:60]}")
    return value
