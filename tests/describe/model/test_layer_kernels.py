"""Kernels of every type of layer, counted by hand for two samples."""

from __future__ import annotations

from forerun.describe.model.layer_types import (
    Embedding,
    Norm,
    SelfAttention,
    activation,
    add,
    batch_norm,
    conv2d,
    linear,
    pool,
)
from forerun.describe.model.layered import Attention, Layer, Matmul, Traffic


def test_a_convolution_is_a_product_of_positions_channels_and_taps() -> None:
    """6 x 10 x 12 to 8 channels of 5 x 6, with 3 x 5 taps: 45 elements of the 3 input channels of either group."""
    layer = conv2d("c", (6, 10, 12), 8, (3, 5), stride=2, groups=2, bias=True)
    assert (layer.output_shape, layer.parameters) == ((8, 5, 6), (8 * 3 * 15, 8))
    x, y, w = 2 * 720, 2 * 240, 8 * 45
    assert layer.forward(2) == [Matmul(2 * 30, 4, 45, 2, x + w, y)]
    assert layer.backward(2) == [Matmul(2 * 30, 45, 4, 2, y + w, x)]
    assert layer.weight_backward(2) == [Matmul(4, 45, 2 * 30, 2, x + y, w), Traffic(y, 8)]
    assert layer.forward_flops == 2 * 30 * 8 * 45
    assert layer.backward_flops == 2 * layer.forward_flops


def test_a_convolution_without_bias_padding_or_groups() -> None:
    layer = conv2d("c", (3, 8, 9), 4, (3, 3), padding=(1, 2))
    assert (layer.output_shape, layer.parameters) == ((4, 8, 11), (4 * 27,))
    assert conv2d("c", (3, 8, 9), 4, (2, 4)).output_shape == (4, 9, 10)
    assert conv2d("c", (3, 8, 9), 4, (1, 1), stride=3).output_shape == (4, 3, 3)
    assert layer.weight_backward(1) == [Matmul(4, 27, 88, 1, 216 + 352, 108)]


def test_one_filter_a_channel_is_bound_by_memory() -> None:
    layer = conv2d("c", (6, 4, 4), 6, (3, 3), groups=6)
    x = 2 * 96
    assert layer.forward(2) == [Traffic(x + 54, x, flops=2 * x * 9)]
    assert layer.weight_backward(2) == [Traffic(2 * x, 54, flops=2 * x * 9)]
    assert isinstance(conv2d("c", (6, 4, 4), 6, (3, 3), groups=3).forward(2)[0], Matmul)
    assert isinstance(conv2d("c", (1, 4, 4), 6, (3, 3)).forward(2)[0], Matmul)


def test_a_linear_layer_works_on_rows_or_flattens() -> None:
    rows = linear("l", (5, 7), 3, output_shape=(5, 3))
    assert rows.parameters == (21, 3)
    assert rows.forward(2) == [Matmul(10, 3, 7)]
    assert rows.backward(2) == [Matmul(10, 7, 3)]
    assert rows.weight_backward(2) == [Matmul(3, 7, 10), Traffic(30, 3)]
    flat = linear("l", (5, 7), 3, bias=False)
    assert (flat.parameters, flat.output_shape) == ((105,), (3,))
    assert flat.weight_backward(2) == [Matmul(3, 35, 2)]


def test_batch_norm_reads_its_input_twice_and_layer_norm_once() -> None:
    batch = batch_norm("n", (6, 2, 3))
    assert (batch.parameters, batch.buffer_bytes) == ((6, 6), 2 * 6 * 4 + 8)
    assert batch.forward(2) == [Traffic(2 * 72, 72)]
    assert batch.backward(2) == [Traffic(2 * 72, 72)]
    assert batch.weight_backward(2) == [Traffic(2 * 72, 0)]
    layer = Norm("n", "norm", (4, 9), (4, 9), (9, 9))
    assert layer.forward(2) == [Traffic(72, 72)]


def test_an_activation_keeps_what_its_function_needs() -> None:
    relu, gelu, dropout, softmax = (
        activation("a", (5, 4), function) for function in ("relu", "gelu", "dropout", "softmax")
    )
    assert relu.forward(2) == gelu.forward(2) == [Traffic(40, 40)]
    assert dropout.forward(2) == [Traffic(40, 40, bytes_written=40)]
    assert gelu.backward(2) == [Traffic(80, 40)]
    assert dropout.backward(2) == [Traffic(40, 40, bytes_read=40)]
    assert [(one.saves_input, one.saves_output, one.own_bytes) for one in (relu, gelu, dropout, softmax)] == [
        *[(False, True, 0), (True, False, 0), (False, False, 20), (False, True, 0)]
    ]


