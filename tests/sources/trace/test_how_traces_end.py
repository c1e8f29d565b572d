"""How a traced program ends, and what is said of an end without a recorded step."""

import json
from importlib.util import find_spec

import pytest
from warm_process import fork, wait

import forerun
from forerun.common.errors import ForerunError
from forerun.core.program.types import Category
from forerun.sources.trace.job import Failure, Job
from forerun.sources.trace.launch import Limits, record_script

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="tracing needs torch")
TRAINING = """
import sys, torch
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
"""


def recorded(tmp_path, code, **settings):
    script = tmp_path / "train.py"
    script.write_text(TRAINING + code, encoding="utf-8")
    (recording,) = record_script(Job("", str(script), **settings), Limits(time_s=60))
    return recording


LINE = TRAINING.count("\n") + 1


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("sys.exit(3)", "the program exited with 3 before its step was recorded"),
        ("sys.exit('no data')", "the program exited with 'no data' before its step was recorded"),
        ("model(1)", "TypeError: linear(): argument 'input'"),
        ("raise ValueError('odd')", "ValueError: odd"),
        ("import no_such_package_at_all", "ModuleNotFoundError: No module named 'no_such_package_at_all'"),
        ("x = = 1", f"SyntaxError: invalid syntax (train.py, line {LINE})"),
    ],
)
def test_an_end_before_the_step_is_one_line_with_its_place(tmp_path, code, said):
    with pytest.raises(ForerunError) as failed:
        recorded(tmp_path, code)
    assert str(failed.value).startswith(f"{tmp_path / 'train.py'}: {said}")
    assert str(failed.value).endswith(f" at {tmp_path / 'train.py'}:{LINE}")
    assert "\n" not in str(failed.value)


def test_an_exit_names_the_exception_that_the_program_caught(tmp_path):
    code = """
try:
    int("ten")
except ValueError:
    sys.exit(1)
"""
    with pytest.raises(ForerunError) as failed:
        recorded(tmp_path, code)
    assert (
        "the program exited with 1 before its step was recorded, after ValueError: invalid literal for int() with base"
        " 10: 'ten'" in str(failed.value)
    )


def test_processes_that_do_not_train_are_mentioned(tmp_path):
    code = """
import multiprocessing
for rank in range(2):
    multiprocessing.Process(target=print, args=(rank,)).start()
"""
    with pytest.raises(ForerunError, match="no process that it started recorded the step either"):
        recorded(tmp_path, code)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("sys.exit(0)", "the program ended after 0 optimizer steps; step 2 was to be recorded (--steps); without an"),
        ("sys.exit()", "the program ended after 0 optimizer steps; step 2 was to be recorded (--steps); without an"),
        ("raise KeyboardInterrupt", "interrupted"),
    ],
)
def test_an_end_that_is_no_fault_has_no_place(tmp_path, code, said):
    with pytest.raises(ForerunError) as failed:
        recorded(tmp_path, code)
    assert said in str(failed.value)
    assert f"train.py:{LINE}" not in str(failed.value)


def test_too_few_steps_are_counted(tmp_path):
    with pytest.raises(ForerunError) as failed:
        recorded(tmp_path, "step(); step()", steps=3)
    said = "the program ended after 2 optimizer steps; step 3 was to be recorded (--steps)"
    assert str(failed.value).endswith(said)


def test_a_program_of_one_step_is_recorded_with_a_note(tmp_path):
    recording = recorded(tmp_path, "step()")
    note = "the program ran only one step, which includes work that is done once"
    assert recording.meta["notes"] == [note]
    assert not recorded(tmp_path, "step(); step()").meta["notes"]


def test_what_follows_the_recorded_step_does_not_run(tmp_path):
    done = tmp_path / "done"
    recorded(tmp_path, f"step(); step(); open({str(done)!r}, 'w')")
    assert not done.exists()


def test_a_step_counts_its_samples_and_knows_no_tokens(tmp_path):
    meta = recorded(tmp_path, "step(); step()").meta
    assert (meta["samples"], meta["tokens"], meta["name"]) == (2, None, "train.py")


def test_memory_of_a_step_is_told_apart_by_its_purpose(tmp_path):
    adam = "optimizer = torch.optim.Adam(model.parameters())\n"
    recording = recorded(tmp_path, adam + "step(); step()")
    held = {}
    for category, size in zip(recording.tensor_category.tolist(), recording.tensor_bytes.tolist(), strict=True):
        held[category] = held.get(category, 0) + size
    both = 2 * 512  # weight and bias, each in a block of the allocator
    assert held[Category.PARAMETER] == held[Category.GRADIENT] == both
    assert held[Category.OPTIMIZER] == 2 * both


def test_an_evaluation_in_the_step_is_noted(tmp_path):
    code = "step()\nwith torch.no_grad(): model(torch.ones(2, 4, device='cuda'))\nstep()"
    (note,) = recorded(tmp_path, code).meta["notes"]
    assert note.startswith("the recorded step runs the model without gradients too (evaluation?)")


def test_a_world_that_can_not_be_made_leaves_its_reason(tmp_path):
    from forerun.sources.trace.inside.start import run

    job = Job(str(tmp_path), device="abacus")
    with (tmp_path / "printed.txt").open("wb") as sink:
        code = wait(fork(lambda: run(job, lambda world: None), sink.fileno(), {}), 60)
    assert code == 1
    assert "--device abacus: there is no such device" in Failure.read(job.failure).message


def facts(tmp_path, **settings):
    """What `build` and `step` of a traced program saw."""
    file = tmp_path / "facts.jsonl"

    def tell(**facts):
        with file.open("a", encoding="utf-8") as sink:
            sink.write(json.dumps(facts) + "\n")

    def build(mesh=None):
        import torch
        import torch.distributed as dist

        group = dist.get_backend() if dist.is_initialized() else ""
        shape = None if mesh is None else [list(mesh.mesh_dim_names), list(mesh.shape), mesh.device_type]
        tell(device=torch.cuda.current_device(), group=group, mesh=shape)
        return torch.nn.Linear(4, 4).cuda()

    def step(model):
        import torch

        tell(step=True)
        model(torch.ones(2, 4, device="cuda")).sum().backward()

    program = forerun.trace(build, step, **settings)
    built, *steps = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return built, len(steps), program


def test_two_functions_are_one_program_whose_calls_are_steps(tmp_path):
    built, steps, program = facts(tmp_path, world_size=1, steps=3)
    assert built == {"device": 0, "group": "", "mesh": None}
    assert steps == 3
    assert program.meta["world_size"] == 1


def test_a_rank_of_a_mesh_is_on_its_device_with_a_group_for_it(tmp_path):
    built, steps, _ = facts(tmp_path, world_size=4, mesh={"dp": 2, "tp": 2}, rank=3)
    assert built == {"device": 3, "group": "nccl", "mesh": [["dp", "tp"], [2, 2], "cuda"]}
    assert steps == 2


def test_a_mesh_of_one_rank_on_the_host_talks_through_gloo(tmp_path):
    built, _, _ = facts(tmp_path, world_size=1, mesh={"dp": 1}, device="cpu")
    assert built["group"] == "gloo"
    assert built["mesh"] == [["dp"], [1], "cpu"]
