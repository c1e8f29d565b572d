"""torchtitan's TOML read as a recipe: known answers, and what --launch writes comes back."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.common.errors import ForerunError
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.complete import complete_plan
from forerun.describe.recipe.read import read_recipe
from forerun.interfaces.report.launch.tools import launch, write_launch
from forerun.sources.symbolic.schedule import layers_of_stages

sys.path.insert(0, str(Path(__file__).parents[2] / "interfaces" / "report"))
from launch_cases import CLUSTER, random_case

H100 = load_cluster("h100-sxm")
LLAMA = """
[job]
description = "Llama 3 8B training"
[model]
name = "llama3"
flavor = "8B"
converters = ["quantize.linear.float8"]
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 2
seq_len = 8192
unheard_of = 7
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 4
context_parallel_degree = 1
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
[compile]
enable = true
components = ["model"]
[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
filter_fqns = ["output"]
"""
OF_BEFORE = """
[model]
name = "llama3"
flavor = "70B"
[training]
batch_size = 8
seq_len = 4096
compile = true
data_parallel_replicate_degree = 1
data_parallel_shard_degree = 16
tensor_parallel_degree = 8
[experimental]
context_parallel_degree = 1
pipeline_parallel_degree = 2
[activation_checkpoint]
mode = "full"
"""


def read(tmp_path, text):
    path = tmp_path / "train.toml"
    path.write_text(text)
    return read_recipe(path)


def plan_of(recipe, gpus=None):
    values, batch, gpus = recipe.under({}, None, gpus)
    return complete_plan(values, n_gpus=gpus, global_batch=batch)


def test_a_configuration_in_the_shape_of_torchtitans_own(tmp_path):
    recipe = read(tmp_path, LLAMA)
    plan = plan_of(recipe, 64)
    assert recipe.named_model() == load_model("llama-3.1-8b")
    assert (plan.seq_len, plan.micro_batch, plan.n_microbatches) == (8192, 2, 1)
    assert (plan.dp_replicate, plan.dp_shard, plan.tp, plan.cp, plan.pp) == (2, 8, 4, 1, 1)
    assert (plan.activation_checkpointing, plan.checkpoint_every) == ("full", 2), "2 recomputes every second layer"
    assert (plan.compile, plan.compile_loss, plan.optimizer, plan.optimizer_impl) == (True, False, "adamw", "fused")
    assert (plan.precision, plan.fp8_recipe, plan.fp8_all_gather) == ("fp8", "tensorwise", True)
    assert plan.stack == "torchtitan"
    assert recipe.unused == ("training.unheard_of",)


@pytest.mark.parametrize(
    ("schedule", "own", "virtual"),
    [
        *(("1F1B", "1F1B", 1), ("GPipe", "GPipe", 1), ("Interleaved1F1B", "Interleaved1F1B", 2)),
        ("ZBVZeroBubble", "ZBV", 2),
    ],
)
def test_schedules_of_several_stages_a_rank_have_two(schedule, own, virtual, tmp_path):
    text = LLAMA.replace('"Interleaved1F1B"', f'"{schedule}"\npipeline_parallel_degree = 2')
    plan = plan_of(read(tmp_path, text), 16)
    assert (plan.pp, plan.pp_schedule, plan.virtual_stages) == (2, own, virtual)


@pytest.mark.parametrize(
    ("lines", "etp", "dispatcher"),
    [
        ("", 1, "auto"),
        ("expert_tensor_parallel_degree = 4\n", 4, "auto"),
        ('expert_parallel_comm_backend = "deepep"\n', 1, "deepep"),
    ],
)
def test_experts_stay_whole_unless_the_file_splits_them(lines, etp, dispatcher, tmp_path):
    experts = 'name = "deepseek_v3"\nflavor = "16B"'
    text = LLAMA.replace('name = "llama3"\nflavor = "8B"', experts)
    text = text.replace("[parallelism]\n", f"[parallelism]\nexpert_parallel_degree = 4\n{lines}")
    plan = plan_of(read(tmp_path, text), 16)
    assert (plan.ep, plan.etp, plan.dispatcher, plan.tp) == (4, etp, dispatcher, 4)


@pytest.mark.parametrize(("line", "micro", "number"), [("", 1, 4), ("pipeline_parallel_microbatch_size = 2\n", 2, 2)])
def test_a_pipeline_cuts_the_local_batch_into_micro_batches(line, micro, number, tmp_path):
    text = LLAMA.replace("local_batch_size = 2", "local_batch_size = 4")
    text = text.replace("[parallelism]\n", f"[parallelism]\npipeline_parallel_degree = 2\n{line}")
    plan = plan_of(read(tmp_path, text), 16)
    assert (plan.micro_batch, plan.n_microbatches, plan.pp) == (micro, number, 2)


@pytest.mark.parametrize(
    ("option", "kind", "every", "policy"),
    [
        *(("op", "selective", 1, "op"), ("1", "full", 1, "op"), ("2", "full", 2, "op"), ("999", "full", 999, "op")),
        *(("0", "", 0, ""), ("1000", "", 0, ""), ("-1", "", 0, ""), ("layer", "", 0, "")),
    ],
)
def test_what_is_recomputed(option, kind, every, policy, tmp_path):
    text = LLAMA.replace('selective_ac_option = "2"', f'selective_ac_option = "{option}"')
    if not kind:
        with pytest.raises(ForerunError, match=f"every n-th layer is recomputed; got '{option}'"):
            read(tmp_path, text)
        return
    plan = plan_of(read(tmp_path, text), 16)
    assert (plan.activation_checkpointing, plan.checkpoint_every, plan.selective_policy) == (kind, every, policy)


@pytest.mark.parametrize(
    ("shard", "cp", "stage", "sharded"), [(1, 1, 0, 1), (2, 1, 3, 2), (1, 2, 3, 1), (-1, 1, 3, 2), (-1, 2, 3, 1)]
)
def test_parameters_are_sharded_over_shards_and_context(shard, cp, stage, sharded, tmp_path):
    text = LLAMA.replace("data_parallel_shard_degree = -1", f"data_parallel_shard_degree = {shard}")
    text = text.replace("context_parallel_degree = 1", f"context_parallel_degree = {cp}")
    plan = plan_of(read(tmp_path, text), 8 * sharded * cp)
    assert (plan.zero_stage, plan.dp_shard, plan.dp_replicate, plan.cp) == (stage, sharded, 2, cp)


def test_a_recipe_may_compile_the_loss_alone(tmp_path):
    plan = plan_of(read(tmp_path, LLAMA.replace('components = ["model"]', 'components = ["loss"]')), 64)
    assert (plan.compile, plan.compile_model, plan.compile_loss) == (True, False, True)


def test_names_of_older_releases(tmp_path):
    plan = plan_of(read(tmp_path, OF_BEFORE))
    assert (plan.micro_batch, plan.n_microbatches) == (1, 8), "a pipeline cuts the local batch into single sequences"
    assert (plan.dp_shard, plan.tp, plan.pp, plan.world_size) == (16, 8, 2, 256)
    assert plan.compile
    assert plan.stack == "torchtitan-0.1"


def test_what_the_file_leaves_out_is_as_torchtitan_has_it(tmp_path):
    recipe = read(tmp_path, '[model]\nname = "llama3"\n')
    plan = plan_of(recipe, 8)
    assert recipe.named_model().hidden == 256, "flavor debugmodel"
    assert (plan.seq_len, plan.micro_batch, plan.dp_shard, plan.checkpoint_every) == (2048, 8, 8, 2)


def test_what_the_user_gives_overrides_the_recipe(tmp_path):
    values, batch, gpus = read(tmp_path, LLAMA).under({"tp": 2, "micro_batch": 1}, 128, 32)
    plan = complete_plan(values, n_gpus=gpus, global_batch=batch)
    assert (plan.tp, plan.dp_shard, plan.micro_batch, plan.n_microbatches) == (2, 8, 1, 8)


def test_what_launch_writes_is_read_back(tmp_path):
    """Each field that a file holds comes back as it was, and so do the sizes of the model."""
    compared = 0
    for number in range(1200):
        model, plan = random_case(number)
        plan = replace(plan, stack="torchtitan")
        try:
            made = launch(plan, model, CLUSTER, "torchtitan-0.2")
        except ForerunError:
            continue
        folder = tmp_path / str(number)
        write_launch(folder, made.files)
        recipe = read_recipe(folder / "forerun.toml")
        back = plan_of(recipe)
        held = set(made.written) - set(made.noted)
        same_ddp = plan.zero_stage == 0 or plan.fsdp == 1  # torchtitan replicates over one axis
        held -= {"dp_replicate", "dp_shard", "zero_stage"} if same_ddp else set()
        held -= {"layers_per_stage", "balance_ends"}  # the modules of each stage say both
        held -= {"fp8_recipe"} if plan.fp8_recipe == "none" else set()
        held -= {"precision"} if plan.precision == "tf32" else set()
        held -= {"compile_model", "compile_loss"} if not plan.compile else set()
        held -= {"activation_checkpointing", "checkpoint_every"} if "selective_policy" in made.noted else set()
        assert layers_of_stages(model.n_layers, back) == layers_of_stages(model.n_layers, plan)
        for name in held:
            assert getattr(back, name) == getattr(plan, name), (name, number, plan)
        assert back.world_size == plan.world_size
        assert back.global_batch == plan.global_batch
        assert back.stack == plan.stack
        assert recipe.unused == ()
        assert replace(recipe.named_model(), name=model.name, max_positions=model.max_positions) == model
        compared += 1
    assert compared > 20


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[training\nseq_len = 4096", "not TOML"),
        ("", "none of the tables"),
        ("[tool.ruff]\nline = 1", "none of the tables"),
        ('[training]\nseq_len = "long"', "training.seq_len must be a whole number"),
        ("[training]\nseq_len = true", "training.seq_len must be a whole number"),
        ("[parallelism]\ntensor_parallel_degree = 0", "tensor_parallel_degree must be at least 1"),
        ('[optimizer]\nname = "Lion"\n[training]\nseq_len=1', "optimizer.name 'Lion' is not known; known: AdamW, Adam"),
        ('[training]\ndtype = "float8"', "training.dtype 'float8' is not known"),
        ('[activation_checkpoint]\nmode = "some"\n[training]\nseq_len=1', "activation_checkpoint.mode 'some' is not"),
        ('[activation_checkpoint]\nselective_ac_option = "-1"\n[training]\nseq_len=1', "every n-th layer"),
        ("[parallelism]\npipeline_parallel_degree=2\nmodule_fqns_per_model_part=[1]", "lists of names of modules"),
    ],
)
def test_a_wrong_file_is_one_line(text, says, tmp_path):
    with pytest.raises(ForerunError) as caught:
        read(tmp_path, text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "train.toml"))


@pytest.mark.parametrize("flavor", ["8Q", "17bx16e"])
def test_an_unknown_flavor_asks_for_the_model(flavor, tmp_path):
    recipe = read(tmp_path, LLAMA.replace('"8B"', f'"{flavor}"'))
    with pytest.raises(ForerunError, match="name the model before --recipe"):
        recipe.named_model()


def test_the_module_beside_a_file_is_never_run(tmp_path):
    text = '[model]\nname = "mine"\nflavor = "a"\n[experimental]\ncustom_import = "mine"\n[training]\nseq_len = 64\n'
    module = 'open("ran", "w")\nARGS = TransformerModelArgs(dim=64, n_layers=2, n_heads=4, vocab_size=100)\n'
    (tmp_path / "mine.py").write_text(module)
    model = read(tmp_path, text).named_model()
    assert (model.hidden, model.n_layers, model.n_heads, model.ffn_hidden) == (64, 2, 4, 256)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "mine.py").write_text("ARGS = TransformerModelArgs(dim=__import__('os').getpid())")
    with pytest.raises(ForerunError, match="only literals are read"):
        read(tmp_path, text).named_model()
    (tmp_path / "mine.py").write_text("ARGS = TransformerModelArgs(dim=")
    with pytest.raises(ForerunError, match="not a Python module"):
        read(tmp_path, text)
    (tmp_path / "mine.py").write_bytes(b"ARGS = '\xff'")
    with pytest.raises(ForerunError, match="not UTF-8"):
        read(tmp_path, text)


OWN_MODELS = {
    "llama-3.1-8b": """TransformerModelArgs(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, vocab_size=128256,
        ffn_dim_multiplier=1.3, multiple_of=1024, rope_theta=500000)""",
    "qwen3-8b": """Qwen3ModelArgs(dim=4096, n_layers=36, n_heads=32, n_kv_heads=8, head_dim=128, hidden_dim=12288,
        vocab_size=151936, rope_theta=1000000, qk_norm=True)""",
    "deepseek-v2-lite": """DeepSeekV3ModelArgs(dim=2048, n_layers=27, n_heads=16, vocab_size=102400, inter_dim=10944,
        moe_inter_dim=1408, n_dense_layers=1, q_lora_rank=0, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, rope_theta=10000,
        moe_args=MoEArgs(num_experts=64, num_shared_experts=2, top_k=6, load_balance_coeff=None))""",
}
"""published sizes in torchtitan's words"""


@pytest.mark.parametrize("name", OWN_MODELS)
def test_a_model_in_the_module_beside_a_file_is_the_published_one(name, tmp_path):
    text = '[model]\nname = "mine"\nflavor = "a"\n[experimental]\ncustom_import = "mine"\n[training]\nseq_len = 64\n'
    for left_out in ("", "q_lora_rank=0, ", ", qk_norm=True"):
        (tmp_path / "mine.py").write_text(f"ARGS = {OWN_MODELS[name].replace(left_out, '')}\n")
        model, published = read(tmp_path, text).named_model(), load_model(name)
        fields = ("hidden", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_hidden", "vocab", "mla", "moe")
        found = {field: getattr(model, field) for field in (*fields, "qk_norm", "tied_embeddings")}
        assert found == {field: getattr(published, field) for field in found}


def test_the_gpus_that_are_left_are_asked_for(tmp_path):
    with pytest.raises(ForerunError, match="say how many with --gpus"):
        plan_of(read(tmp_path, LLAMA))
