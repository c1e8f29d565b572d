"""The sizes of one rank's share of a model under a plan."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.describe.plan.rules import weight_bytes
from forerun.describe.stacks.stack import Stack


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Shapes:
    """The local sizes of one tensor- and context-parallel rank, in elements and tokens."""

    tokens: int
    """tokens of a micro batch inside a tensor-parallel region"""
    tokens_sp: int
    """tokens of a micro batch outside of such a region: a share of them under sequence parallelism"""
    seq: int
    """tokens of one sequence on this context-parallel rank"""
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    ffn: int
    vocab: int
    act_bytes: int
    """bytes of an activation element"""
    weight_bytes: int
    """bytes of a weight element as the kernels read it"""

    @staticmethod
    def of(model: ModelSpec, plan: Plan, stack: Stack) -> Shapes:
        seq = plan.seq_len // plan.cp
        tokens = plan.micro_batch * seq
        sequence_parallel = plan.sequence_parallel and plan.tp > 1
        vocab = ceil_div(model.vocab, plan.tp * stack.padded_vocab_multiple) * stack.padded_vocab_multiple
        wide = weight_bytes(plan)
        mla = model.mla
        return Shapes(
            tokens=tokens,
            tokens_sp=ceil_div(tokens, plan.tp) if sequence_parallel else tokens,
            seq=seq,
            hidden=model.hidden,
            heads=ceil_div(model.n_heads, plan.tp),
            kv_heads=max(1, model.n_kv_heads // plan.tp) if model.n_heads else 0,
            head_dim=mla.qk_nope_dim + mla.qk_rope_dim if mla else model.head_dim,
            v_head_dim=model.value_dim,
            ffn=ceil_div(model.ffn_hidden, plan.tp),
            vocab=vocab,
            act_bytes=wide,
            weight_bytes=wide,
        )
