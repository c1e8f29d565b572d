"""A trace breaks graphs where Dynamo of an older torch does, if it is told that release."""

import numpy as np
import pytest

from forerun.common.errors import ForerunError
from forerun.core.program.types import Phase
from forerun.interfaces.cli.main import run
from forerun.sources.trace.job import Job, release
from forerun.sources.trace.launch import Limits, record_script

pytest.importorskip("torch", reason="tracing needs torch")
DECORATED = """
import torch
from torch.profiler import record_function

class Wave(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(64))

    @record_function("wave")
    def forward(self, x):
        return (x * self.scale).sin()

model = torch.nn.Sequential(*[Wave() for _ in range(4)]).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = torch.compile(model)
for _ in range(3):
    compiled(torch.ones(4096, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dynamo", "kernels"),
    [("2.13", 1), ("2.12", 4), *(pytest.param(*more, marks=pytest.mark.long) for more in (("", 1), ("2.9.0", 4)))],
)
def test_record_function_as_a_decorator_breaks_graphs_before_2_13(tmp_path, dynamo, kernels):
    script = tmp_path / "waves.py"
    script.write_text(DECORATED, encoding="utf-8")
    (step,) = record_script(Job(folder="", target=str(script), dynamo=dynamo), Limits(300))
    forward = np.flatnonzero((step.phase == Phase.FORWARD) & (step.compiled == 1))
    assert sum("sin" in step.ops.name[step.op[node]] for node in forward) == kernels
    assert any("Dynamo" in note for note in step.meta["notes"]) == (kernels > 1)


@pytest.mark.parametrize("text", ["soon", "2", "v2.9", ""])
def test_what_is_no_release_is_named(text):
    with pytest.raises(ForerunError, match=r"is not a release of torch; give one such as 2\.9"):
        release(text)


def test_releases_order_by_number():
    assert release("2.9") < release("2.10.1") < release("2.13.0+cpu") == (2, 13)


def test_the_command_refuses_what_is_no_release(tmp_path, capsys):
    script = tmp_path / "empty.py"
    script.touch()
    assert run(["trace", str(script), "--dynamo", "soon"]) == 2
    assert "'soon' is not a release of torch" in capsys.readouterr().err
