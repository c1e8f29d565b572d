"""Programs that are traced and modelled: the same work, so the same time and the same memory."""

import importlib.util
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from forerun.answers.analysis.predict_program import predict_program
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.sources.trace.module import trace_module

_FILE = Path(__file__).parents[3] / "examples" / "llama" / "model.py"
_SPEC = importlib.util.spec_from_file_location("llama_of_parity", _FILE)
llama = importlib.util.module_from_spec(_SPEC)
sys.modules["llama_of_parity"] = llama
_SPEC.loader.exec_module(llama)

SEQ = 4096
SIZES = {"dim": 2048, "n_layers": 4, "n_heads": 16, "n_kv_heads": 8, "ffn_dim": 5632, "vocab_size": 32000}
CLUSTER, STACK = "h100-sxm", "pytorch"
_LAYOUTS = {
    "FSDP2": {"dp_shard": 8},
    "FSDP2, full checkpointing": {"dp_shard": 8, "activation_checkpointing": "full"},
    "FSDP2, selective checkpointing": {"dp_shard": 8, "activation_checkpointing": "selective"},
    "HSDP": {"dp_replicate": 2, "dp_shard": 4},
}
PROGRAMS = {
    f"{name}, {how}": {**layout, "compile": how == "compiled"}
    for name, layout in _LAYOUTS.items()
    for how in ("eager", "compiled")
}


@cache
def both(name):
    """(traced, symbolic) prediction. Both run the attention kernel that torch chooses on an H100, cuDNN's."""
    plan = Plan(seq_len=SEQ, micro_batch=2, stack=STACK, attention="cudnn", **PROGRAMS[name])
    config = llama.LlamaConfig(**SIZES, seq_len=SEQ)
    spec = ModelSpec("llama", 4, 2048, 16, 8, 128, 5632, 32000)
    tokens = torch.empty(2, SEQ, dtype=torch.int64, device="meta")
    cluster = load_cluster(CLUSTER)
    traced = trace_module(lambda: llama.Llama(config), tokens, plan, fold=False)
    # The programs do nothing between two steps.
    stack = replace(load_stack(STACK), step_us=0.0)
    modelled = simulate_setup(Setup(spec, plan, cluster, replays=True, changed_stack=stack))
    return predict_program(traced, cluster, stack=STACK).prediction, modelled.prediction


def table():
    """What docs/tracing.md shows."""
    lines = ["| program | ms traced | ms modelled | ratio | MiB traced | MiB modelled | ratio |", "|---" * 7 + "|"]
    for name in PROGRAMS:
        times = [each.step_time_s * 1e3 for each in both(name)]
        peaks = [each.peak_allocated_gib * 1024 for each in both(name)]
        cells = [f"{times[0]:.1f} | {times[1]:.1f} | {times[0] / times[1]:.3f}"]
        cells.append(f"{peaks[0]:,.0f} | {peaks[1]:,.0f} | {peaks[0] / peaks[1]:.3f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
