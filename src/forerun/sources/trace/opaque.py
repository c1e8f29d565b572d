"""Describes custom kernels that torch does not know: their results and their cost. Users import it as
`forerun.kernels`.

A traced program runs on a device without kernels, so a custom kernel needs a description. A file for `forerun trace
--kernels FILE.py`, or a package with an entry point in the group `forerun.kernels`, describes kernels with the four
decorators below. Each decorates a *shape rule*, a function that gets the arguments of a call and returns its results:
tensors whose data does not matter. The rule that the decorator returns has a decorator `cost` for the *cost rule*,
which gets the same arguments and returns a `Cost`. Without a cost rule, the time of a kernel follows from the bytes of
its arguments and results.

This module imports neither torch nor anything that needs torch.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from forerun.common.errors import ForerunError

GROUP = "forerun.kernels"
"""The group of entry points; each names a module, or a function to call, that describes kernels."""
OPERATOR, TRITON, CUDA, EXTENSION = "operator", "triton", "cuda", "extension"


@dataclass(frozen=True)
class Cost:
    """The cost of one call. Bytes that are None are those of the tensors that the call reads or writes."""

    flops: float = 0.0
    unit: str = ""
    """The dtype of the matrix unit that runs the FLOPs: bf16, fp16, tf32, fp8, ...; empty for the vector units."""
    bytes_read: float | None = None
    bytes_written: float | None = None
    time_us: float | None = None
    """A measured time. It applies to the device that it was measured on, and replaces the cost of the other fields."""
    launches: int = 1
    """The number of kernels that the call launches."""
    workspace_bytes: int = 0
    """Memory in bytes that the call allocates and frees itself."""

    def __post_init__(self) -> None:
        amounts = (self.flops, self.bytes_read or 0, self.bytes_written or 0, self.time_us or 0, self.workspace_bytes)
        if min(amounts) < 0 or self.launches < 0:
            raise ForerunError(f"{self}: no part of a cost may be negative")


@dataclass
class Rule:
    """The description of one kernel."""

    kind: str
    name: str
    shape: Callable[..., Any] | None = None
    writes: tuple[str, ...] | None = None
    """The parameters that the kernel writes to; None if its source shows them."""
    schema: str = ""
    of_cost: Callable[..., Cost] | None = None
    used: bool = False
    """Whether the program called it."""

    def __call__(self, function: Callable[..., Any]) -> Rule:
        """Takes `function` as the shape rule."""
        self.shape = function
        return self

    def cost(self, function: Callable[..., Cost]) -> Callable[..., Cost]:
        """Decorator that makes `function` the cost rule."""
        self.of_cost = function
        return function


_rules: dict[tuple[str, str], Rule] = {}


def rule_of(kind: str, name: str) -> Rule | None:
    """Returns the rule of a kernel; None if the kernel has no description."""
    return _rules.get((kind, name))


def rules(kind: str) -> list[Rule]:
    """Returns all rules of a kind."""
    return [rule for (of, _), rule in _rules.items() if of == kind]


def _add(rule: Rule) -> Rule:
    _rules[rule.kind, rule.name] = rule
    return rule


def operator(name: str, schema: str = "") -> Rule:
    """Describes an operator of `torch.library`, such as `mylib::scan`.

    Its shape rule is a function for `torch.library.register_fake`. `schema`, such as `(Tensor x) -> Tensor`, defines
    the operator if the library that defines it can't be loaded without a GPU.

    Raises:
        ForerunError: the name has no namespace.
    """
    if "::" not in name:
        raise ForerunError(f"kernels.operator({name!r}): name the operator with its namespace, as in mylib::{name}")
    return _add(Rule(OPERATOR, name, schema=schema))


def triton(name: str, writes: Sequence[str] | None = None) -> Rule:
    """Describes a Triton kernel by the name of its function. Its rules get the arguments that they name as parameters.

    It has no shape rule, because it writes to its arguments: to those in `writes`, or to those that its source stores
    to.
    """
    return _add(Rule(TRITON, name, writes=None if writes is None else tuple(writes)))


def cuda(name: str, writes: Sequence[str] | None = None) -> Rule:
    """Describes a CUDA kernel that the program compiles itself (NVRTC), by the name of its function.

    It writes to the parameters in `writes`, or to those that are pointers without `const`.
    """
    return _add(Rule(CUDA, name, writes=None if writes is None else tuple(writes)))


def extension(name: str, writes: Sequence[str] = ()) -> Rule:
    """Describes a function of a compiled module (pybind11, `torch.utils.cpp_extension`), such as `mylib_cuda.forward`.

    The traced program gets a module with the described functions. `writes` names the parameters that the function
    changes.

    Raises:
        ForerunError: the name has no module.
    """
    if "." not in name:
        raise ForerunError(f"kernels.extension({name!r}): name the function with its module, as in mylib_cuda.{name}")
    return _add(Rule(EXTENSION, name, writes=tuple(writes)))


# -- files and packages that describe kernels ------------------------------------------------------------------


def checked_files(files: Sequence[Path]) -> tuple[str, ...]:
    """Returns the full paths of files for `--kernels`.

    Raises:
        ForerunError: there is no such file.
    """
    for file in files:
        if not file.is_file():
            raise ForerunError(f"--kernels {file}: there is no such file")
    return tuple(str(file.resolve()) for file in files)


def load(files: Sequence[str]) -> None:
    """Runs the entry points of the group, and then `files`, which go before them.

    Raises:
        ForerunError: one of them fails.
    """
    for point in entry_points(group=GROUP):
        _described(f"entry point {point.name} of {GROUP}", partial(_entered, point))
    for file in files:
        _described(f"--kernels {file}", partial(runpy.run_path, file))


def _entered(point: EntryPoint) -> None:
    found = point.load()
    if callable(found):
        found()


def _described(what: str, describe: Callable[[], object]) -> None:
    try:
        describe()
    except Exception as error:  # A file of the user's may raise anything.
        line = error.__traceback__
        while line is not None and line.tb_next is not None:
            line = line.tb_next
        at = f" at {line.tb_frame.f_code.co_filename}:{line.tb_lineno}" if line is not None else ""
        raise ForerunError(f"{what}: {type(error).__name__}: {error}{at}") from error
