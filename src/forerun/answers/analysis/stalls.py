"""loop_time: the time that the periodic work of a training loop adds to a simulated step.

A simulated step begins with an idle device, as in training loops that read a value from the device in every step
(torchtitan the number of tokens, simple_pytorch the loss). Work of the host between two steps therefore stalls the
device for its whole time. Work of the host inside a step, such as recording, is simulated: a busy device hides it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

import numpy as np

from forerun.answers.analysis.loop_time import CheckpointTimes, LoopTime, Stall
from forerun.answers.analysis.reading import Simulation
from forerun.common.units import GIB, GIGA, PS_PER_S
from forerun.core.cost.checkpoint import SavedState, load_s, save_cost
from forerun.core.cost.memory_bound import memory_rates
from forerun.core.cost.periodic import PeriodicConstants, periodic_constants
from forerun.core.engine.simulate import simulate as run_engine
from forerun.core.network.nccl import collective_s
from forerun.core.program.counts import op_counts
from forerun.core.program.groups import CommGroup
from forerun.core.program.origin import Origin
from forerun.core.program.types import Block, Collective, Phase, Program
from forerun.describe.cluster.storage import Storage, usual_storage
from forerun.describe.cluster.types import Cluster
from forerun.describe.plan.training_loop import TrainingLoop

_NUMBER_BYTES = 4
_ALL_DATA = "dp_all"
"""name of the group, in a plan's Program, of all ranks whose losses differ"""


def loop_time(
    simulation: Simulation,
    program: Program,
    cluster: Cluster,
    loop: TrainingLoop,
    saved: SavedState,
    storage: Storage | None = None,
) -> LoopTime:
    """Returns the mean step of `loop`, given its plain step in `simulation`.

    Args:
        program: the simulated Program, before folding.
        saved: the state that a checkpoint of the run saves.
        storage: the storage that checkpoints go to; None for the one in cluster/presets/storage.yaml.
    """
    prediction = simulation.prediction
    work = _Work(simulation, program, cluster, periodic_constants())
    stalls: list[Stall] = []
    checkpoint = None
    if loop.checkpoint:
        found, checkpoint = _checkpoint(work, loop, saved, storage or usual_storage())
        stalls.append(found)
    if loop.profile:
        stalls.append(Stall("profile", loop.profile, work.profile_s(loop.profiler_active)))
    if loop.memory_snapshot:
        stalls.append(Stall("memory_snapshot, recording", 1, work.history_s()))
        stalls.append(Stall("memory_snapshot", loop.memory_snapshot, work.snapshot_s(loop.memory_snapshot)))
    if loop.gc:
        stalls.append(Stall("gc", loop.gc, work.constants.gc.collection_s(work.regions * loop.gc)))
    if loop.metrics:
        stalls.append(Stall("metrics", loop.metrics, work.metrics_s()))
    plain = LoopTime(tuple(stalls), prediction.step_time_s, None, checkpoint)
    if prediction.tokens_per_s_per_gpu is None:
        return plain
    pace = prediction.tokens_per_s_per_gpu * prediction.step_time_s / plain.mean_step_time_s
    return LoopTime(plain.stalls, plain.step_time_s, pace, checkpoint)


def _checkpoint(work: _Work, loop: TrainingLoop, saved: SavedState, storage: Storage) -> tuple[Stall, CheckpointTimes]:
    link = work.host_bytes_per_s
    interval_s = loop.checkpoint * work.simulation.prediction.step_time_s
    cost = save_cost(saved, storage, link, loop.checkpoint_mode, work.before_optimizer_s, interval_s)
    collections = {"disabled": 1, "async": 2, "async_with_pinned_mem": 1}[loop.checkpoint_mode]
    collect_s = collections * work.constants.gc.collection_s(0) if loop.gc else 0.0
    times = CheckpointTimes(
        mode=loop.checkpoint_mode,
        rank_gib=saved.saved_bytes / GIB,
        total_gib=saved.total_bytes / GIB,
        save_s=save_cost(saved, storage, link, loop.checkpoint_mode, work.before_optimizer_s).whole_s,
        load_s=load_s(saved, storage, link),
        storage=_words(storage),
    )
    return Stall("checkpoint", loop.checkpoint, cost.stall_s + collect_s, cost.beside_s), times


def _words(storage: Storage) -> str:
    in_all = "" if storage.bytes_per_s_total == inf else f", {storage.bytes_per_s_total / GIGA:g} GB/s in all"
    return f"{storage.bytes_per_s_per_rank / GIGA:g} GB/s a rank{in_all}{', assumed' if storage.source else ''}"


