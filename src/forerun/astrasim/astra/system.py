"""ASTRA-sim's system file: the speed of a rank, and how collectives are cut and scheduled."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from forerun.common.admission import read_json
from forerun.common.errors import ForerunError
from forerun.common.yaml_files import read_any_yaml

_IMPLEMENTATION = re.compile(
    r"(ring|oneRing|doubleBinaryTree|halvingDoubling|oneHalvingDoubling|(direct|oneDirect)(\d*))"
)
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
KNOWN = "ring, direct, direct<window>, halvingDoubling, doubleBinaryTree, oneRing, oneDirect, oneHalvingDoubling"


class System(BaseModel):
    """The keys of a system file that change a result. Like ASTRA-sim, it ignores other keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        allow_inf_nan=False,
        alias_generator=lambda name: name.replace("_", "-"),
        populate_by_name=True,
    )

    scheduling_policy: Literal["LIFO", "FIFO", "EXPLICIT"] = "LIFO"
    endpoint_delay: int = Field(10, ge=0, le=10**12)
    """ns between a packet's arrival and the next one"""
    active_chunks_per_dimension: int = Field(1, ge=1, le=10**9)
    preferred_dataset_splits: int = Field(1, ge=1, le=10**9)
    collective_optimization: Literal["baseline", "localBWAware"] = "baseline"
    all_reduce_implementation: tuple[str, ...] = ()
    all_gather_implementation: tuple[str, ...] = ()
    reduce_scatter_implementation: tuple[str, ...] = ()
    all_to_all_implementation: tuple[str, ...] = ()
    all_reduce_implementation_chakra: tuple[str, ...] = Field((), max_length=1)
    """prefix of the traces, one for each rank, of a custom all-reduce of all ranks"""
    all_gather_implementation_chakra: tuple[str, ...] = Field((), max_length=1)
    all_to_all_implementation_chakra: tuple[str, ...] = Field((), max_length=1)
    all_reduce_implementation_custom: tuple[str, ...] = Field((), max_length=1)
    """the name of the key in builds since 2025: such a collective is not cut into chunks, and groups run it too"""
    all_gather_implementation_custom: tuple[str, ...] = Field((), max_length=1)
    reduce_scatter_implementation_custom: tuple[str, ...] = Field((), max_length=1)
    all_to_all_implementation_custom: tuple[str, ...] = Field((), max_length=1)
    per_node_custom_implementation: str = ""
    """YAML file: number of a collective's node -> prefix of the traces that it runs"""
    local_mem_bw: float = Field(0.0, ge=0, le=1e12)
    """GB/s of 1e9 bytes"""
    peak_perf: float = Field(0.0, ge=0, le=1e12)
    """TFLOPS"""
    roofline_enabled: bool = False
    replay_only: bool = False
    track_local_mem: bool = False
    model_shared_bus: bool = False

    @field_validator("roofline_enabled", "replay_only", "track_local_mem", "model_shared_bus", mode="before")
    @classmethod
    def _flag(cls, value: Any) -> Any:
        return value != 0 if isinstance(value, int) else value

    @field_validator(*(f"{name}_implementation" for name in _COLLECTIVES), mode="after")
    @classmethod
    def _implementations(cls, value: Any) -> Any:
        for name in value:
            if not _IMPLEMENTATION.fullmatch(name):
                raise ValueError(f"collective implementation {name!r} is unknown; known: {KNOWN}")
        return value

    @field_validator("model_shared_bus", mode="after")
    @classmethod
    def _no_bus(cls, value: bool) -> bool:
        if value:
            raise ValueError("a shared memory bus is not simulated; set model-shared-bus to 0")
        return value

    def custom_implementation(self, collective: str) -> str:
        """Returns the prefix of the traces that a collective runs uncut, "" for none."""
        return next(iter(getattr(self, f"{collective}_implementation_custom", ())), "")

    @cached_property
    def custom_of_nodes(self) -> dict[int, str]:
        """Returns the prefix of the traces that single nodes run, by node number.

        Raises ForerunError for a file that can't be read or lists something else.
        """
        path = self.per_node_custom_implementation
        found = read_any_yaml(path) if path else {}
        if not isinstance(found, dict) or not all(type(k) is int and isinstance(v, str) for k, v in found.items()):
            raise ForerunError(f"{path}: expected numbers of nodes with the prefix of their traces, as 12: traces/ring")
        return found

    @property
    def has_custom(self) -> bool:
        """Returns whether some collective runs traces uncut."""
        named = any(self.custom_implementation(name) for name in _COLLECTIVES)
        return named or bool(self.per_node_custom_implementation)

    def group_implementation(self, collective: str) -> str:
        """Returns the algorithm of a group smaller than the system in builds with `group_algorithm: own`.

        That is the algorithm of the system file where it names a single one, and the ring where it has one for each
        dimension. Raises ForerunError if it names none.
        """
        named: tuple[str, ...] = getattr(self, f"{collective}_implementation")
        if not named:
            raise ForerunError(f"the system file has no {collective.replace('_', '-')}-implementation")
        one = named[0][3:4].lower() + named[0][4:] if named[0].startswith("one") else named[0]
        return one if len(named) == 1 else "ring"

    @property
    def groups_run_rings(self) -> bool:
        """Returns whether `group_implementation` is the ring for every collective."""
        given = [name for name in _COLLECTIVES if getattr(self, f"{name}_implementation")]
        return len(given) == len(_COLLECTIVES) and all(self.group_implementation(name) == "ring" for name in given)

    @property
    def memory_bytes_per_s(self) -> float:
        return self.local_mem_bw * 1e9

    @property
    def peak_flops(self) -> float:
        return self.peak_perf * 1e12


def window(implementation: str) -> int:
    """Returns the window of a direct algorithm, -1 for all peers at once."""
    match = _IMPLEMENTATION.fullmatch(implementation)
    return int(match[3]) if match and match[3] else -1


def read_system(path: str | Path) -> System:
    """Reads the system file at `path`. Raises ForerunError if it can't be read, is not JSON, or has a wrong value."""
    return system_from(read_json(path), str(path))


def system_from(data: Any, place: str) -> System:
    """Makes a System of the mapping in a system file, which errors call `place`."""
    if not isinstance(data, dict):
        raise ForerunError(f"{place}: a system file must be one JSON object")
    try:
        return System.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ForerunError(f"{place}: {key}: {first['msg']}, got {str(first['input'])[:60]!r}") from None
