"""Request: the input of an experiment's simulation, made from a file by `description/`, or in Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from forerun.answers.analysis.setup import Setup


@dataclass(frozen=True)
class Disturbance:
    """The ways in which iterations differ from undisturbed ones. All draws follow from `seed`."""

    seed: int = 0
    compute_jitter: float = 0.0
    """standard deviation of the logarithm of each rank's time, drawn anew each iteration"""
    network_jitter: float = 0.0
    """the same for collectives and transfers, with one draw for all ranks"""
    straggler_probability: float = 0.0
    """probability that a rank is a straggler in an iteration"""
    straggler_slowdown: float = 1.0
    """time of a straggler over that of the other ranks"""
    straggler_tail: float = 0.0
    """0: every straggler is equally slow. Above 0: the additional time is drawn from a Pareto distribution with this
    shape and the least value of straggler_slowdown. A smaller shape has a heavier tail
    """
    slow_ranks: dict[int, float] = field(default_factory=dict)
    """rank -> time of its kernels over that of the others, in every iteration"""
    warmup_iterations: int = 0
    warmup_slowdown: float = 1.0
    """time of the host and of kernels in the first iteration over that of later ones; it falls to 1 linearly"""


@dataclass(frozen=True)
class Thresholds:
    """The shares from which a report calls something a bottleneck, from 0 to 1."""

    compute: float = 0.80
    """share of the step in which kernels compute"""
    memory: float = 0.70
    """share of a GPU's memory that is used"""
    network: float = 0.30
    """share of the step in which communication runs and no kernel does"""
    efficiency: float = 0.80
    """scaling efficiency below which a study calls the scale broken down"""


@dataclass(frozen=True)
class Prices:
    """The prices of GPUs and energy. Without a price for its GPUs, a run takes the cluster's own."""

    dollars_per_gpu_hour: float | None = None
    by_name: dict[str, float] = field(default_factory=dict)
    """cluster or device, by the name that it has in the catalogue -> dollars per GPU and hour; replaces the above"""
    dollars_per_kwh: float = 0.0
    """dollars for a kWh; 0: the price of a GPU includes its energy"""
    pue: float = 1.0
    """energy of the site over that of the GPUs and their hosts"""
    host_power_w: float = 0.0
    """watts of a node without its GPUs"""
    idle_power: float = 1.0
    """power of a GPU that waits over that of one that computes"""


@dataclass(frozen=True)
class Request:
    """One experiment."""

    name: str
    setup: Setup
    num_iterations: int = 100
    batch_schedule: tuple[tuple[int, int], ...] = ()
    """(iteration from which it holds, samples of a micro batch)"""
    seq_len_schedule: tuple[tuple[int, int], ...] = ()
    """(iteration from which it holds, tokens of a sequence)"""
    disturbance: Disturbance = field(default_factory=Disturbance)
    thresholds: Thresholds = field(default_factory=Thresholds)
    prices: Prices = field(default_factory=Prices)
    handlers: tuple[Callable[..., Any] | Any, ...] = ()
    """handlers that see events while they happen (experiment/handlers.py)"""
    sample: str = "sequence"
    """the unit of a batch: sequence or image"""
    config: dict[str, Any] = field(default_factory=dict)
    """the file's sections with every default, as plain data that can be read again: the contents of
    {name}_config.yaml
    """
    given: dict[str, Any] = field(default_factory=dict, compare=False)
    """the sections as they were given, which `description.read.changed` changes"""
    echo: tuple[str, ...] = ()
    """units that people mix up, as they were understood; one line each"""
