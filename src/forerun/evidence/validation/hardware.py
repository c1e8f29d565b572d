"""Hardware: the file that describes the network and devices of each `hw_key` of a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from forerun.common.errors import ForerunError


@dataclass(frozen=True, slots=True)
class HostFacts:
    """One cluster as its source describes it; None or an empty text where the source states nothing."""

    gpu: str = ""
    hbm_gb: float | None = None
    gpus_per_node: int | None = None
    intra: str = ""
    inter_node_gbit_s_per_gpu: float | None = None
    fabric: str = ""
    stated: str = ""


Hardware = Mapping[str, HostFacts]
"""hw_key -> facts of its cluster"""

_TYPES: dict[str, tuple[type, ...]] = {
    "gpu": (str,), "hbm_gb": (int, float), "gpus_per_node": (int,), "intra": (str,),
    "inter_node_gbit_s_per_gpu": (int, float), "fabric": (str,), "stated": (str,),
}  # fmt: skip


def read_hardware(path: str | Path) -> Hardware:
    """Returns the `clusters` of a hardware file.

    Raises ForerunError, which names file and key, for a missing file, broken YAML, or a wrong entry.
    """
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ForerunError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ForerunError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}" if mark else ""
        raise ForerunError(
            f"{path}{place}: not valid YAML ({getattr(error, 'problem', None) or 'unreadable'})"
        ) from None
    clusters = data.get("clusters") if isinstance(data, dict) else None
    if not isinstance(clusters, dict):
        raise ForerunError(f"{path}: expected a mapping with the key 'clusters'")
    return {str(key): _facts(f"{path}: clusters.{key}", entry) for key, entry in clusters.items()}


def _facts(place: str, entry: Any) -> HostFacts:
    if not isinstance(entry, dict):
        raise ForerunError(f"{place}: expected a mapping, got {entry!r}")
    known = [field.name for field in fields(HostFacts)]
    values = {name: entry[name] for name in known if entry.get(name) is not None}
    for name, value in values.items():
        if not isinstance(value, _TYPES[name]) or isinstance(value, bool):
            wanted = "text" if _TYPES[name] == (str,) else "a number"
            raise ForerunError(f"{place}.{name} is {value!r}, expected {wanted}")
    return HostFacts(**values)
