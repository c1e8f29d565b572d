"""The tables of simple_pytorch's document on SimpleFSDP, run as plans of the stack `simple-fsdp`.

Measured figures are read from the document at run time: steps in milliseconds, peaks in MiB.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.analysis.predict import predict
from forerun.cluster.catalog import load_cluster
from forerun.model.spec import ModelSpec
from forerun.plan.plan import Plan

ORIGINS = Path(__file__).parents[2] / ".." / "shared" / "origins"
DOCUMENT = next(iter(sorted(ORIGINS.glob("002_*.txt"))), None)
pytestmark = pytest.mark.skipif(DOCUMENT is None, reason=f"needs the document 002_*.txt in {ORIGINS}")
CLUSTER = load_cluster("a100-80gb-sxm")
MLP = ModelSpec(
    name="four residual MLP blocks",
    n_layers=4,
    hidden=4096,
    n_heads=0,
    n_kv_heads=0,
    head_dim=0,
    ffn_hidden=16384,
    vocab=32768,
    mlp="gelu",
    norm="layernorm",
    position="none",
    mlp_bias=True,
    norm_bias=True,
    block_norms=False,
)
TRANSFORMER = replace(
    MLP, name="transformer", n_heads=32, n_kv_heads=8, head_dim=128, position="sinusoidal", block_norms=True
)
STEP = Plan(seq_len=4096, micro_batch=8, stack="simple-fsdp", reduce_dtype="bf16")
ALONE = replace(STEP, zero_stage=0, optimizer_impl="foreach")
SHARDED = replace(STEP, dp_shard=4, precision="fp32", reduce_dtype="fp32", optimizer_impl="foreach")
WHOLE = {"compile": True, "optimizer_impl": "fused"}
KEPT = replace(STEP, dp_shard=4, compile=True, reshard_after_forward="never")
LOSS_APART = {"compile_loss": False, "optimizer_impl": "foreach"}
MLP_ROWS = {
    "Nothing": replace(ALONE, precision="fp32"),
    "autocast (bf16)": replace(ALONE, autocast=True),
    "compile (_fwd + _bwd)": replace(ALONE, precision="fp32", **WHOLE),
    "both": replace(ALONE, autocast=True, **WHOLE),
    "data_parallel": SHARDED,
    "+compile(2x)": replace(SHARDED, **WHOLE),
    "+ac_mode=full + compile(2x)": replace(KEPT, precision="fp32", reduce_dtype="fp32"),
    "+param=bf16,reduce=bf16": KEPT,
    "+compile(model, options)": replace(KEPT, cuda_graphs=True, **LOSS_APART),
    "+compile(model)": replace(KEPT, **LOSS_APART),
}
"""Each row's plan. With ac_mode other than none, gathers are left to the checkpoints of the model, which has none."""
IN_PIECES = replace(STEP, dp_shard=2, compile=True, graph_breaks=True, activation_checkpointing="selective")
BOTH = replace(IN_PIECES, selective_policy="attention+mlp")


def _figures(line: str) -> list[float]:
    return [float(re.sub(r"[_',`]", "", text)) for text in re.findall(r"\d[\d_',]*", line)]


