"""DistributedDataParallel with a static graph has one bucket until its third step."""

import pytest

from forerun.core.program.types import Collective
from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits, record_script

pytest.importorskip("torch", reason="tracing needs torch")
SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
layers = [torch.nn.Linear(2048, 2048, bias=False) for _ in range(4)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).cuda(), static_graph=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(2, 2048, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("steps", "messages"), [(2, 1), (3, 3)])
def test_the_note_says_which_step_has_all_buckets(tmp_path, steps, messages):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    (recording,) = record_script(Job("", str(script), world_size=2, steps=steps), Limits(time_s=120))
    rows = recording.op[recording.ops.collective[recording.op] == Collective.ALL_REDUCE]
    assert len(rows) == messages
    assert recording.ops.bytes_comm[rows].sum() == 4 * 4 * 2048**2
    assert any("static graph" in note for note in recording.meta["notes"]) == (steps == 2)
