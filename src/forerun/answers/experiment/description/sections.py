"""The sections of an experiment file: their keys, with meanings and units.

The text under a key is its documentation: `forerun experiment keys` and docs/experiments.md show it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from forerun.answers.experiment.description.bandwidth import gbit_s
from forerun.common.errors import UnknownName
from forerun.common.yaml_files import Entry
from forerun.core.network.for_experiment import TOPOLOGY_TYPES
from forerun.describe.model.fields import exponent_number
from forerun.describe.model.inputs import MOST_IMAGES, MOST_MTP_MODULES
from forerun.describe.plan.fields import FIELD_TYPES
from forerun.describe.plan.plan import LARGEST_BUCKET_MIB

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+-]*")


def _whole(value: Any) -> Any:
    number = exponent_number(value)
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _lower(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


def _file_name(name: str) -> str:
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"expected letters, digits, spaces and . _ + - because files get this name, got {name!r}")
    return name


def _key(key: Any) -> Any:
    """Returns a whole number as a key, also where JSON made text of it."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


def _pairs(value: Any) -> Any:
    """Returns a mapping of iterations as a list of pairs."""
    return [[_key(key), each] for key, each in value.items()] if isinstance(value, dict) else value


def _ranks(value: Any) -> Any:
    return {_key(key): each for key, each in value.items()} if isinstance(value, dict) else value


def _bandwidth(value: Any) -> Any:
    """Returns a number of Gbit/s, or text with a unit, which stays text."""
    number = exponent_number(value)
    rate = gbit_s(number) if isinstance(number, str) else number
    if isinstance(rate, bool) or not isinstance(rate, (int, float)):
        raise ValueError(f"expected a number of Gbit/s or a number with its unit such as 200 GB/s, got {value!r:.40}")
    if not _LEAST_RATE <= rate <= _MOST_RATE:
        raise ValueError(f"expected {_LEAST_RATE:g} to {_MOST_RATE:g} Gbit/s, got {rate:g}")
    return number.strip() if isinstance(number, str) else float(rate)


def _stated_bandwidth(value: Any) -> Any:
    if not isinstance(exponent_number(value), str):
        raise ValueError(f"expected a number with its unit, such as {value} GB/s (bytes) or {value} Gbit/s (bits)")
    return _bandwidth(value)


_LEAST_RATE, _MOST_RATE = 1e-3, 1e9
Text = Annotated[str, Field(min_length=1, max_length=4096)]
Name = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_file_name)]
Rate = Annotated[float, BeforeValidator(exponent_number), Field(ge=_LEAST_RATE, le=_MOST_RATE)]
Bandwidth = Annotated[float | str, BeforeValidator(_bandwidth)]
StatedBandwidth = Annotated[str, BeforeValidator(_stated_bandwidth)]
Microseconds = Annotated[float, BeforeValidator(exponent_number), Field(ge=0, le=1e6)]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=10**6)]
Width = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=10**7)]
Layers = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=10_000)]
Tokens = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=10**18)]
Iterations = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=10**9)]
Start = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=10**9)]
Factor = Annotated[float, BeforeValidator(exponent_number), Field(ge=0.01, le=1000)]
Slowdown = Annotated[float, BeforeValidator(exponent_number), Field(ge=1, le=1000)]
Share = Annotated[float, BeforeValidator(exponent_number), Field(ge=0, le=1)]
Spread = Annotated[float, BeforeValidator(exponent_number), Field(ge=0, le=2)]
Schedule = Annotated[
    list[Annotated[list[Start], Field(min_length=2, max_length=2)]], BeforeValidator(_pairs), Field(max_length=1000)
]


class Section(Entry):
    """A section; the text under a key is the key's description."""

    page = "docs/experiments.md"

    model_config = ConfigDict(use_attribute_docstrings=True)


class TopLevel(Section):
    """The keys outside the sections."""

    name: Name | None = None
    """name of the experiment in reports and of their files; default: the name of the experiment file"""
    description: Text | None = None
    """a description of the experiment"""
    handlers: list[Any] = Field(default_factory=list, max_length=100)
    """event handlers, each FILE.py:NAME: an EventHandler, a subclass of it or a function subscribed with @on, in a
    Python file, which Forerun executes"""


