"""Models how evenly a router distributes tokens over experts, and the resulting load of the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.common.errors import ForerunError

BALANCED = "balanced"
_FORMS = "balanced, uniform, zipf:S with an exponent S, or loads:A:B:... with the load of each expert"
_DRAWS = 32
"""drawn models; the mean of the busiest rank's load is known to some 0.3 % then"""
_MOST_LAYERS = 64
"""layers that are drawn of a deeper model"""
_F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Routing:
    """A distribution of tokens over experts."""

    exponent: float = 0.0
    """of Zipf's law: the expert at place n of a layer is chosen in proportion to n ** -exponent; 0 for equal chances"""
    loads: tuple[float, ...] = ()
    """measured tokens of each expert, in their order; in place of the law"""

    @staticmethod
    def parse(text: str) -> Routing | None:
        """Returns the distribution that `text` names, None for `balanced`. Raises ForerunError for other text."""
        kind, _, rest = str(text).partition(":")
        try:
            if text == BALANCED:
                return None
            if text == "uniform":
                return Routing()
            if kind == "zipf" and 0 <= float(rest) <= 10:
                return Routing(float(rest))
            loads = tuple(map(float, rest.split(":")))
            if kind == "loads" and min(loads) >= 0 and 0 < sum(loads) < float("inf"):
                return Routing(loads=loads)
        except ValueError:
            pass
        raise ForerunError(f"plan: expert_routing must be {_FORMS}, got {text!r}")

    def chances(self, n_experts: int, top_k: int) -> _F64:
        """Returns the chance that a token chooses each expert, (n_experts,), with the sum top_k. None is above 1."""
        law = np.arange(1.0, n_experts + 1) ** -self.exponent
        shares: _F64 = np.array(self.loads) if self.loads else law
        chances: _F64 = np.zeros(n_experts)
        sure: npt.NDArray[np.bool_] = np.zeros(n_experts, bool)
        while True:  # an expert that every token chooses leaves the rest to the others
            rest = shares[~sure]
            chances[sure] = 1.0
            chances[~sure] = (top_k - sure.sum()) * rest / max(rest.sum(), 1e-300)
            if not (chances > 1.0).any():
                return chances
            sure |= chances > 1.0


class Spread(NamedTuple):
    """Holds the loads of ranks with different experts under a distribution. Each figure is relative to the mean of all
    ranks.
    """

    busiest: float
    """tokens of the busiest rank in a layer: the others wait for it"""
    fullest: float
    """tokens of the rank that keeps most of all layers together, on which memory depends"""
    dropped: float
    """share of the tokens' choices that experts of limited capacity drop"""


@lru_cache(maxsize=4096)
def spread(
    text: str, n_experts: int, top_k: int, ranks: int, tokens: int, layers: int, capacity: float | None = None
) -> Spread:
    """Returns the loads under the distribution `text` for `ranks` ranks, on which `tokens` tokens arrive in a layer.
    Loads are means over many layers.

    A token chooses each expert with its chance and independently of other tokens (normal approximation of the binomial
    counts). Under Zipf's law popular experts lie anywhere in each layer, so that a rank's loads even out over its
    `layers`; measured loads are those of every layer. An expert of `capacity` computes at most that many times the
    mean.
    """
    routing = Routing.parse(text)
    mean = tokens * top_k / n_experts
    if routing is None:
        return Spread(1.0, 1.0, max(0.0, 1.0 - capacity) if capacity else 0.0)
    random, depth = np.random.default_rng(0), min(max(layers, 1), _MOST_LAYERS)
    chances: Any = np.tile(routing.chances(n_experts, top_k), (_DRAWS * depth, 1))
    if not routing.loads:
        chances = random.permuted(chances, axis=1)
    counts = tokens * chances + np.sqrt(tokens * chances * (1 - chances)) * random.standard_normal(chances.shape)
    counts = np.clip(counts, 0, tokens)
    counts *= tokens * top_k / counts.sum(axis=1, keepdims=True)
    dropped = float(np.maximum(counts - capacity * mean, 0).sum() / counts.sum()) if capacity else 0.0
    by_rank = counts.reshape(_DRAWS, depth, ranks, -1).sum(axis=3) / (tokens * top_k / ranks)
    return Spread(float(by_rank.max(axis=2).mean()), float(by_rank.mean(axis=1).max(axis=1).mean()), dropped)
