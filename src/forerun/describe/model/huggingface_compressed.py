"""Reads the config.json of DeepSeek-V4, whose attention reads a window and compressed entries.

Keys and defaults follow the family's configuration class in Hugging Face transformers. Older files have numbers for
each layer where newer ones have words.
"""

from __future__ import annotations

from dataclasses import replace

from forerun.describe.model.compressed import CompressedSpec
from forerun.describe.model.families import Values, family
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface_decoders import decoder
from forerun.describe.model.huggingface_experts import experts
from forerun.describe.model.layer_lists import SLIDING, each_layer, every, layer_words
from forerun.describe.model.spec import IndexerSpec
from forerun.describe.model.streams import StreamsSpec

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_OF_RATIO = {0: SLIDING, 4: _SPARSE, 128: _HEAVY}
_RATES = {_SPARSE: 4, _HEAVY: 128}
_HASHED = "hash_moe"
_SIZES = {"n_layers": 43, "n_heads": 64, "n_kv_heads": 1, "head_dim": 512}
_NUMERICS = ("hc_sinkhorn_iters", "hc_eps", "compress_rope_theta", "topk_method", "expert_dtype")
_NOTES = (
    "a query reads its window and the compressed keys that its indexer chooses; indexers learn from a loss of their own"
    " on the attention's scores, which takes no time",
    "layers that choose experts by a table of tokens take as long as others",
)


@family("deepseek_v4", "DeepseekV4ForCausalLM", ignored=_NUMERICS)
def deepseek_v4(config: Fields) -> Values:
    """Reads DeepSeek-V4: hyper-connections, one head of keys that are values too, compressed keys by layer, an output
    product in groups, and experts in every layer."""
    for key in ("attention_bias", "mlp_bias"):
        config.expect(key, False)
    config.expect("n_shared_experts", 1)
    config.expect("num_key_value_heads", 1)
    width = config.integer(config.first_of("moe_intermediate_size", "intermediate_size"), 2048)
    values = decoder(config, defaults=_SIZES, width=width)
    layers = int(str(values["n_layers"]))
    moe = experts(config, config.first_of("n_routed_experts", "num_local_experts"), width, width, router_bias=True)
    first = min(layers, config.integer("num_hash_layers", 3, least=0))
    routed = layer_words(config, "mlp_layer_types", (_HASHED, "moe"), [_HASHED] * first + ["moe"] * (layers - first))
    usual, words = _attention(config, int(str(values["head_dim"])), layers)
    changes = [
        kind | ({"moe": replace(moe, router_bias=False)} if word == _HASHED else {})
        for kind, word in zip(words, routed, strict=True)
    ]
    parts: Values = {
        "ffn_hidden": 0,
        "moe": moe,
        "sinks": True,
        "sliding_window": config.integer("sliding_window", 128),
        "streams": StreamsSpec(config.integer("hc_mult", 4, least=2), "hyper"),
        "notes": _NOTES,
    }
    return values | usual | parts | each_layer(changes)


def _attention(config: Fields, head_dim: int, layers: int) -> tuple[Values, list[Values]]:
    """Returns the fields of an attention with an indexer, and the changes of each layer."""
    window = CompressedSpec(
        config.integer("q_lora_rank", 1024),
        _rotated(config, head_dim),
        config.integer("o_groups", 8),
        config.integer("o_lora_rank", 1024),
    )
    heads, width = config.integer("index_n_heads", 64), config.integer("index_head_dim", 128)
    indexer = IndexerSpec(heads, width, config.integer("index_topk", 512))
    rates = _rates(config)
    kinds: dict[str, Values] = {
        SLIDING: {"compressed": window, "indexer": None},
        _SPARSE: {},
        _HEAVY: {"compressed": replace(window, rate=rates[_HEAVY]), "indexer": None},
    }
    words = layer_words(config, "layer_types", tuple(kinds), _usual_words(config, layers))
    usual = {"compressed": replace(window, rate=rates[_SPARSE], overlapping=True), "indexer": indexer}
    return usual, [kinds[word] for word in words]


def _rotated(config: Fields, head_dim: int) -> int:
    """Returns the elements of a head that rotate; the usual ones are an eighth of it."""
    if config.stated("qk_rope_head_dim"):
        return config.integer("qk_rope_head_dim")
    share = config.number("partial_rotary_factor")
    return max(1, int(head_dim * (0.125 if share is None else share)))


def _rates(config: Fields) -> dict[str, int]:
    """Returns the tokens that an entry stands for, by the word of a layer."""
    stated = config.section("compress_rates") or Fields({}, config.place)
    older = {_SPARSE: "compress_rate_csa", _HEAVY: "compress_rate_hca"}
    return {word: config.integer(older[word], stated.integer(word, usual)) for word, usual in _RATES.items()}


def _usual_words(config: Fields, layers: int) -> list[str]:
    """Returns the words of layers for a file without them. They follow from the numbers of older files, which also
    cover the layers that predict further tokens. Without numbers, two heavily compressed layers come first, and then
    both kinds in turn.
    """
    if not config.stated("compress_ratios"):
        return [_HEAVY] * min(2, layers) + every(2, _SPARSE, _HEAVY, max(0, layers - 2))
    ratios = config.items("compress_ratios")[:layers]
    for ratio in ratios:
        if ratio not in _OF_RATIO:
            raise config.error("compress_ratios", f"{ratio!r} is not supported, only 0, 4 and 128")
    return [_OF_RATIO[int(str(ratio))] for ratio in ratios]
