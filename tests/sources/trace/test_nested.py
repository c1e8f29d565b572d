"""Nested tensors of jagged layout: attention over the true lengths, eager and compiled."""

import pytest

pytest.importorskip("torch", reason="tracing needs torch")

from forerun.core.program.kinds import OpKind
from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits, record_script

LENGTHS = (128, 64, 256, 32)
TOKENS, WIDTH, LAYERS = sum(LENGTHS), 64, 2
CAUSAL_PAIRS = sum(n * (n + 1) // 2 for n in LENGTHS)
PAIRS = sum(n * n for n in LENGTHS)
SCRIPT = """
import torch
from torch.nn import functional as F

lengths, width, heads = LENGTHS, 64, 4

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x):
        parts = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, [heads, width // heads]).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=CAUSAL)
        return x + self.out(y.transpose(1, 2).flatten(-2))

model = torch.nn.Sequential(Block(), Block()).cuda().to(torch.DTYPE)
optimizer = torch.optim.AdamW(model.parameters())

def batch():
    parts = [torch.randn(n, width, device="cuda", dtype=torch.DTYPE) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)

def train(x):
    model(x).values().float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

"""


def work(tmp_path, code, dtype="bfloat16", causal=True):
    """FLOPs of products and of attention, and the names of the attention kernels, of a step."""
    script = tmp_path / "train.py"
    begin = SCRIPT.replace("LENGTHS", str(LENGTHS)).replace("DTYPE", dtype).replace("CAUSAL", str(causal))
    script.write_text(begin + code, encoding="utf-8")
    (recording,) = record_script(Job("", str(script)), Limits(time_s=60))
    ops, op = recording.ops, recording.op
    products, attention = (ops.flops[op] * (ops.kind[op] == kind) for kind in (OpKind.GEMM, OpKind.ATTENTION))
    kernels = {ops.name[row] for row in op.tolist() if ops.kind[row] == OpKind.ATTENTION}
    return float(products.sum()), float(attention.sum()), kernels


PRODUCTS = 6 * 4 * WIDTH * WIDTH * LAYERS * TOKENS
FLASH = {"_flash_attention_forward", "_flash_attention_backward"}
EFFICIENT = {"_efficient_attention_forward", "_efficient_attention_backward"}
LOOP = "for _ in range(3):\n    train(batch())\n"


def attention_flops(pairs):
    return 3.5 * 4 * WIDTH * pairs * LAYERS


@pytest.mark.parametrize(
    ("dtype", "causal", "pairs", "kernels"),
    [("bfloat16", True, CAUSAL_PAIRS, FLASH), ("float32", False, PAIRS, EFFICIENT)],
)
def test_attention_goes_over_the_true_lengths(tmp_path, dtype, causal, pairs, kernels):
    assert work(tmp_path, LOOP, dtype, causal) == (PRODUCTS, attention_flops(pairs), kernels)


def test_compiled_code_does_the_same_work(tmp_path):
    code = "model = torch.compile(model)\n" + LOOP
    assert work(tmp_path, code)[:2] == (PRODUCTS, attention_flops(CAUSAL_PAIRS))


def test_copies_keep_their_ragged_size(tmp_path):
    code = """
on_host = torch.nested.nested_tensor([torch.randn(n, width) for n in lengths], layout=torch.jagged)
twice = 2 * on_host
for _ in range(3):
    x, other = on_host.cuda(), twice.cuda()
    train(x.to(torch.bfloat16) + other.bfloat16())
"""
    assert work(tmp_path, code)[:2] == (PRODUCTS, attention_flops(CAUSAL_PAIRS))


def test_unknown_lengths_are_equally_long(tmp_path):
    code = """
read = torch.nn.Linear(4, 4, device="cuda")(torch.ones(4, device="cuda")).long()
for _ in range(3):
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device="cuda"), read.cumsum(0)])
    values = torch.randn(480, width, device="cuda", dtype=torch.bfloat16)
    train(torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=100, max_seqlen=140))
"""
    products, attention, _ = work(tmp_path, code, causal=False)
    assert (products, attention) == (PRODUCTS, attention_flops(4 * 120 * 120))


def test_a_program_asks_which_kernels_the_device_can_use(tmp_path):
    code = """
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

def usable(dtype):
    q = torch.zeros(2, 4, 8, 16, dtype=dtype, device="cuda")
    asked = SDPAParams(q, q, q, None, 0.0, False, False)
    return can_use_flash_attention(asked), can_use_efficient_attention(asked)

assert usable(torch.bfloat16) == (True, True)
assert usable(torch.float32) == (False, True)
"""
    work(tmp_path, code + LOOP)
