"""Finds Forerun's device for the GPU of a profile."""

from __future__ import annotations

import re

from forerun.describe.cluster.catalog import device_names, load_device
from forerun.describe.cluster.types import Device
from forerun.sources.profile.profile import Profile

_FORMS = ("pcie", "nvl", "sxm2", "sxm3")
"""parts of names that tell variants of a device apart; a name without one is the module on a board"""


def device_of(profile: Profile) -> Device | None:
    """Returns the device whose model the file names and whose memory is nearest; None for one that is not known."""
    devices = profile.metadata.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices and isinstance(devices[0], dict) else {}
    words = set(re.findall(r"[a-z0-9]+", str(first.get("name", "")).lower()))
    memory = first.get("totalGlobalMem")
    memory = memory if isinstance(memory, int) else 0
    known = [load_device(name) for name in device_names() if _model(name) <= words]
    if not known:
        return None

    def distance(device: Device) -> tuple[bool, float, str]:
        forms = {form for form in _FORMS if form in device.name}
        return (not forms <= words, abs(device.memory_bytes - memory), device.name)

    return min(known, key=distance)


def _model(name: str) -> set[str]:
    """Returns the words of a device's name to the first one with a digit: `h100`, or `rtx` and `4090`."""
    words = name.split("-")
    numbered = next((k for k, word in enumerate(words) if any(map(str.isdigit, word))), len(words) - 1)
    return set(words[: numbered + 1])
