"""The types that functions are called with, which decide what the build compiles.

With `FORERUN_RECORD_SIGNATURES=FILE` in its environment, a command compiles everything with numba and adds the types of
its calls to FILE.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from forerun.common.native.layout import layout_of

SIGNATURES = Path(__file__).with_name("signatures.json")
"""by `module:name`, a list of {"arguments": [layout, ...], "result": layout}"""
RECORDING = os.environ.get("FORERUN_RECORD_SIGNATURES", "")
_recorded: dict[str, list[dict[str, Any]]] = {}


def record(name: str, arguments: tuple[Any, ...], result: Any) -> None:
    """Adds the types of a call to the file, unless it has them. Several processes can write to one file.

    It leaves a call out that has an argument or a result without layout.
    """
    try:
        variant = {"arguments": [*map(layout_of, arguments)], "result": layout_of(result)}
    except TypeError:
        return
    if variant in _recorded.setdefault(name, []):
        return
    _recorded[name].append(variant)
    with open(RECORDING, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = json.loads(file.read() or "{}")
        if variant not in known.setdefault(name, []):
            known[name].append(variant)
            file.truncate(0)
            lines = (f"{json.dumps(name)}: {json.dumps(variants)}" for name, variants in sorted(known.items()))
            file.write("{\n" + ",\n".join(lines) + "\n}\n")
