"""Low-rank adapters beside frozen weights (LoRA, QLoRA).

An adapter of rank r adds x A B to the product x W of a frozen matrix. Its forward pass is two thin products and a
scaled sum; its backward pass makes the gradients of A and B, and adds its share to the gradient of x (peft,
tuners/lora/layer.py). A frozen matrix has no gradient, so its product keeps no input. Matrices in nf4 are dequantised
before each use, in the forward pass and again in the backward pass (bitsandbytes, autograd/_functions.py, MatMul4Bit).
"""

from __future__ import annotations

from forerun.describe.plan.rules import frozen_matrix_bytes
from forerun.sources.symbolic.kernels import TransformerKernels
from forerun.sources.symbolic.products import ATTENTION, FFN, Product
from forerun.sources.symbolic.tape import Held, Stage, Tape, TapeOp, on_compute
from forerun.sources.symbolic.weights import Weights

ADAPTER = "adapter"
"""kind of the operations of adapters"""
_DEQUANTISE_LAUNCHES = 3
"""kernels that dequantise a matrix: its scales, the addition of their mean, and the matrix"""
_TARGETS = {
    "attention.qkv": ("q_proj", "k_proj", "v_proj"),
    "attention.q": ("q_proj",),
    "attention.q_up": ("q_proj",),
    "attention.k": ("k_proj",),
    "attention.v": ("v_proj",),
    "cross.q": ("q_proj",),
    "cross.k": ("k_proj",),
    "cross.v": ("v_proj",),
    "cross.out": ("o_proj",),
    "attention.out": ("o_proj",),
    "gate": ("gate_proj",),
    "up": ("up_proj",),
    "down": ("down_proj",),
}
"""product (without the name of a feed-forward) -> the modules that it computes, in peft's words"""


def is_adapted(kernels: TransformerKernels, product: Product) -> bool:
    """Returns whether the plan adapts the matrix of `product`."""
    plan = kernels.plan
    if kernels.scores or not plan.lora_rank or product.module not in (ATTENTION, FFN):
        return False
    name = product.name if product.module == ATTENTION else product.name.split(".")[-1]
    found = _TARGETS.get(name, ())
    if name == "up" and kernels.stack.fused_qkv and kernels.model.gated_mlp:
        found = ("gate_proj", "up_proj")  # one matrix holds both
    return any(target in plan.lora_targets for target in found)


def adapter(kernels: TransformerKernels, product: Product, frozen: str, tokens: int, grad_bytes: int) -> TapeOp:
    """Returns the operation that adds x A B to `frozen`, the output of the frozen matrix.

    Its backward pass leaves `grad_bytes` of gradients.
    """
    name, low, rank = product.name + ".adapter", product.y + ".low", kernels.plan.lora_rank
    n_in, n_out, size = product.n_in, product.n_out, kernels.act_bytes
    down, up = kernels.gemms(name + ".a", tokens, n_in, rank), kernels.gemms(name + ".b", tokens, rank, n_out)
    wide = tokens * n_out * size
    scaled_sum = kernels.traffic(name + ".scaled_sum", 3 * wide, 2 * wide, 2)
    scaled = kernels.traffic(name + ".scaled.backward", wide, wide)
    _, added = kernels.pattern("fan_out", tokens * n_in, "composed")
    return TapeOp(
        name,
        ADAPTER,
        product.module,
        [*on_compute(down[0], up[0]), *scaled_sum],
        [*scaled, *on_compute(up[1], down[1]), *added],
        on_compute(up[2], down[2]),
        reads=(product.x, frozen),
        saves=(product.x, low),
        makes=((product.y, wide), (low, tokens * rank * size)),
        parameters=(n_in * rank, rank * n_out),
        weight_grad_bytes=grad_bytes,
    )


def dequantised(kernels: TransformerKernels, product: Product) -> tuple[list[Stage], tuple[Held, ...]]:
    """Returns the kernels that dequantise the 4-bit matrix of `product`, and the memory of the wide matrix.

    Both are empty if the matrix is kept wide.
    """
    if not kernels.plan.quantises_frozen or product.module not in (ATTENTION, FFN):
        return [], ()
    elements = product.elements
    read, written = elements * frozen_matrix_bytes(kernels.plan), elements * kernels.act_bytes
    name = product.name + ".dequantise"
    return kernels.traffic(name, read, written, _DEQUANTISE_LAUNCHES), ((written, 0, 1),)


def freeze(tape: Tape, weights: Weights, adapters: list[tuple[int, int]]) -> None:
    """Freezes the weights of a finished tape, and puts those of its adapters in their place."""
    weights.freeze()
    for n_in, n_out in adapters:
        weights.add_matrix(n_in, n_out)
    for op in tape.ops:
        if op.kind == ADAPTER:
            continue
        op.weight_backward, op.weight_grad_bytes = [], 0
        if op.kind == "matmul":
            op.saves = ()
        if op.gradless:
            op.backward = []
