"""Training steps on one device, or on two, whose tensors are the same on the CPU and on a GPU.

Attention is explicit and nothing is dropped out: the fused kernels of the two devices keep different tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

Step = Callable[[Callable[[], None]], None]
"""calls what it is given before every micro batch"""
BATCH, SEQUENCE = 2, 256
AdamW, SGD = torch.optim.AdamW, torch.optim.SGD


def llama(**options: object) -> nn.Module:
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": 1024, "attn_implementation": "eager", "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**sizes, **more, **options))


def gpt2() -> nn.Module:
    dropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_embd": 256, "n_layer": 3, "n_head": 4, "vocab_size": 1024, "n_positions": SEQUENCE}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropped, attn_implementation="eager", use_cache=False))


def bert() -> nn.Module:
    dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 1024}
    return BertForMaskedLM(BertConfig(**sizes, **dropped, vocab_size=1024, attn_implementation="eager"))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut (He et al. 2015, the stride on the 3x3)."""

    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = ((n_in, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, k, s, k // 2, bias=False) for a, b, k, s in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(size[1]) for size in sizes)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or n_in != 4 * width:
            self.shortcut = nn.Sequential(nn.Conv2d(n_in, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for i, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            out = norm(convolution(out))
            out = F.relu(out, inplace=True) if i < 2 else out
        return F.relu(out + self.shortcut(x), inplace=True)


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    n_in = 64
    for stage, depth in enumerate((3, 4, 6, 3)):
        for block in range(depth):
            layers.append(Bottleneck(n_in, 64 << stage, 2 if stage and not block else 1))
            n_in = 256 << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, 1024))


def _policy(_context: object, func: object, *_: object, **__: object) -> CheckpointPolicy:
    saved = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if func in saved else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(model: nn.Module, selective: bool) -> nn.Module:
    """Each layer recomputed in backward, all of it or all but matrix products."""
    options = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if selective else {}
    for layer in model.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)
    return model


def language(
    device: str,
    model: nn.Module,
    optimizer: Callable[..., torch.optim.Optimizer],
    micro_batches: int = 1,
    dtype: torch.dtype = torch.float32,
    sequence: int = SEQUENCE,
    clip: bool = False,
) -> Step:
    model.to(device, dtype)
    stepper = optimizer(model.parameters())
    ids = torch.randint(0, 1024, (BATCH, sequence), device=device)

    def step(before: Callable[[], None]) -> None:
        for _ in range(micro_batches):
            before()
            logits = model(ids).logits
            F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
            del logits
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        stepper.step()
        stepper.zero_grad()

    return step


def vision(device: str, optimizer: Callable[..., torch.optim.Optimizer]) -> Step:
    model = resnet50().to(device)
    stepper = optimizer(model.parameters())
    images = torch.rand(4, 3, 96, 96, device=device)
    labels = torch.randint(0, 1000, (4,), device=device)

    def step(before: Callable[[], None]) -> None:
        before()
        F.cross_entropy(model(images), labels).backward()
        stepper.step()
        stepper.zero_grad()

    return step


FOREACH, FUSED = partial(AdamW, lr=1e-3, foreach=True), partial(AdamW, lr=1e-3, fused=True)
MOMENTUM = partial(SGD, lr=1e-3, momentum=0.9, foreach=True)
CASES: dict[str, Callable[[str], Step]] = {
    "llama": lambda device: language(device, llama(), FOREACH),
    "llama, fused": lambda device: language(device, llama(), FUSED),
    "llama, SGD": lambda device: language(device, llama(), MOMENTUM),
    "llama, one tensor at a time": lambda device: language(device, llama(), partial(AdamW, lr=1e-3, foreach=False)),
    "llama, accumulating": lambda device: language(device, llama(), FUSED, micro_batches=3),
    "llama, checkpointed": lambda device: language(device, checkpointed(llama(), False), FUSED),
    "llama, selectively checkpointed": lambda device: language(device, checkpointed(llama(), True), FUSED),
    "llama, bfloat16": lambda device: language(device, llama(), FUSED, dtype=torch.bfloat16),
    "llama, tied": lambda device: language(device, llama(tie_word_embeddings=True), FUSED),
    "llama, short": lambda device: language(device, llama(), FOREACH, sequence=16, clip=True),
    "gpt2": lambda device: language(device, gpt2(), FUSED),
    "bert": lambda device: language(device, bert(), FUSED),
    "resnet50": lambda device: vision(device, MOMENTUM),
}


def sharded(device: str, keep: bool) -> Step:
    """Llama under FSDP2 over all ranks; with `keep`, whole parameters stay until backward."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = llama().to(device)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=not keep)
    return language(device, fully_shard(model, mesh=mesh, reshard_after_forward=not keep), FUSED)


def replicated(device: str, view: bool) -> Step:
    """Llama under DDP; with `view`, gradients are views of the buckets."""
    return language(device, DistributedDataParallel(llama().to(device), gradient_as_bucket_view=view), FUSED)


SHARDED: dict[str, Callable[[str], Step]] = {
    "fsdp": lambda device: sharded(device, keep=False),
    "fsdp, kept until backward": lambda device: sharded(device, keep=True),
    "ddp": lambda device: replicated(device, view=False),
    "ddp, views of buckets": lambda device: replicated(device, view=True),
}
"""on two ranks"""
