"""read_experiment: what each key of an experiment comes to."""

import json
from dataclasses import replace

import pytest
import yaml

from forerun.answers.experiment.description.read import changed, read_experiment
from forerun.answers.experiment.request import Prices, Request, Thresholds
from forerun.common.errors import ForerunError, ImpossiblePlan, UnknownName
from forerun.common.own_code import before_own_code
from forerun.common.units import GIB
from forerun.core.network.patterns import CommunicationPattern, NoNetwork
from forerun.core.network.patterns_collectives import RingAllReduce
from forerun.describe.cluster.catalog import load_cluster, load_device
from forerun.describe.model.catalog import load_any, load_model
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.layers_by_hand import layers_from
from forerun.describe.model.parameters import parameter_count


def described(**sections) -> Request:
    """A small experiment, with keys of its sections in place of the usual ones; None takes a key away."""
    usual = {
        "hardware": {"gpu_model": "A100"},
        "model": {"model_type": "gpt2", "sequence_length": 1024},
        "training": {"batch_size_per_gpu": 8},
    }
    for name, keys in sections.items():
        usual[name] = {**usual.get(name, {}), **keys} if isinstance(keys, dict) else keys
        if isinstance(keys, dict):
            usual[name] = {key: value for key, value in usual[name].items() if value is not None}
    return read_experiment(usual)


# -- hardware ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu_model", "device"),
    [
        ("A100", "a100-sxm-80gb"),
        ("a100", "a100-sxm-80gb"),
        ("H100", "h100-sxm-80gb"),
        ("V100", "v100-sxm2-32gb"),
        ("A6000", "rtx-a6000"),
        ("a100-40gb", "a100-sxm-40gb"),
        ("aws-p4d", "a100-sxm-40gb"),
        (" L40S ", "l40s"),
    ],
)
def test_a_gpu_model_is_any_device_or_cluster_in_any_case(gpu_model, device):
    assert described(hardware={"gpu_model": gpu_model}).setup.cluster.device.name == device


def test_network_bandwidth_is_in_bits_and_memory_bandwidth_in_bytes():
    request = described(
        hardware={
            "network_bandwidth_gbps": 100,
            "intra_node_bandwidth_gbps": 2400,
            "memory_bandwidth_gb_s": 1555,
            "num_gpus_per_node": 4,
        },
        training={"num_nodes": 2},
        network={"base_latency_us": 5},
    )
    cluster = request.setup.cluster
    intra, inter = cluster.links
    assert (intra.size, intra.bytes_per_s, cluster.device.memory_bytes_per_s) == (4, 300e9, 1555e9)
    assert (inter.bytes_per_s, inter.latency_s) == (12.5e9, pytest.approx(5e-6))
    assert request.setup.n_gpus == 8
    told = "\n".join(request.echo)
    assert "network_bandwidth_gbps 100: 100 Gb/s = 12.5 GB/s for each GPU and direction between nodes" in told
    assert "intra_node_bandwidth_gbps 2400: 2400 Gb/s = 300 GB/s for each GPU and direction in a node of 4" in told


def test_a_given_bandwidth_keeps_the_latency_of_the_clusters_own_network():
    own = load_cluster("aws-p4d").links[1]
    given = described(hardware={"gpu_model": "aws-p4d", "network_bandwidth_gbps": 80}, training={"num_nodes": 2})
    inter = given.setup.cluster.links[1]
    assert (inter.kind, inter.latency_s, inter.bytes_per_s) == (own.kind, own.latency_s, 10e9)


def test_a_node_without_a_network_gets_one_with_its_bandwidth():
    toy = {"name": "toy", "architecture": "ampere", "peak_tflops": {"bf16": 100}, "memory_gib": 40}
    toy |= {"memory_gb_s": 1000, "multiprocessors": 108, "power_w": 400}
    node = {"device": toy, "gpus_per_node": 4, "intra_node": {"kind": "nvlink", "gb_s": 100}, "host_gb_s": 25}
    keys = {"gpu_model": None, "cluster": {"name": "node", **node}}
    assert len(described(hardware=keys).setup.cluster.links) == 1
    given = described(hardware={**keys, "network_bandwidth_gbps": 80}, training={"num_nodes": 2}).setup
    assert (given.n_gpus, given.cluster.links[1].bytes_per_s) == (8, 10e9)
    assert 0 < given.cluster.links[1].latency_s < 1e-4


