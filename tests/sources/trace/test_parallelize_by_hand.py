"""The parts that apply a plan to a module, against what arithmetic and torch itself say."""

import contextlib
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402
from torch.nn.attention import SDPBackend  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from forerun.common.errors import ForerunError, ImpossiblePlan  # noqa: E402
from forerun.describe.plan.plan import Plan  # noqa: E402
from forerun.sources.trace.inside.parallelize import data, module_program, training_loop  # noqa: E402
from forerun.sources.trace.inside.parallelize.apply import check_traceable  # noqa: E402
from forerun.sources.trace.inside.parallelize.checkpoint import checkpoint_layers  # noqa: E402
from forerun.sources.trace.inside.parallelize.depth import keep_repeats, repeated_layers  # noqa: E402
from forerun.sources.trace.inside.parallelize.mesh import Meshes  # noqa: E402
from forerun.sources.trace.inside.parallelize.pipeline import cut_stage, own_stages, stage_sizes  # noqa: E402
from forerun.sources.trace.inside.parallelize.tensor import (  # noqa: E402
    Gathered,
    LocalTokens,
    ReplicatedWeights,
    style_of,
    tensor_parallel,
)
from forerun.sources.trace.inside.parallelize.training_loop import (  # noqa: E402
    Training,
    attention_of,
    clip_gradients,
    default_loss,
    logits_of,
    loss_of,
    make_optimizer,
    offloaded_activations,
    on_device,
    unique,
)
from forerun.sources.trace.module_request import ModuleRequest  # noqa: E402


def planned(**fields):
    return Plan(**{"seq_len": 16} | fields)


def noted(**fields):
    notes = []
    check_traceable(planned(**fields), notes.append)
    return [note.partition(":")[0].split()[0] for note in notes]


# -- what a trace takes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dp_replicate": 2},
        {"tp": 2},
        {"tp": 2, "dp_shard": 2},
        {"cp_method": "ulysses"},
        {"cp_load_balance": "striped"},
        {"cp": 2, "cp_method": "ring", "cp_load_balance": "head_tail", "dp_shard": 1},
        {"ep": 2, "dp_shard": 2},
        {"offload": "params", "dp_shard": 2},
        {"activation_offload": 1.0},
        {"precision": "fp8", "dp_shard": 2},
        {"loss_chunks": 1},
        {"async_tp": True, "tp": 2, "compile": True},
    ],
)
def test_what_pytorch_has_is_traced_without_a_note(fields):
    assert noted(**fields) == []


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"loss_chunks": 2}, "loss_chunks is not put into a traced model"),
        ({"document_lengths": (8, 8)}, "document_lengths is not put into a traced model"),
        ({"lora_rank": 8}, "lora_rank is not put into a traced model"),
        ({"cp": 2, "cp_load_balance": "striped", "cp_method": "ring"}, "striped has no counterpart"),
        ({"cp": 2, "cp_method": "ulysses"}, "use ring or allgather"),
        ({"zero_stage": 1, "dp_shard": 2}, "zero_stage must be 0 .DDP. or 3"),
    ],
)
def test_what_only_scripts_can_do_is_refused(fields, text):
    with pytest.raises(ForerunError, match=text):
        noted(**fields)


def test_overlap_cannot_be_left_out():
    assert noted(overlap_grad_reduce=False) == ["overlap_grad_reduce"]
    assert noted(async_tp=True, tp=2, compile=False) == ["async_tp"]


# -- meshes ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def ranks(world_size, rank=0, labels=False):
    """This process as one rank of many that say nothing. With `labels` groups take a name as those of a trace do."""
    named = {}
    with pytest.MonkeyPatch.context() as patch:
        group_of = DeviceMesh.get_group
        if labels:
            patch.setattr(
                DeviceMesh, "get_group", lambda mesh: named.setdefault(group_of(mesh).group_name, SimpleNamespace())
            )
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()


def members(mesh):
    return None if mesh is None else mesh.mesh.tolist()


