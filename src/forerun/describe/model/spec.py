"""ModelSpec: the architecture of a language model, without anything about its training.

A model is a list of layers. `ModelSpec.layer(i)` is the ModelSpec of layer i alone. The fields of a model describe all
of its layers, and `layers` has the fields that change by layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from forerun.common.errors import ForerunError
from forerun.describe.model.compressed import CompressedSpec
from forerun.describe.model.encoder import EncoderSpec
from forerun.describe.model.scan import ScanSpec
from forerun.describe.model.shared_block import SharedBlockSpec
from forerun.describe.model.streams import StreamsSpec

MOST_LAYERS = 1024
"""those of DeepNet (arXiv 2203.00555), the deepest published model, and some"""
Mlp = Literal["swiglu", "geglu", "gelu", "relu", "relu2"]
Norm = Literal["rmsnorm", "layernorm"]
NormPlace = Literal["before", "after", "both"]
QkNorm = Literal["head", "all_heads", "plain"]
LayerChanges = tuple[tuple[str, Any], ...]
"""(field, value) of the fields of ModelSpec in which a layer differs from its model"""
Position = Literal["rope", "learned", "alibi", "sinusoidal", "none"]
CrossAttention = Literal["none", "behind", "instead"]


@dataclass(frozen=True, slots=True)
class MoESpec:
    """Mixture-of-experts feed-forward. `expert_ffn` is the width of one expert."""

    n_experts: int
    top_k: int
    expert_ffn: int
    shared_ffn: int = 0
    """total width of the shared experts; 0 for none"""
    n_dense_layers: int = 0
    """number of the first layers that keep a dense feed-forward of width `ffn_hidden`"""
    shared_gate: bool = False
    """a hidden->1 gate on the shared expert (Qwen2-MoE)"""
    router_bias: bool = False
    """a trained or tracked bias per expert on the router (DeepSeek-V3)"""
    n_groups: int = 1
    """number of equal groups of experts; for each token the router first chooses `top_groups` of them (DeepSeek-V3's
    node-limited routing)"""
    top_groups: int = 1
    capacity_factor: float | None = None
    """each expert pads or drops its tokens to this multiple of the mean; None: it processes all of them"""
    zero_experts: int = 0
    """experts without weights among which the router also chooses: they return the token (LongCat-Flash)"""
    router_width: int = 0
    """width of a router of three layers, each with a bias, before the scores (ZAYA); 0: scores come from the token"""
    scored_shared: int = 0
    """shared experts that the router scores too, without choosing among them (Inkling)"""

    def __post_init__(self) -> None:
        if min(self.n_experts, self.expert_ffn) < 1 or min(self.shared_ffn, self.n_dense_layers) < 0:
            raise ForerunError(f"moe: n_experts and expert_ffn must be at least 1, the others at least 0: {self}")
        if not 0 < self.top_k <= self.n_experts:
            raise ForerunError(f"moe: top_k {self.top_k} must be at most n_experts {self.n_experts}")
        if min(self.zero_experts, self.scored_shared, self.router_width) < 0 or (
            self.zero_experts and self.n_groups > 1
        ):
            words = (
                "zero_experts, scored_shared and router_width must be at least 0, zero_experts 0 with groups of experts"
            )
            raise ForerunError(f"moe: {words}: {self}")
        if self.n_groups < 1 or self.n_experts % self.n_groups or not 1 <= self.top_groups <= self.n_groups:
            raise ForerunError(
                f"moe: n_groups {self.n_groups} must divide n_experts {self.n_experts}, and top_groups"
                f" {self.top_groups} lie between 1 and n_groups"
            )
        if self.top_k * self.n_groups > self.n_experts * self.top_groups:
            raise ForerunError(
                f"moe: {self.top_groups} of {self.n_groups} groups hold fewer experts than top_k {self.top_k}"
            )
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ForerunError(f"moe: capacity_factor must be positive, got {self.capacity_factor}")

    @property
    def choices(self) -> int:
        """Returns the number of experts that the router chooses among, with and without weights."""
        return self.n_experts + self.zero_experts

    @property
    def scores(self) -> int:
        """Returns the number of experts that the router scores."""
        return self.choices + self.scored_shared

    @property
    def mean_reached(self) -> float:
        """Returns the experts with weights that a token reaches on average, where all are chosen equally often."""
        return self.top_k * self.n_experts / self.choices


@dataclass(frozen=True, slots=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2)."""

    kv_lora_rank: int
    qk_nope_dim: int
    qk_rope_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    gated_query: bool = False
    """the gate on the attention's output comes with the queries, of the latent query before and after its norm"""

    def __post_init__(self) -> None:
        if self.gated_query and self.q_lora_rank is None:
            raise ForerunError(f"mla: gated_query needs a q_lora_rank: {self}")
        widths = (self.kv_lora_rank, self.qk_nope_dim, self.qk_rope_dim, self.v_head_dim, self.q_lora_rank or 1)
        if min(widths) < 1:
            raise ForerunError(f"mla: every width must be at least 1: {self}")


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """The small attention that chooses the keys of each query (DeepSeek-V3.2, arXiv 2512.02556, section 2.1).

    With compressed keys it chooses among entries, and makes entries of its own from the hidden state.
    """

    heads: int
    head_dim: int
    top_k: int
    """keys, or entries, that a query attends to"""
    shared: bool = False
    """whether the layer takes the choice of an earlier one, and has no indexer of its own"""

    def __post_init__(self) -> None:
        if min(self.heads, self.head_dim, self.top_k) < 1:
            raise ForerunError(f"indexer: every size must be at least 1: {self}")