@pytest.mark.parametrize(("memory_gb", "gib"), [(80, None), (40, 40), (79.25, None), (160, 160), (24, 24)])
def test_memory_as_it_is_sold_is_all_of_it_and_anything_else_is_gib(memory_gb, gib):
    own = load_device("a100").memory_bytes
    found = described(hardware={"memory_gb": memory_gb}).setup.cluster.device.memory_bytes
    assert found == (own if gib is None else gib * GIB)


def test_compute_tflops_is_the_peak_of_the_training_precision_and_others_scale():
    peaks = described(hardware={"compute_tflops": 156}).setup.cluster.device.peak_flops
    assert peaks == {"bf16": 156e12, "fp16": 156e12, "tf32": 78e12, "fp32": 9.75e12}
    in_fp32 = described(hardware={"compute_tflops": 39}, training={"mixed_precision": False})
    assert in_fp32.setup.cluster.device.peak_flops["bf16"] == 624e12


@pytest.mark.parametrize(
    ("size", "n_gpus", "device"), [("small", 8, "a100"), ("medium", 32, "a100"), ("large", 256, "h100")]
)
def test_sizes_of_clusters(size, n_gpus, device):
    setup = described(hardware={"gpu_model": None, "preset": size}).setup
    assert (setup.n_gpus, setup.cluster.device) == (n_gpus, load_device(device))


def test_what_is_given_goes_before_a_size():
    setup = described(hardware={"gpu_model": "V100", "preset": "Medium"}, training={"num_nodes": 2}).setup
    assert (setup.n_gpus, setup.cluster.device.name) == (16, "v100-sxm2-32gb")


def test_a_cluster_by_name_file_or_keys(tmp_path):
    keys = {"device": "a100-sxm-40gb", "gpus_per_node": 4, "inter_node": {"kind": "roce", "gbit_s_per_gpu": 50}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(keys))
    file = tmp_path / "experiment.yaml"
    file.write_text(
        "hardware: {cluster: mine.yaml}\nmodel: {model_type: gpt2}\ntraining: {batch_size_per_gpu: 1, num_nodes: 2}"
    )
    of_file = read_experiment(file).setup.cluster
    assert (of_file.name, of_file.node_size, of_file.links[1].bytes_per_s) == ("mine", 4, 6.25e9)
    of_keys = described(hardware={"gpu_model": None, "cluster": {"name": "mine", **keys}}).setup.cluster
    assert of_keys == of_file
    named = described(hardware={"gpu_model": "A100-40GB", "cluster": "aws-p4d"}).setup.cluster
    assert named == load_cluster("aws-p4d")


def test_gpus_that_differ():
    setup = described(
        hardware={"mixed": [{"gpu_model": "V100", "num_nodes": 1, "batch_size_per_gpu": 3}], "slow_links": 1.5},
        training={"num_nodes": 3},
    ).setup
    (kind,) = setup.kinds
    assert (kind.n_gpus, kind.device, kind.micro_batch) == (8, load_device("v100"), 3)
    assert setup.samples_per_step == 16 * 8 + 8 * 3
    assert setup.plan.precision == "fp16", "bf16 is on one of the two only"
    assert setup.slow_links == 1.5