def test_axes_of_one_rank_are_left_out():
    meshes = Meshes(planned(), "cpu")
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    assert [meshes.axis(name) for name in names] == [None] * 6
    assert meshes.sharded() is meshes.replicated() is meshes.world is None


def test_the_last_axes_of_a_mesh_are_nearest():
    plan = planned(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2, n_microbatches=2, cp_method="ring")
    with ranks(32, rank=13, labels=True):  # 13 = 0b01101: pp 0, dp_replicate 1, dp_shard 1, cp 0, tp 1
        meshes = Meshes(plan, "cpu")
        assert members(meshes.axis("tp")) == [12, 13]
        assert members(meshes.axis("cp")) == [13, 15]
        assert members(meshes.axis("dp_shard")) == [9, 13]
        assert members(meshes.axis("dp_replicate")) == [5, 13]
        assert members(meshes.axis("pp")) == [13, 29]
        assert members(meshes.axis("dp_shard_cp")) == [9, 11, 13, 15]
        assert members(meshes.sharded()) == [[1, 3, 5, 7], [9, 11, 13, 15]]
        assert members(meshes.replicated()) == [1, 3, 5, 7, 9, 11, 13, 15]
        labels = {name: meshes.axis(name).get_group().label for name in ("pp", "cp", "tp", "dp_shard_cp")}
        assert labels == {name: name for name in labels}


@pytest.mark.parametrize("dp_replicate", [1, 2])
def test_experts_are_spread_within_the_ranks_that_shard(dp_replicate):
    plan = planned(dp_replicate=dp_replicate, dp_shard=4, tp=2, ep=2)
    with ranks(8 * dp_replicate, labels=True):
        meshes = Meshes(plan, "cpu")
        assert members(meshes.axis("ep")) == [0, 2]
        assert members(meshes.axis("dp_shard")) == [0, 2, 4, 6]
        assert members(meshes.experts()) == [[0, 1], [2, 3]]
        assert members(meshes.axis("dp_shard_cp")) == [0, 2, 4, 6]
        if dp_replicate == 1:
            assert members(meshes.sharded()) == [0, 2, 4, 6]
            assert members(meshes.expert_sharded()) == [0, 4]
        else:
            assert members(meshes.sharded()) == [[0, 2, 4, 6], [8, 10, 12, 14]]
            assert members(meshes.expert_sharded()) == [[0, 4], [8, 12]]
        assert meshes.axis("dp_shard_mod_ep").get_group().label == "dp_expert"


def test_experts_on_all_ranks_that_shard_leave_units_of_one_rank():
    with ranks(4, labels=True):
        meshes = Meshes(planned(dp_shard=4, ep=4), "cpu")
        assert members(meshes.expert_sharded()) == [0]
        assert members(meshes.experts()) == [0, 1, 2, 3]


def test_experts_take_the_ranks_of_a_context_first():
    with ranks(8, labels=True):
        meshes = Meshes(planned(dp_shard=4, cp=2, ep=4, cp_method="ring"), "cpu")
        assert members(meshes.axis("ep")) == [0, 1, 2, 3]
        assert members(meshes.expert_sharded()) == [0, 4]
        assert members(meshes.axis("dp_shard_cp")) == list(range(8))
    with pytest.raises(ImpossiblePlan, match="ep 2 must be a multiple of cp 4 and divide dp_shard 4 x cp 4"):
        Meshes(planned(dp_shard=4, cp=4, ep=2, cp_method="ring"), "cpu")


def test_ranks_that_hold_everything_are_one_axis_for_ddp():
    with ranks(4, labels=True):
        meshes = Meshes(planned(dp_replicate=4), "cpu")
        assert members(meshes.replicated()) == [0, 1, 2, 3]
        assert meshes.sharded() is None
    with ranks(4, labels=True):
        meshes = Meshes(planned(dp_replicate=2, cp=2, zero_stage=0, cp_method="ring"), "cpu")
        assert members(meshes.replicated()) == [0, 1, 2, 3]


