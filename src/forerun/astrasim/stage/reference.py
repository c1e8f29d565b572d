"""Numbers that STAGE's source code fixes, from `reference.yaml`."""

from __future__ import annotations

from pathlib import Path

from forerun.describe.cluster.files import read_yaml

_FILE = read_yaml(Path(__file__).with_name("reference.yaml"))
FIRST_GENERATION, SECOND_GENERATION = _FILE["first_generation"], _FILE["second_generation"]
