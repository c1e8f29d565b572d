"""Frozen weights of 4 and 8 bits beside trained ones, as QLoRA with bitsandbytes trains: its operators and its class of
parameters, written again here."""

import pytest

pytest.importorskip("torch", reason="tracing needs torch")

from forerun.core.program.kinds import OpKind
from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits, record_script

TOKENS, INNER, OUTER, RANK = 128, 64, 96, 8
SCRIPT = f"""
import torch
from torch.nn import functional as F

tokens, inner, outer, rank = {TOKENS}, {INNER}, {OUTER}, {RANK}
define, fake = torch.library.define, torch.library.register_fake
define("bitsandbytes::quantize_4bit", "(Tensor A, int blocksize) -> (Tensor, Tensor)")
define("bitsandbytes::dequantize_4bit", "(Tensor A, Tensor absmax, int[] shape, ScalarType dtype) -> Tensor")
define("bitsandbytes::gemm_4bit", "(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str quant_type,"
       " Tensor? bias=None, Tensor? absmax_8bit=None, Tensor? absmax_code=None, Tensor? absmax_offset=None) -> Tensor")
define("bitsandbytes::int8_linear_matmul", "(Tensor A, Tensor B) -> Tensor")

@fake("bitsandbytes::quantize_4bit")
def _(A, blocksize):
    return A.new_empty((A.numel() // 2, 1), dtype=torch.uint8), A.new_empty(A.numel() // blocksize, dtype=torch.float32)

@fake("bitsandbytes::dequantize_4bit")
def _(A, absmax, shape, dtype):
    return A.new_empty(shape, dtype=dtype)

@fake("bitsandbytes::gemm_4bit")
def _(A, B, shapeB, absmax, blocksize, quant_type, bias=None, absmax_8bit=None, absmax_code=None, absmax_offset=None):
    return A.new_empty((*A.shape[:-1], shapeB[0]))

@fake("bitsandbytes::int8_linear_matmul")
def _(A, B):
    return A.new_empty((*A.shape[:-1], B.shape[0]), dtype=torch.int32)

ops = torch.ops.bitsandbytes

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, scales):
        ctx.save_for_backward(weight, scales)
        return ops.gemm_4bit(x, weight, [outer, inner], scales, 64, "nf4")

    @staticmethod
    def backward(ctx, gradient):
        weight, scales = ctx.saved_tensors
        return gradient @ ops.dequantize_4bit(weight, scales, [outer, inner], gradient.dtype), None, None

class FourBits(torch.nn.Parameter):
    def __new__(cls, data=None, requires_grad=False, scales=None):
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.scales = scales
        return made

    @property
    def is_packed(self):
        return self.scales is not None

    def to(self, *args, **kwargs):
        if self.is_packed:
            return super().to(*args, **kwargs)
        self.data, self.scales = ops.quantize_4bit(self.data.to("cuda"), 64)
        return self

class Layer(torch.nn.Linear):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.weight = FourBits(self.weight.data)

    def forward(self, x):
        return Product.apply(x, self.weight, self.weight.scales)

def frozen():
    layer = Layer(inner, outer, bias=False, dtype=torch.bfloat16)
    layer.weight = layer.weight.to("cuda")
    assert isinstance(layer.weight, FourBits) and isinstance(layer.weight, torch.nn.Parameter)
    assert layer.weight.is_packed and layer.weight.dtype == torch.uint8 and not layer.weight.requires_grad
    assert [name for name, _ in layer.named_parameters()] == ["weight"] and len(list(layer.parameters())) == 1
    return layer

first = torch.nn.Linear(inner, inner, bias=False).cuda().bfloat16()
layer = frozen()
optimizer = torch.optim.SGD(first.parameters(), lr=0.1)

def train(also=lambda x: 0):
    x = torch.randn(tokens, inner, device="cuda", dtype=torch.bfloat16)
    (layer(first(x)).float().square().mean() + also(x)).backward()
    optimizer.step()
    optimizer.zero_grad()

"""


def rows(tmp_path, code):
    """(name, kind, dtype, FLOPs) of products and kernels of bitsandbytes, and the notes."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT + code, encoding="utf-8")
    (recording,) = record_script(Job("", str(script)), Limits(time_s=60))
    ops, op = recording.ops, recording.op.tolist()
    kept = [row for row in op if ops.kind[row] == OpKind.GEMM or ops.name[row] == "dequantize_4bit"]
    found = [(ops.name[row], ops.dtype[row], float(ops.flops[row])) for row in kept]
    return found, recording.meta["notes"], [float(ops.bytes_written[r]) for r in kept if ops.kind[r] != OpKind.GEMM]


def test_weights_of_four_bits_are_restored_and_multiplied(tmp_path):
    found, notes, restored = rows(tmp_path, "for _ in range(3):\n    train()\n")
    wide, square = 2.0 * TOKENS * INNER * OUTER, 2.0 * TOKENS * INNER * INNER
    assert found == [
        ("mm", "bf16", square),
        ("dequantize_4bit", "bf16", 0.0),
        ("gemm_4bit", "bf16", wide),
        ("dequantize_4bit", "bf16", 0.0),
        ("mm", "bf16", wide),
        ("mm", "bf16", square),
    ]
    assert restored == [2.0 * INNER * OUTER] * 2
    assert notes == []


def test_products_in_eight_bits_run_on_their_unit(tmp_path):
    code = """
weight = torch.zeros(outer, inner, dtype=torch.int8, device="cuda")
def also(x):
    return ops.int8_linear_matmul(x.to(torch.int8), weight).float().mean()
for _ in range(3):
    train(also)
"""
    found, notes, _ = rows(tmp_path, code)
    assert ("int8_linear_matmul", "fp8", 2.0 * TOKENS * INNER * OUTER) in found
    assert notes == []