# -- stages and layers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_layers", "fields", "sizes"),
    [
        (8, {}, [2, 2, 2, 2]),
        (10, {}, [3, 3, 2, 2]),
        (4, {}, [1, 1, 1, 1]),
        (10, {"balance_ends": True}, [2, 3, 3, 2]),
        (11, {"balance_ends": True}, [3, 3, 3, 2]),
        (2, {"balance_ends": True}, [0, 1, 1, 0]),
        (9, {"layers_per_stage": (1, 3, 3, 2)}, [1, 3, 3, 2]),
    ],
)
def test_layers_spread_evenly_and_the_rest_comes_first(n_layers, fields, sizes):
    assert stage_sizes(n_layers, planned(pp=4, n_microbatches=4, **fields)) == sizes


@pytest.mark.parametrize("fields", [{}, {"balance_ends": True}])
def test_fewer_layers_than_stages_are_refused(fields):
    with pytest.raises(ImpossiblePlan, match="1 layers do not spread over 4 stages"):
        stage_sizes(1, planned(pp=4, n_microbatches=4, **fields))


def test_stages_go_down_the_ranks_in_rounds_or_down_and_up():
    rounds = planned(pp=4, virtual_stages=2, pp_schedule="Interleaved1F1B", n_microbatches=4)
    assert [own_stages(rounds, rank) for rank in (0, 3)] == [[0, 4], [3, 7]]
    v = planned(pp=4, virtual_stages=2, pp_schedule="ZBV", n_microbatches=8)
    assert [own_stages(v, rank) for rank in (0, 3)] == [[0, 7], [3, 4]]


def test_a_stage_keeps_its_layers_under_numbers_from_zero():
    def model():
        return nn.Sequential(nn.Embedding(8, 4), nn.Sequential(*[layer(4) for _ in range(5)]), nn.Linear(4, 8))

    plan, cut = planned(pp=2, n_microbatches=2), []
    for stage in range(2):
        part = model()
        part[1][3].mark = "the fourth"
        cut_stage(part, [part[1]], plan, stage)
        cut.append(part)
    assert [len(part[1]) for part in cut] == [3, 2]
    assert list(cut[1][1]._modules) == ["0", "1"]
    assert cut[1][1][0].mark == "the fourth"
    assert [type(part[0]).__name__ for part in cut] == ["Embedding", "PassThrough"]
    assert [type(part[2]).__name__ for part in cut] == ["PassThrough", "Linear"]
    whole = model()
    with pytest.raises(ForerunError, match="pp 2: Sequential does not have all its layers in one container"):
        cut_stage(whole, [whole[1], whole[1]], plan, 0)


def layer(width, number=0):
    made = nn.Sequential(nn.Linear(width, width), nn.ReLU())
    made.number = number
    return made


@pytest.mark.parametrize(
    ("widths", "found"),
    [
        ([4, 4, 4], (0, 1, 3)),
        ([4, 8, 4, 8, 4, 8], (0, 2, 3)),
        ([8, 4, 4, 4, 16], (1, 1, 3)),
        ([4, 8, 16], None),
        ([4, 4, 8, 4, 4, 8, 4, 4, 8], (0, 3, 3)),
        ([4, 4], (0, 1, 2)),
    ],
)
def test_the_shortest_period_that_covers_the_most_layers_repeats(widths, found):
    run = repeated_layers(nn.ModuleDict({"layers": nn.ModuleList([layer(one) for one in widths])}))
    assert (None if run is None else (run.first, run.period, run.repeats)) == found


def test_removed_layers_leave_those_behind_them_numbered():
    layers = nn.ModuleList([layer(8), *[layer(4, i) for i in range(1, 7)], layer(16, 7)])
    for number, one in enumerate(layers):
        one.number = number
    model = nn.ModuleDict({"layers": layers})
    run = repeated_layers(model)
    assert (run.path, run.first, run.n_layers) == ("layers", 1, 6)
    keep_repeats(run, 2)
    assert [one.number for one in layers] == [0, 1, 2, 3]
    assert [one[0].in_features for one in layers] == [8, 4, 4, 16]
    assert list(layers._modules) == ["0", "1", "2", "3"]


