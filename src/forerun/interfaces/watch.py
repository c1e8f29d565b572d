"""Compares a running training loop with its prediction: a line in the log, and a file for `--anchor`.

`StepWatch` works in any training loop. `hugging_face_callback`, `lightning_callback` and `watch_torchtitan` add it to
the loops of these tools.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import yaml

from forerun.answers.analysis.prediction import Prediction
from forerun.common.errors import ForerunError
from forerun.common.files import whole_file
from forerun.interfaces.report.figures import seconds
from forerun.interfaces.report.records import anchor_record


class StepWatch:
    """Compares the steps of a running loop with a prediction.

    >>> watch = forerun.StepWatch(forerun.predict("llama-3.1-8b", plan, "h100-sxm"), anchor="anchor.yaml")
    >>> for batch in loader:
    ...     train_step(batch)
    ...     watch.step()

    The time of a step is the median of the times between calls of `step`, because single steps vary. GPUs lag behind
    the host by at most one step, so the median is right after a few steps.

    Args:
        prediction: the prediction of the step.
        anchor: path of the file for `--anchor`, which is written with each printed line; None writes no file.
        warm_up: number of first steps to ignore, because compilation and allocation make them slow.
        every: number of counted steps from one printed line to the next.
        out: function that receives each line.
        clock: function that returns the present time in seconds.
    """

    def __init__(
        self,
        prediction: Prediction,
        *,
        anchor: str | Path | None = None,
        warm_up: int = 5,
        every: int = 10,
        out: Callable[[str], object] = print,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        if warm_up < 0 or every < 1:
            raise ForerunError(f"StepWatch: expected warm_up >= 0 and every >= 1, got {warm_up} and {every}")
        self.prediction = prediction
        self.steps_s: list[float] = []
        self._anchor, self._every, self._out, self._clock = anchor, every, out, clock
        self._to_skip = warm_up
        self._last_s = clock() if warm_up == 0 else None

    @property
    def step_time_s(self) -> float | None:
        """Returns the median of the counted steps in seconds; None before the first."""
        return median(self.steps_s) if self.steps_s else None

    def step(self) -> None:
        """Records the end of a step; call it after each optimizer step."""
        now_s = self._clock()
        if self._last_s is not None:
            self.steps_s.append(now_s - self._last_s)
            if len(self.steps_s) % self._every == 0:
                self._say()
        else:
            self._to_skip = max(0, self._to_skip - 1)
        self._last_s = now_s if self._to_skip == 0 else None

    def line(self) -> str:
        """Returns one line with the measured and the predicted step time."""
        measured, predicted = self.step_time_s, self.prediction
        if measured is None:
            return f"forerun: predicted step {seconds(predicted.step_time_s)}, none measured yet"
        low_s, high_s = predicted.step_time_low_s, predicted.step_time_high_s
        inside = "inside" if low_s <= measured <= high_s else "outside"
        band = f"{inside} the 80 % band of {seconds(low_s)} to {seconds(high_s)}"
        off = predicted.step_time_s / measured - 1
        figures = f"{seconds(measured)} measured, {seconds(predicted.step_time_s)} predicted"
        return f"forerun: step {figures} ({off:+.1%}, {band})"

    def write_anchor(self, path: str | Path) -> Path:
        """Writes the plan and the measured step time to a file for `--anchor`, and returns its path.

        Raises ForerunError before the first counted step, for a prediction without a plan, or where the file can't be
        written.
        """
        measured = self.step_time_s
        if measured is None:
            raise ForerunError("StepWatch: no step is measured yet, so there is no anchor to write")
        record = anchor_record(self.prediction.own_plan(), float(f"{measured:.6g}"))
        about = f"# {len(self.steps_s)} steps of {self.prediction.model} on {self.prediction.cluster}, measured\n"
        with whole_file(path) as file:
            file.write((about + yaml.safe_dump(record, sort_keys=False)).encode())
        return Path(path)

    def _say(self) -> None:
        self._out(self.line())
        if self._anchor is not None:
            self.write_anchor(self._anchor)


def hugging_face_callback(watch: StepWatch) -> Any:
    """Returns a callback for Hugging Face's Trainer: `Trainer(..., callbacks=[hugging_face_callback(watch)])`.

    Only the first process of the run reports. Raises ForerunError if transformers is not installed.
    """
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise ForerunError("hugging_face_callback needs transformers: pip install transformers") from None

    class ForerunCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
        """Notes each optimizer step."""

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.is_world_process_zero:
                watch.step()

    return ForerunCallback()


def lightning_callback(watch: StepWatch) -> Any:
    """Returns a callback for Lightning: `Trainer(..., callbacks=[lightning_callback(watch)])`.

    A step of Lightning is a batch. The callback counts only batches that end with an optimizer step, in the first
    process of the run. Raises ForerunError if Lightning is not installed.
    """
    try:
        from lightning.pytorch import Callback
    except ImportError:
        raise ForerunError("lightning_callback needs lightning: pip install lightning") from None

    class ForerunCallback(Callback):  # type: ignore[misc, unused-ignore]
        """Notes each batch that ends in an optimizer step."""

        def __init__(self) -> None:
            self._done = 0

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
            if trainer.is_global_zero and trainer.global_step > self._done:
                self._done = trainer.global_step
                watch.step()

    return ForerunCallback()


def watch_torchtitan(trainer: Any, watch: StepWatch) -> None:
    """Records each step of torchtitan's Trainer. Call it before `trainer.train()`, in the first process of the run.

    Raises ForerunError for an object without `train_step`.
    """
    own = getattr(trainer, "train_step", None)
    if own is None:
        raise ForerunError("watch_torchtitan: expected torchtitan's Trainer, which has a method train_step")

    @wraps(own)
    def train_step(*values: Any, **named: Any) -> Any:
        result = own(*values, **named)
        watch.step()
        return result

    trainer.train_step = train_step
