"""Parts of a model that the language models of training frameworks' own scripts don't have."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.describe.model.spec import ModelSpec


def special_parts(model: ModelSpec) -> list[tuple[bool, str]]:
    """Returns whether `model` has each of these parts, and the part in words."""
    return [
        (model.scan is not None or any(kind.scan for kind in model.kinds), "recurrences"),
        (model.runs is not None, "an encoder, or a tower of images or sounds"),
        (bool(model.layers), "layers that differ from each other beyond dense first layers"),
        (model.attention_chunk is not None, "chunked attention"),
        (model.sinks, "attention sinks"),
        (model.attention_gate, "gate on the attention's output"),
        (model.other_parameters > 0, "parameters of layers that Forerun does not know"),
        (model.indexer is not None, "indexer of keys"),
        (any(kind.compressed for kind in model.kinds), "compressed keys"),
        (any(kind.head_gate for kind in model.kinds), "a gate for each head"),
        (model.differential, "differential attention"),
        (model.norm_gate_rank > 0, "gates on norms"),
        (model.conv_taps > 0, "short convolutions of keys, values and halves"),
        (model.relative_rank > 0, "biases of relative positions"),
        (any(kind.shortcut for kind in model.kinds), "experts beside the second half of a layer"),
        (model.qk_conv_taps > 0, "convolutions of queries and keys"),
        (model.residual_scales, "scales on the residual stream"),
        (any(kind.shared_block for kind in model.kinds), "blocks that layers share"),
        (model.attention_experts > 0, "experts of the attention"),
        (model.shared_kv, "keys and values that layers share"),
        (model.equal_kv, "one projection for keys and values"),
        (model.layer_input > 0, "inputs of each layer's own"),
        (model.streams is not None, "several residual streams"),
        (model.laurel_rank > 0, "learned residuals beside the mixer"),
        (model.sparse_gate, "sparse gate of the feed-forward"),
        (any(kind.moe is not None and kind.moe.zero_experts > 0 for kind in model.kinds), "experts without weights"),
        (model.qk_norm and model.qk_norm_over != "head", "norms over the queries and keys of all heads"),
        (model.norm_place != "before", "norms after the halves of a layer"),
        (not model.norm_weight, "norms without weights"),
        (model.parallel, "attention and feed-forward side by side"),
    ]
