"""Replaces the package flash_attn where it is not installed: the same functions on torch's own flash attention.

Training scripts import `flash_attn` unconditionally, and it installs only beside CUDA. Attention is
`aten._flash_attention_forward` (the same kernels, which torch carries), its other kernels are in
`flash_attention_layers`. A function that is missing here is an ImportError or AttributeError by its name.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from email.message import Message
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.common.errors import ForerunError
from forerun.sources.trace.inside.device import flash_attention_3, flash_attention_layers, grouped_gemm, xformers_ops
from forerun.sources.trace.inside.recorder import Recorder

VERSION = "2.8.3"
"""The version of the package whose functions these are."""
_NAME = "flash_attn"


def install(recorder: Recorder) -> None:
    """Lets `import flash_attn`, `flash_attn_interface`, `grouped_gemm` and `xformers` find stand-ins where they are not
    installed."""
    for name, (version, contents) in _PACKAGES.items():
        if importlib.util.find_spec(name) is None:
            sys.meta_path.append(_Finder(name, version, contents, recorder))


def _private_operators() -> dict[str, Any]:
    """Returns the operators that code calls by their private names, registered now and not where the package is."""
    return import_module("forerun.sources.trace.inside.device.flash_attention_2").OPERATORS


def _attention(  # noqa: PLR0913 - the parameters of flash_attn's own functions
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[Tensor | None, Tensor | None, int, int],
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Returns the parameters that both kinds of attention of the package have in common, in its order."""
    window = dict(zip(("window_size_left", "window_size_right"), window_size, strict=True))
    left_open = {name: value for name, value in window.items() if value >= 0}
    operator: Any = torch.ops.aten._flash_attention_forward
    out, logsumexp, _, _, weights = operator(
        q, k, v, *lengths, dropout_p, causal, False, scale=softmax_scale, **left_open
    )
    return (out, logsumexp, weights) if return_attn_probs else out


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Returns the attention of (batch, sequence, heads, head size)."""
    return _attention(q, k, v, (None, None, q.shape[1], k.shape[1]), *args, **kwargs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Returns the attention of packed sequences, (tokens, heads, head size), with their cumulative lengths."""
    return _attention(q, k, v, (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k)), *args, **kwargs)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Returns the attention of (batch, sequence, 3, heads, head size)."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Returns the attention of queries, and of keys and values as (batch, sequence, 2, heads, head size)."""
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **kwargs: Any
) -> Any:
    """Returns the attention of packed sequences, (tokens, 3, heads, head size)."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Returns the attention of packed queries, and of keys and values as (tokens, 2, heads, head size)."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, *args, **kwargs)


def flash_attn_with_kvcache(*_: Any, **__: Any) -> Any:
    """Refuses: only inference uses a cache of keys and values."""
    raise ForerunError("flash_attn_with_kvcache: inference with a cache can't be traced")


# -- padding ---------------------------------------------------------------------------------------------------


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Returns the rows of `x` at `indices`."""
    return x[indices]


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> Any:
    """Returns the tokens that `attention_mask` (batch, sequence) selects, their positions, the cumulative lengths, the
    longest length and all lengths."""
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    cumulated = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, cumulated, int(lengths.max().item()), lengths


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Puts the tokens back at their positions."""
    made = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    made[indices] = hidden_states
    return made.unflatten(0, (batch, seqlen))


# -- as a package ----------------------------------------------------------------------------------------------

FUNCTIONS: tuple[Callable[..., Any], ...] = (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_qkvpacked_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_with_kvcache,
)
Content = Mapping[str, Any]
Contents = Mapping[str, Content | Callable[[], Content]]
"""The content of each module of a package, by the module's name, or a function that makes it when a program imports the
module.
"""


def _named(*functions: Callable[..., Any]) -> dict[str, Any]:
    return {function.__name__: function for function in functions}


_PACKAGES: dict[str, tuple[str, Contents]] = {
    _NAME: (
        VERSION,
        {
            _NAME: {**_named(*FUNCTIONS), "__version__": VERSION},
            f"{_NAME}.flash_attn_interface": lambda: {**_named(*FUNCTIONS), **_private_operators()},
            f"{_NAME}.bert_padding": _named(index_first_axis, pad_input, unpad_input),
            f"{_NAME}.layers": {},
            f"{_NAME}.layers.rotary": _named(*flash_attention_layers.ROTARY),
            f"{_NAME}.modules": {},
            f"{_NAME}.modules.mha": _named(*FUNCTIONS),
            f"{_NAME}.ops": {},
            f"{_NAME}.ops.triton": {},
            f"{_NAME}.ops.triton.cross_entropy": _named(flash_attention_layers.cross_entropy_loss),
            f"{_NAME}.ops.triton.layer_norm": _named(*flash_attention_layers.NORMS),
        },
    ),
    "flash_attn_interface": ("3.0.0", {"flash_attn_interface": _named(*flash_attention_3.FUNCTIONS)}),
    "grouped_gemm": (
        "1.1.4",
        {
            "grouped_gemm": lambda: {"ops": import_module("grouped_gemm.ops"), "__version__": "1.1.4"},
            "grouped_gemm.ops": _named(*grouped_gemm.FUNCTIONS),
        },
    ),
    "xformers": (
        "0.0.32",
        {"xformers": {"__version__": "0.0.32"}, "xformers.ops": xformers_ops.CONTENT},
    ),
}
"""The packages that are replaced where they are not installed: version and modules."""


_KERNELS = {"grouped_gemm": "grouped matrix products"}
"""What torch has in place of a package's kernels, where that is not attention."""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a package, its modules and its metadata."""

    def __init__(self, name: str, version: str, contents: Contents, recorder: Recorder) -> None:
        self._name, self._version, self._contents, self._recorder = name, version, contents, recorder

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._contents or xformers_ops.is_being_imported():
            return None
        is_package = any(name.startswith(fullname + ".") for name in self._contents)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        kernels = _KERNELS.get(self._name, "attention")
        self._recorder.note(f"{self._name} is not installed: traced with torch's own {kernels} in its place")
        content = self._contents[module.__name__]
        vars(module).update(content() if callable(content) else content)

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        name = getattr(context, "name", None)
        wanted = name is None or name.replace("-", "_").lower() == self._name
        return [_Distribution(self._name, self._version)] if wanted else []


class _Distribution(importlib.metadata.Distribution):
    """The metadata that libraries ask for before they use a package."""

    def __init__(self, name: str, version: str) -> None:
        self._name, self._version = name, version

    def read_text(self, filename: str) -> str | None:
        message = Message()
        message["Name"], message["Version"] = self._name.replace("_", "-"), self._version
        return {"METADATA": str(message), "top_level.txt": self._name}.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(path)
