"""The type that HTA gives a kernel by its name, and HTA's short names."""

from __future__ import annotations

import re
from enum import Enum

import numpy as np

from forerun.answers.profile.window import Window
from forerun.sources.profile.profile import Mask


class KernelType(Enum):
    COMPUTATION = "COMPUTATION"
    COMMUNICATION = "COMMUNICATION"
    MEMORY = "MEMORY"
    OTHER = "OTHER"


_COMMUNICATION = re.compile(r"^nccl.*Kernel")
_MEMORY = re.compile(r"(^Memcpy)|(^Memset)|(^dma)")
_NO_COMPUTATION = re.compile(r"(^nccl.*Kernel)|(.*(Memcpy)|(Memset))|(.*Sync)")


def kernel_type(name: str) -> KernelType:
    """Returns the type of the kernel `name`."""
    if _COMMUNICATION.match(name):
        return KernelType.COMMUNICATION
    if _MEMORY.match(name):
        return KernelType.MEMORY
    return KernelType.OTHER if _NO_COMPUTATION.match(name) else KernelType.COMPUTATION


def of_type(window: Window, wanted: KernelType) -> Mask:
    """Returns the mask (events,) of events that run on a stream and are of this type."""
    return np.asarray(
        window.on_stream & window.profile.text_mask(lambda text: kernel_type(text) is wanted)[window.name]
    )


def is_communication(name: str) -> bool:
    """Returns whether the short name of `name` is that of a kernel of NCCL or RCCL."""
    return bool(_COMMUNICATION.match(short_name(name)))


def short_name(name: str) -> str:
    """Returns `name` without arguments, template arguments and the type of its result."""
    if _MEMORY.match(name) or ("<" not in name and "(" not in name):
        return name
    opening = {">": "<", ")": "("}
    stack: list[str] = []
    for letter in name.replace("->", ""):
        if letter not in opening:
            stack.append(letter)
            continue
        while stack and stack[-1] != opening[letter]:
            stack.pop()
        if stack:
            stack.pop()
    return "".join(stack).split(" ")[-1]
