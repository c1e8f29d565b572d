"""Records the CUDA kernels that a program compiles itself with NVRTC (`torch.cuda._compile_kernel`).

Nothing is compiled. The parameters of a kernel come from its source: pointers to `const` are read, other pointers are
written too. A rule of `forerun.kernels` gives the cost of a launch. Without a rule the cost follows from its bytes.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from forerun.common.errors import ForerunError
from forerun.sources.trace.inside.kernels.opaque_calls import Launches
from forerun.sources.trace.opaque import CUDA, rule_of

_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


def install(launches: Launches) -> None:
    """Lets programs compile and launch kernels."""

    def compile_kernel(kernel_source: str, kernel_name: str, *_: Any, **__: Any) -> CompiledKernel:
        return CompiledKernel(kernel_source, kernel_name, launches)

    cuda: Any = torch.cuda
    for name in ("_compile_kernel", "compile_kernel"):
        if hasattr(cuda, name):
            setattr(cuda, name, compile_kernel)


class CompiledKernel:
    """A kernel as torch returns it: launched by a call."""

    def __init__(self, source: str, name: str, launches: Launches) -> None:
        self.name, self._launches = name, launches
        self.parameters, self.written = parameters_of(source, name)

    def __call__(
        self, grid: Any = (1, 1, 1), block: Any = (1, 1, 1), args: Any = (), shared_mem: int = 0, stream: Any = None
    ) -> None:
        rule = rule_of(CUDA, self.name)
        given = dict(zip(self.parameters, args or (), strict=False)) | {"grid": grid, "block": block}
        written = (rule.writes if rule else None) or self.written
        with torch.cuda.stream(stream):
            self._launches.launch(rule, self.name, given, written)
        if rule is None or rule.of_cost is None:
            self._launches.recorder.note(
                f"CUDA kernel {self.name}: it costs the bytes that it reads and writes; describe it with --kernels"
            )

    def set_shared_memory_config(self, shared_mem_bytes: int) -> None:
        """Does nothing, as it changes no cost."""


def parameters_of(source: str, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of a kernel's parameters in order, and those that it may write to.

    Raises:
        ForerunError: the source declares no such kernel.
    """
    text = _COMMENTS.sub("", source)
    plain = name.partition("<")[0]
    found = re.search(rf"__global__[^;{{}}]*?\b{re.escape(plain)}\s*\(", text)
    if found is None:
        raise ForerunError(f"the source of CUDA kernel {name} declares no __global__ function of this name")
    declared = [" ".join(one.split()) for one in _split(text[found.end() :])]
    names = tuple(re.findall(r"\w+", one.partition("=")[0].partition("[")[0])[-1] for one in declared)
    pointers = [name for name, one in zip(names, declared, strict=True) if "*" in one or "[" in one]
    constant = {name for name, one in zip(names, declared, strict=True) if re.match(r"[^*\[]*\bconst\b", one)}
    return names, tuple(name for name in pointers if name not in constant)


def _split(text: str) -> list[str]:
    """Returns the declarations up to the closing parenthesis, split at commas outside brackets."""
    depth, start, found = 0, 0, []
    for place, letter in enumerate(text):
        if depth == 0 and letter in ",)":
            found.append(text[start:place])
            start = place + 1
            if letter == ")":
                break
        depth += (letter in "(<[") - (letter in ")>]")
    return [one for one in found if one.strip()]
