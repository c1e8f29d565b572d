"""What programs do to torch's own classes and functions: parameters of a class of theirs, other constructors, CUDA's
tensor types, parts of a storage, scalars of the device in lists, ranks counted with numpy."""

import pytest
from virtual_process import run_virtual

pytest.importorskip("torch", reason="tracing needs torch")


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_virtual(
        """
        import copy
        import numpy as np
        from forerun.sources.trace.inside.device import storages, tensor_types
        from forerun.sources.trace.inside.module_tree import buffers_in, modules_in, parameters_in
        storages.install(mode)
        tensor_types.install()

        class Marked(nn.Parameter):
            def __new__(cls, tensor, requires_grad=True):
                made = nn.Parameter.__new__(cls, data=tensor.data.detach(), requires_grad=requires_grad)
                made.marks = {}
                return made
            def mark(self, key):
                self.marks[key] = True
            @property
            def is_marked(self):
                return bool(self.marks)

        class Layer(nn.Module):
            def __init__(self):
                super().__init__()
                self.on_host, self.on_device = Marked(torch.zeros(4, 4)), Marked(torch.zeros(4, device="cuda"))
                self.on_host.mark("sharded")
            def forward(self, x):
                return x @ self.on_host + self.on_device

        layer = Layer()
        before = layer.on_host
        layer.cuda()
        result["moved"] = [type(p).__name__ for p in layer.parameters()] + [
            layer.on_host is before, layer.on_host.is_marked, layer.on_device.is_marked, layer.on_host.device.type,
            isinstance(layer.on_host, Marked), isinstance(layer.on_host, nn.Parameter)]
        layer(torch.ones(2, 4, device="cuda")).sum().backward()
        result["gradient"] = [list(p.grad.shape) for p in layer.parameters()]
        result["copied"] = isinstance(copy.deepcopy(layer).on_host, Marked)
        result["again"] = isinstance(type(layer.on_host)(layer.on_host), Marked)
        result["plain"] = type(nn.Parameter(torch.zeros(2))).__name__

        own = torch.empty, torch.zeros, torch.ones, torch.full
        def on_device(make):
            return lambda *args, **kwargs: make(*args, **{**kwargs, "device": "cuda", "dtype": torch.bfloat16})
        torch.empty, torch.zeros, torch.ones, torch.full = replaced = tuple(map(on_device, own))
        made = [torch.zeros(3), torch.full((3,), 2.0), torch.ones(2, 2), torch.empty(5)]
        summed = (made[0] + 1).cumsum(0)
        result["still replaced"] = (torch.empty, torch.zeros, torch.ones, torch.full) == replaced
        torch.empty, torch.zeros, torch.ones, torch.full = own
        result["constructed"] = [[str(one.device), str(one.dtype), list(one.shape)] for one in made]

        flat = torch.zeros(20, device="cuda")
        whole, held = flat.untyped_storage(), recorder.memory.allocated_bytes
        parts = [torch.empty([], device="cuda").set_(source=whole[start:stop]) for start, stop in ((0, 64), (64, 80))]
        result["parts"] = [[list(p.shape), p.storage_offset(), p.device.type, p.data_ptr() - flat.data_ptr()]
                           for p in parts]
        result["shared"] = [p.untyped_storage()._cdata == whole._cdata for p in parts]
        result["part of a part"] = [len(whole[16:48]), whole[16:48][8:].start, len(whole[16:48][8:])]
        result["between"] = fails(lambda: torch.empty([], device="cuda").set_(source=whole[2:10]), RuntimeError)
        host = torch.arange(4)
        result["on the host"] = torch.empty(0, dtype=torch.int64).set_(host).tolist()

        one, other = torch.ones(3, device="cuda").sum(), torch.empty(3, device="cuda").norm()
        recorder.start()
        listed = [torch.tensor([one, other]), torch.tensor([[one, 2.0]], device="cuda"), torch.Tensor([other])]
        result["read"] = len(nodes("_local_scalar_dense"))
        result["listed"] = [[str(t.device), t.tolist()] for t in listed]

        normed = nn.Sequential(nn.utils.weight_norm(nn.Conv1d(4, 4, 3)), nn.utils.spectral_norm(nn.Conv1d(4, 4, 3)))
        before = list(normed.parameters())
        normed.half().to("cuda")
        result["normed"] = [[p.device.type, str(p.dtype), p is q, p.is_leaf and p.requires_grad]
                            for p, q in zip(normed.parameters(), before)]
        normed(torch.ones(1, 4, 8, dtype=torch.half, device="cuda")).sum().backward()
        result["of the normed"] = [str(p.grad.device) for p in before]

        class Wrapper(nn.Module):
            "A module with attributes of its own in place of torch's methods, as Megatron's wrapper has."
            def __init__(self, module):
                super().__init__()
                self.module, self.again = module, module
                self.buffers, self.parameters, self.named_modules = [], None, {}
        wrapped = Wrapper(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))
        plain = nn.ModuleDict({"module": wrapped.module})
        result["wrapped"] = [len(list(parameters_in(wrapped))), len(list(buffers_in(wrapped)))]
        result["paths"] = [[path for path, _ in modules_in(wrapped)], [path for path, _ in plain.named_modules()]]

        typed = [torch.cuda.FloatTensor([1, 2]), torch.cuda.LongTensor(3), torch.cuda.HalfTensor(2, 3)]
        result["typed"] = [[str(t.device), str(t.dtype), list(t.shape), t.type()] for t in typed]
        result["kinds"] = [isinstance(typed[0], torch.cuda.FloatTensor), isinstance(typed[1], torch.cuda.FloatTensor),
                           str(torch.ones(2).type(torch.cuda.HalfTensor).dtype)]
        torch.set_default_tensor_type("torch.cuda.HalfTensor")
        result["by default"] = [[str(t.device), str(t.dtype)] for t in (
            torch.Tensor([1]), torch.linspace(0, 1, 3), torch.tensor(1), torch.zeros(2, device="cpu"))]
        torch.set_default_tensor_type(torch.FloatTensor)
        result["as before"] = [[str(t.device), str(t.dtype)] for t in (torch.Tensor([1]), torch.zeros(2))]

        dist.init_process_group("nccl")
        group = dist.new_group(ranks=list(np.arange(4)))
        recorder.start()
        dist.all_reduce(torch.ones(4, device="cuda"), group=group)
        result["ranks"] = [type(rank).__name__ for rank in (*group.ranks, group.rank_)]
        result["recorded"] = len(nodes("all_reduce"))
        """,
        tmp_path_factory.mktemp("own"),
        world_size=8,
    )


