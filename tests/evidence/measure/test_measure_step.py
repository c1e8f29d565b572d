"""`forerun measure step`: where there is a GPU (a stand-in of torch.cuda here), and where there is none."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
from saved_programs import H100, plan_of, program_of

from forerun.answers.analysis.predict_program import predict_program
from forerun.core.program.origin import Origin
from forerun.core.program.storage import save
from forerun.evidence.measure.step import MeasuredStep, figures
from forerun.sources.symbolic.training_state import InitStage
from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits
from forerun.sources.trace.record import trace_job

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
MIB = 1 << 20
STAND_IN = """
import sys, torch
from forerun.interfaces.cli.main import run

class Memory:
    now = most = 0

    @classmethod
    def hold(cls, mib):
        cls.now = mib << 20
        cls.most = max(cls.most, cls.now)

    @classmethod
    def reset(cls, *_):
        cls.most = cls.now

torch.hold_mib = Memory.hold
torch.cuda.is_available = lambda: True
torch.cuda.set_device = lambda index: None
torch.cuda.synchronize = lambda: None
torch.cuda.get_device_name = lambda: "stand-in"
torch.cuda.get_rng_state = torch.get_rng_state
torch.cuda.set_rng_state = lambda state: None
torch.cuda.memory_allocated = lambda: Memory.now
torch.cuda.max_memory_allocated = lambda: Memory.most
torch.cuda.reset_peak_memory_stats = torch.cuda.memory.reset_peak_memory_stats = Memory.reset
sys.exit(run(sys.argv[1:]))
"""
PLAIN = "import sys; from forerun.interfaces.cli.main import run; sys.exit(run(sys.argv[1:]))"
SCRIPT = """
import sys, time, torch
import forerun

assert sys.argv[1:] == ["--width", "4"]
torch.hold_mib(70)  # the whole model
torch.hold_mib(50)
forerun.mark_stage("model made")
model = torch.nn.Linear(4, 4)
torch.hold_mib(30)  # its shard
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.hold_mib(40)
{compile}
for number in range(100):
    torch.cuda.reset_peak_memory_stats()
    loss = forward(torch.ones(2, 4))
    torch.hold_mib(1000 if number == 0 else 90)
    update(loss)
    torch.hold_mib(60)
    torch.cuda.reset_peak_memory_stats()
    time.sleep(0.02)
raise SystemExit("the harness did not end the script")
"""
EAGER = """
def forward(x): return model(x).sum()
def update(loss):
    loss.backward()
    optimizer.step()
    model.zero_grad()
"""
COMPILED = """
@torch.compile(backend="eager")
def forward(x): return model(x).sum()
@torch.compile(backend="eager")
def update(loss):
    loss.backward()
    optimizer.step()
    model.zero_grad()
"""


@pytest.fixture
def measured(tmp_path):
    """Runs the command on a script, with a GPU or without."""

    def command(script, *options, gpu=True):
        save(program_of(plan_of(dp_shard=8)), tmp_path / "step.program")
        (tmp_path / "train.py").write_text(script)
        (tmp_path / "stand_in.py").write_text(STAND_IN)
        start = ["stand_in.py"] if gpu else ["-c", PLAIN]
        common = ("measure", "step", "train.py", "--cluster", "h100-sxm", "--program", "step.program")
        return subprocess.run(
            [sys.executable, *start, *common, *options, "--", "--width", "4"],
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip

    return command


@needs_torch
@pytest.mark.parametrize("how", [EAGER, COMPILED], ids=["eager", "compiled"])
def test_a_script_is_measured_where_there_is_a_gpu(measured, how):
    done = measured(SCRIPT.replace("{compile}", how), "--warm-up", "2", "--steps", "3", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    found = record["measured"]
    assert found["steps"] == 3
    assert found["device"] == "stand-in"
    assert 0.02 <= found["fastest_s"] <= found["step_s"] <= found["slowest_s"] < 2
    assert found["peak_bytes"] == 90 * MIB, "the peak of the steps that are measured, whatever the script resets"
    stages = {name: size // MIB for name, size in found["stages"]}
    assert stages == {"model made": 70, "optimizer made": 70, "first forward": 70}
    by_name = {one["name"]: one for one in record["figures"]}
    assert by_name["peak of a step"]["measured"] == 90
    assert by_name["step"]["measured"] == pytest.approx(found["step_s"] * 1e3)
    assert by_name["MFU"]["measured"] > 0


@needs_torch
def test_a_script_that_ends_too_soon_is_named(measured):
    short = SCRIPT.replace("{compile}", EAGER).replace("range(100)", "range(4)").replace("raise SystemExit", "print")
    done = measured(short, "--warm-up", "3", "--steps", "10")
    assert done.returncode == 2
    assert "ended after 4 steps; 3 warm up and 10 are measured" in done.stderr


def test_without_a_gpu_the_prediction_stands_alone(measured):
    done = measured("raise SystemExit('never run')", gpu=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("peak of a step") for line in lines)
    assert lines[-1].startswith("This machine has no GPU")
    assert "measured" not in lines[2]


TRACED = """
import torch, forerun
model = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
forerun.mark_stage("model made")
whole = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
del whole
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.cuda.reset_peak_memory_stats()
batch = torch.empty(256, 1024, device="cuda")
for _ in range(3):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@needs_torch
def test_a_trace_notes_the_memory_before_the_first_step(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRACED)
    program, _ = trace_job(Job("", str(script)), Limits())
    found = [(one.name, one.allocated_bytes // MIB, one.peak_bytes // MIB) for one in Origin.of(program).stages]
    assert found == [("model made", 4, 4), ("optimizer made", 4, 12), ("first forward", 5, 12)]
    prediction = predict_program(program, H100).prediction
    assert [one.peak_bytes for one in prediction.init] == [4 * MIB, 12 * MIB, 12 * MIB]


def test_figures_have_errors_where_both_are_known():
    prediction = predict_program(program_of(plan_of(dp_shard=8)), H100).prediction
    prediction = replace(prediction, init=(InitStage("trace", "optimizer made", 5 * MIB, 11 * MIB),))
    step = MeasuredStep(
        prediction.step_time_s / 1.1, 100 * MIB, 10, 1.0, 2.0, "a GPU", (("optimizer made", 10 * MIB), ("mine", MIB))
    )
    found = {one.name: one for one in figures(prediction, step)}
    assert found["optimizer made, most so far"].error == pytest.approx(0.1)
    assert found["mine, most so far"].error is None
    assert found["step"].error == pytest.approx(0.1)
    assert found["MFU"].error == pytest.approx(-1 / 11)
    assert [one.error for one in figures(prediction, None)] == [None] * 4
