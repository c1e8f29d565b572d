"""Megatron-LM's arguments read as a recipe: known answers, no script runs, and what --launch writes comes back."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.common.errors import ForerunError
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.complete import complete_plan
from forerun.describe.plan.plan import Plan
from forerun.describe.recipe.read import read_recipe
from forerun.describe.recipe.shell import words_of_script
from forerun.interfaces.report.launch.tools import launch, write_launch
from forerun.sources.symbolic.schedule import layers_of_stages

sys.path.insert(0, str(Path(__file__).parents[2] / "interfaces" / "report"))
from launch_cases import CLUSTER, random_case

SCRIPT = r"""#!/bin/bash
# It's a comment with a quotation mark.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=4
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT_PATH=$1 #<path>
TP_SIZE=${TP_SIZE:-4}
DTYPE="fp8"
MODEL_ARGS=(
    --num-layers 32   # layers
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --untie-embeddings-and-output-weights
    --disable-bias-linear
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 128
    --lr 1e-4
    --bf16
    --grad-reduce-in-bf16
    --save "$CHECKPOINT_PATH"
    --tokenizer-name-of-mine x
    --novel-switch
)
if [[ "$DTYPE" == "fp8" ]]; then
    TRAINING_ARGS+=("--fp8-format hybrid" "--fp8-recipe tensorwise")
else
    TRAINING_ARGS+=(--fp16)
fi
PARALLEL="--tensor-model-parallel-size $TP_SIZE \
    --sequence-parallel --pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce"
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES pretrain_gpt.py \
    ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} \
    ${PARALLEL} --vocab-size 128256
"""


def read(tmp_path, text, name="train.sh"):
    path = tmp_path / name
    path.write_text(text)
    return read_recipe(path)


def plan_of(recipe, gpus=None):
    values, batch, gpus = recipe.under({}, None, gpus)
    return complete_plan(values, n_gpus=gpus, global_batch=batch)


def test_a_script_in_the_shape_of_the_examples(tmp_path):
    recipe = read(tmp_path, SCRIPT)
    plan = plan_of(recipe)
    assert replace(recipe.named_model(), name="llama-3.1-8b") == load_model("llama-3.1-8b")
    assert (plan.tp, plan.pp, plan.dp_shard, plan.world_size) == (4, 2, 4, 32)
    assert (plan.seq_len, plan.micro_batch, plan.global_batch) == (8192, 1, 128)
    assert (plan.zero_stage, plan.sequence_parallel, plan.overlap_grad_reduce) == (1, True, True)
    assert (plan.precision, plan.fp8_recipe, plan.reduce_dtype) == ("fp8", "tensorwise", "bf16")
    assert plan.stack == "megatron-core"
    assert recipe.unused == ("novel-switch",)


def test_arguments_as_yaml(tmp_path):
    text = """
ENV_VARS: {CUDA_DEVICE_MAX_CONNECTIONS: 1}
MODEL_ARGS:
  --tensor-model-parallel-size: 2
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --seq-length: 1024
  --max-position-embeddings: 1024
  --vocab-file: ${DATA_PATH}/vocab.json
  --merge-file: ${DATA_PATH}/merges.txt
  --micro-batch-size: 4
  --global-batch-size: 32
  --recompute-granularity: full
  --recompute-method: uniform
  --recompute-num-layers: 1
  --use-distributed-optimizer: false
  --fp16: true
"""
    recipe = read(tmp_path, text, "model_config.yaml")
    model, plan = recipe.named_model(), plan_of(recipe, 8)
    assert (model.vocab, model.position, model.max_positions, model.mlp) == (50257, "learned", 1024, "gelu")
    assert (model.ffn_hidden, model.qkv_bias, model.tied_embeddings) == (2048, True, True)
    assert (plan.tp, plan.dp_shard, plan.n_microbatches, plan.zero_stage) == (2, 4, 2, 0)
    assert (plan.activation_checkpointing, plan.precision) == ("full", "fp16")


def test_fields_of_a_nemo_recipe(tmp_path):
    text = """
