"""Event handlers: user code that receives the events of a run, and may change its conditions.

A handler is a subclass of EventHandler with the methods it needs, or a plain function subscribed to one kind of event:

    class Throttling(EventHandler):
        def on_iteration_start(self, iteration, conditions):
            return conditions.slow(3, 1.2, "rank 3 throttles") if iteration >= 50 else None

    @on("iteration_end")
    def tell(iteration):
        print(iteration.first, iteration.step_time_s)

Handlers receive events in the order of time; at one time, they are called in the order of the request. They receive the
events of every iteration, also if iterations are equal. If a run is so long that only a sample of its iterations is
simulated (experiment/run.py), they receive the events of the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forerun.answers.experiment.conditions import Conditions
from forerun.answers.experiment.request import Request
from forerun.answers.experiment.result import Iteration, RunResult
from forerun.common.errors import ForerunError, UnknownName

Kind = Literal["run_start", "iteration_start", "event", "iteration_end", "run_end"]
KINDS: tuple[Kind, ...] = ("run_start", "iteration_start", "event", "iteration_end", "run_end")


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """A kernel, collective or transfer starts or ends."""

    time_s: float
    """seconds since the beginning of the run"""
    starts: bool
    """whether the node starts; False: it ends"""
    iteration: int
    rank_class: str
    """name of the rank class that runs the node"""
    name: str
    """name of the node"""
    stream: str


class EventHandler:
    """The methods that a run calls. A subclass overrides those that it needs."""

    def on_run_start(self, request: Request) -> None:
        """Is called before Forerun simulates anything."""

    def on_iteration_start(self, iteration: int, conditions: Conditions) -> Conditions | None:
        """Is called before each simulated iteration; returns the conditions that replace its own, or None to keep
        them."""
        return None

    def wants_events(self, iteration: int) -> bool:
        """Returns whether Forerun calls `on_event` for the nodes of this iteration: thousands of calls."""
        return False

    def on_event(self, event: NodeEvent) -> None:
        """Is called when a node starts or ends, in the order of time within an iteration."""

    def on_iteration_end(self, iteration: Iteration) -> None:
        """Is called after a simulated iteration; with `repeats` above 1 it stands for those that follow it."""

    def on_run_end(self, result: RunResult) -> None:
        """Is called with the result before the run returns it."""


class Subscription(EventHandler):
    """A plain function that is called for one kind of event, with the arguments of that method of EventHandler."""

    def __init__(self, kind: Kind, function: Callable[..., Any], iterations: Container[int]) -> None:
        if kind not in KINDS:
            raise UnknownName("kind of event", kind, list(KINDS))
        self.kind = kind
        self.function = function
        self.iterations = iterations

    def __call__(self, *arguments: Any) -> Any:
        """Returns the function itself."""
        return self.function(*arguments)

    def on_run_start(self, request: Request) -> None:
        if self.kind == "run_start":
            self.function(request)

    def on_iteration_start(self, iteration: int, conditions: Conditions) -> Conditions | None:
        return self.function(iteration, conditions) if self.kind == "iteration_start" else None

    def wants_events(self, iteration: int) -> bool:
        return self.kind == "event" and iteration in self.iterations

    def on_event(self, event: NodeEvent) -> None:
        self.function(event)

    def on_iteration_end(self, iteration: Iteration) -> None:
        if self.kind == "iteration_end":
            self.function(iteration)

    def on_run_end(self, result: RunResult) -> None:
        if self.kind == "run_end":
            self.function(result)


def on(kind: Kind, iterations: Container[int] = range(1)) -> Callable[[Callable[..., Any]], Subscription]:
    """Returns a decorator that makes a handler of a plain function: `@on("iteration_end")`.

    `iterations` are those whose nodes a function for "event" is told of; by default the first alone.

    Raises UnknownName if there is no such kind.
    """
    return lambda function: Subscription(kind, function, iterations)


class Audience:
    """The handlers of a request, in its order. Raises ForerunError if one of them is not a handler."""

    def __init__(self, handlers: Sequence[Any]) -> None:
        for handler in handlers:
            if not isinstance(handler, EventHandler):
                raise ForerunError(
                    f"handler {handler!r} is neither an EventHandler nor a function subscribed with @on(kind); "
                    f"choose a kind of {', '.join(KINDS)}"
                )
        self._handlers: tuple[EventHandler, ...] = tuple(handlers)

    def __bool__(self) -> bool:
        return bool(self._handlers)

    def run_start(self, request: Request) -> None:
        for handler in self._handlers:
            handler.on_run_start(request)

    def iteration_start(self, iteration: int, conditions: Conditions) -> Conditions:
        """Returns the conditions after all handlers. Each handler sees the conditions that the handler before it
        returned.

        Raises ForerunError if a handler returns something else than Conditions of as many ranks, or None.
        """
        for handler in self._handlers:
            changed = handler.on_iteration_start(iteration, conditions)
            if changed is None:
                continue
            if not isinstance(changed, Conditions) or changed.compute.shape != conditions.compute.shape:
                raise ForerunError(
                    f"handler {handler!r}: on_iteration_start must return None or Conditions of "
                    f"{len(conditions.compute)} ranks, got {changed!r}"
                )
            conditions = changed
        return conditions

    def event_listeners(self, iteration: int) -> list[EventHandler]:
        """Returns the handlers that want to see the nodes of this iteration."""
        return [handler for handler in self._handlers if handler.wants_events(iteration)]

    def iteration_end(self, iteration: Iteration) -> None:
        for handler in self._handlers:
            handler.on_iteration_end(iteration)

    def run_end(self, result: RunResult) -> None:
        for handler in self._handlers:
            handler.on_run_end(result)


def tell_events(listeners: Iterable[EventHandler], events: Iterable[NodeEvent]) -> None:
    """Passes each event to every listener."""
    for event in events:
        for listener in listeners:
            listener.on_event(event)
