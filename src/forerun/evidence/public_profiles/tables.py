"""Prints how well public profiles replay, and how far extrapolations from them are off, as tables in Markdown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from forerun.common.errors import ForerunError
from forerun.evidence.public_profiles.judge import Extrapolated, Judged, Replayed, judge, public_profiles

_FAILED = 2
_REPLAYS = ("profile", "device", "steps", "measured (ms)", "replayed (ms)", "largest error")
_EXTRAPOLATIONS = (
    *("step", "profiled on", "ms there", "predicted for", "GPUs"),
    *("predicted (ms)", "80 % band", "measured (ms)", "error"),
)


def lines_of(judged: Judged) -> list[str]:
    """Returns both tables, and a line for each profile that is in neither."""
    lines = [*_table(_REPLAYS, map(_replay, judged.replays)), ""]
    lines += _table(_EXTRAPOLATIONS, map(_extrapolation, judged.extrapolations))
    if judged.extrapolations:
        errors = [abs(one.error) for one in judged.extrapolations]
        held = sum(one.band_s[0] <= one.measured_s <= one.band_s[1] for one in judged.extrapolations)
        lines += ["", f"mean error {sum(errors) / len(errors):.1%}, in the band {held} of {len(errors)}"]
    return [*lines, "", *(f"left out: {what}: {why}" for what, why in judged.left_out.items())]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def _replay(one: Replayed) -> list[str]:
    device, times = one.device or "unknown", (_ms(one.measured_s), _ms(one.replayed_s))
    return [one.what, device, str(one.steps), *times, f"{one.worst:.3%}"]


def _extrapolation(one: Extrapolated) -> list[str]:
    band = f"{_ms(one.band_s[0])} to {_ms(one.band_s[1])}"
    where = one.device, _ms(one.profiled_s), one.cluster, str(one.gpus)
    return [one.what, *where, _ms(one.predicted_s), band, _ms(one.measured_s), f"{one.error:+.1%}"]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code, 2 where the user has to change something."""
    parser = argparse.ArgumentParser(
        prog="forerun.evidence.public_profiles.tables", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="folder with a checkout of each repository, named owner+name")
    options = parser.parse_args(arguments)
    try:
        print("\n".join(lines_of(judge(public_profiles(), options.folder))))
    except ForerunError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return _FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
