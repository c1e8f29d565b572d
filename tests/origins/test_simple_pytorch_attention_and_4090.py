"""simple_pytorch: checkpointed attention that nothing compiles, and eight RTX 4090 without peer access.

`forerun predict` runs on the author's model with the options of his rows; the figures are read from his README.
"""

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from forerun.cli.main import run

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "origins"
README = next(FOLDER.glob("002_*.txt"), None)
pytestmark = pytest.mark.skipif(README is None, reason="the document is not beside this checkout")

MODEL = """
name: simple-transformer
n_layers: {depth}
hidden: 4096
n_heads: 32
n_kv_heads: 8
head_dim: 128
ffn_hidden: 16384
vocab: 32768
mlp: gelu
norm: layernorm
position: sinusoidal
mlp_bias: true
norm_bias: true
"""
SCRIPT = "--stack simple-fsdp --micro-batch 8 --reduce-dtype bf16 --compile"
CHECKPOINTED = {
    "attn": "selective --selective-policy attention",
    "both": "selective --selective-policy attention+mlp",
    "block": "full",
}
MIB_OF_GIB = 1024
TIME = 0.20
MEMORY = 0.02


def predicted(folder: Path, depth: int, options: str) -> dict:
    """What `forerun predict --json` answers for the author's model of `depth` blocks."""
    model = folder / "model.yaml"
    model.write_text(MODEL.format(depth=depth), encoding="utf-8")
    out = io.StringIO()
    with redirect_stdout(out):
        assert run(["predict", str(model), *SCRIPT.split(), *options.split(), "--json"]) == 0
    return json.loads(out.getvalue())


def rows_without_compiled_flex() -> list[tuple[str, str]]:
    """(what is checkpointed, what is compiled) of the rows that ran out of memory on two A100 of 80 GB."""
    text = README.read_text(encoding="utf-8") if README else ""
    return re.findall(r"^ckpt\((\w+)\) \+ compile\((fwd \+ bwd|model)\): OOM", text, re.MULTILINE)


def measured_on_4090(depth: int, variant: str) -> tuple[float, tuple[float, float]]:
    """Peak memory in MiB and the range of the step in seconds."""
    assert README is not None
    section = README.read_text(encoding="utf-8").partition("### Skipping small ones")[2].partition("\n### ")[0]
    pattern = rf"8xRTX4090, d={depth}\b.*?{variant}:\s+(\d+)/(\d+)-(\d+)"
    found = re.search(pattern, section, re.DOTALL)
    assert found is not None
    memory, *step_ms = map(float, found.groups())
    return memory, (step_ms[0] / 1e3, step_ms[1] / 1e3)


def test_the_document_has_the_rows():
    assert sorted(rows_without_compiled_flex()) == [
        ("attn", "fwd + bwd"), ("attn", "model"), ("block", "fwd + bwd"), ("both", "fwd + bwd"), ("both", "model"),
    ]  # fmt: skip


@pytest.mark.parametrize(("checkpointed", "compiled"), rows_without_compiled_flex())
def test_checkpointed_flex_attention_that_nothing_compiles_runs_out_of_memory(checkpointed, compiled, tmp_path):
    options = f"--cluster a100 --dp-shard 2 --seq-len 4096 --activation-checkpointing {CHECKPOINTED[checkpointed]}"
    options += " --no-compile-loss" if compiled == "model" else ""
    eager = predicted(tmp_path, 4, f"{options} --attention flex_uncompiled")
    assert not eager["fits"]
    assert not eager["fit_in_doubt"]
    assert predicted(tmp_path, 4, f"{options} --attention flex")["fits"], "with compile(flex) the row runs"


@pytest.mark.parametrize(("depth", "seq_len"), [(4, 4096), (32, 128)])
def test_eight_rtx4090_wait_for_the_way_through_host_memory(depth, seq_len, tmp_path):
    checkpointed = f"--activation-checkpointing {CHECKPOINTED['both']}"
    found = predicted(tmp_path, depth, f"--cluster rtx4090 --dp-shard 8 --seq-len {seq_len} {checkpointed}")
    for variant in ("ReplSmall", "ShardSmall"):
        memory_mib, step_s = measured_on_4090(depth, variant)
        assert max(step_s) * (1 - TIME) <= found["step_time_s"] <= min(step_s) * (1 + TIME)
        assert found["peak_allocated_gib"] * MIB_OF_GIB == pytest.approx(memory_mib, rel=MEMORY)
    assert found["bottleneck"] == "exposed_data_parallel"
    assert any("no peer access" in line for line in found["warnings"])


def test_both_depths_are_explained_by_one_way_through_host_memory(tmp_path):
    """What the measured steps leave for messages once the predicted kernels are taken off, as bus bandwidth."""
    rates = []
    for depth, seq_len in ((4, 4096), (32, 128)):
        checkpointed = f"--activation-checkpointing {CHECKPOINTED['both']}"
        found = predicted(tmp_path, depth, f"--cluster rtx4090 --dp-shard 8 --seq-len {seq_len} {checkpointed}")
        kernels_s = found["step_time_s"] - found["exposed_comm_s"]
        left_s = measured_on_4090(depth, "ShardSmall")[1][0] - kernels_s
        rates.append(found["exposed_comm_s"] / left_s)
    assert rates[0] == pytest.approx(rates[1], rel=0.1)