def test_a_sum_has_a_pass_for_each_summand_beyond_the_first() -> None:
    assert add("s", (5,), ("a", "b", "c")).forward(2) == [Traffic(40, 20, launches=2)]
    assert add("s", (5,), ("a", "b")).forward(2) == [Traffic(20, 10, launches=1)]
    assert add("s", (5,), ("a", "b")).backward(2) == []
    assert not add("s", (5,), ("a", "b")).saves_input


def test_maximum_pooling_keeps_its_input_and_an_index_of_64_bits_for_each_output() -> None:
    most, mean = (pool("p", (4, 6, 6), (4, 3, 3), maximum) for maximum in (True, False))
    assert (most.own_bytes, mean.own_bytes) == (36 * 8, 0)
    assert (most.saves_input, mean.saves_input) == (True, False)
    assert most.forward(2) == [Traffic(288, 72, bytes_written=2 * 288)]
    assert most.backward(2) == [Traffic(72, 288, 2 * 288, launches=2)]
    assert mean.backward(2) == [Traffic(72, 288, 0, launches=1)]


def test_an_embedding_sorts_its_indices_on_the_way_back() -> None:
    layer = Embedding("e", "embedding", (8,), (8, 16), (1600,))
    assert layer.forward(2) == [Traffic(256, 256)]
    assert layer.backward(2) == []
    assert layer.weight_backward(2) == [Traffic(512, 512, launches=3)]


def test_self_attention_has_two_products_around_a_fused_kernel() -> None:
    layer = SelfAttention("a", "attention", (10, 12), (10, 12), (432, 144, 36, 12), heads=3)
    assert layer.forward(2) == [Matmul(20, 36, 12), Attention(2, 3, 10, 4), Matmul(20, 12, 12)]
    assert layer.backward(2) == [Matmul(20, 12, 12), Attention(2, 3, 10, 4, backward=True), Matmul(20, 12, 36)]
    assert layer.weight_backward(2) == [Matmul(36, 12, 20), Matmul(12, 12, 20), Traffic(4 * 240, 0, launches=2)]
    plain = SelfAttention("a", "attention", (10, 12), (10, 12), (432, 144), heads=3, causal=True)
    assert len(plain.weight_backward(2)) == 2
    assert plain.forward(2)[1] == Attention(2, 3, 10, 4, causal=True)


def test_flops_of_fused_attention() -> None:
    assert Attention(2, 3, 10, 4).flops == 4 * 2 * 3 * 100 * 4
    assert Attention(2, 3, 10, 4, causal=True).flops == 2 * 2 * 3 * 100 * 4
    assert Attention(2, 3, 10, 4, backward=True).flops == 10 * 2 * 3 * 100 * 4
    assert Matmul(2, 3, 5, 7).flops == 2 * 2 * 3 * 5 * 7
    assert Matmul(2, 3, 5, stated_flops=9.0).flops == 9.0


def test_a_layer_of_no_type_reads_and_writes() -> None:
    layer = Layer("x", "custom", (2, 3), (4,), (5, 6), own_elements=3.0, own_bytes=7.0, saves_output=True)
    assert layer.forward(2) == layer.backward(2) == layer.weight_backward(2) == [Traffic(12, 8)]
    assert Layer("x", "custom", (2, 3), (4,)).weight_backward(2) == []
    assert (layer.num_parameters, layer.activation_bytes(2), layer.activation_bytes(4)) == (11, 33.0, 59.0)
    assert (layer.gradient_bytes(), layer.gradient_bytes(2)) == (44, 22)
    assert Layer("x", "custom", (2,), (2,), (5,), gradient_elements=3).gradient_bytes() == 12


def test_stated_flops_count_half_for_the_weights() -> None:
    layer = Layer("x", "custom", (2,), (2,), (5,), counted_flops=(10.0, 30.0))
    assert (layer.forward_flops, layer.backward_flops, layer.gradient_flops(of_input=False)) == (10.0, 30.0, 15.0)
    assert Layer("x", "custom", (2,), (2,), counted_flops=(10.0, 30.0)).gradient_flops(of_input=False) == 0.0
    product = linear("l", (7,), 3)
    assert (product.forward_flops, product.gradient_flops(of_input=False), product.backward_flops) == (42, 42, 84)