def test_layers_with_names_keep_them():
    names = nn.ModuleDict({name: layer(4) for name in ("a", "b", "c", "d")} | {"end": layer(8)})
    keep_repeats(repeated_layers(nn.ModuleDict({"layers": names})), 2)
    assert list(names) == ["a", "b", "end"]


@pytest.mark.parametrize(
    ("fields", "n_layers"),
    [
        ({}, [2, 3, 4]),
        ({"checkpoint_every": 3}, [2, 3, 4]),
        ({"activation_checkpointing": "full", "checkpoint_every": 3}, [8, 11, 14]),  # 20 = 6 * 3 + 2
        ({"activation_checkpointing": "full", "checkpoint_every": 4}, [8, 12, 16]),
    ],
)
def test_shallow_variants_end_as_the_model_does(fields, n_layers, monkeypatch):
    """Each depth keeps whole rounds of checkpointed layers, and the layers that the last round lacks."""
    seen = []
    for own in (2, 3, 4):
        layers = nn.ModuleList([layer(4) for _ in range(20)])
        model = nn.ModuleDict({"layers": layers})
        request = SimpleNamespace(plan=planned(**fields), depths=(own,))
        monkeypatch.setattr(module_program, "_train", lambda *_, layers=layers: seen.append(len(layers)))
        module_program._fork_shallow(None, request, None, model, repeated_layers(model))
    assert seen == n_layers


# -- data parallelism --------------------------------------------------------------------------------------------------


class Unit(nn.Linear):
    """A unit of FSDP2, which remembers what it gathers ahead."""

    def __init__(self):
        super().__init__(2, 2)

    def set_modules_to_forward_prefetch(self, units):
        self.forward_units = units

    def set_modules_to_backward_prefetch(self, units):
        self.backward_units = units


def test_units_are_gathered_ahead_in_the_order_in_which_they_run():
    units = nn.ModuleList([Unit() for _ in range(5)])
    data._prefetch([units], planned(dp_shard=2, prefetch=2), pytest.fail)
    place = {id(unit): i for i, unit in enumerate(units)}
    assert [[place[id(one)] for one in unit.forward_units] for unit in units] == [[1, 2], [2, 3], [3, 4], [4], []]
    assert [[place[id(one)] for one in unit.backward_units] for unit in units] == [[], [0], [1, 0], [2, 1], [3, 2]]
    once = nn.ModuleList([Unit() for _ in range(3)])
    data._prefetch([once], planned(dp_shard=2, prefetch=1), pytest.fail)
    assert not hasattr(once[0], "forward_units")
    notes = []
    data._prefetch([once], planned(dp_shard=2, prefetch=0), notes.append)
    assert len(notes) == 1


def test_weights_that_modules_share_are_found():
    embedding, head, body = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False), nn.Linear(4, 4)
    assert not data._tied([embedding], [body, head])
    head.weight = embedding.weight
    assert data._tied([embedding], [body, head])
    model = nn.Sequential(embedding, body, head)
    assert not data._owned_elsewhere(model, [embedding, head])
    assert data._owned_elsewhere(model, [embedding])


def test_dtypes_of_activations_and_gradients():
    of = [(one, data.compute_dtype(planned(precision=one))) for one in ("bf16", "fp16", "fp32", "tf32", "fp8")]
    expected = [torch.bfloat16, torch.float16, torch.float32, torch.float32, torch.bfloat16]
    assert [dtype for _, dtype in of] == expected
    assert data.reduce_dtype(planned(reduce_dtype="auto")) == torch.float32
    assert data.reduce_dtype(planned(reduce_dtype="bf16")) == torch.bfloat16