# -- model -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "preset"),
    [
        ({"model_type": "gpt2"}, "gpt2-small"),
        ({"model_type": "GPT2", "num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16}, "gpt2-medium"),
        ({"model_type": "gpt2", "num_layers": 36, "hidden_size": 1280}, "gpt2-large"),
        ({"model_type": "bert"}, "bert-base"),
        ({"model_type": "bert", "num_layers": 24, "hidden_size": 1024}, "bert-large"),
    ],
)
def test_a_family_with_the_dimensions_of_a_preset_is_the_preset(keys, preset):
    request = described(model={**keys, "sequence_length": 512})
    assert replace(request.setup.model, name=preset) == load_model(preset)
    assert request.setup.plan.seq_len == 512


def test_a_transformer_has_twelve_squares_of_its_width_a_layer():
    keys = {
        "model_type": "transformer",
        "num_layers": 2,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "vocab_size": 1000,
    }
    spec = described(model=keys).setup.model
    biases_and_norms = 2 * (13 * 512) + 2 * 512
    assert parameter_count(spec) == 2 * 12 * 512**2 + 2 * 1000 * 512 + biases_and_norms


def test_positions_of_a_family_grow_with_the_sequence_and_those_of_a_preset_do_not():
    assert described(model={"model_type": "gpt2", "sequence_length": 4096}).setup.model.max_positions == 4096
    with pytest.raises(
        ForerunError, match="sequence_length 4096 is longer than max_position_embeddings 1024 of gpt2-small"
    ):
        described(model={"model_type": "gpt2-small", "sequence_length": 4096})


def test_dimensions_go_in_place_of_a_presets():
    spec = described(model={"model_type": "llama-3.1-8b", "num_layers": 4, "num_attention_heads": 16}).setup.model
    assert (spec.n_layers, spec.n_heads, spec.n_kv_heads, spec.head_dim, spec.ffn_hidden) == (4, 16, 4, 256, 14336)


def test_a_model_with_a_tower_is_trained_on_images():
    keys = {"model_type": "llava-1.5-7b", "sequence_length": 2048, "images": 2, "encoder_sequence_length": 400}
    model = described(model={**keys, "freeze_encoder": True}).setup.model
    assert (model.encoder.inputs, model.encoder.tokens) == (2, 400 + model.encoder.extra_tokens)
    assert model.encoder.frozen
    plain = load_model("llava-1.5-7b")
    assert described(model={"model_type": "llava-1.5-7b", "sequence_length": 2048}).setup.model == plain
    with pytest.raises(ForerunError, match=r"model: images: model gpt2 has neither a tower nor an encoder"):
        described(model={"images": 1})
    with pytest.raises(ForerunError, match="images is for transformers, but resnet50 is given layer by layer"):
        described(model={"model_type": "resnet50", "sequence_length": None, "images": 1})


def test_modules_for_multi_token_prediction():
    assert described(model={"mtp_modules": 1}).setup.model.mtp_modules == 1
    assert described(model={"mtp_modules": 0}).setup.model.mtp_modules == 0


def test_resnet50_counts_images():
    request = described(model={"model_type": "ResNet50", "sequence_length": None})
    assert request.setup.model == load_any("resnet50")
    assert request.setup.model.parameter_count == 25_557_032
    assert (request.sample, request.setup.plan.seq_len, request.setup.plan.optimizer) == ("image", 1, "sgd")
    assert request.setup.plan.stack == "pytorch-vision"
    assert "images an optimizer step" in request.echo[-1]


def test_a_model_from_a_config_relative_to_the_file(tmp_path):
    (tmp_path / "mine").mkdir()
    config = {"model_type": "gpt2", "n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 100}
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config))
    file = tmp_path / "experiment.yaml"
    file.write_text("hardware: {gpu_model: H100}\nmodel: {config: mine/config.json}\ntraining: {batch_size_per_gpu: 1}")
    request = read_experiment(file)
    assert (request.name, request.setup.model.name, request.setup.model.hidden) == ("experiment", "mine", 128)
    assert request.setup.plan.seq_len == 64
    assert read_experiment(request.config) == request, "the configuration holds the model itself"


LAYERS = [
    {
        "layer_id": "conv",
        "layer_type": "conv2d",
        "input_shape": [3, 32, 32],
        "output_shape": [8, 32, 32],
        "kernel_size": 3,
    },
    {"layer_id": "pool", "layer_type": "pool", "output_shape": [8, 1, 1]},
    {"layer_id": "head", "layer_type": "linear", "output_shape": [10]},
]


def test_layers_written_by_hand():
    request = described(model={"model_type": None, "sequence_length": None, "layers": LAYERS, "name": "mine"})
    assert isinstance(request.setup.model, LayeredModel)
    assert (request.setup.model.name, request.setup.model.parameter_count) == ("mine", 8 * 27 + 8 + 90)
    assert read_experiment(request.config) == request


def test_a_model_that_python_made():
    spec = load_model("gpt2-small")
    assert described(model=spec).setup.model == spec
    assert described(model={"model_type": None, "spec": spec, "sequence_length": 128}).setup.plan.seq_len == 128
    layered = layers_from(LAYERS, "test")
    assert described(model=layered).setup.model == layered
    assert described(model=load_any("resnet18")).config["model"] == {"preset": "resnet18"}


# -- training ----------------------------------------------------------------------------------------------------------


def test_without_any_data_parallel_key_it_is_ddp_over_all_gpus():
    plan = described(training={"num_nodes": 2, "tp": 2, "bucket_size_mb": 50}).setup.plan
    assert (plan.dp_replicate, plan.dp_shard, plan.tp, plan.zero_stage, plan.ddp_bucket_mib) == (8, 1, 2, 0, 50)
    assert described().setup.plan.ddp_bucket_mib == 25


