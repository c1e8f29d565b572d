"""What CUDA has kernels of its own for stays whole in a trace, forward and backward."""

from importlib.util import find_spec

import pytest

from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits, record_script

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")]
SCRIPT = """
import torch
from torch import nn

model = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64), nn.Mish())
model.to("cuda")
optimizer = torch.optim.SGD(model.parameters())
inputs = torch.rand(8, 64, device="cuda")
while True:
    with torch.inference_mode():
        model(inputs)
    model(inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_norms_and_activations_are_one_kernel_each_way(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (recording,) = record_script(Job("", str(script)), Limits(time_s=120))
    names = [recording.ops.name[op] for op in recording.op.tolist()]
    forward = ["_fused_rms_norm", "addmm", "silu", "addmm", "mish"]
    assert names[:10] == forward * 2, "under inference mode and without"
    backward = [name for name in names if name.endswith("_backward")]
    assert backward == ["mish_backward", "silu_backward", "_fused_rms_norm_backward"]
    assert not {"pow", "rsqrt", "sigmoid", "fill_", "sub_"} & set(names)