# -- tensor parallelism ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", [ReplicatedWeights, LocalTokens])
def test_weights_that_see_other_tokens_on_each_rank_have_partial_gradients(style):
    with ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
        module[1].bias.requires_grad_(False)
        style()._apply(module, mesh)
        x = torch.ones(3, 4)
        given = DTensor.from_local(x, mesh, (Shard(0),), run_check=False) if style is LocalTokens else x
        with CommDebugMode() as counted:
            out = module(given)
            assert type(out) is torch.Tensor
            assert out.shape == (3, 4)
            out.sum().backward()
        assert counted.get_total_counts() == 0
        weights = list(module.parameters())
        assert [weight.placements for weight in weights] == [(Replicate(),)] * 3  # again, after the forward pass
        assert [weight.requires_grad for weight in weights] == [True, True, False]
        assert [weights[number].grad.placements for number in (0, 1)] == [(Partial(),)] * 2


def test_an_input_that_is_split_along_the_sequence_is_gathered_once():
    with ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        module, whole = nn.Identity(), torch.ones(2, 3, 4)
        Gathered()._apply(module, mesh)
        (gather,) = module._forward_pre_hooks.values()
        for given in (whole, DTensor.from_local(whole, mesh, (Shard(1),), run_check=False)):
            with CommDebugMode() as counted:
                first, second = gather(module, (given, "the rest"))
            assert counted.get_total_counts() == 1
            assert (first.placements, tuple(first.shape), second) == ((Replicate(),), (2, 6, 4), "the rest")


@pytest.mark.parametrize(
    ("word", "inputs", "outputs"),
    [
        ("colwise", Replicate(), Shard(-1)),
        ("rowwise", Shard(-1), Replicate()),
        ("colwise_rep", Replicate(), Replicate()),
        ("rowwise_rep", Replicate(), Replicate()),
        ("embedding_rowwise", Replicate(), Replicate()),
    ],
)
def test_words_of_hugging_face_say_how_inputs_and_outputs_lie(word, inputs, outputs):
    style = style_of("a", word, planned(tp=2), False, pytest.fail)
    assert (style.input_layouts, style.output_layouts) == ((inputs,), (outputs,))


def test_the_head_makes_sharded_logits_for_a_loss_over_the_vocabulary():
    sharded = planned(tp=2, loss_parallel=True)
    head = style_of("head", "colwise_gather_output", sharded, True, pytest.fail)
    assert (head.output_layouts, head.use_local_output) == ((Shard(-1),), False)
    for plan, is_head, word in ((planned(tp=2, loss_parallel=False), True, "colwise_gather_output"),
                                (sharded, False, "colwise_gather_output")):  # fmt: skip
        assert style_of("head", word, plan, is_head, pytest.fail).output_layouts == (Replicate(),)
    assert style_of("head", "rowwise", sharded, True, pytest.fail).output_layouts == (Replicate(),)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)


def test_keys_that_match_nothing_are_noted_and_others_are_sharded():
    with ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Module()
        model.layers = nn.ModuleList([Layer(), Layer()])
        notes = []
        given = {"layers.*.proj": "colwise", "layers.*.proj.weight": "colwise", "gone": "rowwise"}
        tensor_parallel(model, mesh, planned(tp=2), given, notes.append)
        assert [one.proj.weight.placements for one in model.layers] == [(Shard(0),)] * 2
        assert notes == ["tp_plan: 'gone' matches no submodule of Module; skipped"]
        with pytest.raises(ForerunError, match="none of its 1 keys matches a submodule of Module"):
            tensor_parallel(model, mesh, planned(tp=2), {"gone": "rowwise"}, notes.append)
        with pytest.raises(ForerunError, match="tp 2: Module has no tp_plan and no module named as in Llama"):
            tensor_parallel(model, mesh, planned(tp=2), None, notes.append)


# -- the step ----------------------------------------------------------------------------------------------------------


