"""A profile of one rank: the output of PyTorch's profiler, in columns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.sources.profile.event_keys import Key
from forerun.sources.profile.scan import Extras, Rows

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

GPU_WORK = frozenset(("kernel", "Kernel", "gpu_memcpy", "Memcpy", "gpu_memset", "Memset", "mtia_ccp_events"))
"""categories of events that run on a device; the capitals are those of 2021"""
CALLS = frozenset(("cuda_runtime", "cuda_driver", "Runtime", "mtia_runtime", "xpu_runtime", "xpu_driver"))
"""categories of calls that the host makes to the device's runtime; ROCm's too are `cuda_runtime`"""
OPERATORS = frozenset(("cpu_op", "Operator"))
STEP = "ProfilerStep"
_ON_DEVICE = 1
"""PyTorch's number of the device type CUDA, which ROCm uses too"""


@dataclass(frozen=True)
class Profile:
    """The events of one file that have a duration, and its memory events, in the order of the file."""

    path: str
    rank: int
    metadata: dict[str, Any]
    """all that stands beside `traceEvents`"""
    texts: tuple[str, ...]
    rows: Rows
    """columns; times are nanoseconds since `baseTimeNanoseconds` of the metadata, or since 1970"""
    extras: Extras
    n_events: int
    """entries of `traceEvents`"""
    without_duration: int
    """complete events that say no duration, which are left out"""
    fractional: bool
    """whether a time has a fraction of a microsecond, as since torch 2.3"""

    def __len__(self) -> int:
        return len(self.rows.place)

    def text_mask(self, wanted: Any) -> Mask:
        """Returns the mask (texts,) of the texts for which `wanted` answers True."""
        return np.fromiter((bool(wanted(text)) for text in self.texts), np.bool_, len(self.texts))

    def in_categories(self, categories: frozenset[str]) -> Mask:
        """Returns the mask (rows,) of the events of these categories; memory events are in none."""
        return np.asarray(self.text_mask(categories.__contains__)[self.rows.cat] & (self.rows.dur_ns >= 0))

    def values(self, key: Key, missing: float) -> F64:
        """Returns an argument of every row, (rows,). Rows without it get `missing`. Of doubles the last one counts."""
        column = np.full(len(self), missing)
        wanted = self.extras.key == key
        column[self.extras.row[wanted]] = self.extras.value[wanted]
        return column

    @cached_property
    def is_gpu_work(self) -> Mask:
        """Returns the mask (rows,) of kernels, copies and fills."""
        return self.in_categories(GPU_WORK)

    @cached_property
    def is_call(self) -> Mask:
        """Returns the mask (rows,) of calls to the device's runtime."""
        return self.in_categories(CALLS)

    @cached_property
    def is_operator(self) -> Mask:
        """Returns the mask (rows,) of PyTorch's operators."""
        return self.in_categories(OPERATORS)

    @cached_property
    def steps(self) -> I64:
        """Returns the rows of the profiler's steps on the host, in order of time."""
        named = self.text_mask(lambda text: text.startswith(STEP))[self.rows.name]
        on_host = ~self.in_categories(frozenset(("gpu_user_annotation",)))
        found = np.flatnonzero(named & on_host & (self.rows.dur_ns >= 0))
        return np.asarray(found[np.argsort(self.rows.ts_ns[found], kind="stable")])

    def device_peak_bytes(self, key: Key) -> int | None:
        """Returns the largest total of the device's memory, allocated or reserved; None if it is not recorded."""
        total = self.values(key, -1)
        on_device = (self.values(Key.DEVICE_TYPE, -1) == _ON_DEVICE) & (total >= 0)
        return int(total[on_device].max()) if on_device.any() else None

    @property
    def world_size(self) -> int | None:
        """Returns the number of ranks of the run, None if the file does not say."""
        return _whole(self._distributed.get("world_size"))

    @property
    def device_names(self) -> tuple[str, ...]:
        """Names of the devices that the host sees."""
        devices = self.metadata.get("deviceProperties")
        if not isinstance(devices, list):
            return ()
        return tuple(str(one.get("name", "?")) for one in devices if isinstance(one, dict))

    @property
    def base_ns(self) -> int:
        """Returns the time of the clock at which the file's times begin, 0 if they are times of the clock."""
        return _whole(self.metadata.get("baseTimeNanoseconds")) or 0

    @property
    def _distributed(self) -> dict[str, Any]:
        return distributed_info(self.metadata)


def distributed_info(metadata: dict[str, Any]) -> dict[str, Any]:
    """Returns the file's entries on the ranks of the run. The dict is empty if there are none."""
    found = metadata.get("distributedInfo")
    return found if isinstance(found, dict) else {}


def stated_rank(metadata: dict[str, Any]) -> int | None:
    """Returns the rank that a file states. Returns None if it states none."""
    return _whole(distributed_info(metadata).get("rank"))


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
