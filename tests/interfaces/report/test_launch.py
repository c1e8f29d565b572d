"""Launch configurations: no field of a plan is lost, every file is what its tool reads."""

import ast
import json
import subprocess
from dataclasses import replace

import pytest
import yaml
from launch_cases import CLUSTER, neighbours, random_case

from forerun.common.errors import ForerunError, ImpossiblePlan, UnknownName
from forerun.describe.model.catalog import load_any, load_model
from forerun.describe.plan.fields import FIELD_TYPES
from forerun.describe.plan.plan import Plan
from forerun.interfaces.report.launch.tools import NOTES, TOOLS, launch, launch_files, write_launch
from forerun.interfaces.report.launch.torchrun import nodes_of
from forerun.interfaces.report.launch.translation import Translation
from forerun.sources.symbolic.schedule import layers_of_stages

LLAMA = load_model("llama-3.1-8b")
PLAN = Plan(
    seq_len=8192,
    micro_batch=2,
    n_microbatches=8,
    dp_shard=4,
    tp=2,
    pp=2,
    activation_checkpointing="full",
    compile=True,
    reshard_after_forward="never",
)
WITHOUT_AXES = replace(PLAN, tp=1, pp=1)
CASES = 400
ALIKE = {"fp8_recipe": {"none", "mx"}, "ddp_bucket_mib": {0.0, 100.0}, "attention": {"auto", "sdpa", "flash2", "cudnn"}}
"""values that are the same to some tool"""
VARLEN = {"flash2", "flash3"}
"""kernels of one backend of torchtitan, which takes the one that the GPU runs"""
SPREAD = ("layers_per_stage", "balance_ends")
"""fields that may say the same"""


def made(model, plan, tool):
    """The launch configuration, or None where the tool refuses in a clear line."""
    try:
        return launch(plan, model, CLUSTER, tool)
    except ForerunError as error:
        refused = str(error)
    named = [f"{name} {getattr(plan, name)}: " for name in FIELD_TYPES] + [f"{model.name}: "]
    assert "\n" not in refused
    assert any(refused.startswith(f"--launch {tool}: {name}") for name in named), refused
    return None


@pytest.mark.parametrize("tool", TOOLS)
def test_every_field_is_written_implied_noted_or_refused(tool):
    taken = 0
    for number in range(CASES):
        model, plan = random_case(number)
        result = made(model, plan, tool)
        if result is None:
            continue
        taken += 1
        assert {*result.written, *result.implied, *result.noted} == set(FIELD_TYPES)
        for name in result.noted:
            assert any(note.startswith(f"{name} {getattr(plan, name)}: ") for note in result.notes), name
    assert taken > CASES / 20, "hardly any plan is taken"


def without_effect(model, plan, name):
    """Whether a field says nothing in this plan."""
    translation = Translation("any", plan, model, CLUSTER)
    translation.without_effect_here()
    return not translation.open(name)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_field_that_is_written_changes_what_is_written(tool):
    """Two plans that differ in one field give different files or notes, or the field says nothing in either."""
    compared = 0
    for number in range(60):
        model, plan = random_case(number)
        first = made(model, plan, tool)
        if first is None:
            continue
        for name, other in neighbours(model, plan):
            if other == plan:  # left open to what the plan says
                continue
            second = made(model, other, tool)
            idle = layers_of_stages(model.n_layers, plan) == layers_of_stages(model.n_layers, other) and name in SPREAD
            idle |= {getattr(plan, name), getattr(other, name)} & {"auto", "default"} != set()
            if second is None or idle:
                continue
            if name in first.implied and name in second.implied:
                alike = {getattr(plan, name), getattr(other, name)} <= ALIKE.get(name, set())
                assert alike or without_effect(model, plan, name), (name, plan, getattr(other, name))
                continue
            if {getattr(plan, name), getattr(other, name)} <= VARLEN and tool == "torchtitan":
                continue
            compared += 1
            assert (first.files, first.notes) != (second.files, second.notes), (name, plan, getattr(other, name))
    assert compared > 20


@pytest.mark.parametrize("tool", TOOLS)
def test_the_same_plan_gives_the_same_files(tool):
    plan = replace(WITHOUT_AXES, stack="deepspeed")
    assert launch_files(plan, LLAMA, CLUSTER, tool) == launch_files(plan, LLAMA, CLUSTER, tool)


# -- what stands in the files --------------------------------------------------------------------------------------


def toml(text):
    """What Python 3.11 and later reads by itself."""
    return pytest.importorskip("tomllib").loads(text)


