"""The seconds that saving and loading a checkpoint takes over a host link and a storage.

A checkpoint holds the weights that the optimizer updates, its states, and the low-precision copy of the weights where
there is one. Ranks that hold the same bytes save each of them once, in equal shares
(torch.distributed.checkpoint, planner `dedup_save_plans`); on loading every rank reads all that it holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from forerun.common.units import US
from forerun.core.cost.periodic import periodic_constants
from forerun.describe.cluster.storage import Storage
from forerun.describe.plan.training_loop import CheckpointMode


@dataclass(frozen=True, slots=True)
class SavedState:
    """The bytes and tensors of a checkpoint."""

    saved_bytes: float
    """bytes that the rank with most saves"""
    total_bytes: float
    """bytes of the whole checkpoint"""
    held_bytes: float
    """bytes that the rank with most holds and loads"""
    held_total_bytes: float
    """bytes that all ranks load"""
    tensors: int
    """tensors of one rank; 0 if the number is unknown"""


@dataclass(frozen=True, slots=True)
class SaveCost:
    """The seconds of one save."""

    stall_s: float
    """seconds in which the training loop waits"""
    beside_s: float
    """seconds of copies and writes beside the next steps"""

    @property
    def whole_s(self) -> float:
        """Returns the seconds from the start of the save until the checkpoint is complete."""
        return self.stall_s + self.beside_s


def save_cost(
    state: SavedState,
    storage: Storage,
    host_bytes_per_s: float,
    mode: CheckpointMode,
    cover_s: float = 0.0,
    interval_s: float = math.inf,
) -> SaveCost:
    """Returns the seconds of one save.

    Args:
        host_bytes_per_s: rate of a rank's copies to pinned host memory.
        mode: `disabled` writes while it copies, and the loop waits for both; `async` waits for a copy into new host
            memory, and writes beside the next steps; `async_with_pinned_mem` also copies beside the next step, into
            pinned memory, and waits for the rest of the copy before the optimizer changes the parameters.
        cover_s: seconds of a step before its optimizer begins, beside which pinned copies run.
        interval_s: seconds of the steps between two saves; a save first waits until the one before it is complete.
    """
    constants = periodic_constants().checkpoint
    write_s = storage.transfer_s(state.saved_bytes, state.total_bytes)
    write_s += state.tensors * constants.save_us_per_tensor * US
    copy_s = state.saved_bytes / host_bytes_per_s
    if mode == "disabled":
        return SaveCost(max(copy_s, write_s), 0.0)
    stage_s = state.tensors * constants.stage_us_per_tensor * US
    if mode == "async":
        copy_s = max(copy_s, state.saved_bytes / constants.new_memory_bytes_per_s)
        stall_s, beside_s = stage_s + copy_s, write_s
    else:
        hidden_s = min(copy_s, cover_s)
        stall_s, beside_s = stage_s + copy_s - hidden_s, hidden_s + write_s
    late_s = max(0.0, beside_s - interval_s)
    return SaveCost(stall_s + late_s, beside_s - late_s)


def load_s(state: SavedState, storage: Storage, host_bytes_per_s: float) -> float:
    """Returns the seconds to load a checkpoint: every rank reads all that it holds and copies it to its device."""
    read_s = storage.transfer_s(state.held_bytes, state.held_total_bytes)
    host_s = state.tensors * periodic_constants().checkpoint.load_us_per_tensor * US
    return read_s + host_s + state.held_bytes / host_bytes_per_s