@pytest.mark.parametrize(
    ("keys", "mesh"),
    [
        ({"zero_stage": 3}, (1, 16, 3)),
        ({"zero_stage": 1}, (1, 16, 1)),
        ({"dp_shard": -1}, (1, 16, 3)),
        ({"dp_shard": 8, "dp_replicate": 2}, (2, 8, 3)),
        ({"dp_shard": 8, "dp_replicate": -1, "zero_stage": 2}, (2, 8, 2)),
        ({"dp_replicate": 2, "zero_stage": 3}, (2, 8, 3)),
        ({"dp_replicate": 16}, (16, 1, 0)),
        ({"communication_pattern": "reduce_scatter"}, (1, 16, 1)),
    ],
)
def test_data_parallel_keys(keys, mesh):
    plan = described(training={"num_nodes": 2, **keys}).setup.plan
    assert (plan.dp_replicate, plan.dp_shard, plan.zero_stage) == mesh


def test_words_of_an_experiment_and_of_a_plan_mean_the_same():
    own = described(training={"batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "overlap": False})
    plans = described(
        model={"sequence_length": None},
        training={
            "batch_size_per_gpu": None,
            "micro_batch": 4,
            "n_microbatches": 2,
            "overlap_grad_reduce": False,
            "seq_len": 1024,
            "precision": "bf16",
        },
    )
    assert own.setup == plans.setup


@pytest.mark.parametrize(
    ("gpu_model", "given", "precision"),
    [
        ("A100", True, "bf16"),
        ("V100", True, "fp16"),
        ("A100", False, "fp32"),
        ("H100", "FP8", "fp8"),
        ("V100", "fp16", "fp16"),
    ],
)
def test_mixed_precision(gpu_model, given, precision):
    request = described(hardware={"gpu_model": gpu_model}, training={"mixed_precision": given})
    assert request.setup.plan.precision == precision


@pytest.mark.parametrize(("gpu_model", "precision"), [("A100", "tf32"), ("V100", "fp32")])
def test_convolutions_without_mixed_precision_run_in_tf32_where_there_is_one(gpu_model, precision):
    request = described(
        hardware={"gpu_model": gpu_model},
        model={"model_type": "resnet18", "sequence_length": None},
        training={"mixed_precision": False},
    )
    assert request.setup.plan.precision == precision


@pytest.mark.parametrize(
    ("keys", "iterations"),
    [
        ({}, 100),
        ({"num_iterations": 7}, 7),
        ({"total_samples": 640}, 10),
        ({"total_samples": 641}, 11),
        ({"total_tokens": 64 * 1024 * 5}, 5),
        ({"total_tokens": "1e9"}, 15259),
        ({"total_samples": 640, "num_iterations": 10}, 10),
        ({"total_samples": 640, "batch_schedule": {5: 16}}, 8),
        ({"total_samples": 640, "batch_schedule": [[0, 4], [2, 8]]}, 11),
        ({"total_tokens": 64 * 1024 * 10, "sequence_length_schedule": [[0, 512], [4, 1024]]}, 12),
    ],
)
def test_how_many_iterations(keys, iterations):
    assert described(training=keys).num_iterations == iterations


@pytest.mark.parametrize(
    ("schedule", "model", "most"),
    [
        ("batch_schedule", {}, 10**6),
        ("sequence_length_schedule", {"model_type": "llama-3.2-1b", "sequence_length": 128}, 10**7),
    ],
)
def test_values_of_schedules_go_from_one_to_the_most(schedule, model, most):
    for value in (1, most):
        request = described(model=model, training={schedule: {5: value}})
        assert getattr(request, schedule.replace("sequence_length", "seq_len")) == ((5, value),)
    for value in (0, most + 1):
        with pytest.raises(ForerunError, match=f"{schedule}: values must be at least 1 and at most {most:,}"):
            described(model=model, training={schedule: {5: value}})


def test_disturbances():
    request = described(
        hardware={"slow_gpus": {3: 1.1}},
        training={
            "warmup_iterations": 5,
            "jitter": {"compute": 0.02, "network": 0.1},
            "stragglers": {"probability": 0.01, "slowdown": 1.5, "tail": 3},
            "seed": 9,
        },
    )
    d = request.disturbance
    assert (d.slow_ranks, d.warmup_iterations, d.warmup_slowdown, d.seed) == ({3: 1.1}, 5, 2.0, 9)
    assert (d.compute_jitter, d.network_jitter) == (0.02, 0.1)
    assert (d.straggler_probability, d.straggler_slowdown, d.straggler_tail) == (0.01, 1.5, 3)
    assert described(training={"jitter": 0.05}).disturbance.compute_jitter == 0.05


# -- network, prices, thresholds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full_mesh", "ring", "tree", "torus_2d", "mesh_2d", "fat_tree", "rail"])
def test_topologies(kind):
    setup = described(training={"num_nodes": 4}, network={"topology_type": kind, "base_latency_us": 3}).setup
    assert setup.network is not None
    assert setup.network.n_npus == 32


def test_an_ideal_network_takes_no_time():
    setup = described(training={"num_nodes": 4}, network={"topology_type": "ideal"}).setup
    assert setup.network is None
    assert setup.pattern == NoNetwork()


def test_a_network_file_or_its_keys(tmp_path):
    keys = {"topology": ["Switch", "Ring"], "npus_count": [8, 2], "bandwidth": [300, 25], "latency": [500, 2000]}
    (tmp_path / "net.yml").write_text(yaml.safe_dump(keys))
    file = tmp_path / "experiment.yaml"
    text = "hardware: {gpu_model: A100}\nmodel: {model_type: gpt2}\ntraining: {batch_size_per_gpu: 1, num_nodes: 2}\n"
    file.write_text(text + "network: {file: net.yml}")
    network = read_experiment(file).setup.network
    assert network is not None
    assert not network.gib, "GB/s are of 10**9 bytes, as in all of an experiment"
    assert described(training={"num_nodes": 2}, network={"file": keys}).setup.network == network
    assert described(training={"num_nodes": 2}, network=network).setup.network == network


def test_prices_and_thresholds():
    request = described(prices={"dollars_per_gpu_hour": 2, "pue": 1.2}, thresholds={"memory": 0.9})
    assert request.prices == Prices(dollars_per_gpu_hour=2, pue=1.2)
    assert request.thresholds == Thresholds(memory=0.9)
    assert described(prices=request.prices, thresholds=request.thresholds).prices == request.prices


# -- code of one's own -------------------------------------------------------------------------------------------------

CODE = """
from forerun.answers.experiment.handlers import EventHandler, on
from forerun.describe.model.catalog import load_any
from forerun.core.network.patterns import TimedBy

def flat(size_bytes, ranks):
    return 1e-3

class Watch(EventHandler):
    pass

@on("iteration_end")
def tell(iteration):
    pass

def net():
    return load_any("resnet18")

def broken():
    raise RuntimeError("no luck")
"""


@pytest.fixture
def own_code(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)

    def write(model="preset: resnet18", pattern="mine.py:flat", handlers="mine.py:Watch, mine.py:tell"):
        file = tmp_path / "experiment.yaml"
        file.write_text(
            f"hardware: {{gpu_model: A100}}\nmodel: {{{model}}}\nhandlers: [{handlers}]\n"
            f"training: {{batch_size_per_gpu: 1, communication_pattern: '{pattern}'}}"
        )
        return read_experiment(file)

    return write


def test_patterns_layers_and_handlers_of_ones_own(own_code):
    request = own_code(model="layers: 'mine.py:net'")
    assert request.setup.model == load_any("resnet18")
    assert request.setup.pattern.name == "flat"
    assert len(request.handlers) == 2
    again = read_experiment(yaml.safe_load(yaml.safe_dump(request.config)))
    assert (again.config, again.setup.model) == (request.config, request.setup.model)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": "layers: 'mine.py:broken'"}, "model: layers: .*RuntimeError: no luck"),
        ({"model": "layers: 'mine.py:flat'"}, "model: layers: .*missing 2 required positional arguments"),
        ({"model": "layers: 'other.py:net'"}, "model: layers: .*other.py cannot be read \\(No such file"),
        ({"model": "layers: 'mine.py:nett'"}, "model: layers: unknown name in .* did you mean net"),
        ({"handlers": "mine.py:flat"}, "handlers.0: .* is no EventHandler"),
        ({"pattern": "mine.py:missing"}, "communication_pattern: .*missing"),
    ],
)
def test_code_of_ones_own_that_fails_is_one_line(own_code, keys, message):
    with pytest.raises(ForerunError, match=message) as error:
        own_code(**keys)
    assert "\n" not in str(error.value)


