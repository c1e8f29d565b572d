"""Tensors of classes of a program's own, as libraries of images mark their data: they keep class and methods on the
device, and compute like others."""

import pytest
from virtual_process import run_virtual

pytest.importorskip("torch", reason="tracing needs torch")


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_virtual(
        """
        class Marked(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                called.append(getattr(func, "__name__", str(func)))
                return super().__torch_function__(func, types, args, kwargs or {})

        class Image(Marked):
            def mirrored(self):
                return self.flip(-1)

        called = []
        host = torch.arange(24.0).view(2, 3, 4).as_subclass(Image)
        image = host.cuda()
        made = torch.zeros(2, 3, 4, device="cuda").as_subclass(Image)
        label = torch.ones(2, device="cuda").as_subclass(Marked)

        def kind(tensor):
            return [type(tensor).__name__, isinstance(tensor, Image), isinstance(tensor, Marked), tensor.device.type]

        result["moved"], result["made"], result["label"] = kind(image), kind(made), kind(label)
        result["computed"] = [kind(image * 2), kind(image.mirrored()), kind(image[0]), kind(host + 1)]
        called.clear()
        result["mixed"] = kind(image.sum((1, 2)) + label)
        result["called"] = called[:]
        result["plain"] = type(image.as_subclass(torch.Tensor)).__mro__[0].__name__
        result["back"] = kind(image.cpu())
        result["values"] = image.cpu().flatten().tolist()[:3]
        result["shares"] = image.as_subclass(Marked).untyped_storage()._cdata == image.untyped_storage()._cdata

        layer = nn.Linear(4, 5).cuda()
        recorder.start()
        out = layer(image)
        result["output"] = kind(out)
        out.sum().backward()
        result["gradient"] = list(layer.weight.grad.shape)
        result["products"] = len(nodes("addmm")) + len(nodes("mm"))
        """,
        tmp_path_factory.mktemp("subclasses"),
    )


def test_the_class_goes_to_the_device_and_back(answers):
    assert answers["moved"] == answers["made"] == ["Image", True, True, "cuda"]
    assert answers["label"] == ["Marked", False, True, "cuda"]
    assert answers["back"] == ["Image", True, True, "cpu"]
    assert answers["values"] == [0.0, 1.0, 2.0]


def test_results_keep_the_class(answers):
    assert answers["computed"] == [["Image", True, True, "cuda"]] * 3 + [["Image", True, True, "cpu"]]
    assert answers["mixed"] == ["Image", True, True, "cuda"]
    assert "add" in answers["called"]


def test_a_tensor_may_leave_the_class(answers):
    assert answers["plain"] == "FakeTensor"
    assert answers["shares"]


def test_a_layer_computes_on_it_as_on_others(answers):
    assert answers["output"] == ["Image", True, True, "cuda"]
    assert answers["gradient"] == [5, 4]
    assert answers["products"] == 2
