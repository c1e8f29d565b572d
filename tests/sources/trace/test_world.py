"""The environment that a traced script runs in, as the script itself finds it."""

import json
from importlib.util import find_spec

import pytest

from forerun.common.errors import ForerunError
from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits, record_script

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="tracing needs torch")
SCRIPT = """
import json, os, shutil, sys, warnings
import torch

facts = {
    "arguments": sys.argv[1:],
    "folder": sys.path[0] == os.path.dirname(os.path.abspath(__file__)),
    "name": __name__,
    "threads": torch.get_num_threads(),
    "engine": torch.autograd.is_multithreading_enabled(),
    "device": [torch.cuda.current_device(), torch.cuda.device_count(), torch.cuda.get_device_name()],
    "variables": {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MINE")},
    "program": shutil.which("nvidia-smi") is not None,
    "lists": str(torch.empty(3, device="cuda").device),
}
read, write = os.pipe()
child = os.fork()
if not child:
    os.write(write, str(torch.get_num_threads()).encode())
    os._exit(0)
os.waitpid(child, 0)
facts["threads of a fork"] = int(os.read(read, 8))
import flash_attn, flash_attn_interface, xformers.ops
q = torch.empty(1, 8, 2, 16, dtype=torch.bfloat16, device="cuda")
outs = [
    flash_attn.flash_attn_func(q, q, q), flash_attn_interface.flash_attn_func(q, q, q),
    xformers.ops.memory_efficient_attention(q, q, q),
]
facts["attention"] = [list(out.shape) for out in outs]
cells = torch.nn.GRU(8, 8).cuda()(torch.empty(3, 2, 8, device="cuda"))[0]
facts["recurrent"] = list(cells.shape)
with open(os.environ["MINE"], "w") as file:
    json.dump(facts, file)

model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    attention = torch.nn.functional.scaled_dot_product_attention
    x = model(torch.ones(2, 4, device="cuda"))
    heads = x.bfloat16().view(2, 1, 4, 1).repeat(1, 1, 1, 8)
    attention(heads, heads, heads).sum().backward()
    with torch.inference_mode():
        attention(q, q, q)
    side = torch.cuda.Stream()
    event = torch.Event("cuda")
    event.record(side)
    event.wait()
    optimizer.step()
if "large" in sys.argv:
    torch.empty(65 * torch.cuda.get_device_properties(0).total_memory, dtype=torch.uint8, device="cuda")
"""


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    script, file = folder / "train.py", folder / "facts.json"
    script.write_text(SCRIPT, encoding="utf-8")
    job = Job("", str(script), ("--lr", "1"), rank=9, world_size=12, device="b200", variables={"MINE": str(file)})
    recordings = record_script(job, Limits(time_s=120))
    return json.loads(file.read_text(encoding="utf-8")), recordings


def test_a_script_runs_as_python_and_torchrun_run_it(traced):
    facts, _ = traced
    assert facts["arguments"] == ["--lr", "1"]
    assert facts["folder"]
    assert facts["name"] == "__main__"
    variables = facts["variables"]
    variables.pop("MINE")
    assert variables == {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "8"}


def test_torch_runs_in_one_thread_in_forks_too(traced):
    facts, _ = traced
    assert (facts["threads"], facts["threads of a fork"], facts["engine"]) == (1, 1, False)


def test_the_current_device_is_that_of_the_local_rank(traced):
    facts, _ = traced
    assert facts["device"] == [1, 8, "NVIDIA B200"]
    assert facts["lists"] == "cuda:1"
    assert facts["program"], "nvidia-smi"


def test_packages_that_need_a_gpu_have_stand_ins(traced):
    facts, (recording,) = traced
    assert facts["attention"] == [[1, 8, 2, 16]] * 3
    assert facts["recurrent"] == [3, 2, 8]
    assert sum("is not installed: traced with torch's own attention" in note for note in recording.meta["notes"]) == 3


def test_the_step_of_that_rank_is_recorded(traced):
    _, (recording,) = traced
    assert recording.rank == 9
    assert recording.meta["world_size"] == 12
    assert recording.meta["gpus_per_node"] == 8
    assert recording.meta["name"] == "train.py"
    names = [recording.ops.name[op] for op in recording.op]
    assert sum("attention" in name for name in names) == 3, "forward, backward and under inference mode"
    assert not {"_softmax", "bmm"} & set(names)


def test_a_tensor_beyond_all_reason_ends_the_trace(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    job = Job("", str(script), ("large",), steps=3, variables={"MINE": str(tmp_path / "facts.json")})
    with pytest.raises(ForerunError, match=r"at most 5068 GiB are traced, 64 times the memory of the device"):
        record_script(job, Limits(time_s=120))
