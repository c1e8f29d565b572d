"""Links that running nodes share: how much of each an op keeps busy, and which links can ever have too much to carry.

Shares are whole parts of FULL, so that the load of a link is the same sum in whatever order nodes start and end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.common.jit import kernel
from forerun.core.program.types import I8, I32, I64, N_STREAMS, Program, Stream

FULL = 10**9
"""parts of a link"""

Mask = npt.NDArray[np.bool_]

_RECEIVING = np.array([stream.name.startswith("PP_RECV") for stream in Stream])
_SENDING = np.array([stream.name.startswith("PP_SEND") for stream in Stream])


@dataclass(frozen=True)
class LinkDemand:
    """The share of each link that each op keeps busy."""

    share: I64
    """(n_ops, n_links) parts of FULL of each link that an op keeps busy while it runs alone"""
    carries: Mask
    """(n_streams, n_links) whether nodes of a stream use a link at all"""

    @cached_property
    def asks(self) -> Mask:
        """Returns whether each op uses a link at all, (n_ops,)."""
        out: Mask = np.logical_or.reduce(self.share > 0, axis=1)
        return out

    @staticmethod
    def of(share: I64, receiving_only: Mask) -> LinkDemand:
        """Returns the demand on links that carry the messages that a rank sends or, where `receiving_only` (n_links,)
        is true, receives.

        Pipeline streams send or receive; nodes of all other streams do both.
        """
        carries = np.where(receiving_only, ~_SENDING[:, None], ~_RECEIVING[:, None])
        return LinkDemand(share, carries)


def joined_demand(parts: Sequence[LinkDemand | None], n_ops: Sequence[int]) -> LinkDemand | None:
    """Returns the demand of op tables of `n_ops` rows one after the other, on the same links."""
    some = next((part for part in parts if part is not None), None)
    if some is None:
        return None
    n_links = some.share.shape[1]
    rows = [
        np.zeros((n, n_links), np.int64) if part is None else part.share for part, n in zip(parts, n_ops, strict=True)
    ]
    return LinkDemand(np.concatenate(rows), some.carries)


class Links(NamedTuple):
    """The links of a run, as the engine needs them."""

    share: I64
    """(n_ops, n_links)"""
    carries: Mask
    """(n_streams, n_links)"""
    load: I64
    """(n_classes, n_links): the shares of the nodes that run, summed"""
    asks: Mask
    """(n_ops,) whether an op uses a link at all"""


def links_of(demand: LinkDemand | None, n_ops: int, n_classes: int) -> Links:
    """Returns the links on which nothing runs yet; none without `demand`."""
    if demand is None:
        demand = LinkDemand(np.zeros((n_ops, 0), np.int64), np.zeros((N_STREAMS, 0), np.bool_))
    share, carries = np.ascontiguousarray(demand.share), np.ascontiguousarray(demand.carries)
    return Links(share, carries, np.zeros((n_classes, share.shape[1]), np.int64), demand.asks)


def used_pairs(op: I32, stream: I8, n_ops: int) -> Mask:
    """Returns a mask of the streams that each op runs on, (n_ops, n_streams)."""
    used = np.zeros((n_ops, N_STREAMS), np.bool_)
    _mark(op, stream, used)
    return used


@kernel
def _mark(op: I32, stream: I8, used: Mask) -> None:
    for i in range(len(op)):
        used[op[i], stream[i]] = True


def pairs_of_program(program: Program) -> Mask:
    """Returns `used_pairs` of all blocks of `program`."""
    op = np.concatenate([np.zeros(0, np.int32), *(block.op for block in program.blocks)])
    stream = np.concatenate([np.zeros(0, np.int8), *(block.stream for block in program.blocks)])
    return used_pairs(op, stream, len(program.ops))


def crowded_links(demand: LinkDemand, used: Mask) -> LinkDemand | None:
    """Returns `demand` on the links that might get more work than they can carry. Returns None if there is no such
    link.

    A link is never overloaded if the largest demands of the streams of `used` (n_ops, n_streams) sum to no more than
    FULL. A link need not be watched if another one always has at least the same load.
    """
    busy = np.flatnonzero(demand.asks)
    row, stream = np.nonzero(used[busy])
    op = busy[row]
    asked = np.where(demand.carries[stream], demand.share[op], 0)
    most = np.zeros((N_STREAMS, asked.shape[1]), np.int64)
    np.maximum.at(most, stream, asked)
    chosen = np.flatnonzero(most.sum(axis=0) > FULL)
    if not len(chosen):
        return None
    columns = np.ascontiguousarray(asked[:, chosen].T)
    first = {column.tobytes(): link for link, column in zip(chosen[::-1].tolist(), columns[::-1], strict=True)}
    chosen = np.array(sorted(first.values()))
    kept = [link for link in chosen.tolist() if not _is_below(asked[:, link], asked[:, chosen[chosen != link]])]
    return LinkDemand(demand.share[:, kept], demand.carries[:, kept])


def _is_below(asked: I64, others: I64) -> bool:
    """Returns whether some column of `others` is at least `asked` in every row. No column equals `asked`."""
    return bool((others >= asked[:, None]).all(axis=0).any())
