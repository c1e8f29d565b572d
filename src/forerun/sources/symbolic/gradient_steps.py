"""Gradients of a rank: summed over micro batches, collected in buckets, and reduced over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable

from forerun.core.program.types import Block
from forerun.describe.plan import rules
from forerun.sources.symbolic import data_parallel
from forerun.sources.symbolic.data_parallel import DataParallel
from forerun.sources.symbolic.kernels import PlanKernels
from forerun.sources.symbolic.steps import Part, Steps
from forerun.sources.symbolic.weights import Weights


class GradientSteps:
    """Appends the steps of gradients, and keeps the blocks that rank classes share."""

    def __init__(self, kernels: PlanKernels, parallel: DataParallel, add: Callable[[Block | None], int]) -> None:
        """`add` appends a block to the Program and returns its number."""
        plan, stack = kernels.plan, kernels.stack
        self.parallel, self.add, self.n_microbatches = parallel, add, plan.n_microbatches
        self.reduces_every_microbatch = bool(rules.reduces_every_microbatch(plan, stack))
        self.overlap = plan.overlap_grad_reduce and stack.grad_reduce_overlap
        self._full_bytes = parallel.bucket_bytes
        self._buckets: dict[tuple[int, ...], int] = {}
        self._forgotten: dict[int, int] = {}
        """bytes of a buffer -> number of the block that frees it"""

    def take(self, steps: Steps, part: Part, first: bool, last: bool) -> None:
        """Appends the work on a unit's gradients after its backward pass of the first or last micro batch."""
        around = part.parallel
        if self.reduces_every_microbatch:
            self._reduce(steps, part, "reduce_first" if first else "reduce")
            return
        if not self.parallel.fsdp:
            steps.add(around["accumulate_first" if first else "accumulate", 0, 0], part.layer)
            if last and self.overlap:
                self._bucket(steps, part)
        elif self.n_microbatches == 1:
            self._reduce(steps, part, "reduce_first")
        else:
            steps.add(around["accumulate_first" if first else "accumulate", 0, 0], part.layer)
            if last:
                self._reduce(steps, part, "reduce_accumulated")

    def _reduce(self, steps: Steps, part: Part, action: data_parallel.Action) -> None:
        if not part.gradients:  # all of its weights are frozen
            return
        steps.add(part.parallel[action, 0, steps.reducing], part.layer)
        if self.parallel.buffers:
            steps.reducing = part.gradients * self.parallel.reduce_bytes

    def let_go(self, steps: Steps) -> None:
        """Frees the buffer of the last reduction at the end of the backward pass."""
        if not steps.reducing:
            return
        if steps.reducing not in self._forgotten:
            self._forgotten[steps.reducing] = self.add(self.parallel.let_go(steps.reducing))
        steps.add(self._forgotten[steps.reducing])
        steps.reducing = 0

    def _bucket(self, steps: Steps, part: Part) -> None:
        """Adds a unit's gradients to the bucket and reduces it when it is full."""
        if not part.gradients:
            return
        steps.bucket.append(part.unit)
        steps.waiting += part.gradients
        if steps.waiting * self.parallel.reduce_bytes >= self._full_bytes:
            self.reduce_bucket(steps)

    def reduce_bucket(self, steps: Steps) -> None:
        key = tuple([id(unit) for unit in steps.bucket])
        if key not in self._buckets:
            name = "reduce " + ", ".join(dict.fromkeys(unit.name for unit in steps.bucket))
            weights = Weights.joined(unit.weights for unit in steps.bucket)
            self._buckets[key] = self.add(self.parallel.reduce_replicated(name, weights, self._full_bytes))
        steps.add(self._buckets[key])
        steps.bucket.clear()
        steps.waiting = 0

    def finish(self, steps: Steps, weights: Weights) -> None:
        """Appends the reductions that are left after the last micro batch; `weights` are all of the rank."""
        if steps.bucket:
            self.reduce_bucket(steps)
        if not self.parallel.fsdp and not self.overlap:
            steps.add(self.add(self.parallel.reduce_replicated("reduce at the end", weights)))
