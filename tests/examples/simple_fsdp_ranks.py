"""One rank of the SimpleFSDP checks: `simple_fsdp_ranks.py RANK WORLD_SIZE DIRECTORY`.

Each rank also trains the same model alone on the samples of all ranks. The first rank writes what it found, the worst
over all ranks, to DIRECTORY/found.json for the tests to judge.
"""

import copy
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import min_cut_rematerialization_partition
from model import Llama, ModelConfig
from simple_fsdp import MixedPrecision, data_parallel
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

BATCH, SEQ_LEN, VOCAB = 2, 16, 96
BF16 = MixedPrecision(torch.bfloat16, torch.float32)


class Odd(nn.Module):
    """Shapes that do not divide by the ranks, fewer rows than ranks, a scalar, a list, a frozen and a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB - 1, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.rows = nn.ParameterList([nn.Parameter(torch.randn(1, 7)), nn.Parameter(torch.randn(3, 7))])
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.first, self.second = nn.Linear(7, 7, bias=False), nn.Linear(7, 7)
        self.second.weight = self.first.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens % (VOCAB - 1)) * self.scale + self.rows[0] + self.rows[1].sum(0)
        x = self.frozen(self.second(torch.tanh(self.first(x))))
        return F.pad(x @ self.embedding.weight.T, (0, 1))


class Collectives(TorchDispatchMode):
    """Notes each collective with its input's bytes, and the storages that all-gathers fill."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []
        self.gathered: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
            self.seen.append((name, args[0].nbytes))
        if name == "all_gather_into_tensor":
            storage = out.untyped_storage()
            self.gathered.append((StorageWeakRef(storage), storage.nbytes()))
        return out

    def live_bytes(self) -> int:
        """Bytes of gathered weights that something still holds; gloo's threads may for a moment after the wait."""
        deadline_s = time.monotonic() + 1
        while (live := self.bytes_now()) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return live

    def bytes_now(self) -> int:
        return sum(nbytes for storage, nbytes in self.gathered if not storage.expired())


def llama(tied: bool = False, checkpoint: str = "none", layers: int = 2) -> Llama:
    config = ModelConfig(
        vocab=VOCAB, layers=layers, dim=32, heads=4, kv_heads=2, seq_len=SEQ_LEN, tied=tied, checkpoint=checkpoint
    )
    torch.manual_seed(7)
    return Llama(config)


def samples(step: int) -> torch.Tensor:
    """The token ids of all ranks in one step, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCAB, (BATCH * dist.get_world_size(), SEQ_LEN + 1), generator=generator)


def own(tokens: torch.Tensor) -> torch.Tensor:
    """This rank's part of the samples."""
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mean_over_ranks(loss: torch.Tensor) -> float:
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean.item()


