"""The cost of a run: GPU hours, dollars and energy."""

from __future__ import annotations

from functools import cache
from math import ceil

import numpy as np

from forerun.answers.analysis.breakdown import breakdown_ps
from forerun.answers.analysis.reading import Simulation
from forerun.answers.analysis.setup import RankKind, Setup
from forerun.answers.experiment.request import Prices, Request
from forerun.answers.experiment.result import Bill
from forerun.common.units import HOUR_S
from forerun.core.program.causes import EXPOSED, Cause
from forerun.describe.cluster.catalog import cluster_table
from forerun.describe.cluster.types import Device

_W_PER_KW = 1000.0
_WAITING = (*EXPOSED, Cause.BUBBLE, Cause.HOST, Cause.WAITING)


def bill_of(
    request: Request, total_s: float, samples: int, tokens: int | None, busy_share: float | None = None
) -> Bill:
    """Returns the cost of `total_s` seconds of `request.setup` that train `samples` samples of `tokens` tokens each.

    A GPU takes power_w x (b + idle_power x (1 - b)) where it computes the share b of the time, a node host_power_w
    more; energy is that x PUE. Dollars are those of the GPUs, and those of the energy if it has a separate price.

    Args:
        tokens: None if samples have no tokens.
        busy_share: share of the time in which kernels run, mean over GPUs (`busy_share`); None: all of it.
    """
    setup, prices = request.setup, request.prices
    hours = total_s / HOUR_S
    energy_kwh = power_w(setup, prices, 1.0 if busy_share is None else busy_share) / _W_PER_KW * hours
    energy_dollars = energy_kwh * prices.dollars_per_kwh if prices.dollars_per_kwh else None
    per_hour = gpu_dollars_per_hour(setup, prices)
    dollars = None if per_hour is None else per_hour * hours + (energy_dollars or 0.0)
    return Bill(
        gpu_hours=setup.n_gpus * hours,
        dollars=dollars,
        dollars_per_hour=_per(dollars, hours),
        dollars_per_billion_tokens=_per(dollars, (tokens or 0) / 1e9),
        dollars_per_million_samples=_per(dollars, samples / 1e6),
        energy_kwh=energy_kwh,
        energy_dollars=energy_dollars,
    )


def gpu_dollars_per_hour(setup: Setup, prices: Prices) -> float | None:
    """Returns the dollars per hour of all GPUs together, each kind at the price of its device. None without a price.

    Where the cluster has the list price of the catalogue, kinds of other devices have theirs.
    """
    usual = price_per_gpu_hour(setup, prices)
    if usual is None:
        return None
    total = usual * (setup.n_gpus - sum(kind.n_gpus for kind in setup.kinds))
    for kind in setup.kinds:
        own = None if kind.device is None else prices.by_name.get(kind.device.name)
        no_price_given = prices.dollars_per_gpu_hour is None and not prices.by_name
        if own is None and kind.device is not None and no_price_given:
            own = _list_prices().get(kind.device.name)
        total += kind.n_gpus * (usual if own is None else own)
    return total


@cache
def _list_prices() -> dict[str, float]:
    """Returns device -> dollars for a GPU and hour, from the first priced cluster of the catalogue with this device."""
    found: dict[str, float] = {}
    for row in cluster_table():
        if row.price_per_gpu_hour is not None:
            found.setdefault(row.device, row.price_per_gpu_hour)
    return found


def price_per_gpu_hour(setup: Setup, prices: Prices) -> float | None:
    """Returns the dollars per GPU and hour: the price by cluster name, else by device, else for all, else the cluster's
    own."""
    cluster = setup.cluster
    known = (
        prices.by_name.get(cluster.name),
        prices.by_name.get(cluster.device.name),
        prices.dollars_per_gpu_hour,
        cluster.price_per_gpu_hour,
    )
    return next((price for price in known if price is not None), None)


def power_w(setup: Setup, prices: Prices, busy: float) -> float:
    """Returns the mean power of the run: GPUs that compute the share `busy` of the time and their hosts, x PUE."""
    cluster = setup.cluster
    drawn = busy + prices.idle_power * (1.0 - busy)
    gpus = cluster.device.power_w * (setup.n_gpus - sum(kind.n_gpus for kind in setup.kinds))
    gpus += sum(kind.n_gpus * _device(setup, kind).power_w for kind in setup.kinds)
    nodes = ceil(setup.n_gpus / cluster.node_size) if cluster.node_size else 1
    return (gpus * drawn + nodes * prices.host_power_w) * prices.pue


def busy_share(simulation: Simulation) -> float:
    """Returns the share of the step in which kernels run, mean over all GPUs."""
    program = simulation.program
    seconds = breakdown_ps(simulation.flat, program, simulation.timeline).astype(np.float64)
    ranks = np.array([cls.n_ranks for cls in program.rank_classes], np.float64)
    waiting = seconds[:, list(_WAITING)].sum(axis=1) / np.maximum(1.0, seconds.sum(axis=1))
    return float(1.0 - (waiting * ranks).sum() / ranks.sum())


def _device(setup: Setup, kind: RankKind) -> Device:
    return kind.device or setup.cluster.device


def _per(dollars: float | None, amount: float) -> float | None:
    return None if dollars is None or amount <= 0 else dollars / amount