@dataclass(frozen=True, slots=True)
class _Work:
    """The figures of a step that the cost of periodic work depends on, on the busiest rank class."""

    simulation: Simulation
    program: Program
    cluster: Cluster
    constants: PeriodicConstants

    @property
    def host_bytes_per_s(self) -> float:
        """Returns the bandwidth of copies to pinned host memory."""
        return memory_rates(self.cluster.device).host_fraction * self.cluster.host_bytes_per_s

    @property
    def before_optimizer_s(self) -> float:
        """Returns the time of the slowest rank until its optimizer begins; the whole step where no rank has one."""
        flat, timeline = self.simulation.flat, self.simulation.timeline
        first, end = flat.class_ptr[self.simulation.slowest : self.simulation.slowest + 2]
        starts = timeline.start_ps[first:end][flat.phase[first:end] == Phase.OPTIMIZER]
        return int(starts.min(initial=timeline.end_of_step_ps)) / PS_PER_S

    @property
    def in_graphs(self) -> bool:
        """Returns whether the host launches CUDA graphs, whose kernels it never sees."""
        return self.simulation.subject.launching.cuda_graphs

    @property
    def launches(self) -> int:
        """Returns the number of kernels, copies and collectives of a step."""
        return int((op_counts(self.program) @ self.program.ops.launches.astype(np.int64)).max(initial=0))

    @property
    def regions(self) -> int:
        """Returns the number of recomputed parts of a step."""
        return self._most(int((block.phase == Phase.RECOMPUTE).any()) for block in self.program.blocks)

    @property
    def allocations(self) -> int:
        """Returns the number of allocations and frees of a step."""
        return self._most(_events(block) for block in self.program.blocks)

    def _most(self, of_blocks: Iterable[int]) -> int:
        """Sums `of_blocks`, a number for each block, over a step, in the rank class where the sum is largest."""
        counts = np.array([*of_blocks, 0], np.int64)
        return max(int(counts[cls.block].sum()) for cls in self.program.rank_classes)

    def profile_s(self, steps: int) -> float:
        """Returns the seconds that one trace of `steps` steps adds."""
        profiler = self.constants.profile
        launches = self.launches
        recording_s = 0.0 if self.in_graphs else profiler.recording_s(launches)
        seen = launches / profiler.events_per_launch if self.in_graphs else launches  # kernels, without their launches
        return steps * (self._slower_step_s(recording_s) + profiler.export_s(seen))

    def history_s(self) -> float:
        """Returns the seconds that recording allocations adds to a step."""
        return self._slower_step_s(self.constants.memory_snapshot.recording_s(self.allocations))

    def snapshot_s(self, every_steps: int) -> float:
        """Returns the seconds of writing the history of `every_steps` steps to a file."""
        return self.constants.memory_snapshot.dump_s(self.allocations * every_steps)

    def metrics_s(self) -> float:
        """Returns the seconds of logging the metrics once."""
        group = _loss_group(self.program)
        reduction_s = 0.0
        if group is not None:
            reduction_s = float(collective_s(Collective.ALL_REDUCE, _NUMBER_BYTES, group, self.cluster))
        return self.constants.metrics.log_s(reduction_s)

    def _slower_step_s(self, host_s: float) -> float:
        """Returns the seconds that a step takes longer when all its launches together take the host `host_s` more."""
        flat, costs, timeline = self.simulation.flat, self.simulation.costs, self.simulation.timeline
        first, end = flat.class_ptr[self.simulation.slowest : self.simulation.slowest + 2]
        issue_ps = int(costs.issue_ps[flat.op[first:end]].sum())
        if issue_ps == 0 or host_s == 0:
            return host_s
        slower = np.rint(costs.issue_ps * (1.0 + host_s * PS_PER_S / issue_ps)).astype(np.int64)
        rest = (costs.slow_compute, costs.slow_network, costs.network_op)
        then = run_engine(flat, costs.duration_ps, slower, *rest)
        return max(0, then.end_of_step_ps - timeline.end_of_step_ps) / PS_PER_S


def _events(block: Block) -> int:
    return int((block.tensor_alloc >= 0).sum() + (block.tensor_free >= 0).sum())


def _loss_group(program: Program) -> CommGroup | None:
    """Returns the largest group of ranks whose losses differ; None if there is only one such rank."""
    numbers = Origin.of(program).data_parallel
    if numbers is None:
        groups = [group for group in program.groups if group.axis == _ALL_DATA]
    else:
        groups = [program.groups[number] for number in numbers]
    largest = max(groups, key=lambda group: group.size, default=None)
    return largest if largest is not None and largest.size > 1 else None
