"""Models given layer by layer: the presets against torch modules, units, layers of one's own."""

from dataclasses import dataclass

import pytest

from forerun.common.errors import ForerunError, UnknownName
from forerun.describe.model.catalog import layered_names, load_any, load_model, model_table
from forerun.describe.model.convolutional import ConvNet, load_convolutional
from forerun.describe.model.layer_types import activation, add, batch_norm, conv2d, linear, pool
from forerun.describe.model.layered import INPUT, Layer, LayeredModel, Traffic, function_layer
from forerun.describe.model.spec import ModelSpec

torch = pytest.importorskip("torch")
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from torch_resnet import NETWORKS  # noqa: E402


def images(n=1):
    return torch.empty(n, 3, 224, 224, device="meta")


def made(name):
    with torch.device("meta"):
        return NETWORKS[name]()


def hooked(module, run):
    """(module name, shape without the batch) of everything that the leaves make, in order."""
    shapes = []
    for name, leaf in module.named_modules():
        if not list(leaf.children()) and name:
            leaf.register_forward_hook(lambda _, __, out, name=name: shapes.append((name, tuple(out.shape[1:]))))
    run()
    return shapes


@pytest.mark.parametrize("name", layered_names())
def test_presets_have_the_parameters_and_shapes_of_the_torch_modules(name):
    model, module = load_convolutional(name), made(name)
    assert model.parameter_count == sum(p.numel() for p in module.parameters())
    shapes = hooked(module, lambda: module(images()))
    layers = [layer for layer in model.layers if layer.layer_type != "add"]
    assert [shape for _, shape in shapes] == [layer.output_shape for layer in layers]
    own = {key: [p.numel() for p in leaf.parameters(recurse=False)] for key, leaf in module.named_modules()}
    assert [own[key] for key, _ in shapes] == [list(layer.parameters) for layer in layers]
    weighted = [layer.layer_id for layer in layers if layer.parameters]
    assert [key for key, _ in shapes if own[key]] == weighted


@pytest.mark.parametrize("name", layered_names())
def test_presets_have_the_flops_of_the_torch_modules(name):
    model, module = load_convolutional(name), made(name)
    with FlopCounterMode(display=False) as forward:
        out = module(images(2))
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert forward.get_total_flops() == 2 * model.forward_flops
    if name != "resnext50_32x4d":  # torch counts the weight gradients of grouped convolutions as if of one group
        assert backward.get_total_flops() == 2 * model.backward_flops
    assert model.backward_flops == 2 * model.forward_flops - model.layers[0].forward_flops


