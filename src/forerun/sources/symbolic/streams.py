"""Several residual streams (`StreamsSpec`): the reads of layers, and the writes of a layer to all streams.

Every tensor-parallel rank has the weights whole and works on its own tokens. Products of a token's streams with its own
small matrix move memory and hardly multiply, so they count as memory traffic.
"""

from __future__ import annotations

from forerun.describe.model.streams import StreamsSpec
from forerun.sources.symbolic.linear import Section
from forerun.sources.symbolic.products import Product

_SINKHORN_LAUNCHES = 20 * 2 * 3
"""kernels that make mixing matrices doubly stochastic: 20 times sum, addition and division over rows and over columns
(arXiv 2512.24880; `hc_sinkhorn_iters` of transformers' DeepSeek-V4)"""
_FP32 = 4


def stream_bytes(section: Section) -> int:
    """Returns the bytes of all residual streams of a rank's tokens."""
    return _elements(section) * section.kernels.stream_bytes


def _elements(section: Section) -> int:
    s, streams = section.kernels.shapes, section.kernels.model.streams
    return s.tokens_sp * s.hidden * (streams.count if streams else 1)


def _mixed(
    section: Section, name: str, reads: tuple[str, ...], made: tuple[str, int], module: int, pattern: str
) -> None:
    """Writes a pattern over all streams that keeps its inputs, and makes one tensor (name, bytes)."""
    style, kind = section.kernels.stack.residual, "residual" if name.endswith("residual") else "pointwise"
    section.pointwise(name, pattern, _elements(section), style, reads, (made,), reads, module, kind)


# -- around a layer ------------------------------------------------------------------------------------------


def before_layer(section: Section, x: str, module: int) -> str:
    """Writes the work of a layer on the streams before its first half. Returns the name of the tensor that its halves
    read.
    """
    streams = section.kernels.model.streams
    if streams is None or streams.rule != "altup":
        return x
    s, n = section.kernels.shapes, streams.count
    section.weights.vectors += [s.hidden, s.hidden]  # those of the router's norm and of the corrected stream
    for rows, columns in ((s.hidden, n), (n, n * n), (n, n)):
        section.weights.add_matrix(rows, columns)
    coefficients = _altup_router(section, streams, x, "altup.predict", n * n, module)
    made = ("predicted", stream_bytes(section))
    _mixed(section, "altup.predict", (x, coefficients), made, module, "altup_predict")
    return "predicted"


def after_layer(section: Section, predicted: str, stream: str, y: str, module: int) -> None:
    """Writes the update of all streams from the output of the layer's halves for the first stream."""
    streams = section.kernels.model.streams
    assert streams is not None
    coefficients = _altup_router(section, streams, stream, "altup.correct", streams.count, module)
    reads = (predicted, stream, coefficients)
    _mixed(section, "altup.correct", reads, (y, stream_bytes(section)), module, "altup_correct")


def _altup_router(section: Section, streams: StreamsSpec, x: str, name: str, width: int, module: int) -> str:
    """Writes the normed router of one stream and the `width` coefficients of each token; its weights are those of the
    layer's other router too."""
    kernels, s = section.kernels, section.kernels.shapes
    size, normed, routed = s.tokens_sp * s.hidden, f"{name}.normed", f"{name}.routed"
    makes = ((normed, size * s.act_bytes),)
    section.pointwise(normed, kernels.norm_pattern, size, kernels.stack.norm, (x,), makes, (x,), module, "norm")
    section.linear(Product(routed, normed, routed, s.hidden, streams.count, False, module), s.tokens_sp)
    product = Product(f"{name}.coefficients", routed, f"{name}.coefficients", streams.count, width, False, module)
    section.linear(product, s.tokens_sp)
    return product.y


# -- around a half -------------------------------------------------------------------------------------------


def before_half(section: Section, x: str, module: int) -> str:
    """Writes the work that a half needs to read one tensor from the streams. Returns the name of the tensor."""
    streams = section.kernels.model.streams
    if streams is None or streams.rule == "altup":
        return x
    section.weights.vectors.append(streams.coefficients + streams.scales)
    return _weighted_sum(section, streams, x, streams.coefficients, f"hyper{module}", module)


