"""How context parallelism shares a causal mask out: what each rank computes at each step of the ring.

A rank has an equal part of every sequence, and meets the keys and values of one rank after the other; at step i those
of the rank i places before it. Under a causal mask a query attends to no later key, so it matters which tokens a rank
has:

* `none`: consecutive ones. The last rank attends to every part whole, the first one to its own alone, and as parts go
  round step by step, the ring takes as long as its last rank;
* `head_tail` (zig-zag; PyTorch's `enable_load_balance`): of 2 cp chunks of a sequence, rank r has chunk r from the head
  and chunk 2 cp - 1 - r from the tail. At each step it computes all queries against half of the keys, or half of them
  against all;
* `striped` (Brandon et al. 2023, arXiv 2311.09431): every cp-th token. At each step a rank computes a triangle, with
  its diagonal or without.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.core.program.types import I64


def pairs(balance: str, cp: int, seq: int) -> I64:
    """Pairs of a query and a key that rank r computes at step i of a ring under a causal mask, (cp, cp).

    `seq` are the tokens that a rank has of a sequence; with `head_tail` an even number.
    """
    rank, step = np.arange(cp)[:, None], np.arange(cp)[None, :]
    earlier = rank >= step
    """where the part is that of an earlier rank, or the rank's own"""
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
    """A call of the attention kernel by the rank that takes longest, all ranks' mean beside it."""

    queries: int
    keys: int
    causal: bool
    share: float = 1.0
    """of its FLOPs, what ranks execute in the mean: the rank that takes longest sets the time, not the FLOPs of all"""


def far_piece(balance: str, seq: int) -> Piece:
    """What a rank computes against the part of another one, under a causal mask; `seq` are the tokens of a part.

    Without balance half of the pairs of a query's and a key's part are not computed, and the last rank computes all
    that it meets.
    """
    if balance == "none":
        return Piece(seq, seq, causal=False, share=0.5)
    if balance == "striped":
        return Piece(seq, seq, causal=True)
    return Piece(seq, max(1, seq // 2), causal=False)


def gathered_piece(balance: str, cp: int, seq: int) -> Piece:
    """What a rank computes against all keys at once, under a causal mask; `seq` are the tokens of a part.

    Without balance the last rank attends to all keys but the later ones of its own part.
    """
    if balance == "none":
        return Piece(seq, seq * cp, causal=True, share=cp / (2 * cp - 1))
    return Piece(seq, max(1, seq * cp // 2), causal=False)
