"""Reads the config.json of models with recurrences: Mamba, the delta rule, linear attention, and their mixtures.

Each reader returns the fields of ModelSpec except its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from forerun.describe.model.families import Values, family
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface_decoders import attention_bias, decoder
from forerun.describe.model.huggingface_experts import experts, latent, mixed, qwen_experts
from forerun.describe.model.layer_lists import FULL, LINEAR, each_layer, every, layer_words
from forerun.describe.model.scan import ScanSpec

_NO_ATTENTION: Values = {"n_heads": 0, "n_kv_heads": 0}


def mamba1(config: Fields, prefix: str = "", inner_norms: bool = False) -> ScanSpec:
    """Reads a Mamba mixer; `prefix` is that of its keys, and with `inner_norms` time step, B and C are normed."""
    hidden = config.integer("hidden_size")
    state, taps, rank_key = (
        (config.integer("mamba_d_state", 16), config.integer("mamba_d_conv", 4), "mamba_dt_rank")
        if prefix
        else (config.integer("state_size", 16), config.integer("conv_kernel", 4), "time_step_rank")
    )
    width = config.integer("mamba_expand" if prefix else "expand", 2) * hidden
    config.expect("mamba_proj_bias" if prefix else "use_bias", False)
    automatic = not config.stated(rank_key) or config.is_text(rank_key)
    rank = ceil(hidden / 16) if automatic else config.integer(rank_key)
    biases = width * (1 + config.flag("mamba_conv_bias" if prefix else "use_conv_bias", True))
    return ScanSpec(
        "mamba1",
        heads=width,
        key_dim=state,
        value_dim=1,
        in_width=2 * width,
        key_heads=1,
        conv_channels=width,
        conv_taps=taps,
        inner=((width, rank + 2 * state), (rank, width)),
        vectors=biases + width * state + width + inner_norms * (rank + 2 * state),
    )


def mamba2_spec(heads: int, head_dim: int, groups: int, state: int, taps: int, conv_bias: bool, norm: bool) -> ScanSpec:
    """Returns a Mamba-2 mixer (arXiv 2405.21060)."""
    width, channels = heads * head_dim, heads * head_dim + 2 * groups * state
    return ScanSpec(
        "mamba2",
        heads=heads,
        key_dim=state,
        value_dim=head_dim,
        in_width=width + channels + heads,
        key_heads=groups,
        conv_channels=channels,
        conv_taps=taps,
        vectors=channels * conv_bias + 3 * heads + width * norm,
    )


def _mamba2_of(config: Fields, norm: bool = True) -> ScanSpec:
    """Reads a Mamba-2 mixer from the keys that hybrids have in common."""
    config.expect("mamba_proj_bias", False)
    heads = config.integer("mamba_n_heads")
    width = config.integer("mamba_d_ssm", config.integer("mamba_expand", 2) * config.integer("hidden_size"))
    head_dim = width // heads if config.is_text("mamba_d_head") else config.integer("mamba_d_head", width // heads)
    sizes = (heads, head_dim, config.integer("mamba_n_groups", 1), config.integer("mamba_d_state", 256))
    return mamba2_spec(*sizes, config.integer("mamba_d_conv", 4), config.flag("mamba_conv_bias", True), norm)


def _only_recurrent(config: Fields, scan: ScanSpec, tied: bool) -> Values:
    return {
        "n_layers": config.integer(config.first_of("num_hidden_layers", "n_layer")),
        "hidden": config.integer(config.first_of("hidden_size", "d_model")),
        **_NO_ATTENTION,
        "head_dim": 0,
        "ffn_hidden": 0,
        "vocab": config.integer("vocab_size"),
        "position": "none",
        "tied_embeddings": config.flag("tie_word_embeddings", tied),
        "scan": scan,
    }


@family("mamba", "MambaForCausalLM")
@family("falcon_mamba", "FalconMambaForCausalLM")
def mamba(config: Fields) -> Values:
    """Reads Mamba and Falcon Mamba, which also norms time step, B and C without weights."""
    return _only_recurrent(config, mamba1(config), tied=True)


@family("mamba2", "Mamba2ForCausalLM")
def mamba2(config: Fields) -> Values:
    """Reads Mamba-2."""
    config.expect("use_bias", False)
    heads, head_dim = config.integer("num_heads"), config.integer("head_dim", 64)
    sizes = (heads, head_dim, config.integer("n_groups", 8), config.integer("state_size", 128))
    bias = config.flag("use_conv_bias", True)
    scan = mamba2_spec(*sizes, config.integer("conv_kernel", 4), bias, config.flag("rms_norm", True))
    return _only_recurrent(config, scan, tied=False)


@family("bamba", "BambaForCausalLM")
def bamba(config: Fields) -> Values:
    """Reads Bamba: Mamba-2 with full attention in the layers that `attn_layer_indices` names."""
    layers, attention = config.integer("num_hidden_layers"), config.items("attn_layer_indices")
    words = ["attention" if layer in attention else "mamba" for layer in range(layers)]
    values = decoder(config) | attention_bias(config) | {"mlp_bias": config.flag("mlp_bias")}
    return values | _hybrid(layer_words(config, "layer_types", _WORDS, words), _mamba2_of(config))


_WORDS = ("mamba", "attention", FULL, LINEAR)


def _hybrid(words: list[str], scan: ScanSpec) -> Values:
    """Returns the fields of a model whose layers have attention, or `scan` in place of it."""
    recurrent = _NO_ATTENTION | {"scan": scan}
    return each_layer([{} if word in ("attention", FULL) else recurrent for word in words])


@family("falcon_h1", "FalconH1ForCausalLM")
def falcon_h1(config: Fields) -> Values:
    """Reads Falcon-H1: attention and Mamba-2 side by side in every layer."""
    config.expect("projectors_bias", False)
    scan = _mamba2_of(config, config.flag("mamba_rms_norm"))
    return decoder(config) | attention_bias(config) | {"mlp_bias": config.flag("mlp_bias"), "scan": scan}


@family("granitemoehybrid", "GraniteMoeHybridForCausalLM")
def granitemoehybrid(config: Fields) -> Values:
    """Reads Granite 4: Mamba-2 or attention, with experts beside a shared feed-forward, or that alone."""
    words = layer_words(config, "layer_types", _WORDS, ["mamba"] * config.integer("num_hidden_layers"))
    shared = config.integer("shared_intermediate_size", 0, least=0)
    values = decoder(config) | attention_bias(config)
    if config.text("position_embedding_type", "nope") != "rope":
        values["position"] = "none"
    if config.integer("num_local_experts", 0, least=0):
        values["moe"] = experts(config, "num_local_experts", config.integer("intermediate_size"), shared)
    else:
        config.stated("num_experts_per_tok")
        values["ffn_hidden"] = shared
    return values | _hybrid(words, _mamba2_of(config))


@family("jamba", "JambaForCausalLM")
def jamba(config: Fields) -> Values:
    """Reads Jamba: Mamba with attention in every n-th layer, and experts in every other layer."""
    layers = config.integer("num_hidden_layers")
    period, offset = config.integer("attn_layer_period", 8), config.integer("attn_layer_offset", 4, least=0)
    words = ["attention" if layer % period == offset else "mamba" for layer in range(layers)]
    values = decoder(config) | {"position": "none"}
    values |= _hybrid(layer_words(config, "layers_block_type", _WORDS, words), mamba1(config, "mamba", True))
    period, offset = config.integer("expert_layer_period", 2), config.integer("expert_layer_offset", 1, least=0)
    moe = experts(config, config.first_of("num_experts", "num_local_experts"), config.integer("intermediate_size"))
    return values | mixed(values, moe, [layer % period == offset for layer in range(layers)])


@family("nemotron_h", "NemotronHForCausalLM")
def nemotron_h(config: Fields) -> Values:
    """Reads Nemotron-H: each layer is a Mamba-2 mixer, an attention, a feed-forward, or experts alone."""
    words = _nemotron_words(config)
    config.expect("mlp_hidden_act", "relu2")
    config.expect("use_bias", False)
    config.expect("moe_latent_size", None)
    sizes = (config.integer("mamba_num_heads"), config.integer("mamba_head_dim"), config.integer("n_groups", 8))
    state, taps = config.integer("ssm_state_size", 128), config.integer("conv_kernel", 4)
    scan = mamba2_spec(*sizes, state, taps, config.flag("use_conv_bias", True), norm=True)
    alone: Values = {"ffn_hidden": 0, "moe": None}
    kinds: dict[str, dict[str, object]] = {
        "M": _NO_ATTENTION | {"scan": scan} | alone,
        "*": dict(alone),
        "-": _NO_ATTENTION | {"moe": None},
        "E": dict(_NO_ATTENTION),
    }
    values = decoder(config, defaults={"n_layers": len(words)}) | attention_bias(config)
    values |= {"mlp": "relu2", "position": "none", "mlp_bias": config.flag("mlp_bias")}
    if "E" in words:
        width = config.integer("moe_intermediate_size")
        shared = config.integer("moe_shared_expert_intermediate_size", width) * config.integer("n_shared_experts", 1)
        values["moe"] = experts(config, "n_routed_experts", width, shared, router_bias=True)
    return values | each_layer([kinds[word] for word in words])


_NEMOTRON = {"mamba": "M", LINEAR: "M", "attention": "*", FULL: "*", "mlp": "-", "moe": "E"}


def _nemotron_words(config: Fields) -> list[str]:
    """Returns M, *, - or E for each layer."""
    if config.stated("layers_block_type"):
        config.stated("hybrid_override_pattern")
        words = config.items("layers_block_type")
        if any(word not in _NEMOTRON for word in words):
            raise config.error("layers_block_type", f"has other words than {', '.join(_NEMOTRON)}")
        found = [_NEMOTRON[str(word)] for word in words]
    else:
        found = list(config.text("hybrid_override_pattern"))
    if set(found) - set("M*-E"):
        raise config.error("hybrid_override_pattern", "has other letters than M, *, - and E")
    if config.integer("num_hidden_layers", len(found)) != len(found):
        raise config.error("num_hidden_layers", f"differs from the {len(found)} layers of the pattern")
    return found


def delta_rule(config: Fields, norm: int | None = None, prefix: str = "linear") -> ScanSpec:
    """Reads a gated delta rule; `norm` is the width of the output's norm, one head's unless given."""
    heads, keys = config.integer(f"{prefix}_num_value_heads"), config.integer(f"{prefix}_num_key_heads")
    key_dim, value_dim = config.integer(f"{prefix}_key_head_dim"), config.integer(f"{prefix}_value_head_dim")
    channels = 2 * keys * key_dim + heads * value_dim
    return ScanSpec(
        "gated_delta",
        heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        in_width=channels + heads * value_dim + 2 * heads,
        key_heads=keys,
        conv_channels=channels,
        conv_taps=config.integer(f"{prefix}_conv_kernel_dim", 4),
        vectors=2 * heads + (value_dim if norm is None else norm),
    )


@family("qwen3_next", "Qwen3NextForCausalLM")
@family("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM")
def qwen3_next(config: Fields) -> Values:
    """Reads Qwen3-Next: three layers of the gated delta rule to one of gated attention, and many small experts."""
    values = qwen3_5(config)
    shared = config.integer("shared_expert_intermediate_size")
    count = config.first_of("num_experts", "num_local_experts")
    moe = experts(config, count, config.integer("moe_intermediate_size"), shared, gate=True)
    return values | qwen_experts(config, values, moe)


@family("qwen3_5_text", "Qwen3_5ForCausalLM")
def qwen3_5(config: Fields) -> Values:
    """Reads Qwen3.5: Qwen3-Next with a dense feed-forward."""
    layers = config.integer("num_hidden_layers")
    interval = config.integer("full_attention_interval", 4)
    words = layer_words(config, "layer_types", _WORDS, every(interval, FULL, LINEAR, layers))
    values = decoder(config, defaults={"ffn_hidden": 0}) | attention_bias(config)
    return values | {"qk_norm": True, "attention_gate": True} | _hybrid(words, delta_rule(config))


@family("olmo_hybrid", "OlmoHybridForCausalLM")
def olmo_hybrid(config: Fields) -> Values:
    """Reads OLMo Hybrid: delta-rule layers with norms before each half, attention layers with norms after each half."""
    layers = config.integer("num_hidden_layers")
    words = layer_words(config, "layer_types", _WORDS, every(4, FULL, LINEAR, layers))
    recurrent = _NO_ATTENTION | {"scan": delta_rule(config)}
    full = {"norm_place": "after", "qk_norm": True, "qk_norm_over": "all_heads"}
    return (
        decoder(config) | attention_bias(config) | each_layer([full if word == FULL else recurrent for word in words])
    )


@family("kimi_linear", "KimiLinearForCausalLM")
def kimi_linear(config: Fields) -> Values:
    """Reads Kimi Linear: three layers of Kimi Delta Attention (arXiv 2510.26692) to one of latent attention without
    positions, and experts behind dense first layers."""
    layers, hidden = config.integer("num_hidden_layers"), config.integer("hidden_size")
    words = layer_words(config, "layer_types", _WORDS, every(4, FULL, LINEAR, layers))
    heads, size = config.integer("linear_num_heads"), config.integer("linear_head_dim")
    inside = heads * size
    scan = ScanSpec(
        "gated_delta",
        heads=heads,
        key_dim=size,
        value_dim=size,
        in_width=3 * inside + heads,
        conv_channels=3 * inside,
        conv_taps=config.integer("linear_conv_kernel_dim", 4),
        inner=((hidden, size), (size, inside), (hidden, size), (size, inside)),
        vectors=inside + heads + size,
    )
    mla, width = latent(config), config.integer("moe_intermediate_size")
    sparse = layer_words(config, "mlp_layer_types", ("dense", "sparse"), ["dense"] + ["sparse"] * (layers - 1))
    shared = width * config.integer("num_shared_experts", 0, least=0)
    moe = experts(config, "num_experts", width, shared, router_bias=True, top_k="num_experts_per_token")
    values = decoder(config, defaults={"head_dim": mla.v_head_dim})
    values |= {"head_dim": mla.v_head_dim, "mla": mla, "position": "none"} | _hybrid(words, scan)
    return values | mixed(values, moe, [word == "sparse" for word in sparse])


@family("minimax", "MiniMaxForCausalLM")
def minimax(config: Fields) -> Values:
    """Reads MiniMax-01."""
    layers = config.integer("num_hidden_layers")
    return lightning(config, [FULL if layer % 2 == 0 else LINEAR for layer in range(layers)])


def lightning(config: Fields, usual: Sequence[str]) -> Values:
    """Reads lightning attention with full attention in between, and experts in every layer. `usual` has the word of
    each layer where the file has no `layer_types`."""
    words = layer_words(config, "layer_types", _WORDS, usual)
    values = decoder(config)
    heads, size = config.integer("num_attention_heads"), int(str(values["head_dim"]))
    width = heads * size
    scan = ScanSpec("linear", heads=heads, key_dim=size, value_dim=size, in_width=4 * width, vectors=width)
    moe = experts(config, "num_local_experts", config.integer("intermediate_size"))
    return values | {"moe": moe} | _hybrid(words, scan)


@family("lfm2", "Lfm2ForCausalLM")
def lfm2(config: Fields) -> Values:
    """Reads LFM2: gated short convolutions with grouped attention in between, a tied embedding."""
    width = config.integer(config.first_of("intermediate_size", "block_ff_dim"))
    if config.flag("block_auto_adjust_ff_dim", True):
        multiple = config.integer("block_multiple_of", 256)
        scaled = (config.number("block_ffn_dim_multiplier") or 1.0) * int(2 * width / 3)
        width = multiple * ceil(int(scaled) / multiple)
    return _lfm2(config) | {"ffn_hidden": width}


@family("lfm2_moe", "Lfm2MoeForCausalLM")
def lfm2_moe(config: Fields) -> Values:
    """Reads LFM2 with experts behind dense first layers."""
    dense = config.integer("num_dense_layers", 2, least=0)
    bias = config.flag("use_expert_bias", True)
    width = config.integer("moe_intermediate_size")
    moe = experts(config, "num_experts", width, dense_layers=dense, router_bias=bias)
    return _lfm2(config) | {"moe": moe}


def short_convolutions(config: Fields, hidden: int, taps: int) -> ScanSpec:
    """Reads LFM's layers of gated short convolutions, of usually `taps` taps."""
    return ScanSpec(
        "none",
        heads=hidden,
        key_dim=1,
        value_dim=1,
        in_width=3 * hidden,
        conv_channels=hidden,
        conv_taps=config.integer("conv_L_cache", taps),
        vectors=5 * hidden * config.flag("conv_bias"),
    )


