"""What the notes on torchtitan's parallelize.py and train.py describe, run as their author runs it."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest
from command_here import run_here

from forerun.core.cost.periodic import periodic_constants
from forerun.sources.trace import titan

sys.path.append(str(Path(__file__).parents[1] / "sources" / "trace"))
import standin_torchtitan

COMMAND = Path(sys.executable).with_name("forerun")
FACTS = Path(__file__).resolve().parents[2].parent / "shared" / "goodput.md"
PLAN = ("llama-3.1-8b", "--cluster", "h100-sxm", "--seq-len", "8192", "--activation-checkpointing", "full")
DEFAULTS = {"gc": 50, "metrics": 10}
"""what torchtitan does without being asked"""
SWITCHED_ON = (
    *("--override", "profiling.enable_profiling=true", "--override", "profiling.profile_freq=100"),
    *("--override", "checkpoint.enable=true", "--override", "checkpoint.async_mode=async"),
)
LONG = ("llama-3.1-8b", "--cluster", "h100-sxm", "--seq-len", 131072, "--cp", 8, "--activation-checkpointing", "full")
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="tracing needs PyTorch")
SCRIPT = '''
import torch
from torch import nn

from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.device_mesh import init_device_mesh

tp_mesh = init_device_mesh("cuda", (1,))


def embedding_plan():
    return RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))


def apply_tp(model: nn.Module, tp_mesh):
    """Apply tensor parallelism to the image transformer."""
    names = ("tok_emb", "row_emb", "col_emb", "chan_emb", "xd_emb")
    parallelize_module(model, tp_mesh, {name: embedding_plan() for name in names})
    return model


class ImageEmbeddings(nn.Module):
    def __init__(self, vocab_size, dim):
        super().__init__()
        self.tok_emb = nn.Embedding(vocab_size, dim)
        self.row_emb = nn.Embedding(32, dim)
        self.col_emb = nn.Embedding(32, dim)
        self.chan_emb = nn.Embedding(3, dim)

    def forward(self, tokens, device):
        b, t = tokens.size()
        tok_emb = self.tok_emb(tokens)
        H, W, C = 32, 32, 3
        positions = torch.arange(t, device=device)
        chans = positions // (H * W)
        rows  = (positions % (H * W)) // W
        cols  = positions % W
        row_emb  = self.row_emb(rows)[None, :, :].expand(b, -1, -1)
        col_emb  = self.col_emb(cols)[None, :, :].expand(b, -1, -1)
        chan_emb = self.chan_emb(chans)[None, :, :].expand(b, -1, -1)
        return tok_emb + row_emb + col_emb + chan_emb


model = ImageEmbeddings(256, 128)

out = apply_tp(model, tp_mesh)
'''
STEP = """
out = out.to("cuda")
optimizer = torch.optim.AdamW(out.parameters())
for _ in range(3):
    tokens = torch.randint(0, 256, (2, 3072), device="cuda")
    loss = out(tokens, tokens.device).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def done(folder, *arguments, path=None):
    """How `forerun ARGUMENTS` ends. It is a command of its own with packages in `path`, and where a trace shows what
    its processes print."""
    if path is None and "--show-output" not in arguments:
        return run_here(folder, *arguments)
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), environment.get("PYTHONPATH", "")])
    words = [str(COMMAND), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, env=environment, cwd=folder, timeout=600, check=False)


def forerun(folder, *arguments, path=None):
    """What `forerun ARGUMENTS` prints."""
    ended = done(folder, *arguments, path=path)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


# -- tensor parallelism ------------------------------------------------------------------------------------------------


@needs_torch
def test_a_plan_entry_without_a_module_is_skipped_with_the_warning(tmp_path):
    """The snippet with one step behind it: PyTorch's warning names xd_emb, and the other embeddings train."""
    (tmp_path / "snippet.py").write_text(SCRIPT + STEP)
    ended = done(tmp_path, "trace", "snippet.py", "--show-output", "-o", "snippet.program")
    assert ended.returncode == 0, ended.stderr
    shown = ended.stdout + ended.stderr
    assert "Parallelize plan key 'xd_emb' could not be resolved: no submodule matching token 'xd_emb'" in shown
    for line in ("(tok_emb): Embedding(256, 128)", "(chan_emb): Embedding(3, 128)", "skipping this plan entry."):
        assert line in shown
    told = done(tmp_path, "predict", "--program", "snippet.program", "--cluster", "h100-sxm", "--json")
    assert told.returncode == 0, told.stderr
    record = json.loads(told.stdout)
    assert record["n_gpus"] == 1
    assert record["step_time_s"] > 0


@needs_torch
def test_the_snippet_as_it_stands_has_no_step(tmp_path):
    """Without a step there is nothing to predict, and one line says so."""
    (tmp_path / "snippet.py").write_text(SCRIPT)
    ended = done(tmp_path, "trace", "snippet.py", "-o", "snippet.program")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1


# -- load balance of ring attention ------------------------------------------------------------------------------------


def predicted(*arguments):
    return json.loads(forerun(None, "predict", *LONG, *arguments, "--json"))


def test_balance_is_worth_nearly_half_of_attention():
    """enable_load_balance off: the last of eight ranks computes 15 / 8 of a balanced rank's attention."""
    usual, off, striped = predicted(), predicted("--cp-load-balance", "none"), predicted("--cp-load-balance", "striped")
    assert usual["plan"]["cp_load_balance"] == "head_tail"
    attention = [each["breakdown"]["attention"] for each in (usual, striped, off)]
    assert attention[2] / attention[0] == pytest.approx(15 / 8, rel=0.05)
    assert attention == sorted(attention)
    assert off["step_time_s"] > 1.3 * usual["step_time_s"]
    assert off["hfu"] * off["step_time_s"] == pytest.approx(usual["hfu"] * usual["step_time_s"])


