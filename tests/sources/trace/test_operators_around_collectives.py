"""Operators of torch that hide collectives from the dispatcher are looked into."""

from __future__ import annotations

from virtual_process import run_virtual

BODY = """
import importlib
importlib.import_module("torch.distributed.tensor.experimental._attention")
dist.init_process_group("nccl")
k = torch.ones(1, 2, 16, 8, device="cuda", requires_grad=True)
v = torch.ones(1, 2, 16, 8, device="cuda", requires_grad=True)
recorder.start()
gathered, _ = torch.ops.cplib.flex_cp_allgather(k, v, 2, dist.group.WORLD.group_name)
result["shape"] = list(gathered.shape)
gathered.sum().backward()
result["ops"] = [node[0] for node in nodes()]
"""


def test_attention_over_context_ranks_gathers_and_scatters(tmp_path):
    result = run_virtual(BODY, tmp_path)
    assert result["shape"] == [1, 2, 8 * 16, 8]
    kinds = [name for name in result["ops"] if "gather" in name or "scatter" in name]
    assert sum("gather" in name for name in kinds) == 2
    assert any("scatter" in name for name in kinds)
    assert not any("cp_allgather" in name for name in result["ops"])