class MixedEntry(Section):
    """GPUs that differ from the cluster's."""

    gpu_model: Text
    """any device, by name or alias"""
    num_nodes: Count | None = None
    """number of whole nodes with these GPUs; give this or num_gpus"""
    num_gpus: Count | None = None
    """number of these GPUs; give this or num_nodes"""
    batch_size_per_gpu: Count | None = None
    """samples of a micro batch on these GPUs; default: training.batch_size_per_gpu"""
    slowdown: Factor = 1.0
    """time of a kernel on these GPUs over its time on a healthy GPU of the same model: 1.1 is 10 % slower"""

    @model_validator(mode="after")
    def _one_size(self) -> MixedEntry:
        if (self.num_nodes is None) == (self.num_gpus is None):
            raise ValueError("give one of num_nodes and num_gpus")
        return self


HardwarePreset = Literal["small", "medium", "large", "a100", "h100", "v100", "a6000"]


class HardwareSection(Section):
    """`hardware`: GPUs, nodes and the links between them."""

    preset: Annotated[HardwarePreset, BeforeValidator(_lower)] | None = None
    """a cluster size: small (1 node of 8 A100), medium (4 nodes of 8 A100) or large (32 nodes of 8 H100); or a GPU and
    its network: a100 (100 GB/s), h100 (200 GB/s), v100 (50 GB/s) or a6000 (25 GB/s); other keys of this
    section and training.num_nodes replace its values"""
    gpu_model: Text | None = None
    """a device or cluster by name or alias, in any case: A100, H100, V100, A6000, ... (`forerun clusters`); its
    node and its links are those of its vendor's reference system where no key says otherwise"""
    cluster: Text | dict[str, Any] | None = None
    """a cluster in place of gpu_model: a preset, a cluster file (relative to this file) or the keys of one"""
    compute_tflops: Rate | None = None
    """dense peak of the training precision in 10**12 FLOP/s, in place of the device's; peaks of other precisions scale
    with it"""
    memory_gb: Annotated[float, BeforeValidator(exponent_number), Field(ge=0.1, le=1e6)] | None = None
    """memory of a GPU: the advertised size (80 for an A100 80GB) means all of it that programs can use; any other
    number is GiB (2**30 bytes)"""
    memory_bandwidth_gb_s: Rate | None = None
    """bandwidth of a GPU's memory in 10**9 bytes a second, in place of the device's"""
    num_gpus_per_node: Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1024)] | None = None
    """number of GPUs in a node; default: that of the reference system"""
    network_bandwidth: StatedBandwidth | None = None
    """bandwidth between nodes with its unit, for each GPU and direction: 200 Gbit/s or 25 GB/s"""
    network_bandwidth_gbps: Bandwidth | None = None
    """the same as a number of 10**9 bits a second: 100 Gb/s are 12.5 GB/s; or text with a unit"""
    intra_node_bandwidth: StatedBandwidth | None = None
    """bandwidth inside a node with its unit, for each GPU and direction: 300 GB/s"""
    intra_node_bandwidth_gbps: Bandwidth | None = None
    """the same as a number of 10**9 bits a second: 2400 Gb/s are the 300 GB/s of an A100's NVLink; or text with a
    unit"""
    mixed: list[MixedEntry] = Field(default_factory=list, max_length=100)
    """GPUs of another model among those of training.num_nodes, as [{gpu_model: V100, num_nodes: 1}]; they take the
    last ranks"""
    slow_gpus: Annotated[dict[Start, Factor], BeforeValidator(_ranks)] = Field(default_factory=dict, max_length=100_000)
    """slowdown of single ranks in every iteration, as rank: time of its kernels over that of the other ranks; {3: 1.1}
    makes rank 3 10 % slower"""
    slow_links: Factor = 1.0
    """time of collectives and transfers over their time on healthy links: 1.1 is 10 % slower"""

    @model_validator(mode="after")
    def _one_rate(self) -> HardwareSection:
        for key in ("network_bandwidth", "intra_node_bandwidth"):
            stated, number = getattr(self, key), getattr(self, key + "_gbps")
            if stated is not None and number is not None:
                raise ValueError(f"{key} {stated} and {key}_gbps {number} say the same thing twice; keep one of them")
        return self

    @property
    def network_gbit_s(self) -> float | None:
        """Returns the bandwidth between nodes in 10**9 bits a second, None if not given."""
        return _rate(self.network_bandwidth, self.network_bandwidth_gbps)

    @property
    def intra_node_gbit_s(self) -> float | None:
        """Returns the bandwidth inside a node in 10**9 bits a second, None if not given."""
        return _rate(self.intra_node_bandwidth, self.intra_node_bandwidth_gbps)


def _rate(stated: str | None, number: float | str | None) -> float | None:
    given = number if stated is None else stated
    return gbit_s(given) if isinstance(given, str) else given


