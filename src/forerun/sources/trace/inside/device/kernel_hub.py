"""Stands for the package `kernels`, with which programs download compiled kernels. It returns known kernels instead."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from forerun.sources.trace.inside.device import flash_attention, flash_attention_3
from forerun.sources.trace.inside.imports import when_imported
from forerun.sources.trace.inside.kernels.extensions import described_module
from forerun.sources.trace.inside.kernels.opaque_calls import Launches
from forerun.sources.trace.inside.recorder import Recorder
from forerun.sources.trace.inside.refusal import Refusal

_INTERFACE = "flash_attn_interface"


def install(launches: Launches, recorder: Recorder) -> None:
    """Lets `kernels.get_kernel` find FlashAttention, and the kernels that `forerun.kernels` describes."""

    def known(repository: str) -> Any:
        plain = repository.rpartition("/")[2].lower().replace("-", "_")
        functions = _functions_of(plain)
        if functions:
            by_name = {function.__name__: function for function in functions}
            return _module(plain, **by_name, **{_INTERFACE: _module(_INTERFACE, **by_name)})
        return described_module(plain, launches)

    def get_kernel(repo_id: str, *_: Any, **__: Any) -> Any:
        found = known(repo_id)
        if found is None:
            plain = repo_id.rpartition("/")[2].replace("-", "_")
            raise Refusal(
                f"kernels.get_kernel({repo_id!r}): nothing is known of it; describe its functions with"
                f" kernels.extension('{plain}.FUNCTION') in a file for --kernels (docs/extending.md)"
            )
        recorder.note(f"kernels.get_kernel({repo_id!r}): traced by its description, without its code")
        return found

    def has_kernel(repo_id: str, *_: Any, **__: Any) -> bool:
        return get_kernel(repo_id) is not None

    def patch(module: Any) -> None:
        module.get_kernel, module.has_kernel = get_kernel, has_kernel

    when_imported({"kernels": patch})


def _functions_of(plain: str) -> Any:
    if plain in ("flash_attn3", "flash_attention_3", "vllm_flash_attn3", "flash_attn_3"):
        return flash_attention_3.FUNCTIONS
    return flash_attention.FUNCTIONS if plain in ("flash_attn2", "flash_attn", "flash_attention_2") else ()


def _module(name: str, **content: Any) -> Any:
    made = ModuleType(name)
    vars(made).update(SimpleNamespace(**content).__dict__)
    return made
