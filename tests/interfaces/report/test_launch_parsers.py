"""The files of launch configurations in the hands of the tools' own parsers, where they are installed."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import pytest
from launch_cases import CLUSTER, random_case

from forerun.answers.analysis.predict_program import predict_program
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.common.errors import ForerunError
from forerun.core.program.storage import load
from forerun.describe.model.catalog import load_model
from forerun.describe.model.parameters import parameter_count
from forerun.describe.plan.plan import Plan
from forerun.interfaces.report.launch.tools import launch_files, write_launch
from forerun.sources.symbolic.schedule import layers_of_stages

CASES = 300
SHARDED = Plan(seq_len=8192, n_microbatches=8, dp_shard=4, tp=2, activation_checkpointing="full", compile=True)


def configurations(tool, most):
    """Up to `most` random (model, plan, files) that the tool takes."""
    found = []
    for number in range(CASES):
        model, plan = random_case(number)
        try:
            found.append((model, plan, launch_files(plan, model, CLUSTER, tool)))
        except ForerunError:
            continue
        if len(found) == most:
            break
    assert len(found) >= min(most, 5)
    return found


def torchtitan(prefix):
    """torchtitan's ConfigManager, if such a version is installed."""
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        pytest.skip(f"torchtitan {prefix} is not installed")
    if not found.startswith(prefix):
        pytest.skip(f"torchtitan {found} is installed, not {prefix}")
    return pytest.importorskip("torchtitan.config").ConfigManager


def fresh(monkeypatch, folder, module):
    """`module` of `folder`, imported anew."""
    monkeypatch.syspath_prepend(folder)
    sys.modules.pop(module, None)
    importlib.invalidate_caches()


def parameters_of(build):
    """Parameters of a model that is built without memory."""
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        model = build()
    return sum(parameter.numel() for parameter in model.parameters())


def expected_parameters(model):
    """torchtitan keeps the biases of routers as buffers."""
    if model.moe and model.moe.router_bias:
        model = replace(model, moe=replace(model.moe, router_bias=False))
    return parameter_count(model)


def has_mesh_of(parallelism, plan):
    replicas = plan.dp_replicate * (plan.dp_shard if plan.zero_stage == 0 else 1)
    shards = 1 if plan.zero_stage == 0 else plan.dp_shard
    degrees = [("data_parallel_replicate", replicas), ("data_parallel_shard", shards), ("tensor_parallel", plan.tp)]
    degrees += [("pipeline_parallel", plan.pp), ("context_parallel", plan.cp), ("expert_parallel", plan.ep)]
    return all(getattr(parallelism, f"{name}_degree") == degree for name, degree in degrees)


def test_torchtitan_0_2_reads_its_toml(tmp_path):
    manager = torchtitan("0.2")
    for number, (model, plan, files) in enumerate(configurations("torchtitan-0.2", 30)):
        write_launch(tmp_path / str(number), files)
        config = manager().parse_args([f"--job.config_file={tmp_path / str(number) / 'forerun.toml'}"])
        assert has_mesh_of(config.parallelism, plan)
        assert config.training.global_batch_size == plan.global_batch
        if plan.pp > 1:
            parts = config.parallelism.module_fqns_per_model_part
            layers = [sum(name.startswith("layers.") for name in part) for part in parts]
            assert layers == layers_of_stages(model.n_layers, plan)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-405b", "qwen3-8b", "qwen3-30b-a3b", "deepseek-v3"])
def test_torchtitan_0_2_builds_the_model(name, tmp_path, monkeypatch):
    manager, model = torchtitan("0.2"), load_model(name)
    write_launch(tmp_path, launch_files(SHARDED, model, CLUSTER, "torchtitan-0.2"))
    config = manager().parse_args([f"--job.config_file={tmp_path / 'forerun.toml'}"])
    specs = importlib.import_module("torchtitan.protocols.train_spec")
    monkeypatch.setattr(specs, "_extra_train_specs", {})
    fresh(monkeypatch, tmp_path, config.experimental.custom_import)
    importlib.import_module(config.experimental.custom_import)
    spec = specs.get_train_spec(config.model.name)
    arguments = spec.model_args[config.model.flavor]
    arguments.update_from_config(config)
    assert parameters_of(lambda: spec.model_cls(arguments)) == expected_parameters(model)