class ModelSection(Section):
    """`model`: the trained model."""

    name: Name | None = None
    """name of the model in reports"""
    model_type: Text | None = None
    """transformer, gpt2 or bert with the dimensions below, or any preset: resnet50, gpt2-medium, llama-3.1-8b, ...
    (`forerun models`)"""
    preset: Text | None = None
    """another spelling of model_type: a preset by name"""
    config: Text | None = None
    """a Hugging Face config.json, its folder or a model's YAML file, relative to this file"""
    spec: dict[str, Any] | None = None
    """the keys of a model's YAML file, written here"""
    layers: Any = None
    """layers written by hand, in the order in which they run; or FILE.py:NAME, a LayeredModel or a function that
    returns one, in a Python file, which Forerun executes"""
    sample: Annotated[Literal["image", "sequence"], BeforeValidator(_lower)] | None = None
    """name of a sample of layers written by hand: image or sequence; default: image"""
    num_layers: Layers | None = None
    """number of layers of a transformer; default: 12; gpt2 and bert have the defaults of their smallest model"""
    hidden_size: Width | None = None
    """width of a token in elements; default: 768"""
    num_attention_heads: Width | None = None
    """number of attention heads; default: as many as keep the width of a head (64 elements)"""
    num_key_value_heads: Width | None = None
    """number of heads of keys and values; default: num_attention_heads, or fewer in the proportion of the preset"""
    ffn_hidden_size: Width | None = None
    """width of the feed-forward in elements; default: 4 x hidden_size, or in the proportion of the preset"""
    vocab_size: Width | None = None
    """rows of the embedding; default: gpt2 50257, bert 30522, transformer 32000"""
    sequence_length: Width | None = None
    """tokens of a sample; default: the rows of the model's position table, or 2048 if it has none"""
    max_position_embeddings: Width | None = None
    """rows of a learned position table; default: 1024 (bert 512), or sequence_length if that is more"""
    activation: Literal["swiglu", "geglu", "gelu", "relu"] | None = None
    """activation of the feed-forward; default: gelu"""
    norm: Literal["rmsnorm", "layernorm"] | None = None
    """norm of the layers; default: layernorm"""
    position: Literal["rope", "learned", "alibi", "sinusoidal", "none"] | None = None
    """how the model encodes positions; default: learned (gpt2, bert) or rope (transformer)"""
    causal: bool | None = None
    """whether a token attends to earlier tokens only; default: false for bert, true for others"""
    tie_word_embeddings: bool | None = None
    """whether embedding and output head are one matrix; default: true for gpt2 and bert, false for transformer"""
    mtp_modules: Annotated[int, BeforeValidator(_whole), Field(ge=0, le=MOST_MTP_MODULES)] | None = None
    """modules for multi-token prediction that are trained with the model; default: none"""
    images: Annotated[int, BeforeValidator(_whole), Field(ge=0, le=MOST_IMAGES)] | None = None
    """images or sounds of a sample, for a model with a tower for them; their tokens are part of sequence_length;
    default: 0, which trains the language model without its tower"""
    encoder_sequence_length: Width | None = None
    """tokens of each input of an encoder: of a source text, patches of an image, frames of a sound; default: the
    model's own"""
    freeze_encoder: bool | None = None
    """whether the tower or the encoder is frozen, so that only the layers behind it are trained; default: false"""


class JitterEntry(Section):
    """Random differences between iterations."""

    compute: Spread = 0.0
    """standard deviation of the logarithm of each rank's time, drawn anew each iteration: 0.05 is about 5 %"""
    network: Spread = 0.0
    """the same for collectives and transfers, with one draw for all ranks"""


class StragglersEntry(Section):
    """Ranks that are slow now and then."""

    probability: Share
    """probability that a rank is a straggler in an iteration"""
    slowdown: Slowdown
    """time of a straggler over that of the other ranks; with a tail, the least such time"""
    tail: Annotated[float, BeforeValidator(exponent_number), Field(ge=0, le=100)] = 0.0
    """0: all stragglers are equally slow; above 0: shape of the Pareto distribution of their extra time, whose tail
    is heavier for a smaller shape"""


