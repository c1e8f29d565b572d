"""Hardware: the file that describes the network and devices of each `hw_key` of a row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, model_validator

from forerun.common.shipped import shipped_data
from forerun.common.yaml_files import Entry, check, read_yaml


class HostFacts(Entry):
    """One cluster as its source describes it; None or an empty text where the source states nothing."""

    model_config = ConfigDict(extra="ignore")

    gpu: str = ""
    hbm_gb: float | None = None
    gpus_per_node: int | None = None
    intra: str = ""
    inter_node_gbit_s_per_gpu: float | None = None
    fabric: str = ""
    stated: str = ""
    clock: float = Field(default=1.0, gt=0.0, le=1.5)
    """clock of the host's GPUs over that of others of their kind, where benchmarks of the host show one"""
    power_w: float | None = Field(default=None, gt=0.0)
    """power limit of the host's GPUs where it is not that of the device"""

    @model_validator(mode="before")
    @classmethod
    def _stated_alone(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


Hardware = Mapping[str, HostFacts]
"""hw_key -> facts of its cluster"""


class _File(Entry):
    model_config = ConfigDict(extra="ignore")

    clusters: dict[str, HostFacts]


def read_hardware(path: str | Path) -> Hardware:
    """Returns the `clusters` of a hardware file, with the facts of hosts.yaml beside it.

    Raises ForerunError, which names file and key, for a missing file, broken YAML, or a wrong entry.
    """
    found = check(_File, read_yaml(path), str(path)).clusters
    for name, facts in shipped_data("forerun.evidence.validation", "hosts.yaml").items():
        if name in found:
            found[name] = HostFacts(**{**facts, **found[name].model_dump(exclude_unset=True)})
    return found