def test_code_of_ones_own_is_told_before_it_runs_and_can_be_refused(own_code, tmp_path):
    told = []
    with before_own_code(told.append):
        own_code(model="layers: 'mine.py:net'")
    assert len(set(told)) == 4
    assert all(f"names Python code ({tmp_path / 'mine.py'}:" in each for each in told)

    def refuse(what):
        raise ForerunError(f"{what}, which is refused")

    marker = tmp_path / "ran"
    (tmp_path / "mine.py").write_text(f"open({str(marker)!r}, 'w')\n" + CODE)
    for keys in ({"model": "layers: 'mine.py:net'"}, {"handlers": ""}):
        with before_own_code(refuse), pytest.raises(ForerunError, match=r"names Python code .*, which is refused"):
            own_code(**keys)
    assert not marker.exists()
    own_code()
    assert marker.exists()


def test_a_pattern_that_python_made():
    class Mine(CommunicationPattern):
        name = "mine"

        def seconds(self, size_bytes, group, wires):
            return size_bytes * 0

    assert isinstance(described(training={"communication_pattern": Mine}).setup.pattern, Mine)
    request = described(training={"communication_pattern": RingAllReduce()})
    assert request.config["training"]["communication_pattern"] == "ring_allreduce"
    assert read_experiment(request.config) == request


