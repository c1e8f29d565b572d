"""What programs do to torch's own classes and functions: parameters of a class of theirs, other constructors, parts of
a storage, ranks counted with numpy."""

import pytest
from virtual_process import run_virtual

pytest.importorskip("torch", reason="tracing needs torch")


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_virtual(
        """
        import copy
        import numpy as np
        from forerun.sources.trace.inside.device import storages
        storages.install(mode)

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