def _weighted_sum(section: Section, streams: StreamsSpec, x: str, coefficients: int, name: str, module: int) -> str:
    """Writes the coefficients of each token and the weighted sum of its streams."""
    kernels, s = section.kernels, section.kernels.shapes
    width, made = streams.count * s.hidden, f"{name}.coefficients"
    section.weights.add_matrix(width, coefficients)
    section.linear(Product(made, x, made, width, coefficients, False, module), s.tokens_sp)
    size = s.tokens_sp * s.hidden * s.act_bytes
    _mixed(section, f"{name}.read", (x, made), (f"{name}.x", size), module, "hyper_read")
    if streams.rule == "hyper" and coefficients > streams.count:
        matrices = s.tokens_sp * streams.count**2 * _FP32
        fused = kernels.style("composed") == "compiled"
        steps = 1 if fused else _SINKHORN_LAUNCHES
        op = section.tape.ops[-1]
        op.forward = [*op.forward, *kernels.traffic("hyper.sinkhorn", steps * matrices, steps * matrices, steps)]
        backward = kernels.traffic("hyper.sinkhorn.backward", 2 * steps * matrices, steps * matrices, steps)
        op.backward = [*backward, *op.backward]
    return f"{name}.x"


def after_half(section: Section, name: str, x: str, branch: str, y: str, module: int) -> None:
    """Writes how the `branch` of a half reaches the residual streams `x`; makes `y`."""
    streams = section.kernels.model.streams
    if streams is None or streams.rule == "altup":
        section.residual(name, x, branch, y, module, section.kernels.model.residual_scales)
        return
    pattern = "hyper_write" if streams.rule == "hyper" else "hyper_add"
    _mixed(section, name, (x, branch), (y, stream_bytes(section)), module, pattern)


# -- around the layers ---------------------------------------------------------------------------------------


def opened(section: Section, x: str, module: int) -> None:
    """Writes all streams from the embedding `x`. AltUp projects and rescales all but the first."""
    streams = section.kernels.model.streams
    if streams is None:
        return
    reads = (x, *_projected(section, streams, (x,) * (streams.count - 1), "streams.in", module))
    _joined_copy(section, "streams.in", "copy", reads, ("streams", stream_bytes(section)), module)


def closed(section: Section, x: str, module: int) -> str:
    """Writes one tensor of the streams `x` behind the last layer; returns its name."""
    streams = section.kernels.model.streams
    if streams is None:
        return x
    if streams.rule != "altup":
        section.weights.vectors.append(streams.count + 1)
        return _weighted_sum(section, streams, x, streams.count, "streams.out", module)
    reads = (x, *_projected(section, streams, (x,) * (streams.count - 1), "streams.out", module))
    size = section.kernels.shapes.tokens_sp * section.kernels.shapes.hidden * section.kernels.stream_bytes
    _joined_copy(section, "streams.out", "stream_mean", reads, ("streams.mean", size), module)
    return "streams.mean"


def _projected(section: Section, streams: StreamsSpec, xs: tuple[str, ...], name: str, module: int) -> tuple[str, ...]:
    """Writes AltUp's projections of `xs`, rescaled to the size of the first stream; returns their names."""
    if streams.rule != "altup":
        return ()
    s, made = section.kernels.shapes, []
    for number, x in enumerate(xs, 1):
        section.weights.add_matrix(s.hidden, s.hidden)
        product = Product(f"{name}{number}", x, f"{name}{number}", s.hidden, s.hidden, False, module)
        section.linear(product, s.tokens_sp)
        size, y = s.tokens_sp * s.hidden, product.y + ".scaled"
        style = section.kernels.stack.norm
        makes = ((y, size * s.act_bytes),)
        section.pointwise(y, "weightless_norm", size, style, (product.y,), makes, (product.y,), module, "norm")
        made.append(y)
    return tuple(made)


def _joined_copy(
    section: Section, name: str, pattern: str, reads: tuple[str, ...], made: tuple[str, int], module: int
) -> None:
    style = section.kernels.stack.residual
    section.pointwise(name, pattern, _elements(section), style, reads, (made,), (), module)