def worst(value: float) -> float:
    """The largest over all ranks."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def farthest(ours: dict[str, torch.Tensor | None], theirs: dict[str, torch.Tensor | None]) -> float:
    """The largest difference between tensors of the same name, relative to the largest value of that tensor."""
    assert ours.keys() == theirs.keys()
    distance = 0.0
    for name, their in theirs.items():
        our = ours[name]
        assert (our is None) == (their is None), name
        if our is not None and their is not None:
            difference = (full(our).double() - full(their).double()).abs().max() / full(their).double().abs().max()
            distance = max(distance, difference.item())
    return worst(distance)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: param.grad for name, param in model.named_parameters()}


def values(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: param.detach() for name, param in model.named_parameters()}


def compare_step(model: nn.Module, alone: nn.Module, run: Callable[..., Any] | None = None) -> dict[str, float]:
    """One forward and backward of the model (as compiled in `run`) and of the same model alone."""
    loss, expected = loss_of(model if run is None else run, own(samples(0))), loss_of(alone, samples(0))
    loss.backward()
    expected.backward()
    return {
        "loss": abs(mean_over_ranks(loss) - expected.item()),
        "gradients": farthest(gradients(model), gradients(alone)),
    }


def compare_training(model: nn.Module, alone: nn.Module, steps: int = 3) -> dict[str, float]:
    """Train both with AdamW on new samples in each step."""
    found = {"loss": 0.0, "gradients": 0.0}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-6) for m in (model, alone)]
    for step in range(steps):
        loss, expected = loss_of(model, own(samples(step))), loss_of(alone, samples(step))
        loss.backward()
        expected.backward()
        found["loss"] = max(found["loss"], abs(mean_over_ranks(loss) - expected.item()))
        found["gradients"] = max(found["gradients"], farthest(gradients(model), gradients(alone)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found | {"parameters": farthest(values(model), values(alone))}


def compiled_with_graphs(model: nn.Module) -> tuple[Callable[..., Any], list[Counter[str]]]:
    """The model compiled as one graph, and how often each collective stands in its forward and backward graph."""
    graphs: list[Counter[str]] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        names = [getattr(node.target, "__name__", "").split(".")[0] for node in graph.graph.nodes]
        graphs.append(Counter(name for name in names if name in ("all_gather_into_tensor", "reduce_scatter_tensor")))
        return boxed_nop(graph, inputs)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    torch.compiler.reset()
    return torch.compile(model, backend=backend, fullgraph=True), graphs


def check_memory(mesh: DeviceMesh, mode: str, reshard: bool, checkpoint: str) -> dict[str, int]:
    """What of the gathered weights is alive between forward and backward, and how many were gathered in each."""
    model = data_parallel(llama(checkpoint=checkpoint), mesh, mode, reshard_after_forward=reshard)
    with Collectives() as collectives:
        loss = loss_of(model, own(samples(0)))
        forward = len(collectives.gathered)
        live = collectives.live_bytes()
        loss.backward()
    return {
        "live_bytes": live,
        "gathers_forward": forward,
        "gathers_backward": len(collectives.gathered) - forward,
        "live_bytes_in_the_end": collectives.live_bytes(),
    }


def check_against_fsdp2(mesh: DeviceMesh, mode: str, precision: MixedPrecision | None) -> dict[str, float]:
    """The same step under PyTorch's own FSDP2, which also means over ranks."""
    model = data_parallel(llama(), mesh, mode, precision)
    theirs = llama()
    policy = (
        MixedPrecisionPolicy(precision.param_dtype, precision.reduce_dtype) if precision else MixedPrecisionPolicy()
    )
    fully_shard(theirs, mesh=mesh, mp_policy=policy)
    losses = [loss_of(m, own(samples(0))) for m in (model, theirs)]
    for loss in losses:
        loss.backward()
    return {
        "loss": abs(mean_over_ranks(losses[0]) - mean_over_ranks(losses[1])),
        "gradients": farthest(gradients(model), gradients(theirs)),
    }


def check_bf16(mesh: DeviceMesh, mode: str) -> dict[str, Any]:
    model = data_parallel(llama(), mesh, mode, BF16)
    found: dict[str, Any] = compare_step(model, llama())
    found["dtypes"] = sorted({str(param.dtype) for param in model.parameters()})
    found["logits"] = str(model(own(samples(0))[:, :-1]).dtype)
    return found


def refusal(act: Callable[[], Any]) -> str:
    """The message with which a call is refused."""
    try:
        act()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def change_before_backward(mesh: DeviceMesh) -> None:
    model = data_parallel(llama(), mesh, "fully_shard")
    loss = loss_of(model, own(samples(0)))
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    loss.backward()


def check_refusals(mesh: DeviceMesh) -> dict[str, str]:
    lstm = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))
    twice = data_parallel(nn.Linear(2, 2), mesh)
    return {
        "mode": refusal(lambda: data_parallel(nn.Linear(2, 2), mesh, "zero3")),
        "mesh": refusal(lambda: data_parallel(nn.Linear(2, 2), mesh, "hybrid_shard")),
        "lstm": refusal(lambda: data_parallel(lstm, mesh)),
        "twice": refusal(lambda: data_parallel(twice, mesh)),
        "untouched": str(type(lstm[0].weight)),
        "changed": refusal(lambda: change_before_backward(mesh)),
    }


def check_checkpointing(mesh: DeviceMesh, mode: str, found: dict[str, Any]) -> None:
    for how in ("full", "selective"):
        model = data_parallel(llama(checkpoint=how), mesh, mode)
        found[f"{mode}/{how} checkpoint"] = compare_step(model, llama())


