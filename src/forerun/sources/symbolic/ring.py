"""Splits a causal mask over the ranks of context parallelism: the attention of each rank at each step of the ring.

A rank has an equal part of every sequence. At step i it receives the keys and values of the rank i places before it.
Under a causal mask a query attends to no later key, so the work of a rank depends on which tokens it has:

* `none`: consecutive tokens. The last rank attends to every part whole, the first one only to its own. Each step waits
  for the slowest rank, so the ring takes as long as its last rank;
* `head_tail` (zig-zag; PyTorch's `enable_load_balance`): of 2 cp chunks of a sequence, rank r has chunk r from the head
  and chunk 2 cp - 1 - r from the tail. At each step it computes all queries against half of the keys, or half of the
  queries against all keys;
* `striped` (Brandon et al. 2023, arXiv 2311.09431): every cp-th token. At each step a rank computes the triangle of
  scores below the diagonal, with the diagonal or without.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.core.program.types import I64


def pairs(balance: str, cp: int, seq: int) -> I64:
    """Returns the (query, key) pairs that rank r computes at step i of a ring under a causal mask, (cp, cp).

    `seq` is the number of tokens of a sequence on a rank, an even number with `head_tail`.
    """
    rank, step = np.arange(cp)[:, None], np.arange(cp)[None, :]
    earlier = rank >= step
    """(cp, cp): whether the keys at step i are the rank's own or those of an earlier rank"""
    with_diagonal, without = seq * (seq + 1) // 2, seq * (seq - 1) // 2
    if balance == "none":
        far = np.where(earlier, seq * seq, 0)
    elif balance == "striped":
        far = np.where(earlier, with_diagonal, without)
    else:
        far = np.full((cp, cp), seq * (seq // 2))
    out: I64 = np.where(step == 0, with_diagonal, far)
    return out


@dataclass(frozen=True, slots=True)
class Piece:
    """A call of the attention kernel by the slowest rank, with the mean work of all ranks beside it."""

    queries: int
    keys: int
    causal: bool
    share: float = 1.0
    """fraction of its FLOPs that the average rank executes: the slowest rank sets the time, the average the FLOPs"""


def far_piece(balance: str, seq: int) -> Piece:
    """Returns the attention of a rank against the keys of another rank's part under a causal mask. A part has `seq`
    tokens.

    Without balance the last rank computes every pair of every part, while the ranks together compute half of the pairs.
    """
    if balance == "none":
        return Piece(seq, seq, causal=False, share=0.5)
    if balance == "striped":
        return Piece(seq, seq, causal=True)
    return Piece(seq, max(1, seq // 2), causal=False)


def gathered_piece(balance: str, cp: int, seq: int) -> Piece:
    """Returns the attention of a rank against all keys at once under a causal mask. A part has `seq` tokens.

    Without balance the last rank attends to all keys but the later ones of its own part.
    """
    if balance == "none":
        return Piece(seq, seq * cp, causal=True, share=cp / (2 * cp - 1))
    return Piece(seq, max(1, seq * cp // 2), causal=False)
