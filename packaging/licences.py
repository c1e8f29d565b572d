"""Checks the licences that a software bill of materials (CycloneDX, JSON) lists: python packaging/licences.py FILE.

Forerun is Apache-2.0, so that its dependencies must be under licences that permit use without conditions on the user's
own code. Exits with 1 and one line for each component whose licence is not known to be one of these.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PERMISSIVE = {
    *("MIT", "MIT-0", "0BSD", "BSD-2-Clause", "BSD-3-Clause", "ISC", "Zlib", "CC0-1.0", "PSF-2.0", "Apache-2.0"),
    *("Apache-2.0 WITH LLVM-exception", "Python-2.0", "HPND", "MIT-CMU", "Unlicense"),
}
CLASSIFIERS = {
    "License :: OSI Approved :: BSD License": "BSD-3-Clause",
    "License :: OSI Approved :: MIT License": "MIT",
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: Python Software Foundation License": "PSF-2.0",
}
"""the trove classifiers of permissive licences, which some packages state in place of an SPDX expression"""
STATED_ELSEWHERE = {"protobuf": "BSD-3-Clause"}
"""packages whose metadata has no licence; source: the file LICENSE of protocolbuffers/protobuf"""


def stated(component: dict[str, Any]) -> list[str]:
    """Returns the licences that a component states, as SPDX expressions where it has them."""
    entries = component.get("licenses", [])
    found = [
        entry.get("expression") or entry.get("license", {}).get("id") or entry.get("license", {}).get("name", "")
        for entry in entries
    ]
    return found or [STATED_ELSEWHERE[name] for name in (component["name"],) if name in STATED_ELSEWHERE]


def is_permissive(licence: str) -> bool:
    """Returns whether each part of an SPDX expression is permissive; of alternatives one is enough."""
    expression = CLASSIFIERS.get(licence, licence)
    return any(
        all(part.strip("() ") in PERMISSIVE for part in re.split(r"\s+AND\s+", alternative))
        for alternative in re.split(r"\s+OR\s+", expression)
    )


def unknown(bill: dict[str, Any]) -> Iterator[str]:
    """Yields a line for each component of `bill` whose licence is missing or not permissive."""
    for component in bill.get("components", []):
        licences = stated(component)
        if not any(map(is_permissive, licences)):
            what = " and ".join(licences) or "no licence"
            yield f"{component['name']} {component.get('version', '')}: {what}"


if __name__ == "__main__":
    lines = list(unknown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
    print("\n".join(lines) or "all dependencies are under permissive licences")
    sys.exit(1 if lines else 0)
