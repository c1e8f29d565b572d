"""Prepares the package for a fast start: `python -m forerun.common.build_ahead` compiles kernels and parses YAML.

The build of the package runs it. `make kernels` runs it again if a source has changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forerun.common.files import whole_file
from forerun.common.native import build
from forerun.common.native.library import ROOT
from forerun.common.parsed_yaml import FILE, digest
from forerun.common.yaml_files import read_any_yaml


def parsed_files(root: Path) -> dict[str, str]:
    """Returns the contents of each YAML file below `root` as JSON, by the digest of its text.

    It leaves out files that JSON can't hold as they are (keys that are numbers, dates) and empty ones.
    """
    found = {}
    for path in sorted(root.rglob("*.yaml")):
        contents: Any = read_any_yaml(path)
        try:
            written = json.dumps(contents)
        except TypeError:
            continue
        if contents is not None and json.loads(written) == contents:
            found[digest(path.read_text(encoding="utf-8"))] = written
    return found


def main() -> None:
    """Builds both, unless they are there already."""
    build.main()
    parsed = json.dumps(parsed_files(ROOT)).encode()
    if not FILE.exists() or FILE.read_bytes() != parsed:
        with whole_file(FILE) as file:
            file.write(parsed)


if __name__ == "__main__":
    main()
