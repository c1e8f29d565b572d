"""The flags of STAGE's second generation."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from forerun.common.errors import ForerunError, UnknownName

MODEL_TYPES = ("dense", "llama", "gpt", "moe")
_MOST = 1 << 31
_MOST_RANKS = 1 << 20
_MOST_TENSORS = 1 << 22
"""of one micro-batch"""
_MOST_COPIES = 1 << 26
"""of all micro-batches"""
_TENSORS_A_BLOCK = 80
_TENSORS_AN_EXPERT = 32


@dataclass(frozen=True, slots=True)
class SecondStageArgs:
    """The flags of STAGE's second generation, with its defaults.

    Degrees need not divide sizes: local sizes are then fractions, which are truncated when they are written.

    Raises ForerunError if a flag is not a whole number of at least 1, the model type is unknown, micro-batches don't
    divide the batch, ep doesn't divide the experts, or there are too many ranks or tensors.
    """

    dp: int = 1
    tp: int = 1
    sp: int = 1
    """context parallelism: tokens are split over ranks, which gather keys and values"""
    ep: int = 1
    """expert parallelism; dense models multiply tp by it"""
    pp: int = 1
    weight_sharded: bool = False
    """whether the weights of a block are split over dp too, and gathered before use"""
    activation_recompute: bool = False
    """accepted and ignored, as by STAGE: its second generation recomputes nothing"""
    tpsp: bool = True
    """whether tokens between blocks are split over tp too; they always are in mixed-precision dense models"""
    dvocal: int = 32000
    dmodel: int = 8192
    dff: int = 28672
    batch: int = 64
    micro_batch: int = -1
    """samples of a micro-batch, -1 for the whole batch"""
    seq: int = 1024
    head: int = 64
    kvhead: int = 8
    """key and value heads of mixed-precision dense models and mixtures of experts; other models have `head`"""
    num_stacks: int = 80
    experts: int = 8
    kexperts: int = 2
    """experts for each token"""
    model_type: str = "dense"
    """`dense` and `llama` are GPT-like, and with mixed precision Llama-like; `gpt`, `moe`"""
    mixed_precision: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and not 1 <= value < _MOST and (field.name, value) != ("micro_batch", -1):
                raise ForerunError(f"--{field.name} {value}: give a whole number of at least 1, below 2^31")
        if self.model_type not in MODEL_TYPES:
            raise UnknownName("--model_type", self.model_type, list(MODEL_TYPES))
        if self.micro_batch > 0 and self.batch % self.micro_batch:
            raise ForerunError(f"--micro_batch {self.micro_batch} does not divide --batch {self.batch}")
        if self.is_mixture and not self.tpsp:
            raise ForerunError("--model_type moe splits tokens over tp: leave --tpsp true")
        if self.is_mixture and self.experts % self.ep:
            raise ForerunError(f"--ep {self.ep} does not divide --experts {self.experts}")
        self._check_extent()

    def _check_extent(self) -> None:
        experts = self.experts // self.ep if self.is_mixture else 0
        tensors = self.num_stacks * (_TENSORS_A_BLOCK + _TENSORS_AN_EXPERT * experts)
        if tensors > _MOST_TENSORS or tensors * self.micro_batches > _MOST_COPIES:
            raise ForerunError(
                f"--num_stacks {self.num_stacks} with {self.micro_batches} micro-batches makes traces of "
                f"about {tensors * self.micro_batches:.2g} tensors; use fewer layers, experts or micro-batches"
            )
        if self.n_ranks > _MOST_RANKS:
            raise ForerunError(f"--dp, --tp, --sp, --ep, --pp make {self.n_ranks} ranks; use {_MOST_RANKS} at most")

    @property
    def is_mixture(self) -> bool:
        return self.model_type == "moe"

    @property
    def is_llama(self) -> bool:
        return self.mixed_precision and self.model_type in ("dense", "llama")

    @property
    def micro_batches(self) -> int:
        return 1 if self.micro_batch == -1 else self.batch // self.micro_batch

    @property
    def degrees(self) -> dict[str, int]:
        """Ranks in each spatial dimension, by STAGE's symbols; the first dimension varies fastest with the rank."""
        if self.is_mixture:
            return {"dp": self.dp, "tp": self.tp, "cp": self.sp, "ep": self.ep}
        return {"dp": self.dp, "tp": self.tp * self.ep, "cp": self.sp}

    @property
    def ranks_a_stage(self) -> int:
        return math.prod(self.degrees.values())

    @property
    def n_ranks(self) -> int:
        return self.pp * self.ranks_a_stage