def test_torchtitan_0_3_reads_its_module(tmp_path, monkeypatch):
    manager = torchtitan("0.3")
    every = configurations("torchtitan", 40)
    taken = [case for case in every if case[1].precision in ("bf16", "fp32", "tf32") and case[1].attention != "flash4"]
    assert taken, "torchtitan makes low precision and flash4 of a configuration only on a GPU"
    for number, (_, plan, files) in enumerate(taken):
        write_launch(tmp_path / str(number), files)
        fresh(monkeypatch, tmp_path / str(number), "forerun_torchtitan")
        config = manager().parse_args(["--module", "forerun_torchtitan", "--config", "planned"])
        assert has_mesh_of(config.parallelism, plan)
        assert config.training.global_batch_size == plan.global_batch


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.2-1b", "qwen3-8b", "qwen3-30b-a3b", "deepseek-v3"])
def test_torchtitan_0_3_builds_the_model(name, tmp_path, monkeypatch):
    manager, model = torchtitan("0.3"), load_model(name)
    write_launch(tmp_path, launch_files(SHARDED, model, CLUSTER, "torchtitan"))
    fresh(monkeypatch, tmp_path, "forerun_torchtitan")
    config = manager().parse_args(["--module", "forerun_torchtitan", "--config", "planned"])
    assert parameters_of(config.model_spec.model.build) == expected_parameters(model)


