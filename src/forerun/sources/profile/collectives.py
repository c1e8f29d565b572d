"""The collectives of a step: their bytes and their ranks, as far as the file states them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from forerun.common.admission import parse_json
from forerun.common.errors import ForerunError
from forerun.core.program.types import Collective
from forerun.sources.profile.event_keys import Key
from forerun.sources.profile.labels import ANNOUNCEMENT, Operator
from forerun.sources.profile.profile import I64, Profile

_KERNEL = re.compile(r"^nccl\w*Kernel|^rccl\w*Kernel")
_KINDS = (
    ("all_?gather", Collective.ALL_GATHER),
    ("reduce_?scatter", Collective.REDUCE_SCATTER),
    ("all_?reduce|barrier", Collective.ALL_REDUCE),
    ("all_?to_?all", Collective.ALL_TO_ALL),
    ("broadcast|scatter|gather|reduce", Collective.BROADCAST),
    ("send_?recv|^send$|^recv$", Collective.SEND_RECV),
)
"""the first that is found in the name, in small letters, decides"""
_WHOLE_IS_OUTPUT = (Collective.ALL_GATHER,)
_ELEMENT_BYTES = {
    "float": 4,
    "bfloat16": 2,
    "half": 2,
    "double": 8,
    "byte": 1,
    "char": 1,
    "bool": 1,
    "short": 2,
    "int": 4,
    "long": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "signed": 1,  # signed and unsigned char, as annotations call char and byte
    "unsigned": 1,
}
_DTYPES = {"float": "fp32", "bfloat16": "bf16", "half": "fp16", "double": "fp64"}


class Call(NamedTuple):
    """One collective."""

    kind: Collective
    bytes_comm: float
    """the full buffer by nccl-tests' convention; 0 if the file does not say"""
    ranks: tuple[int, ...]
    """the ranks of its group; empty if the file does not say"""
    group_size: int
    """0 if the file does not say"""
    group_name: str
    dtype: str


def is_collective(name: str) -> bool:
    """Returns whether a kernel of this name is NCCL's or RCCL's."""
    return bool(_KERNEL.match(name))


def calls_of(profile: Profile, rows: I64, announced: Sequence[Operator | None] = ()) -> list[Call]:
    """Returns the collective calls of the kernels in `rows`, all of NCCL or RCCL.

    Since 2024 kernels say kind, sizes and group. For others, `announced` has the annotations around their launches,
    which say the kind, and the sizes that the rank sends.
    """
    keys = (Key.COLLECTIVE, Key.DTYPE, Key.GROUP_NAME, Key.GROUP_RANKS)
    texts = [[_text(profile, number) for number in profile.values(key, -1)[rows].tolist()] for key in keys]
    sizes = [profile.values(key, 0)[rows].tolist() for key in (Key.IN_ELEMENTS, Key.OUT_ELEMENTS, Key.GROUP_SIZE)]
    names = [profile.texts[number] for number in profile.rows.name[rows].tolist()]
    around = announced or [None] * len(names)
    found = []
    for name, collective, dtype, group, ranks, sent, got, size, said in zip(names, *texts, *sizes, around, strict=True):
        if not collective and said is not None:
            found.append(_announced(profile, name, said))
            continue
        kind = kind_of(collective or name)
        elements = got if kind in _WHOLE_IS_OUTPUT else max(sent, got) if kind == Collective.ALL_REDUCE else sent
        members = _members(ranks)
        found.append(
            Call(
                kind=kind,
                bytes_comm=elements * _ELEMENT_BYTES.get(dtype.lower(), 1),
                ranks=members if len(members) == size else (),
                group_size=int(size),
                group_name=group,
                dtype=_DTYPES.get(dtype.lower(), dtype.lower()),
            )
        )
    return found


def _announced(profile: Profile, kernel: str, said: Operator) -> Call:
    """Returns the call that an annotation announces. Its group is not known, and counts as that of all ranks."""
    kind = kind_of(said.name[len(ANNOUNCEMENT) :].partition(" ")[0]) or kind_of(kernel)
    dtype = said.type.removeprefix("c10::").lower()
    elements = sum(prod(one) for one in said.sizes or ())
    if kind in _WHOLE_IS_OUTPUT:
        elements *= profile.world_size or 1
    n_bytes = float(elements * _ELEMENT_BYTES.get(dtype, 0))
    return Call(kind, n_bytes, (), 0, "", _DTYPES.get(dtype, dtype))


def kind_of(name: str) -> Collective:
    """Returns the kind of collective that a name, of a call or of a kernel, tells; NONE if it tells none."""
    small = name.lower()
    return next((kind for pattern, kind in _KINDS if re.search(pattern, small)), Collective.NONE)


def _text(profile: Profile, number: float) -> str:
    return profile.texts[int(number)] if number >= 0 else ""


def _members(text: str) -> tuple[int, ...]:
    """Returns the ranks that a text lists. The result is empty if the text is cut short."""
    try:
        ranks = parse_json(text, "ranks")
    except ForerunError:
        return ()
    whole = isinstance(ranks, list) and all(isinstance(rank, int) and rank >= 0 for rank in ranks)
    return tuple(sorted(set(ranks))) if whole else ()