def test_parameters_keep_the_class_that_a_program_gives_them(answers):
    assert answers["moved"] == ["Marked", "Marked", True, True, False, "cuda", True, True]
    assert answers["gradient"] == [[4, 4], [4]]
    assert answers["copied"]
    assert answers["again"]
    assert answers["plain"] == "FakeTensor"


def test_constructors_that_a_program_replaces_are_its_own_and_not_those_of_shapes(answers):
    assert answers["still replaced"]
    shapes = [[3], [3], [2, 2], [5]]
    assert answers["constructed"] == [["cuda:0", "torch.bfloat16", shape] for shape in shapes]


def test_parts_of_a_storage_are_its_memory(answers):
    assert answers["parts"] == [[[16], 0, "cuda", 0], [[4], 16, "cuda", 64]]
    assert answers["shared"] == [True, True]
    assert answers["part of a part"] == [32, 24, 24]
    assert "between two elements" in answers["between"]
    assert answers["on the host"] == [0, 1, 2, 3]


def test_ranks_counted_with_numpy_are_numbers(answers):
    assert answers["ranks"] == ["int"] * 5
    assert answers["recorded"] == 1


def test_scalars_of_the_device_in_lists_are_read_by_the_host(answers):
    assert answers["listed"] == [["cpu", [3.0, 1.0]], ["cuda:0", [[3.0, 2.0]]], ["cpu", [1.0]]]
    assert answers["read"] == 4


def test_normed_weights_move_to_the_device_and_stay_the_same_parameters(answers):
    assert answers["normed"] == [["cuda", "torch.float16", True, True]] * 5
    assert answers["of the normed"] == ["cuda:0"] * 5


def test_a_module_that_hides_torchs_methods_has_its_tensors(answers):
    assert answers["wrapped"] == [4, 3]
    own, torchs = answers["paths"]
    assert own == torchs


def test_the_tensor_types_of_cuda_make_tensors_on_the_device(answers):
    assert answers["typed"] == [
        ["cuda:0", "torch.float32", [2], "torch.cuda.FloatTensor"],
        ["cuda:0", "torch.int64", [3], "torch.cuda.LongTensor"],
        ["cuda:0", "torch.float16", [2, 3], "torch.cuda.HalfTensor"],
    ]
    assert answers["kinds"] == [True, False, "torch.float16"]


def test_a_tensor_type_of_cuda_becomes_the_default_and_stops_being_it(answers):
    on_device = [["cuda:0", "torch.float16"]] * 2
    assert answers["by default"] == [*on_device, ["cuda:0", "torch.int64"], ["cpu", "torch.float16"]]
    assert answers["as before"] == [["cpu", "torch.float32"]] * 2
