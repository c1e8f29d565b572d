"""The programs by which versions of torch are compared: one small Llama in every mode that leans on torch's internals.

`python tests/sources/trace/version_programs.py` prints what each does in a step, as version_counts.yaml keeps it.
"""

import importlib.util
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import torch
import yaml

import forerun
from forerun.common.errors import ForerunError
from forerun.core.memory.profile import profile
from forerun.core.program.counts import op_counts
from forerun.core.program.kinds import OpKind
from forerun.core.program.types import Collective, Phase
from forerun.describe.plan.plan import Plan
from forerun.sources.trace.module import trace_module

# Traced processes are forks: what is imported here they don't import again.
for _name in ("two_functions", "parallelize.module_program", "parallelize.pipeline", "compiled.backend"):
    import_module(f"forerun.sources.trace.inside.{_name}")
for _name in ("torch.distributed.tensor.experimental._attention", "torch.distributed.fsdp"):
    import_module(_name)

_FILE = Path(__file__).parents[3] / "examples" / "llama" / "model.py"
_SPEC = importlib.util.spec_from_file_location("llama_of_versions", _FILE)
llama = importlib.util.module_from_spec(_SPEC)
sys.modules["llama_of_versions"] = llama
_SPEC.loader.exec_module(llama)

SEQ, BATCH = 256, 2
_BF16 = {"master_dtype": "bf16"}
_SHARDED = {"dp_shard": 2}
PLANS = {
    "eager": _BF16,
    "data parallel": {"dp_replicate": 2, "zero_stage": 0},
    "FSDP2": {**_SHARDED, "n_microbatches": 2},
    "HSDP": {"dp_replicate": 2, **_SHARDED},
    "tensor parallel": {"tp": 2, **_BF16},
    "FSDP2 and tensor parallel": {**_SHARDED, "tp": 2},
    "pipeline 1F1B": {"pp": 2, "n_microbatches": 2, **_BF16},
    "pipeline ZBV": {"pp": 2, "n_microbatches": 2, "pp_schedule": "ZBV", "virtual_stages": 2, **_BF16},
    "context parallel, ring": {"cp": 2},
    "context parallel, all-gather": {"cp": 2, "cp_method": "allgather"},
    "full checkpointing": {**_SHARDED, "activation_checkpointing": "full"},
    "selective checkpointing": {**_SHARDED, "activation_checkpointing": "selective"},
    "offload": {**_SHARDED, "offload": "params"},
    "compiled blocks": {**_SHARDED, "compile": True},
    "compiled blocks, tensor parallel": {**_SHARDED, "tp": 2, "compile": True},
    "compiled blocks, checkpointed": {**_SHARDED, "compile": True, "activation_checkpointing": "full"},
}
WHOLE = ("compiled whole", "compiled whole step")


def model():
    sizes = {"dim": 128, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 256, "vocab_size": 1024, "seq_len": SEQ}
    return llama.Llama(llama.LlamaConfig(n_layers=4, **sizes))


@cache
def traced(name):
    """The Program of one of `PLANS` or `WHOLE`."""
    if name in WHOLE:
        return forerun.trace(lambda: _build(name), _step, world_size=1)
    tokens = torch.empty(BATCH, SEQ, dtype=torch.int64, device="meta")
    return trace_module(model, tokens, Plan(**{"seq_len": SEQ, "micro_batch": BATCH, **PLANS[name]}), fold=False)


def _build(name):
    net = model().cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    forward = torch.compile(net)
    update = torch.compile(optimizer.step) if name == "compiled whole step" else optimizer.step
    return forward, optimizer, update


def _step(state):
    forward, optimizer, update = state
    tokens = torch.randint(0, 1024, (BATCH, SEQ), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = forward(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
    loss.backward()
    update()
    optimizer.zero_grad()


def counts(program):
    """What a step does: FLOPs of matrix products and attention in each phase, number and bytes of each kind of
    collective, kernels, the peak of allocated memory, of all stages together, and what failed to compile."""
    ops = program.ops
    products = ops.flops * ((ops.kind == OpKind.GEMM) | (ops.kind == OpKind.ATTENTION))
    flops = {phase.name.lower(): float((op_counts(program, (phase,)) * products).sum()) for phase in Phase}
    number = op_counts(program).sum(axis=0)
    collectives = {}
    for kind in sorted({int(c) for c in ops.collective.tolist()} - {int(Collective.NONE)}):
        mine = number * (ops.collective == kind)
        collectives[Collective(kind).name.lower()] = [int(mine.sum()), int((mine * ops.bytes_comm).sum())]
    of_host = ops.is_delay & (ops.launches > 0)
    of_kernels = (ops.kind != OpKind.P2P) & (ops.collective == int(Collective.NONE)) & ~of_host
    return {
        "flops": {name: value for name, value in flops.items() if value},
        "collectives": collectives,
        "kernels": int((number * of_kernels).sum()),
        "peak_bytes": max(one.peak_bytes for one in profile(program)),
        "failures": [note for note in program.meta["notes"] if note.startswith("torch.compile")],
    }


if __name__ == "__main__":
    wanted = sys.argv[1:] or [*PLANS, *WHOLE]
    for _name in wanted:
        try:
            _found = counts(traced(_name))
        except ForerunError as error:
            _found = {"error": str(error)}
        print(yaml.safe_dump({_name: _found}, sort_keys=False, default_flow_style=None), flush=True)
