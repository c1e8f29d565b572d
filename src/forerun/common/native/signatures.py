"""The argument types of functions. The build compiles the functions for these types.

With `FORERUN_RECORD_SIGNATURES=FILE` in its environment, a command compiles everything with numba and appends the types
of its calls to FILE, in lines as `signatures.jsonl` has them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeAlias

from forerun.common.native.layout import layout_of

Signature: TypeAlias = tuple[str, dict[str, Any]]
"""`module:name`, and {"arguments": [layout, ...], "result": layout}"""
RECORDING = os.environ.get("FORERUN_RECORD_SIGNATURES", "")
_recorded: list[Signature] = []


def signatures() -> list[Signature]:
    """Returns the signatures that the build compiles."""
    text = Path(__file__).with_name("signatures.jsonl").read_text(encoding="utf-8")
    return [(name, variant) for name, variant in map(json.loads, text.splitlines())]


def record(name: str, arguments: tuple[Any, ...], result: Any) -> None:
    """Appends the types of a call to the file, once for each process.

    It leaves a call out that has an argument or a result without layout.
    """
    try:
        called = (name, {"arguments": [*map(layout_of, arguments)], "result": layout_of(result)})
    except TypeError:
        return
    if called not in _recorded:
        _recorded.append(called)
        with open(RECORDING, "a", encoding="utf-8") as file:
            file.write(json.dumps(called) + "\n")
