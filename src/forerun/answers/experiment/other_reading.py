"""other_reading: the step time of a run if a bandwidth without a unit means bytes instead of bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.answers.experiment.description.read import changed
from forerun.answers.experiment.request import Request
from forerun.common.errors import ForerunError
from forerun.describe.cluster.schema import BITS_PER_BYTE
from forerun.describe.model.fields import exponent_number

_KEY = "network_bandwidth_gbps"


@dataclass(frozen=True)
class OtherReading:
    """Both readings of a bandwidth that a file gives as a bare number."""

    number: float
    """as the file has it"""
    gbit_step_s: float
    """an undisturbed step where it counts 10**9 bits a second, as it was read"""
    gbyte_step_s: float
    """the same where it counts 10**9 bytes a second"""

    @property
    def text(self) -> str:
        """Returns both readings in one line, and says how to choose."""
        n = f"{self.number:g}"
        return (
            f"{_KEY} {n} is read as {n} Gbit/s ({self.number / BITS_PER_BYTE:g} GB/s), a step of"
            f" {_shown(self.gbit_step_s)}; as {n} GB/s a step takes {_shown(self.gbyte_step_s)}. To choose, write"
            f" network_bandwidth: {n} Gbit/s or network_bandwidth: {n} GB/s"
        )


def other_reading(request: Request) -> OtherReading | None:
    """Simulates an undisturbed step with either reading.

    None if the file states a unit or no bandwidth, or where nothing depends on it.
    """
    given = exponent_number(request.given.get("hardware", {}).get(_KEY))
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        return None
    if request.setup.n_gpus <= request.setup.cluster.node_size:
        return None
    try:
        other = changed(request, {f"hardware.{_KEY}": f"{given} GB/s"})
    except ForerunError:
        return None  # no link has such a bandwidth
    own_s, other_s = _step_s(request), _step_s(other)
    return None if own_s == other_s else OtherReading(float(given), own_s, other_s)


def _step_s(request: Request) -> float:
    setup = replace(request.setup, replays=False)  # a replay of the allocator changes no time
    return simulate_setup(setup, folded=True).prediction.step_time_s


def _shown(time_s: float) -> str:
    return f"{time_s:.4g} s" if time_s >= 1 else f"{time_s * 1e3:.4g} ms"