def test_the_toml_of_torchtitan_holds_the_plan():
    config = toml(launch_files(PLAN, LLAMA, CLUSTER, "torchtitan-0.2")["forerun.toml"])
    assert config["training"]["local_batch_size"] == 16, "a pipeline cuts the local batch into micro batches"
    assert config["training"]["global_batch_size"] == 64
    parallelism = config["parallelism"]
    assert parallelism["pipeline_parallel_microbatch_size"] == 2
    assert parallelism["fsdp_reshard_after_forward"] == "never"
    first, last = parallelism["module_fqns_per_model_part"]
    assert first == ["tok_embeddings", *(f"layers.{i}" for i in range(16))]
    assert last == [*(f"layers.{i}" for i in range(16, 32)), "norm", "output"]
    assert config["activation_checkpoint"] == {"mode": "full"}
    assert config["compile"]["enable"] is True


def test_without_a_pipeline_micro_batches_accumulate():
    config = toml(launch_files(WITHOUT_AXES, LLAMA, CLUSTER, "torchtitan-0.2")["forerun.toml"])
    assert config["training"]["local_batch_size"] == 2
    assert config["training"]["global_batch_size"] == 64
    assert "module_fqns_per_model_part" not in config["parallelism"]


def test_the_module_of_torchtitan_is_python_with_the_plan_in_it():
    tree = ast.parse(launch_files(PLAN, LLAMA, CLUSTER, "torchtitan")["forerun_torchtitan.py"])
    calls = {ast.unparse(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    given = {word.arg: word.value for word in calls["ParallelismConfig"].keywords}
    assert ast.literal_eval(given["tensor_parallel_degree"]) == 2
    assert [len(stage) for stage in ast.literal_eval(given["module_fqns_per_model_part"])] == [17, 18]
    layers = {word.arg: ast.unparse(word.value) for word in calls["_build_llama3_layers"].keywords}
    assert (layers["hidden_dim"], layers["n_kv_heads"]) == ("14336", "8")


def arguments_of(folder, files, program="torchrun", **environment):
    """What launch.sh starts `program` with."""
    write_launch(folder, files)
    stub = folder / "bin" / program
    stub.parent.mkdir()
    stub.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    path = {"PATH": f"{stub.parent}:/usr/bin:/bin", "SCRIPT": "train.py", "MEGATRON": "/megatron", **environment}
    done = subprocess.run([folder / "launch.sh", "--extra"], capture_output=True, text=True, env=path, check=True)
    return done.stdout.splitlines()


def following(arguments, name):
    return arguments[arguments.index(name) + 1]


def test_the_arguments_of_megatron_hold_plan_and_model(tmp_path):
    plan = replace(PLAN, zero_stage=1, stack="megatron-core", compile=False, reshard_after_forward="default")
    words = arguments_of(tmp_path, launch_files(plan, LLAMA, CLUSTER, "megatron-lm"))
    assert following(words, "--nproc-per-node") == "8"
    assert following(words, "--nnodes") == "2"
    assert "/megatron/pretrain_gpt.py" in words
    expected = {
        "--num-layers": "32",
        "--num-query-groups": "8",
        "--ffn-hidden-size": "14336",
        "--seq-length": "8192",
        "--micro-batch-size": "2",
        "--global-batch-size": "64",
        "--tensor-model-parallel-size": "2",
        "--pipeline-model-parallel-size": "2",
        "--recompute-granularity": "full",
    }
    assert {name: following(words, name) for name in expected} == expected
    assert {"--bf16", "--use-distributed-optimizer", "--sequence-parallel", "--swiglu"} <= set(words)
    assert words[-1] == "--extra"


def test_uneven_stages_are_a_layout_for_megatron():
    plan = replace(PLAN, zero_stage=1, balance_ends=True, layers_per_stage=(15, 17))
    text = launch_files(plan, LLAMA, CLUSTER, "megatron-lm")["launch.sh"]
    assert "--pipeline-model-parallel-layout 'E,t*15|t*17,L'" in text


@pytest.mark.parametrize(("stage", "name"), [(0, "muon"), (1, "dist_muon")])
def test_megatron_shares_out_whole_matrices_of_muon_without_its_distributed_optimizer(stage, name):
    plan = replace(PLAN, zero_stage=stage, optimizer="muon")
    text = launch_files(plan, LLAMA, CLUSTER, "megatron-lm")["launch.sh"]
    assert f"--optimizer {name}\n" in text.replace(" \\\n", "\n") or f"--optimizer {name} " in text
    assert "--muon-tp-mode blockwise" in text
    assert "--use-distributed-optimizer" not in text
    assert "--overlap-grad-reduce" not in text


def test_deepspeed_and_accelerate_name_optimizers_as_they_know_them():
    muon = replace(WITHOUT_AXES, optimizer="muon", zero_stage=1)
    config = json.loads(launch_files(muon, LLAMA, CLUSTER, "deepspeed")["ds_config.json"])
    assert config["optimizer"]["type"] == "Muon"
    assert config["optimizer"]["params"]["momentum"] == 0.95
    narrow = replace(WITHOUT_AXES, optimizer="adamw8bit")
    assert "bitsandbytes.optim.AdamW8bit(...)" in launch_files(narrow, LLAMA, CLUSTER, "accelerate")["notes.txt"]


def test_adapters_are_noted_for_scripts_and_refused_by_tools_that_run_their_own_trainer():
    plan = replace(WITHOUT_AXES, lora_rank=16, lora_targets=("q_proj", "v_proj"), frozen_dtype="nf4", compile=False)
    notes = launch_files(plan, LLAMA, CLUSTER, "accelerate")["notes.txt"]
    assert "peft.LoraConfig(r=16" in notes
    assert "target_modules of that LoraConfig: q_proj, v_proj" in notes
    assert "bnb_4bit_use_double_quant=True" in notes
    with pytest.raises(ForerunError, match="lora_rank 16: Megatron-LM trains all weights"):
        launch(plan, LLAMA, CLUSTER, "megatron-lm")
    plan = replace(WITHOUT_AXES, reference=True)
    assert "your script runs the reference model" in launch_files(plan, LLAMA, CLUSTER, "accelerate")["notes.txt"]
    with pytest.raises(ForerunError, match="reference True: Megatron-LM trains one model"):
        launch(plan, LLAMA, CLUSTER, "megatron-lm")


def test_the_json_of_deepspeed_holds_the_plan(tmp_path):
    plan = replace(WITHOUT_AXES, offload="params", ddp_bucket_mib=50.0, accumulate_dtype="fp32")
    files = launch_files(plan, LLAMA, CLUSTER, "deepspeed")
    config = json.loads(files["ds_config.json"])
    assert config["train_batch_size"] == 64 == config["train_micro_batch_size_per_gpu"] * 8 * 4
    zero = config["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_param"]["device"] == zero["offload_optimizer"]["device"] == "cpu"
    assert zero["reduce_bucket_size"] == 25 * 2**20, "50 MiB of bf16"
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    words = arguments_of(tmp_path, files)
    assert following(words, "--deepspeed_config").endswith("/ds_config.json")


def test_the_yaml_of_accelerate_holds_the_plan(tmp_path):
    files = launch_files(replace(WITHOUT_AXES, dp_replicate=2, cp=2), LLAMA, CLUSTER, "accelerate")
    config = yaml.safe_load(files["accelerate.yaml"])
    assert (config["num_processes"], config["num_machines"]) == (16, 2)
    assert config["fsdp_config"]["fsdp_reshard_after_forward"] is False
    assert config["fsdp_config"]["fsdp_activation_checkpointing"] is True
    axes = config["parallelism_config"]
    assert [axes[f"parallelism_config_{axis}_size"] for axis in ("dp_replicate", "dp_shard", "cp", "tp")] == [
        2,
        4,
        2,
        1,
    ]
    words = arguments_of(tmp_path, files, "accelerate", MASTER_ADDR="10.0.0.1", NODE_RANK="1")
    assert words[:1] == ["launch"]
    assert following(words, "--machine_rank") == "1"


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "changes", "message"),
    [
        ("torchtitan-0.2", {"precision": "fp16"}, "precision fp16: torchtitan has no fp16"),
        ("torchtitan-0.2", {"zero_stage": 1}, "zero_stage 1: torchtitan shards parameters"),
        ("torchtitan-0.2", {"dp_shard": 1, "dp_replicate": 4}, "dp_replicate 4: torchtitan 0.2 replicates only"),
        ("torchtitan-0.2", {"dp_shard": 1}, "precision bf16: torchtitan 0.2 mixes precisions only"),
        ("torchtitan", {"optimizer": "sgd"}, "optimizer sgd: torchtitan has adamw and adam"),
        ("torchtitan", {"optimizer": "muon", "tp": 1}, "optimizer muon: torchtitan has adamw and adam"),
        ("megatron-lm", {"optimizer": "adafactor"}, "optimizer adafactor: Megatron-LM has adamw and adam"),
        (
            "megatron-lm",
            {"optimizer": "muon", "zero_stage": 2, "tp": 1},
            "zero_stage 3: Megatron-LM shares out",
        ),
        (
            "deepspeed",
            {"optimizer": "muon", "zero_stage": 0, "pp": 1, "compile": False},
            "optimizer muon: DeepSpeed runs the products of Muon in ZeRO only",
        ),
        ("torchtitan", {"precision": "fp8", "fp8_recipe": "tensorwise"}, "fp8_recipe tensorwise: torchtitan 0.3"),
        ("megatron-lm", {"pp_schedule": "GPipe"}, "pp_schedule GPipe: Megatron-LM has 1F1B"),
        ("megatron-lm", {"master_dtype": "bf16"}, "master_dtype bf16: Megatron-LM keeps master weights in fp32"),
        ("deepspeed", {}, "zero_stage 3: AutoTP goes with zero_stage 0 to 2"),
        ("deepspeed", {"tp": 1}, "zero_stage 3: DeepSpeed's pipelines"),
        ("accelerate", {}, "pp 2: accelerate has no such axis"),
        ("accelerate-deepspeed", {}, "pp 2: accelerate runs no DeepSpeed pipelines"),
    ],
)
def test_what_a_tool_would_train_otherwise_is_refused(tool, changes, message):
    with pytest.raises(ForerunError) as refused:
        launch(replace(PLAN, **changes), LLAMA, CLUSTER, tool)
    assert str(refused.value).startswith(f"--launch {tool}: {message}")


