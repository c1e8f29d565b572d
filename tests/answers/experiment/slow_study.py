"""Run as a script: a scaling study and a comparison of nine points in a folder, with a pause after each of them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from study_sections import sections

from forerun.answers.experiment.comparison import compare
from forerun.answers.experiment.description.read import read_experiment
from forerun.answers.experiment.records import comparison_record, scaling_record
from forerun.answers.experiment.scaling import scale
from forerun.common.errors import ForerunError
from forerun.common.files import whole_file
from forerun.common.workers import Workers


def main(folder: Path, pause_s: float) -> None:
    request = read_experiment(sections(jitter=0.05, stragglers={"probability": 0.01, "slowdown": 1.5}))

    def progress(done: int, todo: int) -> None:
        print("simulated", done, todo, flush=True)
        time.sleep(pause_s)

    study = scale(request, [1, 2, 3, 4, 6, 8], folder=folder, progress=progress, workers=Workers(1))
    comparison = compare(request, precisions=("fp32", "fp8"), folder=folder, progress=progress, workers=Workers(1))
    for name, record in (("scaling", scaling_record(study)), ("comparison", comparison_record(comparison))):
        with whole_file(folder / f"{name}.json") as file:
            file.write(json.dumps(record).encode())


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), float(sys.argv[2]))
    except ForerunError as error:
        sys.exit(f"error: {error}")