def test_what_a_model_returns_has_logits_or_is_them():
    tensor, other = torch.ones(2, 3), torch.zeros(2)
    assert logits_of(SimpleNamespace(logits=tensor, last_hidden_state=other)) is tensor
    assert logits_of(SimpleNamespace(logits=None, last_hidden_state=other)) is other
    assert logits_of((tensor, other)) is logits_of([tensor]) is logits_of(tensor) is tensor
    assert logits_of(()) == ()
    assert default_loss(torch.tensor(2.5), None) == 2.5
    with pytest.raises(ForerunError, match="the model returns Tensor, not logits or a loss"):
        default_loss(torch.ones(2, 3, dtype=torch.int64), None)


def test_inputs_are_positional_or_named(monkeypatch):
    monkeypatch.setattr(training_loop, "_moved", lambda value: ("moved", value))
    tensor = torch.ones(2)
    assert on_device({"a": 1, "b": 2}) == ((), {"a": ("moved", 1), "b": ("moved", 2)})
    assert on_device(tensor) == ((("moved", tensor),), {})
    assert on_device([1, 2]) == ((("moved", 1), ("moved", 2)), {})


def test_the_optimizer_has_what_is_trained():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    made = make_optimizer(model, planned(), None)
    assert [id(p) for group in made.param_groups for p in group["params"]] == [id(p) for p in model[1].parameters()]
    assert made.defaults["lr"] == 1e-4
    assert made.defaults["fused"] == (planned().optimizer_impl == "fused")
    assert make_optimizer(model, planned(), lambda parameters: ("own", parameters))[0] == "own"
    looped = make_optimizer(model, planned(optimizer_impl="foreach"), None)
    assert (looped.defaults["foreach"], looped.defaults["fused"]) == (True, False)


class Pipeline:
    def get_group(self):
        return "pp"


def test_the_norm_of_all_stages_clips_each(monkeypatch):
    def summed(total, group):
        assert group == "pp"
        total += 16.0  # the square of the norm of the other stages

    monkeypatch.setattr(dist, "all_reduce", summed)
    part = nn.Linear(3, 1, bias=False)
    part.weight.grad = torch.tensor([[3.0, 0.0, 0.0]])
    clip_gradients([part], Pipeline())
    assert part.weight.grad[0, 0] == pytest.approx(3 / 5, rel=1e-5)
    clip_gradients([nn.Linear(2, 2)], None)  # nothing has a gradient


def trained(model, plan, inputs, target, loss=None):
    request = ModuleRequest(
        None, inputs, plan, None, loss=loss, target=target, optimizer=lambda p: torch.optim.SGD(p, 0.5)
    )
    meshes = SimpleNamespace(axis=lambda name: None)
    Training([model], request, meshes).step()


@pytest.mark.parametrize("n_microbatches", [1, 3])
def test_a_step_descends_along_the_mean_gradient_of_its_micro_batches(monkeypatch, n_microbatches):
    monkeypatch.setattr(training_loop, "_moved", lambda value: value)
    torch.manual_seed(0)
    batches = [torch.randn(4, 6) for _ in range(n_microbatches)]
    target = torch.randint(3, (4,))
    model, expected = nn.Linear(6, 3), nn.Linear(6, 3)
    expected.load_state_dict(model.state_dict())
    given = iter(batches)
    plan = planned(n_microbatches=n_microbatches, precision="fp32", attention="auto")
    trained(model, plan, lambda: next(given), target)
    assert next(given, None) is None
    torch.stack([F.cross_entropy(expected(x), target) for x in batches]).mean().backward()
    nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
    torch.optim.SGD(expected.parameters(), 0.5).step()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_ddp_reduces_with_the_last_micro_batch_only(monkeypatch):
    class Replicated(nn.Module):
        def no_sync(self):
            return "delayed"

    monkeypatch.setattr(training_loop, "DistributedDataParallel", Replicated)
    run = SimpleNamespace(parts=[Replicated()])
    assert Training._reduction(run, False) == "delayed"
    assert isinstance(Training._reduction(run, True), contextlib.nullcontext)
    run.parts = [nn.Linear(2, 2)]
    assert isinstance(Training._reduction(run, False), contextlib.nullcontext)


