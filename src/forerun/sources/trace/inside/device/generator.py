"""The random number generator of the virtual device."""

from __future__ import annotations

import time
from typing import Any

import torch


class DeviceGenerator(torch.Generator):
    """A generator of the device: seed and offset (Philox), which programs save and restore."""

    def __init__(self) -> None:
        self._seed, self._offset = 0, 0

    def manual_seed(self, seed: int) -> DeviceGenerator:
        self._seed, self._offset = int(seed) & (1 << 64) - 1, 0
        torch.Generator.manual_seed(self, self._seed)
        return self

    def seed(self) -> int:
        return self.manual_seed(time.time_ns() & (1 << 63) - 1)._seed

    def initial_seed(self) -> int:
        return self._seed

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int) -> DeviceGenerator:
        self._offset = int(offset)
        return self

    def get_state(self) -> torch.Tensor:
        """Returns 16 bytes, as generators of CUDA do."""
        data = self._seed.to_bytes(8, "little") + self._offset.to_bytes(8, "little")
        return torch.tensor(list(data), dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> DeviceGenerator:
        data = bytes(state.flatten()[:16].tolist())
        self.manual_seed(int.from_bytes(data[:8], "little"))
        self._offset = int.from_bytes(data[8:], "little")
        return self

    def graphsafe_get_state(self) -> DeviceGenerator:
        return self

    def graphsafe_set_state(self, _state: Any) -> DeviceGenerator:
        return self
