"""What single fields of a plan change in the files of each tool is what `printed/launch-TOOL.txt` holds, and what the
model changes is what `printed/launch-models-TOOL.txt` holds, which people have read.

Where it changes on purpose, `python tests/interfaces/report/test_launch_by_field.py` writes the files anew: read the
difference before you commit it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.common.errors import ForerunError
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.interfaces.report.launch.tools import TOOLS, launch_files

FOLDER = Path(__file__).parent / "printed"
HOPPER, BLACKWELL = load_cluster("h100-sxm"), load_cluster("b200-sxm")
DENSE, EXPERTS = load_model("llama-3.1-8b"), load_model("qwen3-30b-a3b")
BASE = {"seq_len": 4096, "micro_batch": 2, "n_microbatches": 4, "dp_shard": 4}
CHANGES = [
    {"tp": 2},
    {"tp": 2, "sequence_parallel": False},
    {"tp": 2, "async_tp": True},
    {"tp": 2, "compile": True, "async_tp": True},
    {"tp": 2, "loss_parallel": False},
    {"cp": 2},
    {"cp": 2, "cp_method": "allgather"},
    {"cp": 2, "cp_method": "ulysses"},
    {"pp": 2},
    {"pp": 2, "pp_schedule": "Interleaved1F1B", "virtual_stages": 2},
    {"pp": 2, "layers_per_stage": (17, 15)},
    {"dp_replicate": 2},
    {"dp_shard": 1},
    {"dp_shard": 1, "dp_replicate": 2, "zero_stage": 0},
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 1, "offload": "optimizer"},
    {"zero_stage": 2, "offload": "optimizer"},
    {"offload": "params"},
    {"n_microbatches": 1},
    {"reshard_after_forward": "never"},
    {"prefetch": 2},
    {"overlap_grad_reduce": False},
    {"ddp_bucket_mib": 40.0, "zero_stage": 1},
    {"precision": "fp16"},
    {"precision": "fp32"},
    {"precision": "fp8", "fp8_recipe": "tensorwise"},
    {"precision": "fp8", "fp8_recipe": "delayed"},
    {"precision": "fp8", "fp8_recipe": "tensorwise", "fp8_all_gather": True},
    {"precision": "tf32"},
    {"reduce_dtype": "bf16"},
    {"accumulate_dtype": "bf16", "reduce_dtype": "bf16"},
    {"master_dtype": "bf16"},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "full", "checkpoint_every": 2},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "selective", "checkpoint_every": 2},
    {"activation_checkpointing": "selective", "selective_policy": "mlp-act-norm"},
    {"activation_offload": 0.5},
    {"compile": True},
    {"cuda_graphs": True},
    {"attention": "flash2"},
    {"attention": "flex"},
    {"optimizer": "adam"},
    {"optimizer": "sgd"},
    {"optimizer": "muon"},
    {"optimizer_impl": "foreach"},
    {"loss_chunks": 4},
    {"lora_rank": 8},
]
OF_EXPERTS = [{"ep": 2}, {"ep": 4}, {"ep": 2, "tp": 2}, {"ep": 2, "tp": 2, "etp": 2}, {"ep": 2, "dispatcher": "deepep"}]
SCALED_IN_BLOCKS = [
    {"precision": "mxfp8"},
    {"precision": "mxfp8", "fp8_recipe": "mx", "fp8_all_gather": True},
    {"precision": "mxfp8", "fp8_recipe": "tensorwise"},
    {"precision": "nvfp4"},
    {"precision": "nvfp4", "fp8_recipe": "rowwise"},
]

NOT_OF_A_FIELD = re.compile(r"\s*#.*|.*(nproc.per.node|GPUS_PER_NODE|num_processes|Flavor planned|, for ).*")
"""lines that follow from the number of GPUs, and the first line of the notes"""
LONGEST = 200


def files(tool, model, changes, cluster=HOPPER):
    """The lines of all files, or the reason why there are none."""
    try:
        found = launch_files(replace(Plan(**BASE), **changes), model, cluster, tool)
    except ForerunError as error:
        return [f"refused: {error}"]
    return [line for text in found.values() for line in text.splitlines() if not NOT_OF_A_FIELD.fullmatch(line)]


def differences(tool):
    """Yields for each change the lines that come, and those that go without another in their place."""
    for model, cluster, each in (
        (DENSE, HOPPER, CHANGES), (EXPERTS, HOPPER, OF_EXPERTS), (DENSE, BLACKWELL, SCALED_IN_BLOCKS)
    ):  # fmt: skip
        base = files(tool, model, {}, cluster)
        for changes in each:
            yield f"{model.name}, {', '.join(f'{name} {value}' for name, value in changes.items())}"
            now = files(tool, model, changes, cluster)
            yield from changed(base, now)


def changed(base, now):
    """Yields the lines of `now` that come, and those of `base` that go without another in their place."""
    yield from (f"  + {line.strip()[:LONGEST]}" for line in now if line not in base)
    if not now[0].startswith("refused"):
        keys = {key(line) for line in now}
        yield from (f"  - {line.strip()[:LONGEST]}" for line in base if key(line) not in keys)


def models(tool):
    """Yields all lines for one model, and for others those that change."""
    whole = files(tool, DENSE, {})
    yield from (f"  {line[:LONGEST]}" for line in whole)
    for name in ("llama-3.2-1b", "qwen3-8b", "qwen3-30b-a3b", "deepseek-v3", "mixtral-8x7b"):
        yield name
        yield from changed(whole, files(tool, load_model(name), {}))


def key(line):
    """What a line sets."""
    return re.split(r"[ =:]", line.strip(), maxsplit=1)[0]


@pytest.mark.parametrize("tool", TOOLS)
def test_what_a_field_changes_is_what_was_read(tool):
    expected = (FOLDER / f"launch-{tool}.txt").read_text(encoding="utf-8")
    assert list(differences(tool)) == expected.splitlines()


@pytest.mark.parametrize("tool", TOOLS)
def test_what_a_model_changes_is_what_was_read(tool):
    expected = (FOLDER / f"launch-models-{tool}.txt").read_text(encoding="utf-8")
    assert list(models(tool)) == expected.splitlines()


def write():
    """Writes what fields and models change now, so that the difference can be read."""
    for tool in TOOLS:
        (FOLDER / f"launch-models-{tool}.txt").write_text("".join(f"{line}\n" for line in models(tool)))
        (FOLDER / f"launch-{tool}.txt").write_text("".join(f"{line}\n" for line in differences(tool)))


if __name__ == "__main__":
    write()
