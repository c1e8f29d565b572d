"""Writes a cost profile as YAML, with fixed order and one constant a line, so that a diff shows the changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile
from textwrap import indent
from typing import Any

import numpy as np

from forerun.core.cost.profile import Profile

_KERNELS = "\nkernels:\n"
"""key of the constants in the file of a device; their first line is the name"""
_FORMS = "Forms: cost/gemm.py, cost/attention.py, cost/memory_bound.py, network/constants.py."
_RATES = "# Rates are stated as measured on the reference; other devices take the fraction of its peaks."
_LEFT_OUT_WHEN_EMPTY = {
    "gradient_slowdown",
    "odd_rows",
    "own_wgrad_rate",
    "quant_passes",
    "unaligned",
    "rates",
    "stands_in",
}
"""keys that a file leaves out where they are 0 or empty, as all keys where they have no value"""
_TABLES = {"head_dim", "rates", "collectives"}
"""keys that hold rows of the same constants, one row a line"""


def profile_text(profile: Profile, header: Sequence[str]) -> str:
    """Returns the text of `profile` under the comment lines `header`, each with its #. `parse_profile` reads it."""
    data = asdict(profile)
    lines = [*header]
    for key in ("source", "calibrated", "reference"):
        lines += _entry(key, data[key], 0, flow=True)
    lines += ["", *_entry("gemm", dict(sorted(data["gemm"].items(), key=_by_dtype)), 0)]
    lines += _entry("gemm_roles", data["gemm_roles"], 0)
    lines += ["", *_entry("attention", data["attention"], 0), ""]
    for key in ("memory_bound", "host_copy"):
        lines += _entry(key, data[key], 0)
    if data["collectives"] is not None:
        lines += ["", *_entry("collectives", data["collectives"], 0)]
    return "\n".join(lines) + "\n"


_DTYPES = ("bf16", "fp16", "tf32", "fp32", "fp8", "nvfp4")


def _by_dtype(item: tuple[str, Any]) -> tuple[int, str]:
    name = item[0]
    return (_DTYPES.index(name) if name in _DTYPES else len(_DTYPES), name)


def _entry(key: Any, value: Any, depth: int, flow: bool = False) -> Iterator[str]:
    pad = "  " * depth
    if not isinstance(value, Mapping):
        yield f"{pad}{key}: {_scalar(value)}"
    elif flow:
        yield f"{pad}{key}: {_flow(value)}"
    else:
        yield f"{pad}{key}:"
        for name, inner in _kept(value):
            yield from _entry(name, inner, depth + 1, flow=key in _TABLES)


def _kept(values: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Returns the entries in their order, head sizes by size."""
    stated = ((key, value) for key, value in values.items() if value is not None)
    pairs = [(key, value) for key, value in stated if value or key not in _LEFT_OUT_WHEN_EMPTY]
    return sorted(pairs) if all(isinstance(key, int) for key, _ in pairs) else pairs


def _flow(values: Mapping[Any, Any]) -> str:
    pairs = (f"{key}: {_flow(each) if isinstance(each, Mapping) else _scalar(each)}" for key, each in _kept(values))
    return "{" + ", ".join(pairs) + "}"


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return np.format_float_positional(value, trim="-")
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def written_over(old: str, profile: Profile, device: str) -> str:
    """Returns the new text of a file whose text is `old`, with `profile` written into it.

    The file of a device keeps everything but its `kernels`, which come last. A profile's file keeps its first comments.
    """
    before, inside, kernels = old.partition(_KERNELS)
    if inside:
        name = kernels.partition("\n")[0]
        return f"{before}{inside}{name}\n{indent(profile_text(profile, ()), '  ')}"
    found = list(takewhile(lambda line: line.startswith("#"), old.splitlines()))
    return profile_text(profile, found or [f"# Kernel constants of the {device}. {_FORMS}", _RATES])
