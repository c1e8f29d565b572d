"""Groups of options: a dataclass whose fields are options, written once for all commands that take them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

Command = TypeVar("Command", bound=Callable[..., None])
Group = TypeVar("Group")


def grouped(command: Command) -> Command:
    """Gives a command the options of its parameters that are dataclasses.

    Each field of such a dataclass becomes an option: its annotation holds the `typer.Option`, its default is that of
    the option. The command receives the dataclass with the user's values.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())
    groups: dict[str, Any] = {p.name: p.annotation for p in own if is_dataclass(p.annotation)}
    options = [each for p in own for each in (_options(p.annotation) if p.name in groups else [p])]

    def wrapped(**values: Any) -> None:
        made = {
            name: group(**{each.name: values.pop(each.name) for each in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **made)

    return with_parameters(wrapped, options, command)


def around(command: Command, group: type[Group], enter: Callable[[Group], AbstractContextManager[object]]) -> Command:
    """Gives a command the options of the dataclass `group`, and runs it in the context that `enter` makes of them."""
    own = inspect.signature(command, eval_str=True).parameters.values()

    def wrapped(**values: Any) -> None:
        made = group(**{each.name: values.pop(each.name) for each in fields(group)})  # type: ignore[arg-type]
        with enter(made):
            command(**values)

    return with_parameters(wrapped, [*own, *_options(group)], command)


def with_parameters(wrapped: Callable[..., None], parameters: list[inspect.Parameter], command: Command) -> Command:
    """Returns `wrapped` in place of `command`, with these parameters for typer to read."""
    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    wrapped.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in keyword}
    return wrapped  # type: ignore[return-value]


def given(group: Any, *but: str) -> dict[str, object]:
    """Returns the options of a group that differ from their defaults, by name, except those named in `but`."""
    return {
        each.name: value
        for each in fields(group)
        if each.name not in but and (value := getattr(group, each.name)) != each.default
    }


def _options(group: Any) -> list[inspect.Parameter]:
    types = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=_default(each), annotation=types[each.name]
        )
        for each in fields(group)
    ]


def _default(each: Field[Any]) -> Any:
    return inspect.Parameter.empty if each.default is MISSING else each.default
