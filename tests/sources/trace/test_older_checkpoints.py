"""Selective checkpoints around what runs more often in backward, as FSDP's gathers of experts do: torch refuses them
since 2.13, and ran them before."""

import pytest

from forerun.common.errors import ForerunError
from forerun.core.program.kinds import OpKind
from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits, record_script

pytest.importorskip("torch", reason="tracing needs torch")

EXPERTS = """
import functools
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

dist.init_process_group("nccl")
SAVED = torch.ops.aten.mm.default

def policy(context, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operator is SAVED else CheckpointPolicy.PREFER_RECOMPUTE

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(64, 64, bias=False)
        self.experts = nn.Sequential(nn.Linear(64, 64, bias=False), nn.SiLU(), nn.Linear(64, 64, bias=False))

    def forward(self, x):
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(self.inside, x, use_reentrant=False, context_fn=contexts)

    def inside(self, x):
        in_backward = torch._C._current_graph_task_id() != -1
        for _ in range(1 + in_backward):  # As FSDP's gathers, which are at other times in backward.
            with torch.profiler.record_function("gather"):
                pass
        return x + self.experts(self.router(x).sigmoid())

model = nn.Sequential(*[Block() for _ in range(3)]).cuda()
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(32, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def traced(folder, dynamo):
    script = folder / "experts.py"
    script.write_text(EXPERTS, encoding="utf-8")
    return record_script(Job(folder="", target=str(script), world_size=2, dynamo=dynamo), Limits(300))


@pytest.mark.slow
def test_a_release_before_2_13_recomputes_what_fsdp_gathers_at_other_times(tmp_path):
    (step,) = traced(tmp_path, "2.9")
    kinds = [step.ops.kind[op] for op in step.op]
    products = sum(kind == OpKind.GEMM for kind in kinds)
    assert products == 3 * 3 * 3 - 1, (
        "three products of each block, forward and both of backward; the input has no gradient"
    )


@pytest.mark.slow
def test_the_installed_release_refuses_and_says_what_to_do(tmp_path):
    with pytest.raises(ForerunError, match=r"more often in backward than in forward.*--dynamo 2\.9"):
        traced(tmp_path, "")