def test_a_pipeline_gets_the_inputs_of_all_micro_batches():
    run = SimpleNamespace(plan=planned(pp=2, n_microbatches=3))
    tensor, scalar, other = torch.ones(2, 5), torch.tensor(3), object()
    joined, same, kept = Training._all(run, (tensor, scalar, other))
    assert joined.shape == (6, 5)
    assert same is scalar
    assert kept is other
    assert unique([tensor, scalar, tensor]) == [tensor, scalar]


def test_a_loss_sees_a_target_where_the_caller_has_one():
    def request(target, loss=None):
        return ModuleRequest(None, None, planned(), None, loss=loss, target=target)

    seen = loss_of(request(torch.ones(1), loss=lambda output, target: (output, target)))
    assert seen("logits", "target") == ("logits", "target")
    unseen = loss_of(request(None, loss=lambda output, target: (output, target)))
    assert unseen("logits", "target") == ("logits", None)
    assert loss_of(request(torch.ones(1)))(torch.tensor(3.0), None) == 3


def test_attention_is_chosen_among_torchs_backends():
    for name in ("auto", "sdpa"):
        assert isinstance(attention_of(planned(attention=name)), contextlib.nullcontext)
    with attention_of(planned(attention="cudnn")):
        assert torch.nn.attention._cur_sdpa_kernel_backends() == [SDPBackend.CUDNN_ATTENTION]
    with pytest.raises(
        ForerunError, match="attention flex can only be chosen in the model's code; a trace can set auto, "
    ):
        attention_of(planned(attention="flex"))


def test_saved_activations_are_offloaded_where_the_plan_says_so():
    assert isinstance(offloaded_activations(planned()), contextlib.nullcontext)
    offloaded = offloaded_activations(planned(activation_offload=1.0))
    assert isinstance(offloaded, torch.autograd.graph.save_on_cpu)


# -- checkpoints -------------------------------------------------------------------------------------------------------


class Ops(TorchDispatchMode):
    """Counts the calls of operators."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.products = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(5)])

    def forward(self, x):
        for product in self.products:
            x = F.relu(product(x)).exp()
        return x


def again(**fields):
    """How often the backward pass of two layers runs operators of the forward pass again."""
    model = nn.Sequential(Block(), Block())
    checkpoint_layers([model], planned(**fields))
    loss = model(torch.randn(3, 4)).sum()
    with Ops() as ops:
        loss.backward()
    return {name: ops.calls.get(name, 0) for name in ("mm", "relu", "exp")}


def test_backward_runs_again_what_a_policy_does_not_keep():
    own = again(activation_checkpointing="none")
    assert own == {"mm": 19, "relu": 0, "exp": 0}  # two gradients each, but of the input none

    def recomputed(**fields):
        return {name: count - own[name] for name, count in again(**fields).items()}

    assert recomputed(activation_checkpointing="full") == {"mm": 10, "relu": 10, "exp": 10}
    every_second = recomputed(activation_checkpointing="full", checkpoint_every=2)
    assert every_second == {"mm": 5, "relu": 5, "exp": 5}
    by_operation = recomputed(activation_checkpointing="selective", selective_policy="op")
    assert by_operation == {"mm": 4, "relu": 10, "exp": 10}  # the second and fourth product of either layer
    assert recomputed(activation_checkpointing="selective", selective_policy="attention") == {
        "mm": 0,
        "relu": 0,
        "exp": 0,
    }
    norms = recomputed(activation_checkpointing="selective", selective_policy="mlp-act-norm")
    assert norms == {"mm": 0, "relu": 10, "exp": 0}
    with pytest.raises(ForerunError, match="selective_policy params is what FSDP2 does"):
        again(activation_checkpointing="selective", selective_policy="params")
