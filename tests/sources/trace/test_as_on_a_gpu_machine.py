"""What a program sees of tensors without data and of the machine: addresses, copies, values, threads, files."""

import pytest
from virtual_process import run_virtual

pytest.importorskip("torch", reason="tracing needs torch")


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("machine")
    return run_virtual(
        f"folder = {str(folder)!r}\n"
        + """
import copy, io, pickle, subprocess, threading
from pathlib import Path
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, TensorDataset
from forerun.sources.trace.inside import effects

smi = Path(folder) / "programs"
effects.install(recorder, 1, smi, "NVIDIA H100 80GB HBM3")
cuda = torch.device("cuda")

# addresses
a, b = torch.empty(300, device=cuda), torch.empty(300, device=cuda)
result["addresses"] = [a.data_ptr() > 0, b.data_ptr() - a.data_ptr(), a[4:].data_ptr() - a.data_ptr(),
                       a.view(3, 100).data_ptr() == a.data_ptr(), torch.empty(0, device=cuda).data_ptr(),
                       a.untyped_storage().data_ptr() == a.data_ptr(), a.data_ptr() % 512]
layer = nn.Linear(4, 4, bias=False).cuda()
tied = nn.Linear(4, 4, bias=False).cuda()
tied.weight = layer.weight
result["tied"] = tied.weight.data_ptr() == layer.weight.data_ptr()
host = torch.ones(3)
result["host address"] = host.data_ptr() == host.untyped_storage().data_ptr() != 0

# copies
weight = nn.Parameter(torch.ones(3, device=cuda))
weight.note, weight.grad = ["kept"], torch.ones(3, device=cuda)
twin = copy.deepcopy(weight)
result["copied"] = [isinstance(twin, nn.Parameter), twin.requires_grad, twin is weight, twin.note == weight.note,
                    twin.note is weight.note, twin.grad is not None and twin.grad is not weight.grad,
                    twin.data_ptr() == weight.data_ptr()]
result["not a leaf"] = fails(lambda: copy.deepcopy(weight * 2)).split(":")[0]
both = copy.deepcopy([weight, weight])
result["shared copy"] = both[0] is both[1]
frozen = copy.deepcopy(nn.Parameter(torch.ones(2, device=cuda), requires_grad=False))
result["frozen copy"] = frozen.requires_grad
model = nn.Sequential(layer, tied)
result["model copy"] = [len(list(copy.deepcopy(model).parameters())), len(list(model.parameters()))]

# moves
moved = nn.Linear(4, 2)
before = moved.weight
before.label = "kept"
moved.to("cuda")
result["moved"] = [moved.weight is before, str(moved.weight.device), moved.weight.requires_grad]
moved.to("cuda")
result["moved again"] = moved.weight is before
moved.half()
result["label"] = [moved.weight.label, str(moved.weight.dtype), hasattr(moved.bias, "label")]
other = torch.zeros(5)
other.data = torch.ones(2, 2, device=cuda)
result["exchanged"] = [str(other.device), list(other.shape)]
held = nn.Parameter(torch.zeros(3))
held.data = torch.full((4,), 7.0, device=cuda)
result["held"] = [str(held.device), held.tolist(), isinstance(held, nn.Parameter), held.requires_grad]

# values
known = torch.arange(3, device=cuda)
result["values"] = [known.tolist(), f"{known.sum():d}", f"{known.sum().float():.2f}", known.cpu().numpy().tolist()]
result["numpy"] = [fails(known.numpy), fails(lambda: known.__array__()).split(":")[0]]

# initialisation
filled = [nn.init.trunc_normal_(torch.empty(1000, device=cuda), std=std) for std in (0.02, 5.0)]
on_host = nn.init.trunc_normal_(torch.empty(1000))
result["initialised"] = [[one.shape[0] for one in filled], 1 < on_host.abs().max().item() <= 2]

# threads and loaders
seen = {}
def work():
    seen["device"] = str(torch.ones(2, device=cuda).device)
    seen["value"] = torch.ones(2, device=cuda).sum().item()
thread = threading.Thread(target=work)
thread.start(); thread.join()
result["thread"] = [seen["device"], seen["value"]]
loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=4, num_workers=3, pin_memory=True, prefetch_factor=2,
                    persistent_workers=True, timeout=9)
result["loader"] = [loader.num_workers, loader.pin_memory, loader.persistent_workers, loader.timeout,
                    [batch[0].tolist() for batch in loader]]
positional = DataLoader(TensorDataset(torch.arange(6)), 3, False, None, None, 2)
result["loader"].append([positional.batch_size, positional.num_workers])

# operators of packages whose compiled part is missing
torch.library.register_fake("no_such_package::no_such_operator")(lambda x: x)
result["absent operator"] = [one for one in recorder.notes if "no_such_package" in one]

# classes
import torch._subclasses as subclasses
result["class"] = [isinstance(known, subclasses.FakeTensor), fails(lambda: subclasses.NoSuchClass).split(":")[0]]

# checkpoints
target = Path(folder) / "model.pt"
torch.save(layer.state_dict(), target)
torch.save(layer.state_dict(), str(target))
buffer = io.BytesIO()
torch.save({"step": 3}, buffer)
result["saved"] = [target.exists(), buffer.tell() > 0]
dcp.save({"weight": layer.weight}, checkpoint_id=str(Path(folder) / "dcp"))
done = dcp.async_save({"weight": layer.weight}, checkpoint_id=str(Path(folder) / "dcp"))
result["saved"] += [(Path(folder) / "dcp").exists(), done.done(), done.result()]
result["notes"] = [one for one in recorder.notes if "checkpoints" in one]
back = pickle.loads(pickle.dumps(nn.Parameter(torch.ones(2, 3, device="cuda:1").t())))
result["pickled"] = [list(back.shape), list(back.stride()), str(back.device), back.requires_grad]

# other programs and processes
printed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
result["smi"] = [printed.returncode, printed.stdout]
result["wandb"] = os.environ["WANDB_MODE"]
started = []
mp.spawn(lambda index, name: started.append([index, name]), args=("a",), nprocs=4)
mp.start_processes(lambda index: started.append([index]), nprocs=1)
result["started"] = [started, [one for one in recorder.notes if "processes" in one]]
def answer(queue):
    queue.put([torch.cuda.is_available(), torch.backends.cuda.is_flash_attention_available()])
result["forked"] = []
for method in ("spawn", "forkserver"):
    context = mp.get_context(method)
    queue = context.Queue()
    process = context.Process(target=answer, args=(queue,))
    process.start()
    result["forked"].append(queue.get(timeout=60))
    process.join()
copied = nn.DataParallel(nn.Linear(4, 4).cuda(), device_ids=[0])
result["one GPU"] = list(copied(torch.ones(2, 4)).shape)
wide = nn.DataParallel(nn.Linear(4, 4).cuda(), device_ids=[0, 1])
result["more GPUs"] = fails(lambda: wide(torch.ones(2, 4, device=cuda)), ForerunError)
""",
        folder,
    )