model: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, context_parallel_size: 1, num_layers: 16,
  virtual_pipeline_model_parallel_size: null, sequence_parallel: true, hidden_size: 2048, num_attention_heads: 32,
  num_query_groups: 8, ffn_hidden_size: 8192, vocab_size: 128256, gated_linear_unit: true, normalization: RMSNorm,
  position_embedding_type: rope, add_bias_linear: false, share_embeddings_and_output_weights: true, seq_length: 4096}
train: {micro_batch_size: 1, global_batch_size: 64}
trainer: {devices: 8, num_nodes: 2}
ddp: {use_distributed_optimizer: true, overlap_grad_reduce: true}
mixed_precision: bf16_mixed
"""
    recipe = read(tmp_path, text, "recipe.yaml")
    plan = plan_of(recipe)
    assert replace(recipe.named_model(), name="llama-3.2-1b") == load_model("llama-3.2-1b")
    assert (plan.tp, plan.pp, plan.dp_shard, plan.global_batch, plan.precision) == (2, 2, 4, 64, "bf16")
    assert (plan.sequence_parallel, plan.zero_stage) == (True, 1)
    assert recipe.unused == ()


def test_a_plain_list_of_arguments(tmp_path):
    text = "--tensor-model-parallel-size 2\n--seq-length=2048\n--micro-batch-size 2\n--bf16\n"
    assert plan_of(read(tmp_path, text, "args.txt"), 4).dp_shard == 2
    listed = "\n".join(f"- {line}" for line in text.splitlines())
    assert plan_of(read(tmp_path, listed, "args.yaml"), 4) == plan_of(read(tmp_path, text, "args.txt"), 4)


SIZES = """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --seq-length 4096
--max-position-embeddings 4096 --vocab-size 32000 --micro-batch-size 1 --global-batch-size 64 --bf16
"""


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ("", {"activation_checkpointing": "none", "cuda_graphs": False, "offload": "none", "optimizer": "adamw"}),
        ("--recompute-granularity full", {"activation_checkpointing": "full", "checkpoint_every": 1}),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
            {"activation_checkpointing": "full", "checkpoint_every": 1},
        ),
        (  # 4 of the 16 layers of a stage
            "--recompute-granularity full --recompute-method block --recompute-num-layers 4 "
            "--pipeline-model-parallel-size 2",
            {"activation_checkpointing": "full", "checkpoint_every": 4, "pp": 2},
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 64",
            {"activation_checkpointing": "full", "checkpoint_every": 1},
        ),
        ("--recompute-activations", {"activation_checkpointing": "selective"}),
        ("--cpu-offloading-num-layers 8", {"activation_offload": 0.25}),
        ("--cpu-offloading-num-layers 64", {"activation_offload": 1.0}),
        ("--optimizer-cpu-offload", {"offload": "optimizer"}),
        ("--offload-optimizer-states", {"offload": "optimizer"}),
        ("--enable-cuda-graph", {"cuda_graphs": True}),
        ("--weight-decay 0.0", {"optimizer": "adam"}),
        ("--optimizer sgd", {"optimizer": "sgd"}),
        ("--transformer-impl local", {"stack": "megatron-core-local", "attention": "auto"}),
    ],
)
def test_an_argument_sets_its_fields(arguments, fields, tmp_path):
    plan = plan_of(read(tmp_path, SIZES + arguments + "\n", "args.txt"), 8)
    assert {name: getattr(plan, name) for name in fields} == fields


@pytest.mark.parametrize(("rate", "drops"), [("0.1", True), ("0.0", False), ("0", False)])
def test_dropout_is_the_models(rate, drops, tmp_path):
    text = SIZES + f"--attention-dropout {rate}\n"
    model = read(tmp_path, text, "args.txt").named_model()
    assert (model.attention_dropout, model.hidden_dropout) == (drops, None)


def test_a_rate_of_dropout_is_a_probability(tmp_path):
    with pytest.raises(ForerunError, match=r"attention-dropout.* must be from 0 to 1, got 1\.5"):
        read(tmp_path, SIZES + "--attention-dropout 1.5\n", "args.txt").named_model()


def test_what_launch_writes_is_read_back(tmp_path):
    """Each field that the script holds comes back as it was, and so do the sizes of the model."""
    compared = 0
    for number in range(1000):
        model, plan = random_case(number)
        plan = replace(plan, stack="megatron-core")
        try:
            made = launch(plan, model, CLUSTER, "megatron-lm")
        except ForerunError:
            continue
        write_launch(tmp_path / str(number), made.files)
        recipe = read_recipe(tmp_path / str(number) / "launch.sh")
        back = plan_of(recipe, plan.world_size)
        held = set(made.written) - set(made.noted) - set(made.implied)
        held -= {"layers_per_stage", "balance_ends", "activation_offload", "zero_stage", "fp8_recipe", "ddp_bucket_mib"}
        held -= {"attention", "dispatcher", "cuda_graphs", "overlap_grad_reduce", "dp_replicate", "dp_shard"}
        held -= {"precision"} if plan.precision == "tf32" else set()
        held -= {"activation_checkpointing"} if "selective_policy" in made.noted else set()
        held -= {"mesh_order"} if plan.pp == 1 else set()
        held -= {"expert_overlap", "etp", "ep"} if model.moe is None else set()
        for name in held:
            assert getattr(plan, name) in (getattr(back, name), "auto"), (name, number, plan)
        if plan.fsdp > 1 and plan.optimizer != "muon":
            assert (back.zero_stage, back.dp_shard) == (plan.zero_stage, plan.dp_shard) or plan.zero_stage == 0, plan
        assert back.world_size == plan.world_size
        assert back.global_batch == plan.global_batch
        assert layers_of_stages(model.n_layers, back) == layers_of_stages(model.n_layers, plan)
        dropped = {"attention_dropout": model.attention_dropout, "hidden_dropout": model.hidden_dropout}
        read_model = replace(recipe.named_model(), name=model.name, max_positions=model.max_positions, **dropped)
        assert read_model == model, (number, model)
        assert recipe.unused == (), number
        compared += 1
    assert compared > 20


@pytest.mark.parametrize(
    "trick",
    ["X=$(touch ran)", "X=`touch ran`", "eval touch ran", "touch ran", "X=$((0)) ; touch ran", ": ${X:=$(touch ran)}"],
)
def test_nothing_in_a_script_runs(trick, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = read(tmp_path, SCRIPT.replace("GPUS_PER_NODE=8", f"{trick}\nGPUS_PER_NODE=8"))
    assert plan_of(recipe).world_size == 32
    assert [path.name for path in tmp_path.iterdir()] == ["train.sh"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (SCRIPT.replace("TP_SIZE=${TP_SIZE:-4}", "TP_SIZE=$(rm -rf /)"), "must be a whole number, got"),
        (
            SCRIPT.replace("TP_SIZE=${TP_SIZE:-4}", "TP_SIZE=$2"),
            'tensor-model-parallel-size must be a whole number, got "$2"',
        ),
        (SCRIPT.replace("--seq-length 8192", "--seq-length long"), "seq-length must be a whole number"),
        (SCRIPT.replace("RMSNorm", "BatchNorm"), "normalization 'BatchNorm' is not known; known: LayerNorm, RMSNorm"),
        (SCRIPT[: SCRIPT.index("--lr")], "never closed; is it cut short?"),
        ("echo hello\n", "has none of Megatron-LM's arguments"),
        ("", "has none of Megatron-LM's arguments"),
        ("A=xx\n" + 'A="$A$A"\n' * 40 + "--seq-length $A\n", "expands to more than"),
    ],
)
def test_a_wrong_script_is_one_line(text, says, tmp_path):
    with pytest.raises(ForerunError) as caught:
        plan_of(read(tmp_path, text))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_python_is_not_read(tmp_path):
    with pytest.raises(ForerunError, match="nothing is run"):
        read(tmp_path, "import os", "recipe.py")


def test_branches_and_arithmetic():
    text = (
        'N=2\nM=$((N*4))\nif [ $N -gt 3 ]; then\nA=(--a 1)\nelif [ "$N" = 2 ]; then\nA=(--a 2)\nelse\nA=(--a 3)\nfi\n'
    )
    assert words_of_script(text + "python x.py ${A[@]} --m $M --n ${K:-7}\n", "x")[-6:] == [
        "--a",
        "2",
        "--m",
        "8",
        "--n",
        "7",
    ]


@pytest.mark.parametrize(
    ("test", "branch"),
    [
        *(("3 -gt 3", "c"), ("4 -gt 3", "a"), ("3 -lt 3", "c"), ("2 -lt 3", "a"), ("10 -lt 9", "c")),
        *(("$N == 2", "a"), ("$N != 2", "c"), ("$N -eq 3", "c"), ("$N -ne 3", "a"), ("x = x", "a")),
        *(('-n "$EMPTY"', "c"), ('-z "$EMPTY"', "a"), ('-n "$N"', "a"), ('-z "$N"', "c"), ("$UNKNOWN == 2", "c")),
        *(("x -gt 3", "c"), ("-f file", "c"), ("$N == 3 ] || [ $N == 2", "a")),
    ],
)
def test_a_branch_is_taken_as_a_shell_takes_it(test, branch):
    """Of `if`, `elif` and `else` one branch is taken, and none within a branch that is not."""
    inner = "if [ 1 == 1 ]; then\nA=(--{0})\nfi\n"
    script = "N=2\nEMPTY=\nif [ {0} ]; then\n{1}elif [ 1 == 2 ]; then\n{2}else\n{3}fi\npython x.py ${{A[@]}}\n"
    text = script.format(test, *(inner.format(letter) for letter in "abc"))
    assert words_of_script(text, "x")[-1] == f"--{branch}"


@pytest.mark.parametrize(
    ("term", "result"), [("7*3", "21"), ("7+3", "10"), ("7-3", "4"), ("7/3", "2"), ("$N * M", "8"), ("7/0", "$((7/0))")]
)
def test_arithmetic_is_that_of_a_shell(term, result):
    assert words_of_script(f"N=2\nM=4\npython x.py --n=$(({term}))\n", "x")[-1] == f"--n={result}"


@pytest.mark.parametrize(
    ("word", "known"),
    [
        *(("$NOWHERE", "$NOWHERE"), ("${NOWHERE}", "${NOWHERE}"), ("${NOWHERE:-5}", "5"), ('${NOWHERE:-"5"}', "5")),
        *(("$N", "2"), ("${N}", "2"), ("${N:-5}", "2"), ("${EMPTY:-5}", "5"), ("x${N}y", "x2y")),
    ],
)
def test_a_variable_stands_for_its_value_and_an_unknown_one_stays(word, known):
    assert words_of_script(f"N=2\nEMPTY=\npython x.py --k={word}\n", "x")[-1] == f"--k={known}"


def test_a_backslash_joins_lines_and_takes_a_sign_for_itself():
    text = 'python x.py --a 1 \\\n--b \\"2\\; --c 3\\\n4 --d "5 \\" 6"\n'
    assert words_of_script(text, "x")[-9:] == ["--a", "1", "--b", '"2;', "--c", "3", "4", "--d", '5 " 6']


def test_modules_that_predict_further_tokens_come_back(tmp_path):
    model = replace(load_model("llama-3.1-8b"), mtp_modules=2)
    plan = complete_plan({"seq_len": 4096, "tp": 2, "stack": "megatron-core", "zero_stage": 1}, 16, 64)
    write_launch(tmp_path, launch(plan, model, CLUSTER, "megatron-lm").files)
    scripts = [path for path in tmp_path.iterdir() if "--mtp-num-layers 2" in path.read_text()]
    assert [read_recipe(path).model.mtp_modules for path in scripts] == [2]


def test_torchtitan_has_no_modules_that_predict_further_tokens():
    model = replace(load_model("llama-3.1-8b"), mtp_modules=1)
    with pytest.raises(ForerunError, match="no modules that predict further tokens"):
        launch(Plan(seq_len=4096, dp_shard=8), model, CLUSTER, "torchtitan")
