"""What the notes on torchtitan's parallelize.py show, run as their author runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="tracing needs PyTorch")

COMMAND = Path(sys.executable).with_name("forerun")
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


def forerun(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    words = [str(COMMAND), *map(str, arguments)]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=600)


def test_a_plan_entry_without_a_module_is_skipped_with_the_warning(tmp_path):
    """The snippet with one step behind it: PyTorch's warning names xd_emb, and the other embeddings train."""
    (tmp_path / "snippet.py").write_text(SCRIPT + STEP)
    done = forerun(tmp_path, "trace", "snippet.py", "--show-output", "-o", "snippet.program")
    assert done.returncode == 0, done.stderr
    shown = done.stdout + done.stderr
    assert "Parallelize plan key 'xd_emb' could not be resolved: no submodule matching token 'xd_emb'" in shown
    for line in ("(tok_emb): Embedding(256, 128)", "(chan_emb): Embedding(3, 128)", "skipping this plan entry."):
        assert line in shown
    told = forerun(tmp_path, "predict", "--program", "snippet.program", "--cluster", "h100-sxm", "--json")
    assert told.returncode == 0, told.stderr
    record = json.loads(told.stdout)
    assert record["n_gpus"] == 1
    assert record["step_time_s"] > 0


def test_the_snippet_as_it_stands_has_no_step(tmp_path):
    """Without a step there is nothing to predict, and one line says so."""
    (tmp_path / "snippet.py").write_text(SCRIPT)
    done = forerun(tmp_path, "trace", "snippet.py", "-o", "snippet.program")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