# -- reading -----------------------------------------------------------------------------------------------------------


def test_json_reads_as_yaml_does(tmp_path):
    request = described(hardware={"slow_gpus": {3: 1.1}}, training={"batch_schedule": {0: 4, 10: 8}})
    data = {**request.given, "name": "same"}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(data))
    (tmp_path / "a.json").write_text(json.dumps(data, indent="\t"))
    assert read_experiment(tmp_path / "a.yaml") == read_experiment(tmp_path / "a.json")


def test_an_experiment_is_named_by_itself_or_by_its_file(tmp_path):
    file = tmp_path / "my run (1).yaml"
    text = "hardware: {gpu_model: A100}\nmodel: {model_type: gpt2}\ntraining: {batch_size_per_gpu: 1}\n"
    file.write_text(text)
    assert read_experiment(file).name == "my-run-1"
    file.write_text(text + "name: gpt on a100\ndescription: |\n  two\n  lines\n")
    request = read_experiment(file)
    assert (request.name, request.config["description"]) == ("gpt on a100", "two lines")


def test_what_is_neither_a_preset_nor_a_file():
    with pytest.raises(UnknownName, match="did you mean resnet50-a100"):
        read_experiment("resnet50-a10")
    with pytest.raises(ForerunError, match=r"nowhere\.yaml: can't be read"):
        read_experiment("nowhere.yaml")


def test_an_impossible_plan_says_where():
    with pytest.raises(ImpossiblePlan, match=r"experiment: training: impossible plan: .*tp 3"):
        described(training={"tp": 3})


RICH = {
    "name": "rich",
    "description": "everything at once",
    "hardware": {
        "preset": "medium",
        "compute_tflops": 300,
        "memory_gb": 48,
        "memory_bandwidth_gb_s": 1e3,
        "network_bandwidth_gbps": 33.3,
        "mixed": [{"gpu_model": "V100", "num_gpus": 8, "batch_size_per_gpu": 4, "slowdown": 1.1}],
        "slow_gpus": {3: 1.1},
        "slow_links": 1.5,
    },
    "model": {"model_type": "bert", "num_layers": 8, "hidden_size": 512},
    "training": {
        "batch_size_per_gpu": 8,
        "total_tokens": "1e9",
        "communication_pattern": {"name": "ring_allreduce", "efficiency": 0.8},
        "batch_schedule": {0: 4, 100: 8},
        "sequence_length_schedule": [[50, 256]],
        "jitter": 0.05,
        "stragglers": {"probability": 0.01, "slowdown": 2},
        "warmup_iterations": 5,
        "activation_checkpointing": "full",
    },
    "network": {"topology_type": "fat_tree", "oversubscription": 2, "base_latency_us": 4.1},
    "prices": {"dollars_per_gpu_hour": {"A100": 1.5}, "dollars_per_kwh": 0.1},
    "thresholds": {"memory": 0.9},
}
SOME = {
    "rich": RICH,
    "pipeline": {
        "hardware": {"gpu_model": "H100"},
        "model": {"preset": "llama-3.2-1b"},
        "training": {
            "micro_batch": 1,
            "n_microbatches": 8,
            "pp": 4,
            "layers_per_stage": [4, 4, 4, 4],
            "precision": "bf16",
        },
    },
    "transformer": {
        "hardware": {"gpu_model": "rtx-4090"},
        "model": {"model_type": "transformer", "num_layers": 4, "num_key_value_heads": 4, "activation": "swiglu"},
        "training": {"batch_size_per_gpu": 2, "mixed_precision": False, "zero_stage": 3},
    },
    "ideal": {
        "hardware": {"gpu_model": "A6000", "network_bandwidth_gbps": 10},
        "model": {"model_type": "resnet50"},
        "training": {"batch_size_per_gpu": 32, "num_nodes": 2, "communication_pattern": "all_gather"},
        "network": {"topology_type": "ideal"},
    },
}