def _lfm2(config: Fields) -> Values:
    hidden, layers = config.integer("hidden_size"), config.integer("num_hidden_layers")
    attention = config.items("full_attn_idxs")
    words = [FULL if layer in attention or not attention else "conv" for layer in range(layers)]
    words = layer_words(config, "layer_types", (FULL, "conv"), words)
    scan = short_convolutions(config, hidden, taps=3)
    tied = config.flag(config.first_of("tie_word_embeddings", "tie_embedding"), True)
    return decoder(config) | {"qk_norm": True, "tied_embeddings": tied} | _hybrid(words, scan)


@family("recurrent_gemma", "RecurrentGemmaForCausalLM")
def recurrent_gemma(config: Fields) -> Values:
    """Reads RecurrentGemma: two layers of a gated linear recurrence (RG-LRU) to one with a window."""
    config.text("hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",))
    hidden = config.integer("hidden_size")
    width, heads = config.integer("lru_width", hidden), config.integer("num_attention_heads")
    scan = ScanSpec(
        "gated",
        heads=width,
        key_dim=1,
        value_dim=1,
        in_width=2 * width,
        conv_channels=width,
        conv_taps=config.integer("conv1d_width", 4),
        inner=((width, width // heads),) * 2,
        vectors=(2 + 1 + 1 + 2) * width + hidden,
    )
    layers = config.integer("num_hidden_layers")
    kinds = config.items("block_types") or ["recurrent", "recurrent", "attention"]
    words = [str(kinds[layer % len(kinds)]) for layer in range(layers)]
    values = decoder(config, tied=True, activation="gelu_pytorch_tanh")
    values |= {"ffn_hidden": config.integer("intermediate_size") // 2, "mlp_bias": True, "out_bias": True}
    attention = {"sliding_window": config.integer("attention_window_size", 2048)}
    recurrent = _NO_ATTENTION | {"scan": scan}
    values["qkv_bias"] = config.flag("attention_bias")
    return values | each_layer([attention if word == "attention" else recurrent for word in words])


@family("rwkv", "RwkvForCausalLM")
def rwkv(config: Fields) -> Values:
    """Reads RWKV-4: decayed sums in time, and a feed-forward of two matrices behind a receptance.

    The feed-forward's receptance counts to the mixer.
    """
    hidden = config.integer("hidden_size")
    width = config.integer("attention_hidden_size", hidden)
    scan = ScanSpec(
        "gated",
        heads=width,
        key_dim=1,
        value_dim=1,
        in_width=3 * width,
        inner=((hidden, hidden),),
        vectors=2 * width + 5 * hidden,
    )
    return _only_recurrent(config, scan, tied=False) | {
        "ffn_hidden": config.integer("intermediate_size", 4 * hidden),
        "mlp": "relu2",
        "norm": "layernorm",
        "norm_bias": True,
        "embedding_norm": True,
    }


@family("xlstm", "xLSTMForCausalLM")
def xlstm(config: Fields) -> Values:
    """Reads xLSTM: matrix memories (mLSTM, arXiv 2503.13427) and gated feed-forwards."""
    config.expect("use_bias", False)
    hidden = config.integer(config.first_of("hidden_size", "embedding_dim"))
    layers, heads = config.integer(config.first_of("num_hidden_layers", "num_blocks")), config.integer("num_heads")
    keys = int(hidden * (config.number("qk_dim_factor") or 0.5))
    values_width = int(hidden * (config.number("v_dim_factor") or 1.0))
    multiple = config.integer("ffn_round_up_to_multiple_of", 64)
    inside = (config.number("ffn_proj_factor") or 2.667) * hidden
    scan = ScanSpec(
        "linear",
        heads=heads,
        key_dim=keys // heads,
        value_dim=values_width // heads,
        in_width=2 * keys + 2 * values_width + 2 * heads,
        vectors=2 * heads + values_width,
    )
    return {
        "n_layers": layers,
        "hidden": hidden,
        **_NO_ATTENTION,
        "head_dim": 0,
        "ffn_hidden": multiple * ceil(inside / multiple),
        "vocab": config.integer("vocab_size"),
        "position": "none",
        "tied_embeddings": config.flag("tie_word_embeddings"),
        "final_norm": config.flag("add_out_norm", True),
        "scan": scan,
    }
