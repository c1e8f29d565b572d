"""simple_pytorch: what its README measures, predicted as plans of the stack `simple-fsdp`.

Measured figures are read from the document at run time: steps in milliseconds, peaks in MiB.
`test_simple_pytorch_main.py` traces the author's script.
"""

import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.answers.analysis.predict import predict
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.interfaces.cli.main import run

COMMAND = Path(sys.executable).with_name("forerun")
ORIGINS = Path(__file__).resolve().parents[2].parent / "shared" / "origins"
DOCUMENT = next(iter(sorted(ORIGINS.glob("002_*.txt"))), None)
TEXT = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT else ""
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
STEP = Plan(seq_len=4096, micro_batch=8, stack="simple-fsdp", reduce_dtype="bf16", optimizer_impl="fused")
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


def printed(*arguments):
    """What `forerun ARGUMENTS` prints; the command runs in this process, which has its modules."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert run([str(argument) for argument in arguments]) == 0
    return out.getvalue()


def _figures(line):
    return [float(re.sub(r"[_',`]", "", text)) for text in re.findall(r"\d[\d_',]*", line)]


def _cells(heading):
    """Rows of the tables below a heading, up to the next heading."""
    text = TEXT.split(heading, 1)[1]
    lines = re.split(r"^#", text, maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")]


def _off(model, plan, step_ms, peak_mib):
    """Relative errors of step time and allocated peak."""
    found = predict(model, plan, CLUSTER)
    return found.step_time_s * 1e3 / step_ms - 1, found.peak_allocated_gib * 1024 / peak_mib - 1


@pytest.mark.parametrize("what", MLP_ROWS)
def test_rows_of_the_mlp_are_met_within_four_percent(what):
    row = next(cells for cells in _cells("### On 4xA100 SXM, seqlen=4096") if cells[0] == what)
    time, memory = _off(MLP, MLP_ROWS[what], _figures(row[4])[0], _figures(row[3])[0])
    assert abs(time) < 0.04
    assert abs(memory) < 0.012


@pytest.mark.parametrize("seq_len", [512, 1024, 2048, 4096, 8192, 16384])
def test_steps_of_any_sequence_length_are_met_within_six_percent(seq_len):
    row = next(cells for cells in _cells("### Scaling behaviour") if cells[0] == str(seq_len))
    time, memory = _off(TRANSFORMER, replace(BOTH, seq_len=seq_len), _figures(row[2])[0], _figures(row[1])[0])
    assert abs(time) < 0.06
    assert abs(memory) < 0.017


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
    line = next(line for line in TEXT.splitlines() if line.startswith(row))
    peak_mib, step_ms = _figures(line.removeprefix(row))
    time, memory = _off(TRANSFORMER, replace(IN_PIECES, **fields), step_ms, peak_mib)
    assert abs(time) < 0.03
    assert abs(memory) < 0.005


def _small(setting, which):
    """Peak and mean step of a row below a setting, as `4xA100SXM, d=8`."""
    below = TEXT.split(setting + "\n", 1)[1]
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


# -- attention that nothing compiles, and GPUs without peer access -----------------------------------------------------

TRANSFORMER_FILE = """
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
SCRIPT = "--stack simple-fsdp --micro-batch 8 --reduce-dtype bf16 --compile --graph-breaks"
CHECKPOINTED = {
    "attn": "selective --selective-policy attention-block",
    "both": "selective --selective-policy attention+mlp",
    "block": "full",
}
MIB_OF_GIB = 1024


def predicted(folder, depth, options):
    """What `forerun predict --json` answers for the author's model of `depth` blocks."""
    model = folder / "model.yaml"
    model.write_text(TRANSFORMER_FILE.format(depth=depth), encoding="utf-8")
    return json.loads(printed("predict", model, *SCRIPT.split(), *options.split(), "--json"))


def rows_without_compiled_flex():
    """(what is checkpointed, what is compiled) of the rows that ran out of memory on two A100 of 80 GB."""
    return re.findall(r"^ckpt\((\w+)\) \+ compile\((fwd \+ bwd|model)\): OOM", TEXT, re.MULTILINE)


def measured_on_4090(depth, variant):
    """Peak memory in MiB and the range of the step in seconds."""
    section = TEXT.partition("### Skipping small ones")[2].partition("\n### ")[0]
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
    for variant, least_mib in (("ReplSmall", 1), ("ShardSmall", 0)):
        options = f"--cluster rtx4090 --dp-shard 8 --seq-len {seq_len} {checkpointed} --shard-min-mib {least_mib}"
        found = predicted(tmp_path, depth, options)
        memory_mib, step_s = measured_on_4090(depth, variant)
        assert max(step_s) * 0.8 <= found["step_time_s"] <= min(step_s) * 1.2
        assert found["peak_allocated_gib"] * MIB_OF_GIB == pytest.approx(memory_mib, rel=0.021)
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
    assert rates[0] == pytest.approx(rates[1], rel=0.15)


# -- stages, options, checkpoints, nodes -------------------------------------------------------------------------------

MLP_FILE = """
n_layers: {layers}
hidden: {width}
n_heads: 0
n_kv_heads: 0
head_dim: 0
ffn_hidden: {hidden}
vocab: {vocab}
mlp: gelu
mlp_bias: true
norm: layernorm
position: none
tied_embeddings: false
"""
"""its MyMLP: embedding, residual blocks of two products with biases, norm, head; the vocabulary was 32000 at first"""


