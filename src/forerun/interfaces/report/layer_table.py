"""One model, part by part: the parameters, the FLOPs and the saved activations of each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.text import Text

from forerun.common.units import GIGA
from forerun.describe.model.inputs import unused_encoder
from forerun.describe.model.layer_parameters import kind_parameters
from forerun.describe.model.layered import MB, LayeredModel
from forerun.describe.model.parameters import active_parameter_count, layer_counts, outer_parameters, parameter_count
from forerun.describe.model.spec import ModelSpec
from forerun.interfaces.report.console import print_table

_KEPT_BYTES = 2
"""bytes of an element of an activation in mixed precision"""


@dataclass(frozen=True)
class LayerRow:
    """One layer of a LayeredModel. FLOPs count 2 for a multiply-add."""

    layer_id: str
    layer_type: str
    output_shape: tuple[int, ...]
    """without the batch"""
    num_parameters: int
    forward_flops: float
    """of one sample"""
    backward_flops: float
    activation_memory_mb: float
    """10**6 bytes of its output that are kept until the backward pass, for one sample in 16 bits"""


@dataclass(frozen=True)
class PartRow:
    """A part of a transformer that occurs `count` times."""

    part: str
    count: int
    num_parameters: int
    """of one"""


def layer_rows(model: LayeredModel) -> list[LayerRow]:
    """Returns a row for each layer, in the order in which they run."""
    kept = model.kept_of(_KEPT_BYTES)
    return [
        LayerRow(
            layer.layer_id,
            layer.layer_type,
            layer.output_shape,
            layer.num_parameters,
            layer.forward_flops,
            layer.gradient_flops(wanted),
            kept[layer.layer_id] / MB,
        )
        for layer, wanted in zip(model.layers, model.input_gradients, strict=True)
    ]


def part_rows(spec: ModelSpec) -> list[PartRow]:
    """Returns a row for each part outside the layers, and for the parts of each kind of layer."""
    return [PartRow(part, 1, count) for part, count in outer_parameters(spec).items()] + list(_layer_parts(spec))


def _layer_parts(spec: ModelSpec) -> Iterator[PartRow]:
    names = Counter[str]()
    for layer, count in layer_counts(spec):
        name = "moe layer" if layer.moe else "layer"
        names[name] += 1
        name += f" {names[name]}" if names[name] > 1 else ""
        for part, number in kind_parameters(layer).items():
            yield PartRow(f"{name}: {part}", count, number)


def model_record(model: ModelSpec | LayeredModel) -> dict[str, object]:
    """Returns the same rows as plain data."""
    if isinstance(model, ModelSpec):
        rows: list[LayerRow] | list[PartRow] = part_rows(model)
        parts = [asdict(row) for row in rows]
        return {
            "model": model.name,
            "parameters": parameter_count(model),
            "active_parameters": active_parameter_count(model),
            "parts": parts,
            "notes": [*model.notes, *unused_encoder(model)],
        }
    return {
        "model": model.name,
        "parameters": model.parameter_count,
        "forward_flops": model.forward_flops,
        "backward_flops": model.backward_flops,
        "activation_memory_mb": model.activation_bytes(_KEPT_BYTES) / MB,
        "layers": [asdict(row) for row in layer_rows(model)],
        "notes": list(model.notes),
    }


def print_model(out: Console, model: ModelSpec | LayeredModel) -> None:
    """Prints a model as a table."""
    if isinstance(model, ModelSpec):
        parts = (
            (part.part.replace("_", " "), f"{part.count:,}", f"{part.num_parameters:,}") for part in part_rows(model)
        )
        title = f"{model.name}: {parameter_count(model):,} parameters"
        print_table(out, title, "lrr", ("part", "times", "parameters of one"), parts)
        _print_notes(out, model)
        return
    totals = (
        f"{model.parameter_count:,} parameters, forward {model.forward_flops / GIGA:.2f} GFLOPs,"
        f" kept {model.activation_bytes(_KEPT_BYTES) / MB:.1f} MB"
    )
    layers = (
        (
            row.layer_id,
            row.layer_type,
            "x".join(map(str, row.output_shape)),
            f"{row.num_parameters:,}" if row.num_parameters else "",
            f"{row.forward_flops / GIGA:.3f}",
            f"{row.backward_flops / GIGA:.3f}",
            f"{row.activation_memory_mb:.2f}",
        )
        for row in layer_rows(model)
    )
    headings = ("layer", "type", "output", "parameters", "forward\nGFLOPs", "backward\nGFLOPs", "kept\nMB")
    print_table(out, f"{model.name}, of one {model.sample}: {totals}", "lllrrrr", headings, layers)
    _print_notes(out, model)


def _print_notes(out: Console, model: ModelSpec | LayeredModel) -> None:
    left_out = unused_encoder(model) if isinstance(model, ModelSpec) else ()
    for note in (*model.notes, *left_out):
        out.print(Text(note), soft_wrap=True)
