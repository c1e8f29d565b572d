"""The Distributed AI Workload Simulator: what its README does and says, done here as its author types it."""

import csv
import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

import forerun
from forerun.answers.analysis.predict import simulate
from forerun.common.units import PS_PER_S
from forerun.core.engine.sharing import FULL
from forerun.core.engine.simulate import simulate as run_engine
from forerun.core.program.types import Stream
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.interfaces.cli.main import run

COMMAND = Path(sys.executable).with_name("forerun")
DOCUMENTS = Path(__file__).resolve().parents[2].parent / "shared" / "origins"
PRESETS = {"A100": (312, 80, 100), "H100": (989, 80, 200), "V100": (125, 32, 50), "A6000": (154, 48, 25)}
"""its hardware presets: TFLOPS, GB of memory, GB/s of network"""
LAYER = """
- layer_id: 0
  layer_type: conv2d
  input_shape: (3, 224, 224)
  output_shape: (64, 112, 112)
  num_parameters: 9408
  forward_flops: 118e9
  backward_flops: 236e9
  activation_memory_mb: 50
  gradient_memory_mb: 0.04
"""
"""its custom layer, with the values that its Python has"""


def printed(folder, *arguments):
    """What `forerun ARGUMENTS` prints in `folder`; it runs in this process, which has its modules."""
    out, before = io.StringIO(), Path.cwd()
    os.chdir(folder)
    try:
        with redirect_stdout(out):
            assert run([str(argument) for argument in arguments]) == 0
    finally:
        os.chdir(before)
    return out.getvalue()


def typed(folder, *arguments):
    """What `forerun experiment ARGUMENTS` prints in `folder`."""
    return printed(folder, "experiment", *arguments)


