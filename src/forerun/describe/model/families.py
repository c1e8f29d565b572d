"""Families of Hugging Face models: for each `model_type`, the function that reads its config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forerun.describe.model.fields import Fields

Values = dict[str, object]
"""the fields of ModelSpec except its name; `notes` list features of a family that a prediction leaves out"""
Reader = Callable[[Fields], Values]


@dataclass(frozen=True)
class Family:
    """The reader of one `model_type`."""

    read: Reader
    architectures: tuple[str, ...]
    """classes of Hugging Face transformers that the reader understands"""
    ignored: tuple[str, ...] = ()
    """further keys of its config.json that change neither size nor computation, beside huggingface_keys.yaml"""
    encodes: bool = False
    """whether it is an encoder with a decoder"""


FAMILIES: dict[str, Family] = {}
WRAPPERS: dict[str, str] = {}
"""model_type of a language model behind a tower of images or sounds -> that of its `text_config` unless it says so"""


def family(
    model_type: str, *architectures: str, ignored: tuple[str, ...] = (), encodes: bool = False
) -> Callable[[Reader], Reader]:
    """Makes the decorated function the reader of the config.json of a `model_type`; see Family."""

    def register(read: Reader) -> Reader:
        FAMILIES[model_type] = Family(read, architectures, ignored, encodes)
        return read

    return register