def test_tensors_have_addresses_as_if_they_had_memory(answers):
    positive, apart, *others, rest = answers["addresses"]
    assert positive
    assert apart == 1536, "1200 bytes in blocks of 512"
    assert others == [4 * 4, True, 0, True]
    assert rest == 0
    assert answers["tied"]
    assert answers["host address"]


def test_copies_are_deep_but_for_memory_and_share_what_the_original_shares(answers):
    assert answers["copied"] == [True, True, False, True, False, True, False]
    assert answers["not a leaf"] == "RuntimeError"
    assert answers["shared copy"]
    assert not answers["frozen copy"]
    assert answers["model copy"] == [1, 1], "tied weights stay tied"


def test_a_parameter_stays_the_same_object_where_it_moves(answers):
    assert answers["moved"] == [True, "cuda:0", True]
    assert answers["moved again"]
    assert answers["label"] == ["kept", "torch.float16", False], (
        "attributes that a program sets stay, as with plain data"
    )
    assert answers["exchanged"] == ["cuda:0", [2, 2]]
    assert answers["held"] == ["cuda:0", [7] * 4, True, True]


def test_known_values_are_read_as_from_a_device(answers):
    assert answers["values"] == [[0, 1, 2], "3", "3.00", [0, 1, 2]]
    text, kind = answers["numpy"]
    assert text == "TypeError: can't convert cuda:0 device type tensor to numpy; use Tensor.cpu() first"
    assert kind == "TypeError"
    assert answers["initialised"] == [[1000, 1000], True], "samples that are drawn until they fit end"


def test_threads_and_loaders_work_in_the_traced_world(answers):
    assert answers["thread"] == ["cuda:0", 2]
    assert answers["loader"] == [0, False, False, 0, [[0, 1, 2, 3], [4, 5]], [3, 0]]


def test_processes_of_the_program_see_the_traced_world(answers):
    assert answers["forked"] == [[True, True]] * 2, "a process that starts afresh would import the script without it"


def test_an_operator_whose_compiled_part_is_missing_is_noted(answers):
    (note,) = answers["absent operator"]
    assert note.startswith("no_such_package::no_such_operator is not there")


def test_programs_see_no_fake_tensors(answers):
    assert answers["class"] == [False, "AttributeError"]


def test_checkpoints_are_written_to_buffers_alone(answers):
    assert answers["saved"] == [False, True, False, True, None]
    assert answers["notes"] == ["checkpoints are not written while a program is traced"]
    assert answers["pickled"] == [[3, 2], [1, 3], "cuda:1", True]


def test_the_machine_has_its_management_program_and_no_account(answers):
    assert answers["smi"] == [0, "GPU 0: NVIDIA H100 80GB HBM3 (traced, not there)\n"]
    assert answers["wandb"] == "disabled"


def test_one_of_the_processes_that_a_program_starts_is_traced(answers):
    started, notes = answers["started"]
    assert started == [[1, "a"], [0]]
    assert notes == [
        f"the program starts {n} processes itself; number {i} of them is traced" for n, i in ((4, 1), (1, 0))
    ]


def test_data_parallel_runs_on_one_gpu_alone(answers):
    assert answers["one GPU"] == [2, 4]
    assert answers["more GPUs"] == (
        "ForerunError: DataParallel over 2 GPUs of one process can't be traced; use DistributedDataParallel"
    )