def saved_bytes(module, samples):
    """Bytes of the distinct storages that autograd keeps, without the parameters' own."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(images(samples))
    for parameter in module.parameters():
        kept.pop(parameter.untyped_storage()._cdata, None)
    for buffer in module.buffers():
        kept.pop(buffer.untyped_storage()._cdata, None)
    return sum(kept.values())


@pytest.mark.parametrize("name", layered_names())
def test_presets_keep_what_autograd_keeps(name):
    model, module = load_convolutional(name), made(name)
    one, three = (saved_bytes(module, samples) for samples in (1, 3))
    masks = sum(layer.own_bytes for layer in model.layers if layer.layer_id.startswith("classifier"))
    # on the meta device dropout's mask is as wide as its input; kernels keep a byte
    assert (three - one) / 2 == pytest.approx(model.activation_bytes(4) + 3 * masks, rel=0.002)


def test_resnet50_is_what_everybody_knows():
    model = load_any("ResNet50")
    assert model.parameter_count == 25_557_032
    assert model.forward_flops / 2 == pytest.approx(4.09e9, rel=0.001)
    assert model.layers[0].input_shape == (3, 224, 224)
    assert [len(unit) for unit in model.units] == [4, 12, 10, 10, 12, *[10] * 3, 12, *[10] * 5, 12, 10, 10, 2]
    conv = model.layers[0]
    assert (conv.num_parameters, conv.forward_flops) == (9408, 2 * 118_013_952)
    assert conv.gradient_bytes() == 4 * 9408
    assert conv.activation_bytes() == 2 * 3 * 224 * 224


def test_the_first_convolution_makes_no_gradient_of_the_image():
    model = load_any("resnet18")
    conv = model.layers[0]
    assert model.input_gradients[:3] == (False, True, True)
    assert sum(layer.backward_flops for layer in model.layers) - model.backward_flops == conv.forward_flops


def test_a_v1_bottleneck_strides_in_its_first_convolution():
    v1 = ConvNet("bottleneck", (3, 4, 6, 3), stride_in_first=True).model("v1")
    v15 = load_any("resnet50")
    assert v1.parameter_count == v15.parameter_count
    assert v1.forward_flops < v15.forward_flops
    assert v1.forward_flops / 2 == pytest.approx(3.86e9, rel=0.01)


def test_small_images_make_small_networks():
    assert ConvNet("basic", (2, 2, 2, 2), classes=10, image=32).model("small").layers[-1].output_shape == (10,)


def test_units_are_closed():
    """Nothing but the last output of a unit is read after it."""
    for name in layered_names():
        model = load_convolutional(name)
        number_of = {layer.layer_id: n for n, layer in enumerate(model.layers)} | {INPUT: -1}
        assert [n for unit in model.units for n in unit] == list(range(len(model.layers)))
        for before, unit in zip(((-1,), *model.units), model.units, strict=False):
            read = {number_of[key] for n in unit for key in model.read_by(n)}
            assert read <= {before[-1], *unit}


def test_a_skip_over_layers_joins_them_into_one_unit():
    shape = (8, 4, 4)
    layers = (
        batch_norm("a", shape),
        conv2d("b", shape, 8, (3, 3)),
        activation("c", shape),
        add("d", shape, ("a", "c")),
        batch_norm("e", shape),
    )
    assert LayeredModel("skip", layers).units == ((0,), (1, 2, 3), (4,))


def test_tensors_that_layers_share_are_kept_once():
    shape = (8, 4, 4)
    model = LayeredModel("m", (conv2d("a", shape, 8, (3, 3)), activation("r", shape), conv2d("b", shape, 8, (3, 3))))
    assert model.kept_of(2) == {INPUT: 256, "a": 0, "r": 256, "b": 0}
    assert sum(layer.activation_bytes() for layer in model.layers) == 3 * 256


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((), "has no layers; add one"),
        ((batch_norm("a", (1, 2, 2)), batch_norm("a", (1, 2, 2))), "'a' is there twice"),
        ((batch_norm(INPUT, (1, 2, 2)),), "'input' names the sample"),
        ((add("a", (1, 2, 2), ("b", INPUT)),), "'a': reads 'b', which is not a layer before it"),
        ((batch_norm("a", (1, 2, 2)), linear("b", (5,), 3)), r"'b': input_shape \[5\] has 5 elements, 'a' makes"),
    ],
)
def test_models_that_do_not_fit_together_are_refused(layers, message):
    with pytest.raises(ForerunError, match=message):
        LayeredModel("m", layers)


# -- layers of one's own -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fourier(Layer):
    """Mixes positions by a fast Fourier transform: three passes over the sequence, nothing to keep, no weights."""

    def forward(self, samples):
        size = samples * self.input_elements
        return [Traffic(3 * size, 3 * size, launches=3, flops=5 * size * 9)]


def test_a_layer_of_ones_own_is_a_subclass():
    mix = Fourier("mix", "custom", (512, 64), (512, 64), saves_input=False)
    model = LayeredModel("fnet", (linear("in", (512, 64), 64, output_shape=(512, 64)), mix), "sequence")
    assert mix.forward_flops == mix.backward_flops == 5 * 512 * 64 * 9
    assert model.forward_flops == 2 * 512 * 64 * 64 + mix.forward_flops
    assert model.kept_of(2) == {INPUT: 2 * 512 * 64, "in": 0, "mix": 0}


def test_a_layer_of_ones_own_is_a_function():
    def blur(samples):
        return [Traffic(samples * 3 * 32 * 32, samples * 3 * 32 * 32, flops=9.0 * samples * 3 * 32 * 32)]

    layer = function_layer("blur", (3, 32, 32), (3, 32, 32), blur)
    assert layer.forward_flops == 9 * 3 * 32 * 32
    assert layer.backward_flops == layer.forward_flops
    weighted = function_layer("blur", (3, 32, 32), (3, 32, 32), blur, parameters=(9,))
    assert weighted.backward_flops == 2 * layer.forward_flops
    quiet = function_layer("blur", (3, 32, 32), (3, 32, 32), blur, lambda samples: [], parameters=(9,))
    assert quiet.backward_flops == 0


def test_layers_without_parameters_run_as_pytorchs_do():
    maximum = pool("p", (64, 8, 8), (64, 4, 4), True)
    assert maximum.own_bytes == 8 * 64 * 16
    dropped = activation("d", (10,), "dropout")
    assert (dropped.own_bytes, dropped.saves_input, dropped.saves_output) == (10, False, False)
    assert activation("g", (10,), "gelu").saves_input
    summed = add("s", (10,), ("a", "b", "c"))
    (kernel,) = summed.forward(2)
    assert (kernel.elements_read, kernel.elements_written, kernel.launches) == (80, 40, 2)


def test_depthwise_convolutions_are_bound_by_memory():
    layer = conv2d("d", (32, 8, 8), 32, (3, 3), groups=32)
    assert layer.forward_flops == 2 * 32 * 64 * 9
    assert all(isinstance(kernel, Traffic) for kernel in (*layer.forward(2), *layer.backward(2)))


# -- the catalogue -----------------------------------------------------------------------------------------------


def test_the_catalogue_loads_any_model():
    assert isinstance(load_any("gpt2-small"), ModelSpec)
    assert isinstance(load_any(" VGG16 "), LayeredModel)
    with pytest.raises(UnknownName, match=r"unknown model or folder 'resnet-50'; did you mean .*resnet50"):
        load_any("resnet-50")
    with pytest.raises(ForerunError, match="No such file"):
        load_any("missing.yaml")


def test_where_only_transformers_are_taken_a_layered_name_says_so():
    with pytest.raises(ForerunError, match=r"^resnet50 is a model given layer by layer, which `forerun predict`"):
        load_model("resnet50")


def test_the_table_of_models_lists_them():
    rows = {row.name: row for row in model_table()}
    assert rows["resnet50"].parameters == rows["resnet50"].active_parameters == 25_557_032
    assert rows["resnet50"].hidden is None
    assert list(rows)[-len(layered_names()) :] == layered_names()