@pytest.mark.parametrize(
    ("tool", "model", "message"),
    [
        ("torchtitan-0.2", "gpt2-xl", "gelu feed-forward"),
        ("torchtitan", "mixtral-8x7b", "experts without qk_norm"),
        ("megatron-lm", "bert-large", "attention without a causal mask"),
        ("deepspeed", "resnet50", "is given layer by layer"),
    ],
)
def test_models_that_a_tool_cannot_build_are_refused(tool, model, message):
    plan = Plan(seq_len=1 if model == "resnet50" else 512)
    with pytest.raises(ForerunError, match=f"--launch {tool}: {model}.*{message}"):
        launch(plan, load_any(model), CLUSTER, tool)


@pytest.mark.parametrize("change", [{"position": "alibi"}, {"mlp": "relu"}, {"norm_bias": False}, {"mlp_bias": False}])
def test_parts_that_megatron_lacks_are_refused(change):
    with pytest.raises(ForerunError, match="--launch megatron-lm: gpt2-xl: Megatron-LM"):
        launch(Plan(seq_len=512), replace(load_model("gpt2-xl"), **change), CLUSTER, "megatron-lm")


def test_unknown_tools_and_impossible_plans_are_refused():
    with pytest.raises(UnknownName, match=r"unknown tool 'titan'; .*known: accelerate"):
        launch(PLAN, LLAMA, CLUSTER, "titan")
    with pytest.raises(ImpossiblePlan, match="not divisible by tp 3"):
        launch(replace(PLAN, tp=3), LLAMA, CLUSTER, "torchtitan")


