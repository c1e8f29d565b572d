"""An experiment with a layer, a communication pattern and an event handler of one's own."""

from __future__ import annotations

import forerun
from forerun.answers.experiment.conditions import Conditions
from forerun.answers.experiment.handlers import EventHandler, on
from forerun.answers.experiment.result import Iteration
from forerun.core.network.patterns_messages import MessagePattern, Round
from forerun.core.program.groups import CommGroup
from forerun.describe.model.layered import Layer, LayeredModel, Matmul, Traffic, function_layer


class Mixer(Layer):
    """Mixes tokens by a matrix: what it runs for a number of samples is all that a layer has to say."""

    def forward(self, samples: int) -> list[Matmul | Traffic]:
        tokens, width = self.input_shape
        return [Matmul(samples * width, tokens, tokens), Traffic(samples * tokens * width, samples * tokens * width)]


def dense(samples: int) -> list[Matmul]:
    """The same as a plain function."""
    return [Matmul(samples * 256, 1024, 1024)]


def model() -> LayeredModel:
    layers = []
    for number in range(12):
        layers.append(Mixer(f"mixer {number}", "custom", (256, 1024), (256, 1024), parameters=(256 * 256,)))
        layers.append(function_layer(f"dense {number}", (256, 1024), (256, 1024), dense, parameters=(1024 * 1024,)))
    head = function_layer("head", (256, 1024), (1000,), lambda samples: [Matmul(samples, 1000, 1024)])
    return LayeredModel("mixer-12", (*layers, head))


class ToNodeZero(MessagePattern):
    """Every rank sends its gradients to rank 0, which sends the sum back: two rounds of messages."""

    name = "to rank 0 and back"

    def rounds(self, group: CommGroup, size_bytes: float) -> list[Round]:
        others = range(1, group.size)
        return [Round([(rank, 0, size_bytes) for rank in others]), Round([(0, rank, size_bytes) for rank in others])]


class Throttling(EventHandler):
    """From iteration 50 on, GPU 3 is hot: what comes back replaces the conditions of the iteration."""

    def on_iteration_start(self, iteration: int, conditions: Conditions) -> Conditions | None:
        return conditions.slow(3, 1.2, "GPU 3 throttles") if iteration >= 50 else None


slow = []


@on("iteration_end")
def remember(iteration: Iteration) -> None:
    """The same as a plain function, for one kind of event."""
    if iteration.note:
        slow.append(iteration.first)


experiment = forerun.Experiment.from_dict(
    {
        "hardware": {"gpu_model": "A100", "num_gpus_per_node": 8, "network_bandwidth_gbps": 100},
        "model": model(),
        "training": {
            "batch_size_per_gpu": 64,
            "num_nodes": 2,
            "num_iterations": 100,
            "mixed_precision": True,
            "communication_pattern": ToNodeZero,
        },
        "handlers": [Throttling(), remember],
    }
)
run = experiment.run()
summary = run.summary()
print(f"{summary['model']}: step {summary['step_mean_s'] * 1e3:.1f} ms, {summary['samples_per_s']:,.0f} images/s")
print(f"iterations that GPU 3 slows: {len(slow)}, from {slow[0]} on")
for usage in run.analyze().bottlenecks.found:
    print(f"bottleneck: {usage.name}: {usage.text}")
