"""The parts that apply a plan to a module, each on its own."""

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel  # noqa: E402
from warm_process import fork, wait  # noqa: E402

from forerun.common.errors import ForerunError, ImpossiblePlan  # noqa: E402
from forerun.describe.plan.plan import Plan  # noqa: E402
from forerun.sources.symbolic.schedule import layers_of_stages, rank_stages  # noqa: E402
from forerun.sources.trace.inside.parallelize.apply import check_traceable, compile_layers, materialise  # noqa: E402
from forerun.sources.trace.inside.parallelize.checkpoint import checkpoint_layers  # noqa: E402
from forerun.sources.trace.inside.parallelize.data import around_layers  # noqa: E402
from forerun.sources.trace.inside.parallelize.depth import PassThrough, layer_containers, on_meta  # noqa: E402
from forerun.sources.trace.inside.parallelize.expert import expert_parallel, grouped_experts, skew_of  # noqa: E402
from forerun.sources.trace.inside.parallelize.pipeline import cut_stage, own_stages, stage_sizes  # noqa: E402
from forerun.sources.trace.inside.parallelize.tensor import llama_styles, matching, model_styles, style_of  # noqa: E402
from forerun.sources.trace.inside.parallelize.training_loop import clip_gradients, default_loss, make_optimizer  # noqa: E402

_FILE = Path(__file__).parents[3] / "examples" / "llama" / "model.py"


def example():
    spec = importlib.util.spec_from_file_location("llama_example", _FILE)
    module = sys.modules["llama_example"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


llama = example()
TINY = llama.LlamaConfig(dim=32, n_layers=7, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=64, seq_len=16)


def tiny():
    return on_meta(lambda: llama.Llama(TINY))


def quiet(_):
    raise AssertionError("nothing to note")


# -- plans ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"zero_stage": 1, "dp_shard": 2}, "zero_stage 1 has no counterpart"),
        ({"cp": 2, "cp_method": "ulysses"}, "ulysses has no counterpart"),
        ({"offload": "optimizer"}, "offload optimizer has no counterpart"),
        ({"activation_offload": 0.5}, "offloads all saved activations"),
        ({"precision": "nvfp4"}, "precision nvfp4 can't be traced"),
        ({"ep": 2, "dp_shard": 2, "zero_stage": 0}, "ep 2 can.t be traced without zero_stage 3"),
        ({"tp": 2, "dp_replicate": 4}, "tp 2 under DDP can.t be traced.*replace dp_replicate 4 by dp_shard 4"),
    ],
)
def test_what_pytorch_lacks_is_refused_by_name(fields, text):
    with pytest.raises(ForerunError, match=text):
        check_traceable(Plan(seq_len=16, **fields), quiet)


def test_what_is_traced_as_something_else_is_noted():
    notes = []
    check_traceable(Plan(seq_len=16, cuda_graphs=True, async_tp=True, tp=2), notes.append)
    assert [note.split(":")[0] for note in notes] == ["cuda_graphs", "async_tp"]


# -- names of modules ----------------------------------------------------------------------------------------------


def test_patterns_match_word_by_word():
    model = tiny()
    assert len(matching(model, "layers.*.attention.w[qkv]")) == 3 * TINY.n_layers
    assert matching(model, "layers.3.feed_forward.w2") == [model.layers["3"].feed_forward.w2]
    assert matching(model, "layers.*") == list(model.layers.values())
    assert matching(model, "*.attention") == []


def test_the_plan_for_llama_names_only_what_is_there():
    styles = llama_styles(tiny(), Plan(seq_len=16, tp=2))
    assert isinstance(styles["layers.*.attention.wo"], RowwiseParallel)
    assert isinstance(styles["layers.*.ffn_norm"], SequenceParallel)
    assert "layers.*.moe" not in styles
    assert "norm" not in llama_styles(tiny(), Plan(seq_len=16, tp=2, sequence_parallel=False))
    assert llama_styles(nn.Sequential(nn.Linear(2, 2)), Plan(seq_len=16, tp=2)) == {}


def test_plans_of_hugging_face_models_are_understood():
    model = nn.Module()
    model.model, model.base_model_prefix = nn.Module(), "model"
    model.lm_head = nn.Linear(4, 4)
    model.config = SimpleNamespace(base_model_tp_plan={"layers.*.self_attn.q_proj": "colwise"})
    model._tp_plan = {"lm_head": "colwise_gather_output"}
    assert model_styles(model) == {
        "model.layers.*.self_attn.q_proj": "colwise",
        "lm_head": "colwise_gather_output",
    }
    plan = Plan(seq_len=16, tp=2)
    assert isinstance(style_of("a.q_proj", "colwise", plan, False, quiet), ColwiseParallel)
    assert style_of("lm_head", "colwise_gather_output", plan, True, quiet).use_local_output is False
    noted = []
    assert style_of("a.experts", "moe_tp_experts", plan, False, noted.append) is None
    assert "moe_tp_experts" in noted[0]
    with pytest.raises(ForerunError, match="'a': unknown style 'diagonal'; known: colwise"):
        style_of("a", "diagonal", plan, False, quiet)