# -- around them ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "node_size", "nodes"),
    [(64, 8, (8, 8)), (4, 8, (1, 4)), (12, 8, (2, 6)), (7, 4, (7, 1)), (16, 0, (1, 16))],
)
def test_nodes_are_filled_equally(world, node_size, nodes):
    assert nodes_of(world, node_size) == nodes


@pytest.mark.parametrize("tool", TOOLS)
def test_a_name_cannot_leave_its_comment(tool, tmp_path):
    model = replace(LLAMA, name='x"""\nexit 1\n$(exit 1)')
    files = launch_files(replace(WITHOUT_AXES, stack="pytorch"), model, CLUSTER, tool)
    program = "accelerate" if "accelerate" in tool else "torchrun"
    assert arguments_of(tmp_path, files, program)[-1] == "--extra"
    for name, text in files.items():
        if name.endswith(".py"):
            assert len(ast.parse(text).body) > 1


@pytest.mark.parametrize(
    ("method", "rotates", "noted"), [("ring", "alltoall", False), ("allgather", "allgather", False),
                                     ("ulysses", "allgather", True)]
)  # fmt: skip
def test_torchtitan_passes_keys_and_values_round_or_gathers_them(method, rotates, noted):
    plan = replace(WITHOUT_AXES, cp=2, cp_method=method)
    files = launch_files(plan, LLAMA, CLUSTER, "torchtitan-0.2")
    assert toml(files["forerun.toml"])["parallelism"]["context_parallel_rotate_method"] == rotates
    assert ("cp_method ulysses" in files[NOTES]) == noted


def test_notes_say_what_differs():
    notes = launch_files(replace(PLAN, prefetch=2), LLAMA, CLUSTER, "torchtitan-0.2")[NOTES]
    assert "* prefetch 2: FSDP2 gathers one unit ahead" in notes


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ForerunError, match="can't be made a folder: "):
        write_launch(tmp_path / "file" / "folder", {"a": "b"})
