"""What stands for `xformers.ops` computes what its formulas say, on the kernels that xformers takes."""

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from virtual_process import run_virtual  # noqa: E402

from forerun.sources.trace.inside.device.xformers_ops import (  # noqa: E402
    LowerTriangularMask,
    SwiGLU,
    memory_efficient_attention,
    unbind,
)

BATCH, TOKENS, HEADS, WIDTH = 2, 5, 3, 8


class FlashCalls(TorchDispatchMode):
    """Keeps the arguments of FlashAttention, which the CPU has not, and answers with its first input."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._flash_attention_forward.default:
            self.calls.append((*args[3:], kwargs))
            return (args[0], *[args[0].new_empty(0)] * 4)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_swiglu_gates_one_half_by_the_other(packed, bias):
    made = SwiGLU(4, 6, 3, bias, _pack_weights=packed)
    if packed:
        (gate, up), biases = made.w12.weight.chunk(2), made.w12.bias.chunk(2) if bias else (None, None)
    else:
        (gate, up), biases = (made.w1.weight, made.w2.weight), (made.w1.bias, made.w2.bias)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    product = F.silu(F.linear(x, gate, biases[0])) * F.linear(x, up, biases[1])
    torch.testing.assert_close(made(x), F.linear(product, made.w3.weight, made.w3.bias))
    assert sum(one.numel() for one in made.parameters()) == 2 * 6 * (4 + bias) + 3 * (6 + bias)
    assert SwiGLU(4, 6).w3.out_features == 4


@pytest.mark.parametrize("bias", ["none", "causal", "tensor"])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_attention_of_whole_precision_is_that_of_torch(bias, scale):
    q, k, v = torch.randn(3, BATCH, TOKENS, HEADS, WIDTH, generator=torch.Generator().manual_seed(0))
    added = torch.zeros(TOKENS, TOKENS)
    if bias == "causal":
        added = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)
    elif bias == "tensor":
        added = torch.arange(25.0).reshape(TOKENS, TOKENS) / 10
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (WIDTH**-0.5 if scale is None else scale) + added
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    given = {"none": None, "causal": LowerTriangularMask(), "tensor": added}[bias]
    torch.testing.assert_close(memory_efficient_attention(q, k, v, given, scale=scale), expected)
    alone = memory_efficient_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0], given, scale=scale)
    torch.testing.assert_close(alone, expected[:, :, 0])


@pytest.mark.parametrize(("bias", "causal"), [(None, False), (LowerTriangularMask(), True)])
def test_attention_of_half_precision_is_flash_attention(bias, causal):
    q, k = torch.ones(BATCH, TOKENS, HEADS, WIDTH).bfloat16(), torch.ones(BATCH, 7, HEADS, WIDTH).bfloat16()
    with FlashCalls() as flash:
        memory_efficient_attention(q, k, k, bias, 0.25, 2.0)
    assert flash.calls == [(None, None, TOKENS, 7, 0.25, causal, False, {"scale": 2.0})]


def test_a_mask_of_half_precision_is_not_for_flash_attention():
    q = torch.ones(BATCH, TOKENS, HEADS, WIDTH).bfloat16()
    with FlashCalls() as flash:
        made = memory_efficient_attention(q, q, q, torch.zeros(TOKENS, TOKENS).bfloat16())
    assert flash.calls == []
    torch.testing.assert_close(made, q)


def test_unbind_gives_views():
    x = torch.zeros(2, 3)
    first, second = unbind(x, 0)
    first += 1
    second += 2
    assert x.tolist() == [[1, 1, 1], [2, 2, 2]]


INSTALLED = {
    "__init__": "",
    "ops/__init__": "from . import fmha",
    "ops/fmha/__init__": "from . import flash",
    "ops/fmha/common": "_built_with_cuda = False",
    "ops/fmha/flash": "from importlib.util import find_spec\nfrom . import common\nfound = find_spec('flash_attn')",
}
"""What of xformers asks for flash_attn."""


def test_an_installed_xformers_uses_the_attention_of_torch(tmp_path):
    for name, text in INSTALLED.items():
        path = tmp_path / "xformers" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    answers = run_virtual(
        f"""
        from forerun.sources.trace.inside.device import flash_attention
        sys.path.insert(0, {str(tmp_path)!r})
        flash_attention.install(recorder)
        from xformers.ops.fmha import common, flash
        import flash_attn
        result["xformers"] = [flash.found is None, common._built_with_cuda]
        result["flash_attn"] = callable(flash_attn.flash_attn_func)
        """,
        tmp_path,
    )
    assert answers["xformers"] == [True, True]
    assert answers["flash_attn"], "the program itself finds the stand-in"