@pytest.mark.parametrize("name", SOME)
def test_the_configuration_reads_back_to_the_same_request_and_the_same_bytes(name):
    request = read_experiment(SOME[name])
    text = yaml.safe_dump(request.config, sort_keys=False)
    again = read_experiment(yaml.safe_load(text))
    assert again == request
    assert yaml.safe_dump(again.config, sort_keys=False) == text
    assert read_experiment(json.loads(json.dumps(request.config))) == request


# -- changes -----------------------------------------------------------------------------------------------------------


def test_what_follows_from_a_key_follows_from_its_new_value():
    request = described(hardware={"compute_tflops": 300}, training={"total_samples": 6400})
    more = changed(request, {"training.num_nodes": 4})
    assert (more.setup.plan.dp_replicate, more.num_iterations) == (32, 25)
    other = changed(request, {"hardware.gpu_model": "V100"})
    assert (other.setup.plan.precision, other.setup.cluster.device) == ("fp16", load_device("v100"))
    assert changed(request, {"training.micro_batch": 2}).setup.plan.micro_batch == 2
    assert changed(request, {"training.num_iterations": 3}).num_iterations == 3
    assert changed(request, {"model.preset": "resnet18", "model.sequence_length": None}).sample == "image"
    assert changed(request, {"network": {"topology_type": "ring"}, "name": "other"}).name == "other"
    assert changed(request, {}) == request


def test_a_change_is_checked_as_a_file_is():
    with pytest.raises(ForerunError, match="training: unknown key 'num_node'; did you mean num_nodes"):
        changed(described(), {"training.num_node": 4})
    with pytest.raises(ForerunError, match="without sections"):
        changed(replace(described(), given={}), {"training.num_nodes": 4})


# -- bandwidths with a unit --------------------------------------------------------------------------------------------

UNITS = {
    "200 GB/s": 200e9,
    "200GB/s": 200e9,
    "200 GBps": 200e9,
    "200 gbyte/s": 200e9,
    "200 Gbit/s": 25e9,
    "200 Gb/s": 25e9,
    "200 Gbps": 25e9,
    "200 GBIT/S": 25e9,
    "1.6 Tb/s": 200e9,
    "2e2 GB/s": 200e9,
    "800 MB/s": 0.8e9,
    "1 GiB/s": 2.0**30,
}


@pytest.mark.parametrize("text", UNITS)
@pytest.mark.parametrize("key", ["network_bandwidth", "network_bandwidth_gbps"])
def test_a_bandwidth_may_state_its_unit(key, text):
    request = described(hardware={key: text}, training={"num_nodes": 2})
    assert request.setup.cluster.links[1].bytes_per_s == pytest.approx(UNITS[text])
    inside = described(hardware={f"intra_node_{key.removeprefix('network_')}": text})
    assert inside.setup.cluster.links[0].bytes_per_s == pytest.approx(UNITS[text])
    assert request.config["hardware"][key] == text
    assert read_experiment(request.config) == request


@pytest.mark.parametrize(
    ("hardware", "message"),
    [
        (
            {"network_bandwidth": 200},
            r"hardware: network_bandwidth: .* 200 GB/s \(bytes\) or 200 Gbit/s \(bits\)",
        ),
        ({"network_bandwidth": "200 gb/s"}, "network_bandwidth: .*bytes.*bits.*got '200 gb/s'"),
        ({"network_bandwidth": "fast"}, "network_bandwidth: .*got 'fast'"),
        ({"network_bandwidth_gbps": "200"}, "network_bandwidth_gbps: .*got '200'"),
        ({"network_bandwidth_gbps": [1]}, "network_bandwidth_gbps: expected a number of Gbit/s"),
        ({"network_bandwidth": "0 GB/s"}, "expected 0.001 to 1e\\+09 Gbit/s, got 0"),
        ({"network_bandwidth": "1 GB/s", "network_bandwidth_gbps": 8}, "say the same thing twice; keep one"),
    ],
)
def test_a_bandwidth_without_a_clear_unit_is_refused(hardware, message):
    with pytest.raises(ForerunError, match=message) as refused:
        described(hardware=hardware)
    assert "\n" not in str(refused.value)