def told(folder, *arguments):
    """The same as the object of --json."""
    return json.loads(typed(folder, *arguments, "--json"))


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    """Its config.yaml, as the document has it."""
    found = sorted(DOCUMENTS.glob("001_*.txt"))
    if not found:
        pytest.skip(f"the document of the simulator is not in {DOCUMENTS}")
    text = found[0].read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(name: .*?)```", text, re.DOTALL)
    path = tmp_path_factory.mktemp("origin") / "config.yaml"
    path.write_text(block, encoding="utf-8")
    return path


# -- the custom layer --------------------------------------------------------------------------------------------------


def of_layers(layers):
    return {
        "hardware": {"gpu_model": "A100"},
        "model": {"layers": layers},
        "training": {"batch_size_per_gpu": 8, "num_nodes": 1, "num_iterations": 10},
    }


@pytest.mark.parametrize("layer_type", ["conv2d", "custom"])
def test_the_custom_layer_runs_as_it_is_written(tmp_path, layer_type):
    text = LAYER.replace("conv2d", layer_type)
    indented = "".join(f"    {line}\n" for line in text.strip().splitlines())
    sections = yaml.safe_dump({key: value for key, value in of_layers([]).items() if key != "model"})
    (tmp_path / "layer.yaml").write_text(f"{sections}model:\n  layers:\n{indented}", encoding="utf-8")
    output = typed(tmp_path, "run", "layer.yaml", "--no-analysis")
    lines = [line for line in output.splitlines() if "as stated" in line]
    if layer_type == "custom":
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith("warning: layer 0 (conv2d): forward_flops is 1.18e+11 as stated, 2.36028e+08 by")
        assert "activation_memory_mb is 50 as stated" in line
        assert "num_parameters" not in line
        assert "gradient_memory_mb" not in line
    step_s = told(tmp_path, "run", "layer.yaml", "--no-analysis")["prediction"]["step_time_s"]
    ideal_s = 8 * (118e9 + 236e9) / 312e12
    assert 1 < step_s / ideal_s < 2


def test_the_custom_layer_in_python_with_its_tuples():
    layer = {
        "layer_id": 0,
        "layer_type": "CONV2D",
        "input_shape": (3, 224, 224),
        "output_shape": (64, 112, 112),
        "num_parameters": 9408,
        "forward_flops": 118e9,
        "backward_flops": 236e9,
        "activation_memory_mb": 50,
        "gradient_memory_mb": 0.04,
    }
    run = forerun.Experiment.from_dict(of_layers([layer])).run()
    made = run.result.request.setup.model.layers[0]
    assert (made.layer_id, made.forward_flops, made.backward_flops) == ("0", 118e9, 236e9)
    assert (made.num_parameters, made.activation_bytes(), made.gradient_bytes()) == (9408, 50e6, 40_000)


# -- units -------------------------------------------------------------------------------------------------------------


def test_a_bare_number_shows_both_readings_and_how_to_choose(config):
    output = typed(config.parent, "run", config.name, "--no-analysis")
    (line,) = [line for line in output.splitlines() if line.startswith("network_bandwidth_gbps 200 is read as")]
    bits, byte = (
        told(config.parent, "run", config.name, "--no-analysis", "--set", f"hardware.network_bandwidth={text}")
        for text in ("200 Gbit/s", "200 GB/s")
    )
    assert "network_bandwidth: 200 Gbit/s or network_bandwidth: 200 GB/s" in line
    shown = [f"{each['prediction']['step_time_s']:.4g} s" for each in (bits, byte)]
    shown[1] = f"{byte['prediction']['step_time_s'] * 1e3:.4g} ms"
    assert f"a step of {shown[0]}; as 200 GB/s a step takes {shown[1]}." in line
    bare = told(config.parent, "run", config.name, "--no-analysis")
    assert bare["prediction"] == bits["prediction"]
    assert bare["other_reading"] == line
    assert "other_reading" not in bits
    assert "other_reading" not in byte


@pytest.mark.parametrize("spelling", ["network_bandwidth: 200 GB/s", 'network_bandwidth_gbps: "200 GB/s"'])
def test_a_file_states_the_unit(config, tmp_path, spelling):
    text = config.read_text(encoding="utf-8").replace("network_bandwidth_gbps: 200.0", spelling)
    (tmp_path / "stated.yaml").write_text(text, encoding="utf-8")
    record = told(tmp_path, "run", "stated.yaml", "--no-analysis")
    assert "network_bandwidth_gbps 1600: 1600 Gb/s = 200 GB/s" in "\n".join(record["echo"])
    assert "other_reading" not in record


@pytest.mark.parametrize("gpu", PRESETS)
def test_a_hardware_preset_is_the_gpu_with_the_network_that_it_has_there(tmp_path, gpu):
    tflops, memory_gb, network_gb_s = PRESETS[gpu]
    sections = {
        "hardware": {"preset": gpu},
        "model": {"model_type": "resnet50"},
        "training": {"batch_size_per_gpu": 32, "num_nodes": 2},
    }
    (tmp_path / "preset.yaml").write_text(yaml.safe_dump(sections), encoding="utf-8")
    echo = "\n".join(told(tmp_path, "run", "preset.yaml", "--no-analysis")["echo"])
    peak, gib = (float(re.search(rf"{key} ([\d.]+)", echo)[1]) for key in ("compute_tflops", "memory_gb"))
    assert int(peak) == tflops
    assert memory_gb / 1.05 <= gib <= memory_gb
    assert f"= {network_gb_s} GB/s for each GPU and direction between nodes" in echo


# -- its command line --------------------------------------------------------------------------------------------------


def test_preset_medium(tmp_path):
    words = [str(COMMAND), "experiment", "run", "--preset", "medium"]
    output = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=True).stdout
    for words in ("experiment file: ", "step time", "Bottlenecks", "Recommended"):
        assert words in output


def test_config_file(config):
    output = typed(config.parent, "run", "--config", config.name, "--out", "results")
    assert "my_experiment" in output
    written = {path.name for path in (config.parent / "results").iterdir()}
    files = {f"my_experiment_{kind}" for kind in ("config.yaml", "results.json", "bottlenecks.json")}
    assert files | {"iteration_breakdown.png", "resource_utilization.png"} <= written


def test_scaling_study_of_the_command_line(tmp_path):
    study = told(tmp_path, "run", "--scaling", "--nodes", 1, 2, 4, 8, 16)
    assert [point["num_nodes"] for point in study["points"]] == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, ("basic_simulation: resnet50", "Bottlenecks")),
        (2, ("custom_experiment: transformer on 64 x h100-sxm", "200 GB/s")),
        (3, ("weak scaling", "efficiency", "fastest")),
        (4, ("ring_allreduce", "tree_allreduce", "reduce_scatter", "all_gather")),
        (5, ("my_experiment: transformer on 128 x h100-sxm", "ring_allreduce")),
    ],
)
def test_example(tmp_path, number, words):
    output = typed(tmp_path, "run", "--example", number)
    for each in words:
        assert each in output
    (line,) = [line for line in output.splitlines() if line.startswith("experiment file: ")]
    path = Path(line.removeprefix("experiment file: ").split(" (copy")[0])
    copied = tmp_path / "mine.yaml"
    copied.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    record = told(tmp_path, "run", copied.name, "--no-analysis")
    assert record["summary"]["num_iterations"] == 100


def test_example_five_is_the_file_of_the_document(config, tmp_path):
    """In which 200.0 means GB/s, as its presets say."""
    text = config.read_text(encoding="utf-8").replace("_gbps: 200.0", ": 200 GB/s")
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    ours = told(tmp_path, "run", "--example", 5, "--no-analysis")
    assert ours["summary"] == told(tmp_path, "run", "config.yaml", "--no-analysis")["summary"]


# -- from Python -------------------------------------------------------------------------------------------------------


def test_examples_of_its_python(config, tmp_path):
    run = forerun.Experiment.from_preset("small").run()  # example 1
    assert run.analyze().bottlenecks.found
    assert {path.name for path in run.plot(tmp_path / "plots")} >= {"iteration_breakdown.png"}

    custom = forerun.Experiment.from_dict(  # example 2
        {
            "name": "custom_experiment",
            "hardware": {
                "gpu_model": "H100",
                "compute_tflops": 989.0,
                "memory_gb": 80.0,
                "network_bandwidth": "200 GB/s",
            },
            "model": {"model_type": "transformer", "num_layers": 32, "hidden_size": 4096},
            "training": {"batch_size_per_gpu": 8, "num_iterations": 100, "num_nodes": 8},
        }
    )
    assert custom.run().summary()["n_gpus"] == 64

    study = forerun.Experiment.from_preset("medium").scale([1, 2, 4, 8, 16])  # example 3
    assert [point.num_nodes for point in study.result.points] == [1, 2, 4, 8, 16]
    assert {path.name for path in study.plot(tmp_path / "scaling")} == {"scaling_efficiency.png"}

    loaded = forerun.Experiment.from_yaml(config).run()  # examples 4 and 5
    assert loaded.summary()["n_gpus"] == 128
    assert "200 GB/s" in loaded.other_reading().text


def test_event_history_from_python_is_that_of_the_files(tmp_path):
    pytest.importorskip("pandas")
    experiment = forerun.Experiment.from_preset("medium").changed({"training.num_iterations": 2})
    run = experiment.run()
    run.export(tmp_path, history=True)
    with (tmp_path / "medium_events.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    history = run.event_history
    assert list(history.columns) == header
    assert [[str(cell) for cell in row] for row in history.itertuples(index=False)] == rows
    events = list(run.events())
    assert len(events) == len(rows)
    for event, row in zip(events, rows, strict=True):
        assert f"Event: {event.event_type} at t={event.timestamp}"
        assert event.timestamp == int(row[header.index("time_ps")]) / 1e12
    for kind in ("compute", "communication", "host"):
        some = history[history["kind"] == kind]
        assert len(some) == len(list(run.events(kind=kind))) > 0
    starts = list(run.events(kind="communication_start"))
    assert {event.event_type for event in starts} == {"communication_start"}
    assert any("grads" in event.op for event in starts)


# -- gradient compression, which its bottleneck analysis recommends and its roadmap names -----------------------------


def test_gradient_compression_shortens_a_step_that_the_network_bounds(tmp_path):
    (tmp_path / "bound.yaml").write_text(
        yaml.safe_dump(
            {
                "hardware": {"gpu_model": "A100", "network_bandwidth": "25 Gbit/s"},
                "model": {"model_type": "gpt2-medium"},
                "training": {"batch_size_per_gpu": 4, "num_nodes": 4},
            }
        ),
        encoding="utf-8",
    )
    steps = {}
    for method in ("none", "fp16", "int8", "{name: powersgd, rank: 4}", "topk"):
        setting = ("--set", f"training.gradient_compression={method}")
        steps[method] = told(tmp_path, "run", "bound.yaml", "--no-analysis", *setting)["prediction"]
    times = {method: step["step_time_s"] for method, step in steps.items()}
    assert times["{name: powersgd, rank: 4}"] < times["topk"] < times["fp16"] < times["none"] < times["int8"]


# -- two kinds of parallelism on one network ---------------------------------------------------------------------------

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
OUTWARD = 1
"""the link that a GPU sends to other nodes over, among those of a cluster with two levels"""


def cluster_file(folder, gpus_per_node):
    """A100s on 10 Gbit/s Ethernet between nodes."""
    path = folder / f"slow-{gpus_per_node}.yaml"
    links = {"intra_node": {"kind": "nvswitch", "gb_s": 300}, "inter_node": {"kind": "ethernet", "gbit_s_per_gpu": 10}}
    known = {"device": "a100-80gb-sxm", "gpus_per_node": gpus_per_node, "host_gb_s": 25}
    path.write_text(yaml.safe_dump({"name": path.stem, **known, **links}), encoding="utf-8")
    return path


def predicted(folder, cluster, *options):
    """What `forerun predict` says."""
    config = folder / "config.json"
    config.write_text(json.dumps(MIXTRAL), encoding="utf-8")
    words = ["predict", config, "--cluster", cluster, *options, "--seq-len", 2048, "--json"]
    return json.loads(printed(folder, *words))


def simulated(folder, cluster, plan):
    return simulate(load_model(folder / "config.json"), plan, load_cluster(cluster))


def step_alone_s(simulation):
    """The step if every collective took the time that it takes alone."""
    costs = simulation.costs
    rates = (costs.slow_compute, costs.slow_network, costs.network_op)
    return run_engine(simulation.flat, costs.duration_ps, costs.issue_ps, *rates).end_of_step_ps / PS_PER_S


def on_the_network(simulation, *streams):
    """Seconds alone, and the mean share of the network that they take, of all that runs on `streams`."""
    flat, demand = simulation.flat, simulation.costs.demand
    assert demand is not None
    mine = flat.op[np.isin(flat.stream, streams)]
    seconds = simulation.costs.duration_ps[mine] / PS_PER_S
    large = seconds > 1e-3
    return seconds, float(np.average(demand.share[mine, OUTWARD][large] / FULL, weights=seconds[large]))


def test_gathers_and_experts_on_one_slow_network_take_as_much_longer_as_their_bytes_imply(tmp_path):
    cluster = cluster_file(tmp_path, 1)
    told = predicted(tmp_path, cluster, "--gpus", 8, "--dp-shard", 8, "--ep", 4)
    simulation = simulated(tmp_path, cluster, Plan(seq_len=2048, dp_shard=8, ep=4))
    alone_s = step_alone_s(simulation)
    assert told["step_time_s"] == pytest.approx(simulation.prediction.step_time_s)
    assert told["step_time_s"] > alone_s

    # Gathers and reductions are the longer chain. All of the exchange of tokens runs beside it, and together they ask
    # for more than the network has: what is beyond it is what the chain is late by.
    tokens, asked_by_tokens = on_the_network(simulation, Stream.EP)
    chain, asked_by_chain = on_the_network(simulation, Stream.GATHER, Stream.REDUCE)
    assert tokens.sum() < chain.sum() < alone_s
    beyond = asked_by_tokens + asked_by_chain - 1
    assert 0.1 < beyond < 1
    late_s = told["step_time_s"] - alone_s
    assert late_s == pytest.approx(tokens.sum() * beyond, rel=0.1)
    # Both of them are late by that, the one in sight and the other behind it.
    assert told["shared_links_s"] == pytest.approx(2 * late_s, rel=0.05)
    assert any(line.startswith("shared_links_s: ") for line in told["explain"])


def test_the_network_never_carries_more_than_it_can(tmp_path):
    cluster = cluster_file(tmp_path, 1)
    predicted(tmp_path, cluster, "--gpus", 8, "--dp-shard", 8, "--ep", 8)
    simulation = simulated(tmp_path, cluster, Plan(seq_len=2048, dp_shard=8, ep=8))
    flat, demand, timeline = simulation.flat, simulation.costs.demand, simulation.timeline
    assert demand is not None
    sent = demand.share[flat.op, OUTWARD] / FULL * simulation.costs.duration_ps[flat.op]
    moving = np.flatnonzero(sent)
    for begin in np.unique(timeline.start_ps[moving]).tolist():
        inside = moving[timeline.start_ps[moving] >= begin]
        order = inside[np.argsort(timeline.end_ps[inside])]
        room = timeline.end_ps[order] - begin
        assert (np.cumsum(sent[order]) <= room * (1 + 1e-9) + 1000).all()


def test_two_networks_do_not_touch_each_other(tmp_path):
    cluster = cluster_file(tmp_path, 8)
    told = predicted(tmp_path, cluster, "--gpus", 32, "--tp", 8, "--dp-replicate", 4, "--zero-stage", 0)
    simulation = simulated(tmp_path, cluster, Plan(seq_len=2048, tp=8, dp_replicate=4, zero_stage=0))
    assert told["shared_links_s"] == 0
    assert told["step_time_s"] == pytest.approx(step_alone_s(simulation))
    assert not any(line.startswith("shared_links_s") for line in told["explain"])


def test_a_network_file_is_shared_as_the_links_of_a_cluster(tmp_path):
    cluster = cluster_file(tmp_path, 1)
    plan = ("--gpus", 8, "--dp-shard", 8, "--ep", 4)
    links, routed = (predicted(tmp_path, cluster, *plan, *more) for more in ((), ("--network", "switch:8@1.25/10us")))
    assert routed["shared_links_s"] == pytest.approx(links["shared_links_s"], rel=0.1)
    faster = replace(load_cluster(cluster), links=load_cluster("a100-80gb-sxm").links)
    assert simulate(
        load_model(tmp_path / "config.json"), Plan(seq_len=2048, dp_shard=8, ep=4), faster
    ).prediction.step_time_s < min(links["step_time_s"], routed["step_time_s"])
