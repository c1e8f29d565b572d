"""Storages on the virtual device: what a checkpoint brings, and how much memory it takes."""

import pytest
from virtual_process import run_virtual

torch = pytest.importorskip("torch", reason="tracing needs torch")


def checkpoint():
    whole = torch.arange(12).reshape(3, 4)
    return {
        "whole": whole,
        "row": whole[1],
        "turned": whole.t(),
        "weight": torch.nn.Parameter(torch.ones(1 << 16, dtype=torch.bfloat16)),
        "last known": torch.ones(1 << 14),
        "narrow": torch.ones(6, dtype=torch.float8_e4m3fn),
        "wide": torch.ones(5, dtype=torch.uint16),
        "frozen": torch.nn.Parameter(torch.ones(3), requires_grad=False),
    }


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("storages")
    torch.save(checkpoint(), folder / "checkpoint.pt")
    return run_virtual(
        f"file = {str(folder / 'checkpoint.pt')!r}\n"
        + """
from forerun.sources.trace.inside.device import storages

storages.install(mode)
def load(**options):
    before = recorder.memory.allocated_bytes
    found = torch.load(file, **options)
    return found, recorder.memory.allocated_bytes - before

found, size = load(map_location="cuda:2")
result["devices"] = sorted({str(one.device) for one in found.values()})
result["parameters"] = [name for name, one in found.items() if isinstance(one, nn.Parameter)]
result["dtypes"] = [str(one.dtype) for one in found.values()]
result["shapes"] = [list(one.shape) for one in found.values()]
result["strides"] = list(found["turned"].stride())
result["trained"] = [name for name, one in found.items() if one.requires_grad]
result["bytes"] = size
result["sums"] = [found[name].sum().item() for name in ("whole", "row", "turned", "last known")]
result["unknown"] = known_value(found["weight"]) is None
found["whole"].zero_()
result["after"] = [found["row"].sum().item(), found["turned"].sum().item()]
on_host, size = load(map_location="cpu")
result["host"] = [str(on_host["whole"].device), size, on_host["wide"].sum().item()]

before = recorder.memory.allocated_bytes
empty, some = torch.UntypedStorage(device="cuda"), torch.UntypedStorage(1000, device="cuda:3")
result["made"] = [empty.nbytes(), some.nbytes(), recorder.memory.allocated_bytes - before]
host = torch.UntypedStorage(10)
result["kept"] = [str(host.device), host.nbytes(), str(host.to("cpu").device)]
torch.cuda.set_device(1)
moved = torch.tensor([1.0, 2.0]).untyped_storage()
result["moved"] = [moved.cuda().nbytes(), moved.to(device="cuda").nbytes()]
del found, empty, some
""",
        folder,
    )


def test_a_checkpoint_is_loaded_onto_the_device_it_is_mapped_to(answers):
    assert answers["devices"] == ["cuda:2"]
    assert answers["parameters"] == ["weight", "frozen"]
    assert [one.removeprefix("torch.") for one in answers["dtypes"]] == [
        *(["int64"] * 3),
        "bfloat16",
        "float32",
        "float8_e4m3fn",
        "uint16",
        "float32",
    ]
    assert answers["shapes"] == [[3, 4], [4], [4, 3], [1 << 16], [1 << 14], [6], [5], [3]]
    assert answers["strides"] == [1, 4]
    assert answers["trained"] == ["weight"]


def test_tensors_of_one_storage_take_its_memory_once(answers):
    rounded = [512, 2 << 16, 4 << 14, 512, 512, 512]  # to blocks of 512 bytes
    assert answers["bytes"] == sum(rounded)


def test_values_of_small_storages_are_known_and_views_change_together(answers):
    assert answers["sums"] == [66, 4 + 5 + 6 + 7, 66, 1 << 14]
    assert answers["unknown"]
    assert answers["after"] == [0, 0]


def test_storages_of_the_host_stay_as_they_are(answers):
    assert answers["host"] == ["cpu", 0, 5]
    assert answers["kept"] == ["cpu", 10, "cpu"]


def test_a_storage_takes_the_bytes_that_it_is_made_with(answers):
    assert answers["made"] == [0, 1000, 1024]
    assert answers["moved"] == [8, 8]
