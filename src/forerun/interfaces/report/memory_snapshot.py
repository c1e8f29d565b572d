"""A memory snapshot beside a prediction: console tables and a record for JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

from forerun.common.units import GIB, MIB
from forerun.interfaces.report.console import make_table, print_table, print_title
from forerun.interfaces.report.figures import percent

if TYPE_CHECKING:
    from forerun.answers.analysis.prediction import Prediction
    from forerun.sources.profile.memory_snapshot import MemorySnapshot


def snapshot_record(found: MemorySnapshot, prediction: Prediction | None, top: int) -> dict[str, Any]:
    """Returns every figure of a snapshot, with the `top` places and tensors, beside those of a prediction if there is
    one."""
    record: dict[str, Any] = {
        "device": found.device,
        "events": len(found.moments) - 1,
        "peak_allocated_gib": found.peak.allocated / GIB,
        "peak_reserved_gib": found.peak_reserved / GIB,
        "reserved_at_peak_gib": found.peak.reserved / GIB,
        "fragmentation": _fragmentation(found),
        "inactive_gib": found.inactive / GIB,
        "largest_inactive_gib": found.largest_inactive / GIB,
        "out_of_memory_events": found.retries,
        "by_category_gib": {name: size / GIB for name, size in _sums(found, "category").items()},
        "by_place_gib": {name: size / GIB for name, size in list(_sums(found, "where").items())[:top]},
        "largest": [block._asdict() for block in found.at_peak[:top]],
        "timeline": [list(moment) for moment in found.moments],
    }
    if prediction is not None:
        record["predicted"] = {
            "peak_allocated_gib": prediction.peak_allocated_gib,
            "peak_reserved_gib": prediction.peak_reserved_gib,
            "by_category_gib": dict(prediction.memory_by_category_gib),
        }
    return record


def print_snapshot(out: Console, found: MemorySnapshot, prediction: Prediction | None, top: int) -> None:
    """Prints peak, categories, places and the largest tensors at the peak, beside a prediction if there is one."""
    print_title(out, f"{found.path}: device {found.device}, {len(found.moments) - 1:,} events")
    rows = [
        ("peak allocated", _gib(found.peak.allocated), _predicted(prediction, "peak_allocated_gib")),
        ("peak reserved", _gib(found.peak_reserved), _predicted(prediction, "peak_reserved_gib")),
        ("reserved but not allocated at the peak", percent(_fragmentation(found)), ""),
        ("inactive at the end", f"{_gib(found.inactive)}, largest piece {_gib(found.largest_inactive)}", ""),
    ]
    if found.retries:
        rows.append(("out of memory", f"{found.retries:,} times", ""))
    out.print(make_table("lrr", (), rows))
    out.print()
    of_prediction = {} if prediction is None else prediction.memory_by_category_gib
    measured = _sums(found, "category")
    names = dict.fromkeys([*measured, *of_prediction])
    cells = [
        (name, f"{measured.get(name, 0) / GIB:.3f}", f"{of_prediction[name]:.3f}" if name in of_prediction else "-")
        for name in names
    ]
    print_table(out, "Memory at the peak by category (GiB)", "lrr", ("category", "measured", "predicted"), cells)
    out.print()
    places = list(_sums(found, "where").items())
    shown = [(name or "(no frame recorded)", f"{size / MIB:,.1f}") for name, size in places[:top]]
    print_table(out, f"By place ({len(shown)} of {len(places)}, MiB)", "lr", ("allocated at", "size"), shown)
    out.print()
    largest = [
        (f"{one.size / MIB:,.1f}", one.category, one.where or "(no frame recorded)") for one in found.at_peak[:top]
    ]
    title = f"Largest tensors at the peak ({len(largest)} of {len(found.at_peak):,}, MiB)"
    print_table(out, title, "rll", ("size", "category", "allocated at"), largest)


def _sums(found: MemorySnapshot, key: str) -> dict[str, int]:
    """Returns bytes at the peak by category or place, the most first."""
    sums: dict[str, int] = {}
    for block in found.at_peak:
        name = getattr(block, key)
        sums[name] = sums.get(name, 0) + block.size
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _fragmentation(found: MemorySnapshot) -> float:
    return 1.0 - found.peak.allocated / found.peak.reserved if found.peak.reserved > 0 else 0.0


def _gib(size: int) -> str:
    return f"{size / GIB:.3f} GiB"


def _predicted(prediction: Prediction | None, key: str) -> str:
    return "" if prediction is None else f"predicted {getattr(prediction, key):.3f} GiB"
