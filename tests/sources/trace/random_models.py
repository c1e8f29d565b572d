"""Random small models and inputs, drawn from a seed: the same for each way to run them."""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.utils.checkpoint import checkpoint

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
FUNCTIONS = (F.gelu, F.silu, F.relu, torch.tanh, torch.sigmoid, F.softplus, F.elu)


class Mixer(nn.Module):
    """Products around a function of each element."""

    def __init__(self, width, draw):
        super().__init__()
        hidden = draw.choice((1, 8)) * draw.randint(2, 64)  # Inductor multiplies elements where it is 1
        self.up, self.down = nn.Linear(width, hidden, bias=draw.random() < 0.5), nn.Linear(hidden, width)
        self.gate = nn.Linear(width, hidden, bias=False) if draw.random() < 0.3 else None
        self.function = draw.choice(FUNCTIONS)

    def forward(self, x):
        y = self.function(self.up(x))
        return self.down(y if self.gate is None else y * self.gate(x))


class Attention(nn.Module):
    """Attention of some heads, which may share keys and values, with rotary positions or without."""

    def __init__(self, width, draw):
        super().__init__()
        self.heads = draw.choice([heads for heads in (1, 2, 4) if width % (8 * heads) == 0])
        self.groups = draw.choice([n for n in (1, 2, 4) if self.heads % n == 0])
        self.head = width // self.heads
        self.q = nn.Linear(width, width, bias=draw.random() < 0.3)
        self.kv = nn.Linear(width, 2 * self.groups * self.head, bias=False)
        self.causal, self.rotary = draw.random() < 0.5, draw.random() < 0.3

    def forward(self, x):
        q = self.q(x).unflatten(-1, (self.heads, self.head)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2 * self.groups, self.head)).transpose(1, 2).chunk(2, 1)
        if self.rotary:
            q, k = self._rotated(q), self._rotated(k)
        k, v = (one.repeat_interleave(self.heads // self.groups, 1) for one in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)

    def _rotated(self, x):
        half = self.head // 2
        angle = torch.arange(x.shape[-2], device=x.device)[:, None] / (1 + torch.arange(half, device=x.device))
        sine, cosine = angle.sin().to(x.dtype), angle.cos().to(x.dtype)
        one, other = x[..., :half], x[..., half:]
        return torch.cat([one * cosine - other * sine, one * sine + other * cosine], -1)


class Gathered(nn.Module):
    """A product of all ranks' samples, whose sum over the ranks is scattered again."""

    def __init__(self, width, draw):
        super().__init__()
        self.product = nn.Linear(width, width, bias=draw.random() < 0.5)

    def forward(self, x):
        whole = all_gather_tensor_autograd(x.contiguous(), 0, dist.group.WORLD)
        return reduce_scatter_tensor_autograd(self.product(whole), "sum", 0, dist.group.WORLD)


class Reshaped(nn.Module):
    """Views, copies and selections that leave the shape as it is."""

    WAYS = ("turned", "cut", "shifted", "masked", "summed", "chosen", "stacked", "widened", "written")

    def __init__(self, width, draw):
        super().__init__()
        self.ways = draw.choices(self.WAYS, k=draw.randint(1, 3))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        for way in self.ways:
            x = getattr(self, way)(x)
        return x * self.scale

    def turned(self, x):
        return x.transpose(1, 2).contiguous().flip(-1).transpose(1, 2)

    def cut(self, x):
        one, other = x.split((x.shape[1] // 2, x.shape[1] - x.shape[1] // 2), 1)
        return torch.cat([other, one.reshape(one.shape)], 1)

    def shifted(self, x):
        return F.pad(x, (0, 0, 1, 0))[:, :-1].roll(1, 0)

    def masked(self, x):
        kept = torch.arange(x.shape[1], device=x.device) % 3 > 0
        return torch.where(kept[:, None], x, 0.0).masked_fill(~kept[:, None], 0.5)

    def summed(self, x):
        return x.cumsum(1) / x.shape[1]

    def chosen(self, x):
        order = torch.arange(x.shape[1] - 1, -1, -1, device=x.device)
        return x.index_select(1, order)[:, order]

    def stacked(self, x):
        return torch.stack(x.unbind(0), 0)

    def widened(self, x):
        return x[:, :, None].expand(-1, -1, 2, -1).reshape(x.shape[0], x.shape[1], 2, -1).mean(2)

    def written(self, x):
        y = x.clone()
        y[:, ::2] += 1.0
        return y.mul_(0.5)


class Convolved(nn.Module):
    """A convolution along the sequence."""

    def __init__(self, width, draw):
        super().__init__()
        groups = draw.choice((1, width))
        self.convolution = nn.Conv1d(width, width, 3, padding=1, groups=groups, bias=draw.random() < 0.5)

    def forward(self, x):
        return self.convolution(x.transpose(1, 2)).transpose(1, 2)


def norm_of(width, draw):
    """A norm of the last dimension, or nothing."""
    kind = draw.choice((nn.LayerNorm, nn.LayerNorm, nn.RMSNorm, nn.RMSNorm, nn.Identity))
    affine = draw.random() < 0.8
    return nn.Identity() if kind is nn.Identity else kind(width, elementwise_affine=affine)


class Layer(nn.Module):
    def __init__(self, width, draw):
        super().__init__()
        kinds = (Mixer, Mixer, Attention, Gathered, Reshaped, Convolved)
        self.norm, self.inner = norm_of(width, draw), draw.choice(kinds)(width, draw)
        self.residual, self.recomputed = draw.random() < 0.7, draw.random() < 0.3

    def forward(self, x):
        y = checkpoint(self._inside, x, use_reentrant=False) if self.recomputed else self._inside(x)
        return x + y if self.residual else y

    def _inside(self, x):
        return self.inner(self.norm(x))


class Model(nn.Module):
    """Layers on floats, or between an embedding of tokens and a head, with a loss."""

    def __init__(self, draw):
        super().__init__()
        width = 16 * draw.randint(1, 32)
        self.vocabulary = draw.choice((0, 8 * draw.randint(2, 100)))
        self.layers = nn.Sequential(*[Layer(width, draw) for _ in range(draw.randint(1, 4))])
        self.upcast = draw.random() < 0.7
        if self.vocabulary:
            self.embedding, self.head = nn.Embedding(self.vocabulary, width), nn.Linear(width, self.vocabulary, False)
            if draw.random() < 0.3:
                self.head.weight = self.embedding.weight
        first, *others = self.layers.parameters()
        first.requires_grad_(not others or draw.random() > 0.2)
        self.shape = (draw.randint(1, 8), 8 * draw.randint(1, 64), *(() if self.vocabulary else (width,)))

    def forward(self, x):
        if not self.vocabulary:
            y = self.layers(x)
            return (y.float() if self.upcast else y).square().mean()
        logits = self.head(self.layers(self.embedding(x))).flatten(0, 1)
        return F.cross_entropy(logits.float() if self.upcast else logits, x.flatten())


def model_and_input(seed):
    """A model and an input on the device, and the dtype of autocast or None."""
    draw = random.Random(seed)
    model, dtype = Model(draw), draw.choice(DTYPES)
    autocast = torch.bfloat16 if dtype == torch.float32 and draw.random() < 0.3 else None
    model = model.to("cuda", dtype)
    if model.vocabulary:
        return model, torch.zeros(model.shape, dtype=torch.int64, device="cuda"), autocast
    return model, torch.ones(model.shape, dtype=dtype, device="cuda"), autocast
