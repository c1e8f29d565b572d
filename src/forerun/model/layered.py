"""LayeredModel: a model given layer by layer, which need not be a transformer: convolutional, or written by hand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayeredModel:
    """Layers in the order in which they run."""

    name: str