def test_a_changed_bandwidth_replaces_the_other_spelling():
    request = described(hardware={"network_bandwidth_gbps": 100}, training={"num_nodes": 2})
    other = changed(request, {"hardware.network_bandwidth": "100 GB/s"})
    assert other.setup.cluster.links[1].bytes_per_s == 100e9
    assert changed(other, {"hardware.network_bandwidth_gbps": 100}).setup == request.setup


PROFILES = {
    "A100": (312, 80, 100),
    "H100": (989, 80, 200),
    "V100": (125, 32, 50),
    "A6000": (154, 48, 25),
}
"""TFLOP/s, GB of memory as it is sold, GB/s of the network"""


@pytest.mark.parametrize("name", PROFILES)
def test_a_preset_of_a_gpu_carries_its_network_and_is_the_gpu_itself(name):
    tflops, memory_gb, network_gb_s = PROFILES[name]
    request = described(hardware={"preset": name, "gpu_model": None}, training={"num_nodes": 2})
    cluster = request.setup.cluster
    assert cluster.device == load_cluster(name).device
    assert int(cluster.device.peak(request.setup.plan.precision) / 1e12) == tflops
    assert memory_gb / 1.05 <= cluster.device.memory_bytes / 2**30 <= memory_gb
    assert cluster.links[1].bytes_per_s == network_gb_s * 1e9
    assert read_experiment(request.config) == request
    own = described(
        hardware={"preset": name, "gpu_model": None, "network_bandwidth_gbps": 8}, training={"num_nodes": 2}
    )
    assert own.setup.cluster.links[1].bytes_per_s == 1e9


# -- compressed gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (None, None),
        ("none", None),
        ("powersgd", "powersgd rank 1"),
        ({"name": "PowerSGD", "rank": 4}, "powersgd rank 4"),
        ("int8", "int8 gathered"),
        ("topk", "top 0.01 of gradients"),
        ({"name": "topk", "density": "1e-3"}, "top 0.001 of gradients"),
    ],
)
def test_gradients_may_be_compressed(given, name):
    request = described(training={"gradient_compression": given})
    pattern = request.setup.pattern
    assert pattern is None if name is None else pattern.name.startswith(name)
    assert read_experiment(request.config) == request


def test_casts_of_gradients_are_the_dtype_of_their_sums():
    request = described(training={"gradient_compression": "fp16"})
    assert (request.setup.plan.reduce_dtype, request.setup.pattern) == ("fp16", None)
    assert read_experiment(request.config) == request
    assert request.setup == described(training={"reduce_dtype": "fp16"}).setup


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"gradient_compression": "powersdg"}, "gradient_compression: .*powersgd"),
        ({"gradient_compression": 4}, "gradient_compression: expected one of none, fp16"),
        ({"gradient_compression": {"rank": 4}}, "gradient_compression: missing key 'name'"),
        ({"gradient_compression": {"name": "int8", "rank": 4}}, "gradient_compression: unknown key 'rank'"),
        ({"gradient_compression": {"name": "topk", "density": 2}}, "density is a share of the gradients, at most 1"),
        ({"gradient_compression": {"name": "powersgd", "rank": 0}}, "rank must be at least 1"),
        ({"gradient_compression": "fp16", "reduce_dtype": "bf16"}, "fp16 and reduce_dtype bf16 contradict"),
        ({"gradient_compression": "powersgd", "zero_stage": 3}, "gradients are reduce-scattered"),
        (
            {"gradient_compression": "topk", "communication_pattern": "ring_allreduce"},
            "doesn't go with .* ring_allreduce",
        ),
    ],
)
def test_compression_that_makes_no_sense_is_refused(training, message):
    with pytest.raises(ForerunError, match=message) as refused:
        described(training=training)
    assert "\n" not in str(refused.value)
    assert "training" in str(refused.value)
