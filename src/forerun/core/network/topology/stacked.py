"""Topologies stacked by dimension."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from operator import mul

import numpy as np

from forerun.core.network.topology.base import MAX_LINKS, Links, Topology, joined
from forerun.core.program.types import I32, I64


@dataclass(frozen=True)
class Stacked(Topology):
    """Dimension 0 is the innermost: NPU a0 + n0 * (a1 + n1 * (a2 ...)).

    The NPUs that differ in one digit only are an instance of that dimension's topology, with links and switches of its
    own. A message first settles the lowest digit that differs. NPUs forward messages for other NPUs.
    """

    dims: tuple[Topology, ...]

    def __init__(self, dims: tuple[Topology, ...]) -> None:
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "bandwidth_gbps", dims[0].bandwidth_gbps)
        object.__setattr__(self, "latency_ns", dims[0].latency_ns)
        self.__post_init__()

    def __str__(self) -> str:
        return ", ".join(str(each) for each in self.dims)

    @property
    def n_npus(self) -> int:
        return prod(each.n_npus for each in self.dims)

    @property
    def n_devices(self) -> int:
        return self._first_switch[-1]

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Returns the distance between neighbours in each dimension, then the number of NPUs."""
        return tuple(accumulate((each.n_npus for each in self.dims), mul, initial=1))

    @cached_property
    def _first_switch(self) -> tuple[int, ...]:
        """Returns the first switch of each dimension, and the number of devices. Switches count instance by
        instance."""
        counts = (self.n_npus // each.n_npus * (each.n_devices - each.n_npus) for each in self.dims)
        return tuple(accumulate(counts, initial=self.n_npus))

    def links(self) -> Links:
        parts = [each.links() for each in self.dims]
        n_links = sum(self.n_npus // each.n_npus * len(part) for each, part in zip(self.dims, parts, strict=True))
        if n_links > MAX_LINKS:
            raise self.error(f"it has {n_links:,} links, more than {MAX_LINKS:,}")
        return joined(*(self._links_of(d, part) for d, part in enumerate(parts)))

    def _links_of(self, d: int, part: Links) -> Links:
        n_instances = self.n_npus // self.dims[d].n_npus
        instance = np.repeat(np.arange(n_instances), len(part))
        src, dst = (self._device(d, instance, np.tile(end, n_instances)) for end in (part.src, part.dst))
        return Links(src, dst, np.tile(part.bandwidth_gbps, n_instances), np.tile(part.latency_ns, n_instances))

    def _device(self, d: int, instance: I64, local: I32) -> I32:
        """Returns the devices of the instances of dimension `d`, by their number in the instance."""
        each, stride = self.dims[d], self.strides[d]
        npu = instance % stride + stride * local + instance // stride * self.strides[d + 1]
        switch = self._first_switch[d] + instance * (each.n_devices - each.n_npus) + local - each.n_npus
        return np.where(local < each.n_npus, npu, switch).astype(np.int32)

    def next_device(self, at: I32, to: I32) -> I32:
        following: I32 = at.copy()
        open_npus = at < self.n_npus
        for d, each in enumerate(self.dims):
            n, stride = each.n_npus, self.strides[d]
            n_switches = each.n_devices - n
            digit, goal = at // stride % n, (to // stride % n).astype(np.int32)
            instance = at % stride + at // self.strides[d + 1] * stride
            here = open_npus & (digit != goal)
            open_npus &= ~here
            local = digit
            if n_switches:
                number = at - self._first_switch[d]
                in_switch = (number >= 0) & (at < self._first_switch[d + 1])
                here |= in_switch
                local = np.where(in_switch, n + number % n_switches, digit)
                instance = np.where(in_switch, number // n_switches, instance)
            ahead = each.next_device(local[here].astype(np.int32), goal[here])
            following[here] = self._device(d, instance[here], ahead)
        return following

    def hop_counts(self, src: I32, dst: I32) -> I32:
        hops: I32 = np.zeros(len(src), np.int32)
        for each, stride in zip(self.dims, self.strides, strict=False):
            hops = hops + each.hop_counts(src // stride % each.n_npus, dst // stride % each.n_npus)
        return hops