class TrainingSection(Section):
    """`training`: how it is trained. Every key of a Plan goes too."""

    batch_size_per_gpu: Count | None = None
    """samples (sequences, images) that a GPU works on at a time: a micro batch of a data-parallel rank; with tp, cp or
    pp the GPUs of a replica share it"""
    num_nodes: Count | None = None
    """number of nodes; default: 1"""
    num_iterations: Iterations | None = None
    """number of optimizer steps; default: 100"""
    total_tokens: Tokens | None = None
    """tokens to train on, in place of num_iterations; Forerun rounds the number of iterations up"""
    total_samples: Tokens | None = None
    """samples to train on, in place of num_iterations; Forerun rounds the number of iterations up"""
    communication_pattern: Any = None
    """how gradients are exchanged: nccl (its own choice, the default), ring_allreduce, tree_allreduce, reduce_scatter,
    all_gather, parameter_server, no_network; {name: ..., efficiency: ...} with options; or FILE.py:NAME for one of your
    own, in a Python file, which Forerun executes"""
    gradient_compression: Any = None
    """how gradients are compressed before they are exchanged: none (the default), fp16, bf16, int8, powersgd or topk;
    with options {name: powersgd, rank: 4} (default: 1) or {name: topk, density: 0.01} (the share that is sent)"""
    mixed_precision: Annotated[bool | Text, BeforeValidator(_lower)] = True
    """true: bf16, or fp16 on a GPU without bf16; false: fp32, and tf32 for convolutions where the GPU has it, as
    PyTorch does; or a precision: bf16, fp16, tf32, fp32, fp8, mxfp8, nvfp4"""
    gradient_accumulation_steps: Annotated[int, BeforeValidator(_whole), Field(ge=1, le=10_000)] | None = None
    """number of micro batches of an optimizer step; with pp those of the pipeline; default: 1"""
    bucket_size_mb: Annotated[float, BeforeValidator(exponent_number), Field(gt=0, le=LARGEST_BUCKET_MIB)] | None = None
    """size of a bucket of gradients in MiB (2**20 bytes), as DDP's bucket_cap_mb; default: 25"""
    overlap: bool | None = None
    """whether gradients are reduced while the backward pass still runs; default: true"""
    warmup_iterations: Annotated[int, BeforeValidator(_whole), Field(ge=0, le=10**5)] = 0
    """number of iterations at the start that are slower (allocator, autotuning, caches)"""
    warmup_slowdown: Slowdown | None = None
    """time of the first iteration over that of later ones; it falls to 1 over warmup_iterations; default: 2"""
    jitter: JitterEntry = JitterEntry()
    """{compute: 0.05, network: 0.1}: standard deviations of the logarithm of times; a single number means compute"""
    stragglers: StragglersEntry | None = None
    """{probability: 0.01, slowdown: 1.5}: ranks that are slow now and then"""
    batch_schedule: Schedule = Field(default_factory=list)
    """[[iteration, batch_size_per_gpu], ...] or {iteration: batch_size_per_gpu}; each holds from its iteration on"""
    sequence_length_schedule: Schedule = Field(default_factory=list)
    """[[iteration, sequence_length], ...] or {iteration: sequence_length}; each holds from its iteration on"""
    seed: Annotated[int, BeforeValidator(_whole), Field(ge=0, lt=2**63)] = 0
    """seed of all random draws; the same seed gives the same run"""

    @field_validator("jitter", mode="before")
    @classmethod
    def _of_compute(cls, value: Any) -> Any:
        number = exponent_number(value)
        return {"compute": number} if isinstance(number, (int, float)) and not isinstance(number, bool) else value


IDEAL = "ideal"


def _topology(value: str) -> str:
    if value not in (*TOPOLOGY_TYPES, IDEAL):
        raise UnknownName("topology", value, [*TOPOLOGY_TYPES, IDEAL])
    return value


class NetworkSection(Section):
    """`network`: how nodes are joined."""

    topology_type: Annotated[str, BeforeValidator(_lower), AfterValidator(_topology)] | None = None
    """cluster (its own links: switches that never block), full_mesh, ring, tree, torus_2d, mesh_2d, fat_tree, rail, or
    ideal (communication takes no time); default: cluster"""
    base_latency_us: Microseconds | None = None
    """latency of a hop between nodes in microseconds, in place of the link's"""
    oversubscription: Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1000)] | None = None
    """only for fat_tree: ports of a switch towards the nodes over its ports towards the core; default: 1"""
    file: Text | dict[str, Any] | None = None
    """a network file (relative to this file) or its keys, in place of topology_type"""


class ThresholdsSection(Section):
    """`thresholds`: from when on something is called a bottleneck, as shares of 1."""

    compute: Share = 0.80
    """share of the step in which kernels compute"""
    memory: Share = 0.70
    """share of a GPU's memory that is used"""
    network: Share = 0.30
    """share of the step in which communication runs and no kernel does"""
    efficiency: Share = 0.80
    """scaling efficiency below which a study calls the scale broken down"""


PLAN_KEYS = tuple(FIELD_TYPES)
"""keys of a Plan, which `training` takes too"""
