"""Runs a training script in this process, as torchrun or `python SCRIPT ARGUMENTS` would start it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

_ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
"""the variables of torchrun for a process that it did not start"""


def local_rank() -> int:
    """Returns the rank of this process on its node, and sets the variables of torchrun that are missing."""
    for name, value in _ALONE.items():
        os.environ.setdefault(name, value)
    return int(os.environ["LOCAL_RANK"])


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Runs the script to its end. What it raises goes through."""
    kept = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv, sys.path[0] = kept