@pytest.mark.parametrize("other", [{}, None, ["a"], lambda: {"a": "rowwise"}])
def test_a_plan_that_is_empty_or_no_mapping_is_passed_over(other):
    model = nn.Module()
    model.tp_plan = other
    assert model_styles(model) is None
    model._tp_plan = {"head": "colwise"}
    assert model_styles(model) == {"head": "colwise"}


def test_ends_of_a_model_are_found_around_its_layers():
    model = tiny()
    front, back = around_layers(model, layer_containers(model))
    assert (front, back) == ([model.tok_embeddings], [model.norm, model.output])


# -- memory and checkpoints --------------------------------------------------------------------------------------------


class Broken(nn.Linear):
    """A layer whose forward pass is no single graph."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


def test_a_compiled_layer_is_one_graph():
    model = nn.Sequential(Broken(2, 2), Broken(2, 2))
    compile_layers(model, [model])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        model(torch.ones(1, 2))


def test_memory_is_given_once_to_what_is_shared():
    model = tiny()
    model.output.weight = model.tok_embeddings.weight
    materialise(model, "cpu", "cpu")
    assert model.output.weight is model.tok_embeddings.weight
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}


def test_every_second_layer_is_checkpointed():
    model = tiny()
    plan = Plan(seq_len=16, activation_checkpointing="full", checkpoint_every=2)
    checkpoint_layers(layer_containers(model), plan)
    wrapped = [name for name, layer in model.layers.items() if hasattr(layer, "_checkpoint_wrapped_module")]
    assert wrapped == ["1", "3", "5"]


@pytest.mark.parametrize(
    ("policy", "wrapped"),
    [("mlp", ["feed_forward"]), ("attention-block", ["attention"]), ("attention+mlp", ["attention", "feed_forward"])],
)
def test_a_policy_by_parts_wraps_these_parts_of_every_layer(policy, wrapped):
    model = tiny()
    plan = Plan(seq_len=16, activation_checkpointing="selective", selective_policy=policy)
    checkpoint_layers(layer_containers(model), plan)
    for layer in model.layers.values():
        assert [name for name, part in layer.named_children() if hasattr(part, "_checkpoint_wrapped_module")] == wrapped


def test_a_policy_for_parts_that_are_not_there_names_those_that_are():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)])
    plan = Plan(seq_len=16, activation_checkpointing="selective", selective_policy="mlp")
    with pytest.raises(ForerunError, match=r"a Sequential has none of feed_forward.*it has 0, 1"):
        checkpoint_layers([model], plan)


# -- stages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBV", "DualPipeV"])
def test_ranks_hold_the_stages_that_the_symbolic_path_gives_them(schedule):
    virtual = 1 if schedule == "1F1B" else 2
    plan = Plan(seq_len=16, pp=4, pp_schedule=schedule, virtual_stages=virtual, n_microbatches=8)
    assert [own_stages(plan, rank) for rank in range(4)] == [rank_stages(plan, rank) for rank in range(4)]


@pytest.mark.parametrize("n_layers", [8, 13, 126])
@pytest.mark.parametrize("balance", [False, True])
def test_layers_spread_as_the_symbolic_path_spreads_them(n_layers, balance):
    plan = Plan(seq_len=16, pp=4, n_microbatches=4, balance_ends=balance)
    assert stage_sizes(n_layers, plan) == layers_of_stages(n_layers, plan)


def test_layers_that_do_not_spread_are_refused():
    with pytest.raises(ImpossiblePlan, match="3 layers do not spread over 4 stages"):
        stage_sizes(3, Plan(seq_len=16, pp=4, n_microbatches=4))
    with pytest.raises(ImpossiblePlan, match="does not spread 7 layers over 2 stages"):
        stage_sizes(7, Plan(seq_len=16, pp=2, n_microbatches=2, layers_per_stage=(3, 3)))


def test_stages_together_compute_what_the_model_does():
    torch.manual_seed(0)
    whole = llama.Llama(TINY)
    plan = Plan(seq_len=16, pp=3, n_microbatches=3)
    stages = []
    for number in range(3):
        stage = llama.Llama(TINY)
        stage.load_state_dict(whole.state_dict())
        cut_stage(stage, layer_containers(stage), plan, number)
        stages.append(stage)
    assert [list(stage.layers) for stage in stages] == [["0", "1", "2"], ["3", "4"], ["5", "6"]]
    assert isinstance(stages[1].tok_embeddings, PassThrough)
    assert isinstance(stages[1].output, PassThrough)
    tokens = x = torch.randint(TINY.vocab_size, (2, 16))
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, whole(tokens))


# -- the step ----------------------------------------------------------------------------------------------------------


def test_the_loss_is_the_models_own_or_cross_entropy():
    logits = torch.randn(2, 3, 5)
    target = torch.randint(5, (2, 3))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    assert torch.equal(default_loss(logits, target), expected)
    assert torch.equal(default_loss((logits, None), target), expected)
    assert torch.equal(default_loss(SimpleNamespace(loss=None, logits=logits), target), expected)
    assert default_loss(SimpleNamespace(loss=torch.tensor(3.0), logits=logits), None) == 3
    flat = torch.nn.functional.cross_entropy(logits[0], target[0])
    assert torch.equal(default_loss(logits[0], target[0]), flat)
    with pytest.raises(ForerunError, match="returns dict, not logits or a loss; pass loss="):
        default_loss({}, None)


def test_gradients_are_clipped_as_torch_does_it():
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        (model(torch.ones(2, 4)) * 7).sum().backward()
    clip_gradients([models[0]])
    torch.nn.utils.clip_grad_norm_(models[1].parameters(), 1.0)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd", "adafactor"])
def test_the_optimizer_is_the_plans(kind):
    plan = Plan(seq_len=16, optimizer=kind, optimizer_impl="foreach")
    made = make_optimizer([nn.Linear(2, 2)], plan, None)
    assert type(made).__name__.lower() == kind
    assert made.defaults["foreach"]
    assert not made.defaults.get("fused")


@pytest.mark.parametrize("kind", ["muon", "adamw8bit"])
def test_an_optimizer_that_torch_has_not_for_all_parameters_is_refused(kind):
    with pytest.raises(ForerunError, match=f"optimizer {kind} is not one of torch.optim"):
        make_optimizer([nn.Linear(2, 2)], Plan(seq_len=16, optimizer=kind), None)


# -- experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("imbalance", [1.0, 1.3, 2.0, 3.5])
def test_the_busiest_rank_has_what_the_plan_says(imbalance):
    s = skew_of(imbalance, 32, 4)
    weights = [1 / (i + 1) ** s for i in range(32)]
    assert sum(weights[:8]) / sum(weights) * 4 == pytest.approx(imbalance, rel=1e-6)


class Experts(nn.Module):
    """Stacked experts as a loop, so that they run on any device and dtype."""

    def __init__(self, n_experts, dim):
        super().__init__()
        self.w = nn.Parameter(torch.randn(n_experts, dim, dim, dtype=torch.float64))

    def forward(self, x, tokens_per_expert):
        parts = torch.split(x, tokens_per_expert.tolist())
        return torch.cat([part @ w for part, w in zip(parts, self.w, strict=True)])


def test_stacked_experts_are_found_by_their_weights_and_inputs():
    config = llama.LlamaConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, n_experts=4, seq_len=16)
    model = on_meta(lambda: llama.Llama(config))
    assert grouped_experts(model) == [layer.moe.experts for layer in model.layers.values()]
    assert grouped_experts(tiny()) == []
    with pytest.raises(ForerunError, match="ep 2: Llama has no module with stacked experts"):
        expert_parallel(tiny(), None, Plan(seq_len=16, ep=2, dp_shard=2))


def expert_rank(rank, folder):
    """Train split experts on one of two ranks against whole ones."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    whole = Experts(6, 8)
    split = nn.Sequential(Experts(6, 8))
    split[0].load_state_dict(whole.state_dict())
    meshes = SimpleNamespace(experts=lambda: mesh, axis=lambda _: mesh)
    expert_parallel(split, meshes, Plan(seq_len=16, ep=2, dp_shard=2))
    torch.manual_seed(1 + rank)
    counts = torch.tensor([[3, 0, 5, 1, 2, 4], [0, 7, 1, 1, 0, 6]][rank])
    x = torch.randn(15, 8, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [module(one, counts) for module, one in zip((whole, split[0]), inputs, strict=True)]
    for out in outputs:
        (out**2).sum().backward()
    dist.all_reduce(whole.w.grad)
    mine = split[0].w.grad.to_local()
    expected = whole.w.grad[3 * rank : 3 * rank + 3]
    assert torch.allclose(outputs[0], outputs[1])
    assert torch.allclose(inputs[0].grad, inputs[1].grad)
    assert torch.allclose(mine, expected)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_split_experts_compute_what_whole_ones_do(tmp_path):
    with (tmp_path / "said.txt").open("wb") as sink:
        ranks = [fork(lambda rank=rank: expert_rank(rank, tmp_path), sink.fileno(), {}) for rank in range(2)]
    assert [wait(rank, 120) for rank in ranks] == [0, 0], (tmp_path / "said.txt").read_text()[-4000:]