def test_a_search_tries_the_balances_that_are_listed():
    question = ("--cluster", "h100-sxm", "--gpus", 8, "--seq-len", 65536, "--global-batch", 8)
    fixed = ("--cp", "1,8", "--tp", 1, "--pp", 1, "--micro-batch", 1, "--activation-checkpointing", "full")
    balances = ("--cp-load-balance", "none,head_tail,striped")
    record = json.loads(forerun(None, "plan", "llama-3.2-1b", *question, *fixed, *balances, "--json"))
    places = {}
    for place, each in enumerate(record["top"]):
        plan = each["plan"]
        if plan["cp"] == 8:
            places.setdefault((plan["zero_stage"], plan["reshard_after_forward"]), {})[plan["cp_load_balance"]] = place
    assert places
    assert all(found["head_tail"] < found.get("none", 99) for found in places.values())
    assert record["counts"]["renamed"] > 0  # with cp 1 the three are one


def test_a_sequence_that_has_no_two_chunks_a_rank_is_refused():
    ask = ("predict", "llama-3.2-1b", "--cluster", "h100-sxm", "--cp", 8, "--seq-len", 8 * 1021)
    ended = done(None, *ask)
    assert ended.returncode == 2
    assert "seq_len 8168 is not divisible by 2 x cp 8" in ended.stderr
    assert done(None, *ask, "--cp-load-balance", "none").returncode == 0


# -- what runs every n steps -------------------------------------------------------------------------------------------


def stalls(record):
    return {stall["name"]: stall for stall in record["loop"]["stalls"]}


def test_every_branch_is_listed_with_its_stall(tmp_path):
    every = "checkpoint=500,profile=100,memory_snapshot=100,gc=50,metrics=10"
    text = forerun(tmp_path, "predict", *PLAN, "--dp-shard", 64, "--every", every, "--storage", "0.5,50")
    table = text.partition("With the periodic work of the training loop")[2]
    for kind, steps in (part.split("=") for part in every.split(",")):
        assert re.search(rf"^  {kind} +{steps} steps +\d.*%$", table, re.MULTILINE), kind
    assert re.search(r"mean step .* tokens/s/GPU", table)
    assert "storage: 0.5 GB/s a rank, 50 GB/s in all" in " ".join(table.split())


def test_blocking_parts_of_asynchronous_saves_are_those_of_512_gpus(tmp_path):
    """Llama 3 8B: under half a second, and 0.06 s with pinned memory."""
    if not FACTS.is_file():
        pytest.skip(f"{FACTS} is not here")
    row = next(line for line in FACTS.read_text().splitlines() if line.startswith("| torchtitan/DCP Llama3-8B"))
    most_s, pinned_s = (float(number) for number in re.findall(r"< ([\d.]+) async; ([\d.]+) with pinned", row)[0])
    found = {}
    for mode in ("async", "async_with_pinned_mem"):
        options = ("--every", "checkpoint=500", "--checkpoint-mode", mode, "--json")
        found[mode] = json.loads(forerun(tmp_path, "predict", *PLAN, "--dp-shard", 512, *options))
    assert stalls(found["async"])["checkpoint"]["stall_s"] < most_s
    assert stalls(found["async_with_pinned_mem"])["checkpoint"]["stall_s"] == pytest.approx(pinned_s, rel=0.35)


def test_checkpointed_regions_leave_the_garbage_that_the_constants_say():
    torch = pytest.importorskip("torch")
    checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint
    layers = [torch.nn.Linear(8, 8) for _ in range(5)]

    def step():
        x = torch.ones(2, 8)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        x.sum().backward()

    step()
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            step()
        found = gc.collect(1)
    finally:
        gc.enable()
    assert found / (4 * len(layers)) == pytest.approx(periodic_constants().gc.objects_per_checkpointed_region, abs=1)


@pytest.mark.long
def test_a_trace_keeps_what_is_switched_on(tmp_path):
    """A package in torchtitan's place; its trainer refuses to run with what a trace leaves out."""
    standin_torchtitan.install(tmp_path / "path")
    _traced_stalls(tmp_path, tmp_path / "path")


def _missing():
    try:
        return "" if version("torchtitan").startswith("0.2") else "torchtitan 0.2.2 is not installed"
    except PackageNotFoundError:
        return f"torchtitan is not installed; supported: {', '.join(titan.SUPPORTED)}"


@pytest.mark.slow
@pytest.mark.skipif(bool(_missing()), reason=_missing() or "installed")
def test_torchtitan_itself_says_what_its_loop_does(tmp_path):
    _traced_stalls(tmp_path, None)


def _traced_stalls(folder, path):
    """Trace with everything switched on, and predict what was traced."""
    program = folder / "step.program"
    run = ("trace", "--torchtitan", "llama3", "llama3_debugmodel", "--world-size", 8, "-o", program)
    forerun(folder, *run, *SWITCHED_ON, path=path)
    predict = ("predict", "--program", program, "--cluster", "h100-sxm", "--json")
    found = json.loads(forerun(folder, *predict))
    every = {name: stall["every_steps"] for name, stall in stalls(found).items()}
    assert every == DEFAULTS | {"checkpoint": 500, "profile": 100}
    assert all(stall["stall_s"] > 0 for stall in stalls(found).values())
    assert found["loop"]["checkpoint"]["mode"] == "async"
    assert found["loop"]["mean_step_time_s"] > found["step_time_s"]
    off = json.loads(forerun(folder, *predict, "--every", "checkpoint=0,profile=0,gc=0,metrics=0"))
    assert "loop" not in off
    assert off["step_time_s"] == found["step_time_s"]