@pytest.fixture
def mlp(tmp_path):
    """What `forerun predict` says of the MLP of so many layers and such a width, on A100s."""

    def command(*options, layers=4, width=4096, vocab=32768):
        model = tmp_path / "mlp.yaml"
        model.write_text(MLP_FILE.format(layers=layers, width=width, hidden=4 * width, vocab=vocab))
        words = ["predict", model, "--cluster", "a100-80gb-sxm", "--stack", "simple-fsdp", "--seq-len", width, "--json"]
        return json.loads(printed(*words, *options))

    return command


def peaks_mib(record):
    """(way, stage) -> MiB that were allocated at most up to its end, as the author's script prints it."""
    return {(stage["way"], stage["stage"]): stage["peak_gib"] * 1024 for stage in record["init"]}


def within(share, *pairs):
    for found, measured in pairs:
        assert found == pytest.approx(measured, rel=share, abs=0.5)


def test_stages_of_initialisation_are_the_author_s(mlp):
    without = re.search(r"Without: (\d+) after Model\(\), (\d+) after data_parallel", TEXT)
    meta = re.search(r"With: (\d+) after Model\(\) and data_parallel, (\d+) after to_empty, (\d+) after init", TEXT)
    found = peaks_mib(mlp("--dp-shard", 4, "--micro-batch", 8))
    model, sharded = map(float, without.groups())
    nothing, empty, initialised = map(float, meta.groups())
    within(0.01, (found["direct", "model"], model), (found["direct", "sharded"], sharded))
    within(0.01, (found["meta", "model"], nothing), (found["meta", "sharded"], nothing))
    within(0.01, (found["meta", "to_empty"], empty), (found["meta", "init_weights, gathered"], initialised))
    assert found["meta", "init_weights"] == found["meta", "to_empty"]


def test_columns_before_the_first_step_are_those_of_the_tables(mlp):
    big = re.search(r"^\| data_parallel +\| +(\d+) +\| +(\d+)", TEXT, re.MULTILINE)
    small = re.search(r"^\| Nothing +\| +(\d+) \|  -", TEXT, re.MULTILINE)
    found = peaks_mib(mlp("--dp-shard", 4, "--micro-batch", 8))
    within(0.01, (found["direct", "model"], float(big[1])), (found["direct", "sharded"], float(big[2])))
    found = peaks_mib(mlp("--dp-shard", 2, "--micro-batch", 8, layers=3, width=1024, vocab=32000))
    within(0.01, (found["direct", "model"], float(small[1])))


def test_stages_are_shown_to_people(mlp, tmp_path):
    mlp("--dp-shard", 4)
    words = ["predict", tmp_path / "mlp.yaml", "--cluster", "a100-80gb-sxm", "--stack", "simple-fsdp"]
    words += ["--seq-len", 4096, "--dp-shard", 4, "--explain"]
    done = subprocess.run([str(COMMAND), *map(str, words)], capture_output=True, text=True, timeout=600, check=True)
    table = done.stdout.partition("Memory before the first step, MiB")[2]
    assert re.search(r"on meta +to_empty +768 +768", table)
    assert re.search(r"on the device +sharded +768 +3,200", table)


def test_options_of_inductor_change_what_their_rows_say(mlp):
    """Epilogue fusion and padding are on by default, autotuning chooses among kernels for the same products: nothing
    but CUDA graphs changes the Program, and the rows are within 3 % of that."""
    rows = dict(re.findall(r"^\| ([\w+-]+(?: option)?) +\| +[\d_]+ \| (\d+) \|$", TEXT, re.MULTILINE))
    plain = mlp("--dp-shard", 4, "--micro-batch", 8, "--compile")
    graphs = mlp("--dp-shard", 4, "--micro-batch", 8, "--compile", "--cuda-graphs")
    ours = {name: graphs if name.startswith(("cudagraph", "cg")) else plain for name in rows}
    assert set(rows) == {"no option", "epifusion", "shape-padding", "autotune", "cudagraph", "cg+epi+pad"}
    for name, measured in rows.items():
        ratio = ours[name]["step_time_s"] / plain["step_time_s"]
        assert ratio == pytest.approx(float(measured) / float(rows["no option"]), rel=0.03), name


def test_a_checkpoint_is_saved_and_loaded(mlp):
    parameters = (2 * 32768 * 4096 + 4 * (2 * 4096 * 16384 + 4096 + 16384 + 2 * 4096) + 2 * 4096) * 12
    found = mlp("--dp-shard", 4, "--every", "checkpoint=100", "--storage", "2")["loop"]["checkpoint"]
    assert found["total_gib"] * 2**30 == pytest.approx(parameters, rel=1e-3)
    assert found["rank_gib"] == pytest.approx(found["total_gib"] / 4)
    assert found["save_s"] == pytest.approx(parameters / 4 / 2e9, rel=0.05)
    assert found["load_s"] > parameters / 4 / 2e9


def test_more_nodes_train_more_tokens_at_a_price(mlp):
    found = [
        mlp("--dp-shard", -1, "--gpus", gpus, "--micro-batch", 8, "--optimizer-impl", "fused")
        for gpus in (8, 16, 32, 64)
    ]
    paces = [record["tokens_per_s_per_gpu"] for record in found]
    assert paces == sorted(paces, reverse=True)
    assert paces[-1] > 0.9 * paces[0]
    assert [record["plan"]["dp_shard"] for record in found] == [8, 16, 32, 64]
    peaks = [record["peak_allocated_gib"] for record in found]
    assert peaks == sorted(peaks, reverse=True)
