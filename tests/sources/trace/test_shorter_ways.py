"""What the tracer computes in fewer steps than torch has the same result: operators over lists of tensors, and the fake
values of a graph after Inductor's passes."""

import pytest
from virtual_process import run_virtual

pytest.importorskip("torch", reason="tracing needs torch")

LISTS = """
def described(tensors):
    return [[list(t.shape), list(t.stride()), str(t.dtype), str(t.device), t.requires_grad] for t in tensors]

sizes = [(4, 8), (16,), (4, 8), (), (16,), (4, 8)]
made = [torch.empty(size, device="cuda", dtype=d) for size in sizes for d in (torch.float32, torch.bfloat16)]
made.append(torch.empty(8, 4, device="cuda").t())
others = [t.float() for t in made]
scalars = [float(i) for i in range(len(made))]
calls = {
    "add": (torch._foreach_add, torch.add, (made, others)),
    "in place": (torch._foreach_mul_, torch.Tensor.mul_, (others, made)),
    "scalars": (torch._foreach_mul, torch.mul, (made, scalars)),
    "one scalar": (torch._foreach_div, torch.div, (made, 3)),
    "norm": (torch._foreach_norm, torch.linalg.vector_norm, (made,)),
    "three lists": (torch._foreach_addcdiv, torch.addcdiv, (others, others, others)),
}
for name, (of_list, of_one, args) in calls.items():
    each = [of_one(*(a[i] if isinstance(a, list) else a for a in args)) for i in range(len(made))]
    out = of_list(*args)
    out = args[0] if out is None else out
    storages = {t.untyped_storage()._cdata for t in out}
    result[name] = described(out) == described(each) and len(storages) == len(made)
result["refused"] = fails(lambda: torch._foreach_add(made, made[:3]))
result["shapes"] = fails(lambda: torch._foreach_add(made[:2], [made[2], torch.empty(3, 3, 3, device="cuda")]))
from forerun.sources.trace.inside import list_operators
kinds = list_operators._kinds(mode.fake, torch.ops.aten._foreach_add.List, (made, others), {})
result["kinds"] = [len(kinds), len(set(kinds))]
"""


@pytest.mark.slow
def test_an_operator_over_a_list_gives_what_each_tensor_gives(tmp_path):
    found = run_virtual(LISTS, tmp_path)
    for name in ("add", "in place", "scalars", "one scalar", "norm", "three lists"):
        assert found[name] is True, name
    assert found["kinds"] == [13, 7], "thirteen tensors of seven kinds"
    assert "same number" in found["refused"], "lists of different lengths are refused"
    assert "size of tensor" in found["shapes"] or "broadcast" in found["shapes"], "so are shapes that don't match"


UPDATES = """
import random
from torch.fx.experimental.proxy_tensor import make_fx
from torch._inductor import fx_utils
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from forerun.sources.trace.inside.torch_versions.graph_passes import skip_unchanged_nodes

aten = torch.ops.aten
def program(x, *weights):
    parts = torch._foreach_mul(list(weights), 2.0)
    total = x.sin()
    for part in parts:
        total = total + part.cos().sum() * part
    return total, [part.exp() for part in torch._foreach_sqrt(parts)]

def update(seed):
    "Fake values of a graph after random changes of its nodes, and how many the update made anew."
    with FakeTensorMode() as fakes:
        given = [torch.empty(4, 4) for _ in range(6)]
        gm = make_fx(program)(*given)
        found = []
        with V.set_fake_mode(fakes):
            updater = fx_utils.FakeTensorUpdater(gm)
            chance = random.Random(seed)
            for _ in range(3):
                for node in list(gm.graph.nodes):
                    if node.target in (aten.cos.default, aten.exp.default) and chance.random() < 0.3:
                        node.target = aten.isnan.default
                    elif node.target is aten.sin.default and chance.random() < 0.5:
                        with gm.graph.inserting_before(node):
                            node.args = (gm.graph.call_function(aten.to.dtype, (node.args[0], torch.float64)),)
                made = updater.incremental_update()
                found.append(made)
        for node in gm.graph.nodes:
            value = node.meta.get("val")
            for t in value if isinstance(value, (list, tuple)) else [value]:
                found.append(str((node.name, getattr(t, "dtype", None), getattr(t, "shape", None))))
    return found

mode.__exit__(None, None, None)
torch_own = [update(seed) for seed in range(5)]
skip_unchanged_nodes()
looked = []
arguments_of = fx_utils.get_fake_args_kwargs
fx_utils.get_fake_args_kwargs = lambda *a: looked.append(a[0]) or arguments_of(*a)
result["same"] = torch_own == [update(seed) for seed in range(5)]
result["updated"] = sum(map(sum, (one[:3] for one in torch_own)))
mode.__enter__()
"""


@pytest.mark.slow
def test_fake_values_are_updated_where_torch_updates_them(tmp_path):
    found = run_virtual(UPDATES, tmp_path)
    assert found["updated"] > 20
    assert found["same"]
