"""Communication patterns of one's own: as rounds of messages, and as a function of bytes and ranks.

An experiment file names them, too: `communication_pattern: own_patterns.py:Butterfly`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log2

from forerun.core.network.patterns_messages import Message, MessagePattern
from forerun.core.program.groups import CommGroup
from forerun.interfaces.experiments import Experiment


class Butterfly(MessagePattern):
    """Recursive doubling: in round k every rank exchanges all it has with the one that differs in bit k."""

    name = "butterfly"

    def rounds(self, group: CommGroup, size_bytes: float) -> Iterator[list[Message]]:
        for bit in range(int(log2(group.size))):
            yield [(rank, rank ^ (1 << bit), size_bytes) for rank in range(group.size)]


def in_the_switch(size_bytes: float, n_ranks: int) -> float:
    """Switches that sum: a node sends its gradients once over 8 NICs of 100 Gb/s, and gets the sum. Seconds."""
    return 10e-6 * log2(n_ranks) + size_bytes / (8 * 12.5e9)


if __name__ == "__main__":
    for pattern in ("nccl", "ring_allreduce", "parameter_server", Butterfly, in_the_switch):
        experiment = Experiment.from_dict(
            {
                "hardware": {"gpu_model": "A100", "network_bandwidth_gbps": 800},
                "model": {"model_type": "gpt2"},
                "training": {"batch_size_per_gpu": 8, "num_nodes": 4, "communication_pattern": pattern},
                "network": {"topology_type": "fat_tree"},
            }
        )
        summary = experiment.run().summary()
        name = pattern if isinstance(pattern, str) else pattern.__name__
        print(f"{name:18} {summary['step_mean_s'] * 1e3:8.1f} ms a step, MFU {summary['mfu']:.1%}")