def check_compiled(mesh: DeviceMesh, mode: str, how: str, found: dict[str, Any], reshard: bool = True) -> None:
    model = data_parallel(llama(checkpoint=how, layers=1), mesh, mode, reshard_after_forward=reshard)
    run, graphs = compiled_with_graphs(model)
    name = f"{mode}/compiled, {how} checkpoint" + ("" if reshard else ", kept")
    found[name] = compare_step(model, llama(layers=1), run) | {"graphs": graphs}


def check_compiled_blocks(mesh: DeviceMesh, found: dict[str, Any]) -> None:
    """Blocks compiled one by one inside an eager model."""
    model = data_parallel(llama(), mesh, "fully_shard")
    torch.compiler.reset()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    found["fully_shard/compiled blocks"] = compare_step(model, llama())


def check_state(mesh: DeviceMesh) -> dict[str, Any]:
    """Names of the state, and a round trip through it."""
    model = data_parallel(llama(tied=True), mesh, "fully_shard")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(state)
    copied = copy.deepcopy(model)
    return {
        "names": list(state) == list(llama(tied=True).state_dict()),
        "parameters": farthest(values(copied), values(llama(tied=True))),
        "shards": sorted({str(param.placements) for param in model.parameters()}),
        "local_share": sum(p.to_local().numel() for p in model.parameters())
        / sum(p.numel() for p in model.parameters()),
    }


def odd() -> Odd:
    torch.manual_seed(5)
    return Odd()


def distance_from_first_rank(mesh: DeviceMesh) -> float:
    """How far the ranks' weights are from the first rank's when each rank was initialised otherwise."""
    torch.manual_seed(dist.get_rank())
    model = data_parallel(nn.Linear(6, 6), mesh)
    torch.manual_seed(0)
    return farthest(values(model), values(nn.Linear(6, 6)))


def check_one_dimension(found: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for mode in ("replicate", "fully_shard"):
        found[f"{mode}/training"] = compare_training(data_parallel(llama(), mesh, mode), llama())
        found[f"{mode}/tied"] = compare_training(data_parallel(llama(tied=True), mesh, mode), llama(tied=True))
        found[f"{mode}/odd shapes"] = compare_step(data_parallel(odd(), mesh, mode), odd())
        found[f"{mode}/bf16"] = check_bf16(mesh, mode)
        check_checkpointing(mesh, mode, found)
        check_compiled(mesh, mode, "none", found)
    for how in ("full", "selective"):
        check_compiled(mesh, "fully_shard", how, found)
    check_compiled(mesh, "fully_shard", "none", found, reshard=False)
    check_compiled_blocks(mesh, found)
    for how, reshard in (("none", True), ("none", False), ("full", False), ("selective", False)):
        found[f"memory/{how}, {'resharded' if reshard else 'kept'}"] = check_memory(mesh, "fully_shard", reshard, how)
    for name, precision in (("fp32", None), ("bf16", BF16), ("all bf16", MixedPrecision(torch.bfloat16))):
        found[f"fsdp2/{name}"] = check_against_fsdp2(mesh, "fully_shard", precision)
    found["refusals"] = check_refusals(mesh)
    found["state"] = check_state(mesh)
    found["first rank's weights"] = distance_from_first_rank(mesh)


def check_two_dimensions(found: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    mode = "hybrid_shard"
    found[f"{mode}/training"] = compare_training(data_parallel(llama(tied=True), mesh, mode), llama(tied=True))
    found[f"{mode}/odd shapes"] = compare_step(data_parallel(odd(), mesh, mode), odd())
    found[f"{mode}/bf16"] = check_bf16(mesh, mode)
    check_checkpointing(mesh, mode, found)
    check_compiled(mesh, mode, "none", found)
    found["memory/none, resharded"] = check_memory(mesh, mode, True, "none")
    found["fsdp2/bf16"] = check_against_fsdp2(mesh, mode, BF16)
    model = data_parallel(nn.Linear(8, 8, bias=False), mesh, mode)
    with Collectives() as collectives:
        model(torch.ones(2, 8)).sum().backward()
    found["collectives"] = collectives.seen


def main() -> None:
    rank, world, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    found: dict[str, Any] = {}
    if world == 4:
        check_two_dimensions(found)
    else:
        check_one_dimension(found)
    dist.barrier()
    if rank == 0:
        (directory / "found.json").write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
