"""Blocks that move activations and gradients between pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from forerun.core.program.builder import BlockBuilder
from forerun.core.program.types import Block, Category, Channel, Phase, Stream
from forerun.describe.plan.plan import V_SCHEDULES
from forerun.sources.symbolic.kernels import PlanKernels
from forerun.sources.symbolic.schedule import stage_rank

ARRIVED, ARRIVED_GRAD, SENT = 3, 4, 5
"""event slots that arrivals and sends record"""


_STREAMS = {
    (True, False, False): Stream.PP_SEND,
    (False, False, False): Stream.PP_RECV,
    (True, True, False): Stream.PP_SEND_GRAD,
    (False, True, False): Stream.PP_RECV_GRAD,
    (True, False, True): Stream.PP_SEND_BACK,
    (False, False, True): Stream.PP_RECV_BACK,
    (True, True, True): Stream.PP_SEND_GRAD_BACK,
    (False, True, True): Stream.PP_RECV_GRAD_BACK,
}
"""(sends, moves gradients, on the way up of a V schedule) -> stream"""


class Wires:
    """Channels and blocks of the stage borders of one plan."""

    def __init__(self, kernels: PlanKernels, add_block: Callable[[Block], int], carried: Sequence[int]) -> None:
        """`carried` are the bytes that cross each border beside the output of the layer before it."""
        self.carried = carried
        self.kernels, self.add_block = kernels, add_block
        self.channels: list[Channel] = []
        self._numbers: dict[tuple[str, int], int] = {}
        self._blocks: dict[tuple[str, str, int], int] = {}
        self.size_bytes = kernels.border_bytes
        """bytes of the output of a stage's last layer"""
        plan = kernels.plan
        ranks = [stage_rank(plan, stage) for stage in range(plan.n_stages)]
        self._crosses = [a != b for a, b in pairwise(ranks)]
        receivers = [("F", stage + 1, "activations") for stage in range(plan.n_stages - 1)]
        receivers += [("B", stage, "gradients") for stage in range(plan.n_stages - 1)]
        self.needs = {
            (kind, stage): what
            for (kind, stage, what), crosses in zip(receivers, 2 * self._crosses, strict=True)
            if crosses
        }
        """(kind of a pass, stage) -> the message of another rank for which it waits, if there is one"""

    @property
    def _is_v(self) -> bool:
        return self.kernels.plan.pp_schedule in V_SCHEDULES

    @property
    def _syncs(self) -> bool:
        syncs = self.kernels.stack.p2p_syncs
        return syncs == "always" or (syncs == "uninterleaved" and self.kernels.plan.virtual_stages == 1)

    def crosses(self, stage: int) -> bool:
        """Says whether the border between `stage` and the next lies between two ranks."""
        return self._crosses[stage]

    def _channel(self, what: str, stage: int) -> int:
        key = (what, stage)
        if key not in self._numbers:
            plan = self.kernels.plan
            members = tuple(sorted((stage_rank(plan, stage), stage_rank(plan, stage + 1))))
            self._numbers[key] = len(self.channels)
            self.channels.append(Channel(f"{what} between stages {stage} and {stage + 1}", members))
        return self._numbers[key]

    def _op(self, what: str, stage: int) -> int:
        kernels, plan = self.kernels, self.kernels.plan
        a, b = sorted((stage_rank(plan, stage), stage_rank(plan, stage + 1)))
        per_node = kernels.groups[kernels.group_index["pp"]].ranks_per_node
        near = a // per_node == b // per_node
        return kernels.p2p("pipeline." + what, "pp_near" if near else "pp_far", self._sent_bytes(stage))

    def _sent_bytes(self, stage: int) -> int:
        """Returns the bytes that cross the border after `stage` in either direction."""
        return self.size_bytes + self.carried[stage]

    def block(self, action: str, what: str, stage: int) -> int:
        """Returns the number of the block that does `action` (send, recv) of `what` over the border after `stage`.

        `what` is activations or gradients.
        """
        key = (action, what, stage)
        if key not in self._blocks:
            self._blocks[key] = self.add_block(self._build(action, what, stage))
        return self._blocks[key]

    def _build(self, action: str, what: str, stage: int) -> Block:
        grad = what == "gradients"
        back = stage_rank(self.kernels.plan, stage) > stage_rank(self.kernels.plan, stage + 1) and self._is_v
        stream = _STREAMS[action == "send", grad, back]
        slot = SENT if action == "send" else ARRIVED_GRAD if grad else ARRIVED
        phase = Phase.BACKWARD if grad else Phase.FORWARD
        block = BlockBuilder()
        start = block.node(self.kernels.marker, Stream.COMPUTE, phase)
        block.node(
            self._op(what, stage), stream, phase, after=(start,), record=slot, channel=self._channel(what, stage)
        )
        if action == "recv" and not self.kernels.stack.pipeline_keeps:
            block.tensor(self._sent_bytes(stage) if grad else self.size_bytes, Category.COMMUNICATION, 0, 1)
        if action == "send" and not grad and self.kernels.stack.pipeline_keeps:
            block.tensor(self.size_bytes, Category.ACTIVATION, 0, -1)
        if self.carried[stage] and not self.kernels.stack.pipeline_keeps:  # layers of the stage behind read it later
            if action == "recv" and not grad:
                block.tensor(self.carried[stage], Category.ACTIVATION, 0, -1)
            if action == "send" and grad:
                block.tensor(self.carried[stage], Category.ACTIVATION, -1, 1)
        return block.build(f"{action} {what}")

    def forget(self) -> int:
        """Returns the number of the block that frees the output of a stage, which has been sent."""
        key = ("forget", "activations", 0)
        if key not in self._blocks:
            block = BlockBuilder()
            block.node(self.kernels.marker)
            block.tensor(self.size_bytes, Category.ACTIVATION, -1, 0)
            self._blocks[key] = self.add_block(block.build("forget output"))
        return self._blocks[key]

    def buffer_bytes(self, stages: list[int]) -> int:
        """Returns the bytes of the receive buffers that these stages of a rank keep."""
        plan = self.kernels.plan
        if not self.kernels.stack.pipeline_keeps:
            return 0
        before = [stage - 1 for stage in stages if stage > 0]
        behind = [stage for stage in stages if stage < plan.n_stages - 1]
        received = sum(self._sent_bytes(border) for border in (*before, *behind) if self.crosses(border))
        return received * plan.n_microbatches

    def read_loss(self) -> int:
        """Returns the number of the block in which the host waits until the device has computed a loss."""
        key = ("read loss", "loss", 0)
        if key not in self._blocks:
            block = BlockBuilder()
            block.node(self.kernels.marker, sync=True)
            self._blocks[key] = self.add_block(block.build("read loss"))
        return self._blocks[key]

    def wait(self, forward: bool, backward: bool, sent: bool) -> int:
        """Returns the number of the block in which compute waits for arrivals and, where `sent`, for its own sends.

        Where the framework synchronizes after an exchange, the host waits too.
        """
        key = ("wait", f"{forward}{backward}{sent}", 0)
        if key not in self._blocks:
            slots = [ARRIVED] * forward + [ARRIVED_GRAD] * backward + [SENT] * sent
            block = BlockBuilder()
            block.node(self.kernels.marker, wait=slots, sync=self._syncs)
            self._blocks[key] = self.add_block(block.build("wait"))
        return self._blocks[key]
