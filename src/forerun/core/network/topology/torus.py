"""Tori: grids of NPUs with wrap-around links."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from forerun.core.network.topology.base import Links, Topology
from forerun.core.network.topology.ring import Ring
from forerun.core.network.topology.stacked import Stacked
from forerun.core.program.types import I32


@dataclass(frozen=True)
class Torus2D(Topology):
    """NPU x + nx * y, a ring in every row and column; x first, the shorter way round, clockwise (+1) on a tie."""

    between_nodes: ClassVar[str] = "four links, to the neighbours in a grid as square as possible that wraps around"

    nx: int
    ny: int

    @property
    def n_npus(self) -> int:
        return self.nx * self.ny

    @cached_property
    def _rings(self) -> Topology:
        return rings(self)

    def links(self) -> Links:
        return self._rings.links()

    def next_device(self, at: I32, to: I32) -> I32:
        return self._rings.next_device(at, to)

    def hop_counts(self, src: I32, dst: I32) -> I32:
        return self._rings.hop_counts(src, dst)


@dataclass(frozen=True)
class Torus3D(Torus2D):
    """NPU x + nx * (y + ny * z), rings along all three axes; x first, then y, then z."""

    nz: int

    @property
    def n_npus(self) -> int:
        return self.nx * self.ny * self.nz


def rings(torus: Topology) -> Topology:
    """Returns the rings of a torus, along its axes that are longer than 1."""
    line = [n for n in torus.sizes if n > 1]
    parts = [Ring(n, bandwidth_gbps=torus.bandwidth_gbps, latency_ns=torus.latency_ns) for n in line]
    return Stacked(tuple(parts))
