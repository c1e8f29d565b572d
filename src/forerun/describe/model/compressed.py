"""CompressedSpec: attention to the last tokens and to entries that each stand for several tokens (DeepSeek-V4)."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.common.errors import ForerunError


@dataclass(frozen=True, slots=True)
class CompressedSpec:
    """Queries from a latent vector, one head whose keys are its values too, and an output product in groups.

    Keys are the tokens of the layer's window and, behind them, entries: weighted means of `rate` tokens each. With an
    indexer a query reads `top_k` of these entries, else all that lie before it. As DeepSeek-V4's report (section 2.3)
    and its modelling code in Hugging Face transformers have it. Widths are in elements.
    """

    q_lora_rank: int
    """width of the latent vector that queries come from"""
    rope_dim: int
    """part of a head that rotates, before the attention and back behind it"""
    out_groups: int
    """groups of heads, each with a product of its own before the output's"""
    out_rank: int
    """width that such a product gives"""
    rate: int = 0
    """tokens that an entry stands for; 0: the layer reads its window alone"""
    overlapping: bool = False
    """whether an entry also takes up the tokens of the entry before, by a second series of the same width"""

    def __post_init__(self) -> None:
        if min(self.q_lora_rank, self.rope_dim, self.out_groups, self.out_rank) < 1 or self.rate < 0:
            raise ForerunError(f"compressed: every width must be at least 1, and rate at least 0: {self}")
        if self.overlapping and not self.rate:
            raise ForerunError(f"compressed: overlapping needs a rate: {self}")

    @property
    def series(self) -> int:
        """Returns the vectors that each token gives to entries: one, or two where entries overlap."""
        return 1 + self.overlapping if self.rate else 0

    def products(self, hidden: int, heads: int, head_dim: int) -> list[tuple[int, int]]:
        """Returns (columns that are read, rows that are made) of each matrix, in the order in which they run.

        These are queries down and up, keys, entries and their weights, the groups' products as one matrix, and the
        output.
        """
        query, made = heads * head_dim, self.out_groups * self.out_rank
        entries = [(hidden, self.series * head_dim)] * (2 if self.rate else 0)
        queries = [(hidden, self.q_lora_rank), (self.q_lora_rank, query), (hidden, head_dim)]
        return [*queries, *entries, (query // self.out_groups, made), (made, hidden)]

    def vectors(self, head_dim: int) -> int:
        """Returns the elements of the table that weights the tokens of an entry by their place."""
        return self.rate * self.series * head_dim

    def norm_widths(self, head_dim: int) -> list[int]:
        """Returns the widths of the norms with weights: of the latent vector, of keys, and of entries."""
        return [self.q_lora_rank, head_dim, *[head_dim] * (self.rate > 0)]

    def mean_entries(self, seq_len: int, most: int | None = None) -> float:
        """Returns the entries that a query of a sequence of `seq_len` tokens reads on average, at most `most`.

        A query reads an entry once its last token has come.
        """
        if not self.rate or seq_len < self.rate:
            return 0.0
        whole = seq_len // self.rate
        limit = whole if most is None else min(most, whole)
        before = self.rate * (limit * (limit - 1) // 2 + limit * (whole - limit))
        return (before + limit * (seq_len - whole * self.rate + 1)) / seq_len

    def mean_keys(self, seq_len: int, window: int, most: int | None = None) -> float:
        """Returns the keys of a window of `window` tokens and the entries that a query reads on average."""
        reached = min(window, seq_len)
        return reached - reached * (reached - 1) / (2 * seq_len) + self.mean_entries(seq_len, most)
