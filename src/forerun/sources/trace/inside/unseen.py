"""What torch.compile sees of the tracer: nothing.

Dynamo meets Python in two ways, and neither must show it the tracer:

* It captures *frames* that begin inside a compiled region, between two of its graphs. A frame of the tracer is skipped,
  with all frames below it.
* It follows *calls* inside what it captures. Where the tracer has put a function in the place of one of torch's, Dynamo
  follows torch's (`stand_in`).

So a compiled region has the graphs and the graph breaks that it has without the tracer. This module does not import
Dynamo; `compiled/dynamo.py` tells Dynamo what is written here.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch

_FORERUN = Path(__file__).parents[3]
PACKAGE = os.path.join(_FORERUN, "")
"""path that the files of Forerun begin with"""
PROGRAMS = tuple(f"forerun.sources.trace.inside.{name}" for name in ("parallelize", "titan", "device.flash_attention"))
"""modules that stand for code of a program: torch.compile sees them as it sees the program"""
_OF_PROGRAMS = tuple(str(_FORERUN.parent.joinpath(*name.split("."))) for name in PROGRAMS)
_stand_ins: dict[int, CodeType] = {}
"""by identity, because code objects that differ only in their file are equal"""


def is_own(code: CodeType) -> bool:
    """Whether `code` is the tracer's: neither it nor what it calls is for torch.compile."""
    return code.co_filename.startswith(PACKAGE) and not code.co_filename.startswith(_OF_PROGRAMS)


def stands_in(code: CodeType) -> bool:
    """Whether `code` is that of a stand-in: its frame is not for torch.compile, what it calls is."""
    return id(code) in _stand_ins


def stand_in(original: Any, replacement: Any) -> Any:
    """A function that does what `replacement` does; torch.compile captures `original` instead.

    Dynamo follows Python functions only, and knows everything else by its name: that is replaced as it is.
    """
    if not (isinstance(original, FunctionType) and isinstance(replacement, FunctionType)):
        return replacement
    capturing = torch.compiler.is_dynamo_compiling

    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if capturing() else replacement(*args, **kwargs)

    return in_place_of(original, call)


def in_place_of(original: Any, function: Any) -> Any:
    """`function` with the name and the file of `original`, by which Dynamo decides whether to follow a call.

    It has to call `original` where `torch.compiler.is_dynamo_compiling()`, and may do more elsewhere.
    """
    code = function.__code__.replace(co_filename=original.__code__.co_filename)
    _stand_ins[id(code)] = code
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(made, original)
