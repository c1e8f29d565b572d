"""What workers of Ray answer in tests; they import it by name."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from forerun.answers.analysis.predict import predict
from forerun.answers.analysis.prediction import Prediction
from forerun.common.errors import ForerunError
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan


@dataclass(frozen=True)
class Watched:
    """Predicts, and leaves a file named after its process in `folder`."""

    folder: Path
    pause_s: float = 0.0

    def __call__(self, model: ModelSpec, plan: Plan, cluster: Cluster) -> Prediction:
        (self.folder / str(os.getpid())).touch()
        time.sleep(self.pause_s)
        if plan.micro_batch == 2:
            raise ForerunError("one or four at a time")
        return predict(model, plan, cluster)


def deadly(model: ModelSpec, plan: Plan, cluster: Cluster) -> Prediction:
    """Ends the process that it runs in."""
    os._exit(7)


def faulty(model: ModelSpec, plan: Plan, cluster: Cluster) -> Prediction:
    """Has a fault."""
    raise ZeroDivisionError(plan.tp)


def here() -> str:
    """Something that is different in every process."""
    return str(os.getpid())