_WIDTHS = (
    "v_head_dim",
    "layer_input",
    "layer_input_vocab",
    "laurel_rank",
    "norm_gate_rank",
    "attention_experts",
    "attention_input",
    "conv_taps",
    "qk_conv_taps",
    "head_conv_taps",
    "relative_rank",
    "relative_extent",
)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder or encoder stack of layers between an embedding and a head.

    Widths are in elements. A layer has an attention where `n_heads` is above 0, a recurrence where `scan` is there
    (beside the attention where it has both), and a feed-forward where `ffn_hidden` is above 0 or `moe` is there.
    """

    name: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_hidden: int
    vocab: int
    mlp: Mlp = "swiglu"
    norm: Norm = "rmsnorm"
    position: Position = "rope"
    max_positions: int = 0
    """rows of a learned position table; without effect for other positions"""
    causal: bool = True
    tied_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    """LayerNorm with a bias (RMSNorm never has one)"""
    head_bias: bool = False
    qk_norm: bool = False
    """a norm of width head_dim on queries and on keys"""
    embedding_norm: bool = False
    """a norm right after the embedding (BLOOM, BERT)"""
    block_norms: bool = True
    """a norm before each half of a layer; a plain residual stack has none"""
    final_norm: bool = True
    token_types: int = 0
    """rows of a token-type embedding (BERT)"""
    pooler: bool = False
    """a hidden x hidden tanh pooler (BERT)"""
    pooler_classes: int = 0
    """width of a classifier on the pooler (BERT's next-sentence head has 2)"""
    head_transform: bool = False
    """dense + activation + norm before the head (BERT's masked-language-model head)"""
    head_transform_bias: bool = True
    """a bias on the dense layer of `head_transform`"""
    sliding_window: int | None = None
    """keys that a query reads, itself and those before it; without `causal`, as many to each side"""
    moe: MoESpec | None = None
    mla: MLASpec | None = None
    attention_chunk: int | None = None
    """a query attends to its own chunk of this many tokens (Llama 4)"""
    sinks: bool = False
    """a trained logit for each head that takes part of the softmax (gpt-oss)"""
    attention_gate: bool = False
    """a gate as wide as the queries on the attention's output (Qwen3-Next)"""
    head_gate: bool = False
    """a gate of one number for each head on the attention's output (LFM3)"""
    differential: bool = False
    """pairs of heads whose outputs are subtracted and normed, each over the values of both (arXiv 2410.05258)"""
    norm_gate_rank: int = 0
    """rank of a gate, made of their results, on the norms before the mixer and before experts (A.X K2); 0: none"""
    conv_taps: int = 0
    """taps of a short causal convolution on keys, on values, and on what each half gives (Inkling); 0: there is none"""
    qk_conv_taps: int = 0
    """taps of a causal convolution of each channel of queries and keys, with a bias (ZAYA); 0: there is none"""
    head_conv_taps: int = 0
    """taps of the convolution behind it that mixes the channels of each head, with a bias"""
    residual_scales: bool = False
    """scales and biases on the stream and on the output of each half (ZAYA)"""
    relative_rank: int = 0
    """width of the vectors from which each head mixes the relative positions' biases (Inkling); 0: there are none"""
    relative_extent: int = 0
    """tokens back to which these biases reach"""
    qk_norm_over: QkNorm = "head"
    """weights of `qk_norm`: one head's width, a width of all heads, or none"""
    shared_kv: bool = False
    """the layer reads the keys and values of a layer before it"""
    v_head_dim: int = 0
    """width of a head of values, where it differs from `head_dim`; 0: it is the same"""
    equal_kv: bool = False
    """one projection for keys and values (Gemma 4)"""
    value_norm: bool = False
    """a norm without weights on values; values that come with the keys always have one"""
    layer_input: int = 0
    """width of an input that each layer has for itself, from a table of its own and from the embedding (Gemma 4)"""
    layer_input_vocab: int = 0
    """rows of the table of these inputs"""
    streams: StreamsSpec | None = None
    """several residual streams in place of one"""
    laurel_rank: int = 0
    """rank of a learned residual beside the mixer (LAuReL, arXiv 2411.07501); 0: there is none"""
    sparse_gate: bool = False
    """the feed-forward keeps only values of its gate that lie far above the mean of their token (Gemma 3n)"""
    attention_dropout: bool | None = None
    """whether training drops probabilities of attention at random; None: as the framework's recipes do"""
    hidden_dropout: bool | None = None
    """whether training drops outputs of attention and feed-forward at random; None: as the framework's recipes do"""
    indexer: IndexerSpec | None = None
    compressed: CompressedSpec | None = None
    """attention to a window and to entries that stand for several tokens (DeepSeek-V4)"""
    shared_block: SharedBlockSpec | None = None
    """attention and feed-forward before the mixer, whose weights layers share (Zamba)"""
    attention_experts: int = 0
    """experts that make queries and read the attention's output, each for n_kv_heads heads, of which a token chooses
    n_heads / n_kv_heads (JetMoE); 0: all tokens have the same projections"""
    attention_input: int = 0
    """width that queries, keys and values are made of, where it differs from `hidden`; 0: it is the same"""
    scan: ScanSpec | None = None
    """a recurrence in place of the attention, or beside it where `n_heads` is above 0"""
    norm_place: NormPlace = "before"
    """place of the norms around each half of a layer"""
    norm_weight: bool = True
    """whether norms have trained weights (those of OLMo have none)"""
    parallel: bool = False
    """the feed-forward and the attention read the same input, and both are added to the stream at once (GPT-J)"""
    shared_norm: bool = False
    """a `parallel` layer has one norm for both halves"""
    other_parameters: int = 0
    """elements of a layer's trained parameters beyond those of its parts, such as scales of branches or of an
    activation: they are kept, reduced and updated, and their computation takes no time
    """
    shortcut: bool = False
    """a layer has two attentions and two dense feed-forwards; its experts read the input of the first feed-forward, and
    their output is added after the second one (LongCat-Flash)
    """
    mtp_modules: int = 0
    """modules that predict one further token each, behind the last layer: norms of the stream and of the next token's
    embedding, a projection of both, a layer like the last one, a norm, and the model's own head (DeepSeek-V3, arXiv
    2412.19437, section 2.2)"""
    encoder: EncoderSpec[ModelSpec] | None = None
    """a second stack of layers, whose output this one reads"""
    cross_attention: CrossAttention = "none"
    """an attention to the encoder's output: behind a layer's own attention (T5), or in its place (Llama 3.2 Vision)"""
    key_bias: bool = True
    """whether `qkv_bias` gives keys a bias too (Whisper's have none)"""
    layers: tuple[LayerChanges, ...] = ()
    """the changes of each layer; a list shorter than `n_layers` repeats"""
    rope_theta: float | None = field(default=None, compare=False)
    """base of rotary positions, for launch files; it changes neither time nor memory"""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """entries of the model's file that nothing here uses, in sentences"""

    def __post_init__(self) -> None:
        if self.n_layers > MOST_LAYERS:
            raise ForerunError(f"model {self.name}: {self.n_layers:,} layers; at most {MOST_LAYERS:,} are simulated")
        for key in ("n_layers", "hidden", "vocab"):
            if getattr(self, key) < 1:
                raise ForerunError(f"model {self.name}: {key} must be at least 1, got {getattr(self, key)}")
        if self.ffn_hidden < 0:
            raise ForerunError(f"model {self.name}: ffn_hidden must be at least 0, got {self.ffn_hidden}")
        if not (self.n_heads or self.scan or self.ffn_hidden or self.moe):
            raise ForerunError(f"model {self.name}: a layer needs n_heads, scan, ffn_hidden or moe")
        if self.n_heads < 0 or (self.n_heads and self.head_dim < 1):
            raise ForerunError(
                f"model {self.name}: n_heads {self.n_heads} needs a positive head_dim, got {self.head_dim}"
            )
        if self.n_heads and (self.n_kv_heads < 1 or self.n_heads % self.n_kv_heads):
            raise ForerunError(
                f"model {self.name}: n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}"
            )
        if self.compressed and (self.mla or self.n_kv_heads != 1 or self.sliding_window is None):
            raise ForerunError(f"model {self.name}: compressed needs one key head and a sliding_window, and no mla")
        if self.compressed and self.n_heads % self.compressed.out_groups:
            groups = self.compressed.out_groups
            raise ForerunError(f"model {self.name}: n_heads {self.n_heads} is not a multiple of out_groups {groups}")
        if self.differential and (self.mla or self.compressed or self.n_heads % 2 or self.n_kv_heads % 2):
            raise ForerunError(f"model {self.name}: differential needs even n_heads and n_kv_heads, and no mla")
        if self.shortcut and (not self.n_heads or not self.ffn_hidden or self.scan or self.streams or self.parallel):
            raise ForerunError(
                f"model {self.name}: shortcut needs n_heads and ffn_hidden, and neither scan, streams nor parallel"
            )
        last = dict(self.layers[(self.n_layers - 1) % len(self.layers)]) if self.layers else {}
        reads_others = any(last.get(key, getattr(self, key)) for key in ("shared_kv", "shared_block", "layer_input"))
        if self.mtp_modules and (self.streams or reads_others or not self.causal or self.head_transform):
            raise ForerunError(
                f"model {self.name}: mtp_modules need a causal model with one residual stream, whose last layer reads"
                " nothing but the layer before"
            )
        chosen = self.n_heads // max(1, self.n_kv_heads)
        if self.attention_experts and (self.mla or self.compressed or self.attention_experts < chosen):
            raise ForerunError(f"model {self.name}: attention_experts need at least n_heads / n_kv_heads, and no mla")
        if self.cross_attention != "none" and (not self.n_heads or self.parallel or self.shortcut or self.scan):
            raise ForerunError(
                f"model {self.name}: cross_attention needs n_heads, and neither scan, parallel nor shortcut"
            )
        joined = self.encoder is not None and self.encoder.joins == "attention"
        attends = self.cross_attention != "none" or any(
            dict(changes).get("cross_attention", "none") != "none" for changes in self.layers
        )
        if attends and not (joined and self.runs):
            raise ForerunError(
                f"model {self.name}: layers with cross_attention need an encoder with joins: attention, and inputs for"
                " it in each sample"
            )
        if self.streams and self.parallel:
            raise ForerunError(f"model {self.name}: several residual streams need halves in turn, not parallel: true")
        if self.pooler_classes and not self.pooler:
            raise ForerunError(f"model {self.name}: pooler_classes {self.pooler_classes} needs pooler: true")
        for key in ("max_positions", "token_types", "pooler_classes", "other_parameters", "mtp_modules", *_WIDTHS):
            if getattr(self, key) < 0:
                raise ForerunError(f"model {self.name}: {key} must be at least 0, got {getattr(self, key)}")
        for key in ("sliding_window", "attention_chunk"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise ForerunError(f"model {self.name}: {key} must be at least 1, got {getattr(self, key)}")
        if self.moe and not 0 <= self.moe.n_dense_layers <= self.n_layers:
            raise ForerunError(
                f"model {self.name}: n_dense_layers {self.moe.n_dense_layers} exceeds n_layers {self.n_layers}"
            )

    @property
    def value_dim(self) -> int:
        """Returns the width of a head of values."""
        return self.mla.v_head_dim if self.mla else self.v_head_dim or self.head_dim

    @property
    def ends_share(self) -> bool:
        """Returns whether the last unit reads the embedding's matrix: as its head, or for tokens to predict."""
        return self.tied_embeddings or self.mtp_modules > 0

    @property
    def runs(self) -> EncoderSpec[ModelSpec] | None:
        """Returns the encoder if samples have inputs for it."""
        return self.encoder if self.encoder is not None and self.encoder.inputs else None

    @property
    def gated_mlp(self) -> bool:
        """Returns whether the feed-forward has three matrices (gate, up, down) instead of two."""
        return self.mlp in ("swiglu", "geglu")

    @property
    def has_feed_forward(self) -> bool:
        """Returns whether a layer has a feed-forward, dense or of experts."""
        return self.ffn_hidden > 0 or self.moe is not None

    @property
    def has_mixer(self) -> bool:
        """Returns whether a layer has an attention or a recurrence."""
        return self.n_heads > 0 or self.scan is not None

    @property
    def kinds(self) -> tuple[ModelSpec, ...]:
        """Returns the distinct layers, each as a model of this one layer, in the order in which they first occur."""
        return _layers_of(self)[0]

    @property
    def kind_of_layer(self) -> tuple[int, ...]:
        """Returns the place in `kinds` of every layer."""
        return _layers_of(self)[1]

    def layer(self, layer: int) -> ModelSpec:
        """Returns layer number `layer` (from 0) as a model of this one layer."""
        return self.kinds[self.kind_of_layer[layer]]

    def kv_source(self, layer: int) -> int:
        """Returns the layer whose keys and values layer number `layer` reads: itself, or the last one before it that
        has its own and the same window."""
        here = self.layer(layer)
        if not here.shared_kv:
            return layer
        return next(
            (
                number
                for number in range(layer - 1, -1, -1)
                if (one := self.layer(number)).n_heads
                and not one.shared_kv
                and one.sliding_window == here.sliding_window
            ),
            layer,
        )

    def is_moe_layer(self, layer: int) -> bool:
        """Returns whether layer number `layer` (from 0) has experts instead of a dense feed-forward."""
        return self.layer(layer).moe is not None


@lru_cache(maxsize=1024)
def _layers_of(spec: ModelSpec) -> tuple[tuple[ModelSpec, ...], tuple[int, ...]]:
    """Returns the distinct layers of a model, and which of them each layer is."""
    found: dict[tuple[LayerChanges, bool], int] = {}
    kinds: dict[ModelSpec, int] = {}
    places = []
    for number in range(spec.n_layers):
        changes = spec.layers[number % len(spec.layers)] if spec.layers else ()
        dense = spec.moe is not None and number < spec.moe.n_dense_layers
        if (changes, dense) not in found:
            alone = _alone(spec, changes, dense)
            found[changes, dense] = kinds.setdefault(alone, len(kinds))
        places.append(found[changes, dense])
    return tuple(kinds), tuple(places)


def _alone(spec: ModelSpec, changes: LayerChanges, dense: bool) -> ModelSpec:
    """Returns one layer of `spec` with its `changes`; with `dense` it keeps its dense feed-forward."""
    moe = None if dense or spec.moe is None else replace(spec.moe, n_dense_layers=0)
    plain = {"n_layers": 1, "layers": (), "notes": (), "moe": moe, "mtp_modules": 0}
    layer = replace(spec, **{**plain, **dict(changes)})
    return layer if layer.cross_attention != "none" or layer.encoder is None else replace(layer, encoder=None)
