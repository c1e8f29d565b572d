"""DeepSeek's own stack keeps inputs of SwiGLU in 1 byte, outputs of attention in 12 bits (arXiv 2412.19437, 3.3.2)."""

from __future__ import annotations

from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.build import build

from .by_hand import kept_by
from .cases import CLUSTER

MODEL = ModelSpec("small", n_layers=2, hidden=256, n_heads=4, n_kv_heads=4, head_dim=64, ffn_hidden=512, vocab=1000)
TOKENS = 256
WIDE_INPUT, WIDE_OUTPUT = TOKENS * 2 * 512 * 2, TOKENS * 256 * 2
"""bytes of SwiGLU's inputs and of attention's output in bf16"""


def test_narrow_copies_wait_for_the_backward_pass_in_place_of_wide_tensors() -> None:
    fields = {"precision": "fp8", "fp8_recipe": "block", "activation_checkpointing": "none"}
    program = build(MODEL, Plan(seq_len=TOKENS, stack="hai-llm", **fields), CLUSTER)  # type: ignore[arg-type]
    moved = zip(program.ops.name, program.ops.bytes_read, program.ops.bytes_written, strict=True)
    copies = {name: (int(read), int(written)) for name, read, written in moved if name.endswith((".narrow", ".wide"))}
    narrow_input, narrow_output = WIDE_INPUT // 2, WIDE_OUTPUT * 3 // 4
    assert copies == {
        "ffn.u.narrow": (WIDE_INPUT, narrow_input),
        "ffn.u.wide": (narrow_input, WIDE_INPUT),
        "o.narrow": (WIDE_OUTPUT, narrow_output),
        "o.wide": (narrow_output, WIDE_OUTPUT),
    }
    kept = [size for _, size in kept_by(program, "layer.forward")]
    assert kept.count(narrow_input) == kept.count(narrow_output) == 1
    assert WIDE_INPUT not in kept