@pytest.mark.slow
def test_torchtitan_0_3_trains_the_plan_as_predicted(tmp_path):
    """Its own trainer, started with the files, traced: the same groups, tokens and state as the plan's Program."""
    torchtitan("0.3")
    plan = Plan(seq_len=2048, n_microbatches=2, dp_shard=4, tp=2, activation_checkpointing="full")
    model, path = load_model("llama-3.2-1b"), tmp_path / "step.program"
    write_launch(tmp_path, launch_files(plan, model, CLUSTER, "torchtitan"))
    words = ["trace", "-o", str(path), "--world-size", "8", "--torchtitan", "forerun_torchtitan", "planned"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    start = [sys.executable, "-c", "from forerun.interfaces.cli.main import main; main()", *words]
    subprocess.run(start, check=True, capture_output=True, env=environment)
    program = load(path)
    assert {(group.axis, group.size) for group in program.groups} >= {("tp", 2), ("fsdp", 4)}
    traced = predict_program(program, CLUSTER).prediction
    planned = simulate_setup(Setup(model, plan, CLUSTER)).prediction
    assert traced.step_time_s == pytest.approx(planned.step_time_s, rel=0.15)
    assert traced.tokens_per_s_per_gpu * traced.step_time_s * 8 == pytest.approx(plan.tokens_per_step)


def test_deepspeed_reads_its_json(monkeypatch):
    config = pytest.importorskip("deepspeed.runtime.config", reason="deepspeed is not installed")
    for _, plan, files in configurations("deepspeed", 40):
        settings = json.loads(files["ds_config.json"])
        monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
        monkeypatch.setattr(config.dist, "get_world_size", lambda group=None, ranks=plan.dp * plan.cp: ranks)
        read = config.DeepSpeedConfig(settings)
        assert read.train_batch_size == plan.global_batch
        assert read.gradient_accumulation_steps == plan.n_microbatches
        assert read.zero_optimization_stage == (plan.zero_stage if plan.fsdp > 1 else 0)
        assert read.bfloat16_config.enabled == (plan.precision == "bf16")


def launched(folder, launch):
    """What `accelerate launch` makes of launch.sh: its arguments, and the environment of a process."""
    text = (folder / "launch.sh").read_text().partition("accelerate launch")[2]
    values = {"$HERE": str(folder), "${NODE_RANK:-0}": "0", "${MASTER_PORT:-29500}": "0", '"$@"': "", "\\\n": " "}
    values |= {"${MASTER_ADDR:?the first node}": "10.0.0.1", "${SCRIPT:?your training script}": "train.py"}
    for name, value in values.items():
        text = text.replace(name, value)
    return launch._validate_launch_command(launch.launch_command_parser().parse_args(shlex.split(text)))


def test_accelerate_reads_its_yaml(tmp_path, monkeypatch):
    launch = pytest.importorskip("accelerate.commands.launch", reason="accelerate is not installed")
    utils = importlib.import_module("accelerate.utils")
    environment = importlib.import_module("accelerate.utils.launch")
    for number, (_, plan, files) in enumerate(configurations("accelerate", 30)):
        if plan.precision == "fp8":
            continue  # its environment needs torchao's kernels
        folder = tmp_path / str(number)
        write_launch(folder, files)
        read: Namespace = launched(folder, launch)[0]
        assert (read.num_processes, read.use_fsdp) == (plan.world_size, plan.fsdp > 1 and plan.zero_stage != 0)
        if not read.use_fsdp:
            continue
        with monkeypatch.context() as inside:
            for name, value in environment.prepare_multi_gpu_env(read).items():
                inside.setenv(name, value)
            plugin = utils.FullyShardedDataParallelPlugin()
            mesh = importlib.import_module("accelerate.parallelism_config").ParallelismConfig()
        assert plugin.fsdp_version == 2
        assert plugin.reshard_after_forward == (plan.zero_stage == 3 and plan.reshard_after_forward != "never")
        assert plugin.activation_checkpointing == (plan.activation_checkpointing != "none")
        assert (mesh.dp_replicate_size, mesh.dp_shard_size) == (plan.dp_replicate, plan.dp_shard)
        assert (mesh.tp_size, mesh.cp_size) == (plan.tp, plan.cp)


def test_accelerate_finds_deepspeeds_file(tmp_path):
    launch = pytest.importorskip("accelerate.commands.launch", reason="accelerate is not installed")
    plan = Plan(seq_len=4096, dp_shard=8, stack="deepspeed")
    write_launch(tmp_path, launch_files(plan, load_model("llama-3.1-8b"), CLUSTER, "accelerate-deepspeed"))
    read = launched(tmp_path, launch)[0]
    assert read.use_deepspeed
    assert read.deepspeed_config_file == str(tmp_path / "ds_config.json")


def test_megatron_reads_its_arguments(tmp_path, monkeypatch):
    arguments = pytest.importorskip("megatron.training.arguments", reason="Megatron-LM is not on the path")
    stub = tmp_path / "torchrun"
    stub.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    for number, (model, plan, files) in enumerate(configurations("megatron-lm", 60)):
        folder = tmp_path / str(number)
        write_launch(folder, files)
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MEGATRON": "/m"}
        words = subprocess.run([folder / "launch.sh"], capture_output=True, text=True, env=environment, check=True)
        given = words.stdout.splitlines()
        given = given[given.index("/m/pretrain_gpt.py") + 1 :]
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *given])
        monkeypatch.setenv("WORLD_SIZE", str(plan.world_size))
        monkeypatch.setattr(arguments, "is_te_min_version", lambda *_: True)
        monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 10)
        monkeypatch.setattr(arguments.torch.cuda, "get_device_capability", lambda: (10, 0))  # CLUSTER's
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
        if "CONNECTIONS=1" in files["launch.sh"]:
            monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        read = arguments.parse_args()
        arguments.validate_args(read)
        assert read.num_layers == model.n_layers
        assert read.data_parallel_size == plan.dp
        assert read.global_batch_size == plan.global_batch
        assert (read.virtual_pipeline_model_parallel_size or 1) == plan.virtual_stages