def _cells(heading: str) -> list[list[str]]:
    """Rows of the tables below a heading, up to the next heading."""
    assert DOCUMENT is not None
    text = DOCUMENT.read_text(encoding="utf-8").split(heading, 1)[1]
    lines = re.split(r"^#", text, maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")]


def _off(model: ModelSpec, plan: Plan, step_ms: float, peak_mib: float) -> tuple[float, float]:
    """Relative errors of step time and allocated peak."""
    found = predict(model, plan, CLUSTER)
    return found.step_time_s * 1e3 / step_ms - 1, found.peak_allocated_gib * 1024 / peak_mib - 1


@pytest.mark.parametrize("what", MLP_ROWS)
def test_rows_of_the_mlp_are_met_within_three_percent(what):
    row = next(cells for cells in _cells("### On 4xA100 SXM, seqlen=4096") if cells[0] == what)
    time, memory = _off(MLP, MLP_ROWS[what], _figures(row[4])[0], _figures(row[3])[0])
    assert abs(time) < 0.03
    assert abs(memory) < 0.012


@pytest.mark.parametrize("seq_len", [512, 1024, 2048, 4096, 8192, 16384])
def test_steps_of_any_sequence_length_are_met_within_five_percent(seq_len):
    row = next(cells for cells in _cells("### Scaling behaviour") if cells[0] == str(seq_len))
    time, memory = _off(TRANSFORMER, replace(BOTH, seq_len=seq_len), _figures(row[2])[0], _figures(row[1])[0])
    assert abs(time) < 0.05
    assert abs(memory) < 0.015


@pytest.mark.parametrize("n_gpus", [1, 2, 3, 4, 6, 8])
def test_peaks_of_any_number_of_gpus_are_met_within_a_percent(n_gpus):
    table = [cells for cells in _cells("### Scaling behaviour") if len(cells) == 5 and cells[2] == "8"]
    row = next(cells for cells in table if cells[0] == str(n_gpus))
    time, memory = _off(TRANSFORMER, replace(BOTH, dp_shard=n_gpus), _figures(row[4])[0], _figures(row[3])[0])
    assert abs(time) < 0.02
    assert abs(memory) < 0.005


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ("compile(fwd + bwd):", {"selective_policy": "params"}),
        ("compile(model):", {"selective_policy": "params", "compile_loss": False}),
        ("ckpt(mlp) + compile(fwd + bwd):", {"selective_policy": "mlp"}),
        ("ckpt(mlp) + compile(model):", {"selective_policy": "mlp", "compile_loss": False}),
        ("ckpt(attn) + compile(flex) + compile(fwd + bwd):", {"selective_policy": "attention-block"}),
        ("ckpt(both) + compile(flex) + compile(fwd + bwd):", {"selective_policy": "attention+mlp"}),
    ],
)
def test_checkpointed_parts_keep_what_the_document_shows(row, fields):
    assert DOCUMENT is not None
    line = next(line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith(row))
    peak_mib, step_ms = _figures(line.removeprefix(row))
    time, memory = _off(TRANSFORMER, replace(IN_PIECES, **fields), step_ms, peak_mib)
    assert abs(time) < 0.03
    assert abs(memory) < 0.005


def _small(setting: str, which: str) -> tuple[float, float]:
    """Peak and mean step of a row below a setting, as `4xA100SXM, d=8`."""
    assert DOCUMENT is not None
    below = DOCUMENT.read_text(encoding="utf-8").split(setting + "\n", 1)[1]
    line = next(line for line in below.splitlines() if which in line)
    peak, *steps = _figures(line.split(":", 1)[1])
    return peak, sum(steps) / len(steps)


@pytest.mark.parametrize("which", ["ReplSmall", "ShardSmall"])
@pytest.mark.parametrize(
    ("setting", "depth", "seq_len"), [("4xA100SXM, d=8", 8, 4096), ("4xA100SXM, d=32, s=128", 32, 128)]
)
def test_small_parameters_whole_or_sharded_are_met_within_five_percent(setting, depth, seq_len, which):
    peak_mib, step_ms = _small(setting, which)
    model = replace(TRANSFORMER, n_layers=depth)
    plan = replace(BOTH, dp_shard=4, seq_len=seq_len, shard_min_mib=1.0 if which == "ReplSmall" else 0.0)
    time, memory = _off(model, plan, step_ms, peak_mib)
    assert abs(time) < 0.05
    assert abs(memory) < 0.012


def test_whole_small_parameters_cost_memory_and_save_gathers():
    model = replace(TRANSFORMER, n_layers=32)
    sharded, whole = (
        predict(model, replace(BOTH, dp_shard=4, seq_len=128, shard_min_mib=least), CLUSTER) for least in (0.0, 1.0)
    )
    assert whole.step_time_s < sharded.step_time_s
    assert whole.peak_allocated_gib > sharded.peak_allocated_gib
