"""Hides the tracer from torch.compile.

Dynamo meets Python code in two ways, and neither must show it the tracer:

* It captures *frames* that begin inside a compiled region, between two of its graphs. A frame of the tracer is skipped
  together with all frames below it.
* It inlines *calls* inside captured code. Where the tracer has replaced one of torch's functions, Dynamo inlines
  torch's own function (`stand_in`).

So a compiled region has the graphs and graph breaks that it has without the tracer. This module does not import Dynamo;
`compiled/dynamo.py` tells Dynamo these rules.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

_FORERUN = Path(__file__).parents[3]
PACKAGE = os.path.join(_FORERUN, "")
"""The path that the files of Forerun begin with."""
PROGRAMS = tuple(
    f"forerun.sources.trace.inside.{name}"
    for name in ("parallelize", "titan", "device.flash_attention", "device.flash_attention_3", "device.xformers_ops")
)
"""The modules that stand for code of the program: torch.compile sees them as it sees the program."""
OF_PROGRAMS = tuple(_FORERUN.parent.joinpath(*name.split(".")).as_posix() for name in PROGRAMS)
"""The paths that the files of these modules begin with."""
_stand_ins: dict[int, CodeType] = {}
"""Code objects by identity, because code objects that differ only in their file are equal."""


def is_own(code: CodeType) -> bool:
    """Returns whether `code` belongs to the tracer, so that torch.compile skips it and everything that it calls."""
    return code.co_filename.startswith(PACKAGE) and not code.co_filename.startswith(OF_PROGRAMS)


def stands_in(code: CodeType) -> bool:
    """Returns whether `code` belongs to a stand-in. torch.compile skips the frame of a stand-in, but not the functions
    that it calls.
    """
    return id(code) in _stand_ins


def stand_in(original: Any, replacement: Any) -> Any:
    """Returns a function that runs `replacement`. torch.compile captures `original` in its place.

    Dynamo inlines Python functions only and knows everything else by name, so other callables are replaced as they are.
    """
    if not (isinstance(original, FunctionType) and isinstance(replacement, FunctionType)):
        return replacement
    capturing = torch.compiler.is_dynamo_compiling

    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if capturing() else replacement(*args, **kwargs)

    return in_place_of(original, call)


def in_place_of(original: Any, function: Any, shares_code: bool = False) -> Any:
    """Returns `function` with the name and the file of `original`, by which Dynamo decides whether to inline a call.

    It has to call `original` where `torch.compiler.is_dynamo_compiling()`, and may do more elsewhere. Dynamo captures
    a frame once for each code object, so functions that a program makes again and again share one (`shares_code`).
    """
    made_of = _in_file if shares_code else _in_file.__wrapped__
    code = made_of(function.__code__, original.__code__.co_filename)
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(made, original)


@functools.cache
def _in_file(code: CodeType, file: str) -> CodeType:
    """Returns the code of a stand-in as if it stood in `file`."""
    made = code.replace(co_filename=file)
    _stand_ins[id(made)] = made
    return made


def rebind(new: Mapping[int, Any], prefix: str = "torch") -> None:
    """Replaces objects by identity in every loaded module of a package. torch.compile still captures the original
    functions."""
    made: dict[int, Any] = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and (name == prefix or name.startswith(prefix + ".")):
            if new.keys().isdisjoint(map(id, vars(module).values())):
                continue
            for key, value in list(vars(module).items()):
                number = id(value)
                if number in new:
                    if number not in made:
                        made[number] = stand_in(value, new[number])
                    setattr(module, key, made[number])
