"""Layers of a config.json that differ: converts a list of words, one for each layer, to the changes of each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forerun.describe.model.families import Values
from forerun.describe.model.fields import Fields

FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"


def each_layer(changes: Sequence[Mapping[str, object]]) -> Values:
    """Returns the fields of a model whose layers change `changes`; where all are alike, the model has them itself.

    A list that repeats is kept as its shortest period.
    """
    if all(change == changes[0] for change in changes):
        return dict(changes[0])
    period = next(
        size
        for size in range(1, len(changes) + 1)
        if all(change == changes[place % size] for place, change in enumerate(changes))
    )
    return {"layers": tuple(tuple(sorted(change.items())) for change in changes[:period])}


def layer_words(config: Fields, key: str, known: Sequence[str], default: Sequence[str]) -> list[str]:
    """Reads the word of each layer under `key`, or `default` where the key is missing; every word must be `known`."""
    layers = config.integer(config.first_of("num_hidden_layers", "n_layer", "num_layers"))
    words = config.items(key) or list(default)
    if len(words) != layers:
        raise config.error(key, f"has {len(words)} entries for {layers} layers")
    for word in words:
        if word not in known:
            raise config.error(key, f"{word!r} is not supported, only {' and '.join(known)}")
    return [str(word) for word in words]


def every(period: int, last: str, others: str, layers: int) -> list[str]:
    """Returns `last` for every `period`-th layer, and `others` for the rest."""
    return [last if (layer + 1) % period == 0 else others for layer in range(layers)]
