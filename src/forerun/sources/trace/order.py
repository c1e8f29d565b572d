"""Computes which nodes have certainly ended when a node starts: a vector clock over the tracks of a recording."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from forerun.common.jit import njit
from forerun.core.program.types import I8, I32, I64


@njit
def last_ended(track: I32, pred_ptr: I64, pred: I32, sync: I8, n_tracks: int) -> tuple[I32, npt.NDArray[np.bool_]]:
    """Returns when nodes start, as far as it is certain, and which waits are needed for that.

    The first result, (N, n_tracks), is the last node of each track that has ended when a node starts, -1 for none. The
    second, (len(pred),), is False for a wait that the order of the track, a wait of the host or another wait implies.

    Tracks run in order, `pred` (CSR) are earlier nodes that a node waits for, and after a node with sync = 1 the host
    issues nothing before that node has ended.
    """
    n = len(track)
    keep = np.ones(len(pred), np.bool_)
    clock = np.full((n, n_tracks), -1, np.int32)
    host = np.full(n_tracks, -1, np.int32)
    last = np.full(n_tracks, -1, np.int32)
    for i in range(n):
        for t in range(n_tracks):
            clock[i, t] = host[t]
        before = last[track[i]]
        if before >= 0:
            for t in range(n_tracks):
                clock[i, t] = max(clock[i, t], clock[before, t])
            clock[i, track[i]] = max(clock[i, track[i]], before)
        for e in range(pred_ptr[i], pred_ptr[i + 1]):
            p = pred[e]
            at = track[p]
            keep[e] = p > clock[i, at]
        for e in range(pred_ptr[i], pred_ptr[i + 1]):
            p = pred[e]
            at = track[p]
            for other in range(pred_ptr[i], pred_ptr[i + 1]):
                q = pred[other]
                implies = p <= clock[q, at] or (at == track[q] and (p < q or (p == q and other < e)))
                if keep[e] and other != e and keep[other] and implies:
                    keep[e] = False
        for e in range(pred_ptr[i], pred_ptr[i + 1]):
            p = pred[e]
            for t in range(n_tracks):
                clock[i, t] = max(clock[i, t], clock[p, t])
            clock[i, track[p]] = max(clock[i, track[p]], p)
        last[track[i]] = i
        if sync[i]:
            for t in range(n_tracks):
                host[t] = max(host[t], clock[i, t])
            host[track[i]] = max(host[track[i]], i)
    return clock, keep
