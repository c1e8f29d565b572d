"""StreamsSpec: several residual streams in place of one, and the work of layers to read and write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forerun.common.errors import ForerunError

StreamRule = Literal["altup", "hyper", "gated"]
"""How a half reads one tensor of the streams, and how its result reaches all of them: AltUp predicts all streams from
each other before a layer and corrects them behind it (arXiv 2301.13310); hyper-connections read a weighted sum before
each half, and mix the streams behind it by a matrix of each token (arXiv 2409.19606); gated ones have no matrix."""


@dataclass(frozen=True, slots=True)
class StreamsSpec:
    """`count` residual streams of the model's width, joined by `rule`."""

    count: int
    rule: StreamRule

    def __post_init__(self) -> None:
        if self.count < 2:
            raise ForerunError(f"streams: count must be at least 2, got {self.count}")

    @property
    def coefficients(self) -> int:
        """Returns the numbers that a half computes for each token: weights to read, to write, and to mix streams."""
        return self.count * (2 + self.count * (self.rule == "hyper"))

    @property
    def scales(self) -> int:
        """Returns the scalars that scale these numbers, one for each kind."""
        return 0 if self.rule == "altup" else 2 + (self.rule == "hyper")

    def layer_parameters(self, hidden: int, halves: int) -> int:
        """Returns the elements of the parameters of a layer with `halves` in a model of width `hidden`.

        AltUp has a normed router, predictions, corrections and a scale; hyper-connections a product of all streams
        with its base and scales for each half.
        """
        n = self.count
        if self.rule == "altup":
            return hidden + n * hidden + n**3 + n**2 + hidden
        return halves * (self.coefficients * (n * hidden + 1) + self.scales)

    def outer_parameters(self, hidden: int) -> int:
        """Returns the elements of the parameters that make the streams and join them again.

        AltUp has a product in and out for each stream but the first; the others copy the embedding and join the streams
        by a weighted sum.
        """
        if self.rule == "altup":
            return 2 * (self.count - 1) * hidden * hidden
        return self.count * (self.count * hidden + 1) + 1
