"""Prices: of GPUs and energy, from the `prices` section of an experiment and from price files.

A price file and the section have the same keys. The section may name a file, which gives the keys that it omits:

    dollars_per_gpu_hour:        # one number for whatever runs, or by name of a cluster or device
      a100-sxm-80gb: 1.79
      h100-sxm: 2.99
    dollars_per_kwh: 0.12        # 0 (or nothing): energy is in the price of the GPU
    pue: 1.2                     # energy of the site over that of GPUs and hosts
    host_power_w: 1500           # of a node beside its GPUs
    idle_power: 0.4              # power of a GPU that waits over that of one that computes
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from forerun.answers.experiment.description.sections import Section
from forerun.answers.experiment.request import Prices
from forerun.common.errors import ForerunError, UnknownName, at
from forerun.common.yaml_files import check, read_yaml
from forerun.describe.cluster.catalog import cluster_names, cluster_table, device_names, load_device
from forerun.describe.cluster.schema import NotNegative

_KEYS = ("dollars_per_kwh", "pue", "host_power_w", "idle_power")


class PriceFile(Section):
    """The content of a price file."""

    dollars_per_gpu_hour: NotNegative | dict[str, NotNegative] | None = None
    """dollars for a GPU and hour: one number, or one for each cluster or device; default: the cluster's own"""
    dollars_per_kwh: NotNegative | None = None
    """dollars for a kWh; default: 0, because the price of a GPU includes its energy"""
    pue: Annotated[float, Field(ge=1, le=10)] | None = None
    """energy of the site over the energy of GPUs and hosts; default: 1"""
    host_power_w: NotNegative | None = None
    """watts of a node without its GPUs; default: 0"""
    idle_power: Annotated[float, Field(ge=0, le=1)] | None = None
    """power of a GPU that waits over the power of one that computes; default: 1"""


class PricesSection(PriceFile):
    """The `prices` section of an experiment."""

    file: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """a price file, relative to the experiment's"""


def read_prices(path: str | Path) -> PriceFile:
    """Returns the price file at `path`.

    Raises ForerunError if it can't be read, or has a key or a value that it may not have; the message names both.
    """
    return check(PriceFile, read_yaml(Path(path)), str(path))


def prices_of(section: dict[str, Any], folder: Path, place: str, own_names: Collection[str] = ()) -> Prices:
    """Returns the Prices of an experiment's `prices` section.

    Args:
        folder: the folder to which the section's `file` is relative.
        place: names the section in errors.
        own_names: names of the experiment's cluster and devices; they may have a price beside those of the catalogue.

    Raises ForerunError for an unknown key, a wrong value, or a name that is neither in the catalogue nor in
    `own_names`.
    """
    own = check(PricesSection, section, place)
    layers: list[tuple[PriceFile, str]] = [(own, place)]
    if own.file is not None:
        path = folder / own.file
        with at(f"{place}: file"):
            layers.append((read_prices(path), str(path)))
    values: dict[str, float] = {}
    for key in _KEYS:
        given = [getattr(layer, key) for layer, _ in layers if getattr(layer, key) is not None]
        values |= {key: given[0]} if given else {}
    for_all, by_name = _gpu_prices(layers, own_names)
    return Prices(dollars_per_gpu_hour=for_all, by_name=by_name, **values)


def _gpu_prices(
    layers: list[tuple[PriceFile, str]], own_names: Collection[str]
) -> tuple[float | None, dict[str, float]]:
    """Returns the price of every GPU, and those by name; a number that the section gives goes over the file's names."""
    by_name: dict[str, float] = {}
    for layer, place in layers:
        given = layer.dollars_per_gpu_hour
        if isinstance(given, dict):
            by_name = {**_by_known_name(given, own_names, f"{place}: dollars_per_gpu_hour"), **by_name}
        elif given is not None:
            return given, by_name
    return None, by_name


def _by_known_name(prices: dict[str, float], own_names: Collection[str], place: str) -> dict[str, float]:
    """Returns the prices by the names of the catalogue in place of aliases. A name of a cluster and of a device stands
    for both.
    """
    found: dict[str, float] = {}
    for name, price in prices.items():
        names = [name] if name in own_names else _catalogue_names(name)
        if not names:
            known = sorted({*own_names, *cluster_names(), *device_names()})
            raise ForerunError(f"{place}: {UnknownName('cluster or device', name, known)}")
        for each in names:
            if found.setdefault(each, price) != price:
                raise ForerunError(f"{place}: {each} has two prices, {found[each]:g} and {price:g}; keep one of them")
    return found


def _catalogue_names(name: str) -> list[str]:
    """Returns the clusters and the device that `name` is the name or an alias of."""
    word = name.strip().lower()
    names = [row.name for row in cluster_table() if word in {row.name.lower(), *map(str.lower, row.aliases)}]
    with suppress(UnknownName):
        names.append(load_device(word).name)
    return names
