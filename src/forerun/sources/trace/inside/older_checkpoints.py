"""Lets selective checkpoints recompute as an older torch does.

torch 2.13 counts how often each operator of a checkpointed region runs, and refuses a recomputation that runs one more
often than the forward pass did. FSDP within the region, as of experts, gathers parameters in the one and finds them
gathered in the other, so such a program ends with an error, on a GPU too (pytorch/torchtitan#3427). Older releases run
every operator again that the policy does not save, however often.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from forerun.sources.trace.inside.refusal import Refusal
from forerun.sources.trace.job import release

_COUNTS_SINCE = (2, 13)


def install(dynamo: str) -> None:
    """Makes recomputations run operators for which the forward pass saved nothing, if `dynamo` is a release before
    2.13. Otherwise a recomputation that torch refuses ends the trace with an error that says what to change.
    """
    checkpoint: Any = import_module("torch.utils.checkpoint")
    if not hasattr(checkpoint, "_RECOMPUTE"):  # This torch does not count.
        return
    again: Any = checkpoint._CachedTorchDispatchMode
    plain = again.__torch_dispatch__
    older = bool(dynamo) and release(dynamo) < _COUNTS_SINCE

    @functools.wraps(plain)
    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in checkpoint.SAC_IGNORED_OPS or _is_counted(self, checkpoint, func, args):
            return plain(self, func, types, args, kwargs)
        if not older:
            raise Refusal(
                f"a selective checkpoint runs {func} more often in backward than in forward, which torch refuses since"
                " 2.13; checkpoint what FSDP does not wrap within, or trace it as an older torch runs it, with --dynamo"
                " 2.9"
            )
        return func(*args, **(kwargs or {}))

    again.__torch_dispatch__ = dispatch


def _is_counted(mode: Any, checkpoint: Any, func: Any, args: Any) -> bool:
    """Returns whether the forward pass ran this call of `func`, or saved a result of another one."""
    key = checkpoint._sac_storage_key(func, args)
    entries = mode.storage.get(key) or {}
    return mode.func_counter[key] in entries or any(entry is not checkpoint._RECOMPUTE for entry in entries.values())
