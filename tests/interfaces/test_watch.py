"""A run beside its prediction: lines, the anchor file, and the loops of other tools."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import yaml

import forerun
from forerun.interfaces.cli.main import run


@pytest.fixture(scope="module")
def prediction():
    plan = forerun.Plan(seq_len=4096, dp_shard=8, micro_batch=2, activation_checkpointing="full")
    return forerun.predict("llama-3.2-1b", plan, "h100-sxm")


class Clock:
    """A clock that goes on by what each step takes."""

    def __init__(self, *steps_s):
        self.now_s, self.steps_s = 100.0, iter(steps_s)
        self.first = True

    def __call__(self):
        self.now_s += next(self.steps_s)
        return self.now_s


def watched(prediction, steps_s, **options):
    lines = []
    watch = forerun.StepWatch(prediction, out=lines.append, clock=Clock(*steps_s), **options)
    return watch, lines


def test_the_median_leaves_out_the_warm_up(prediction):
    watch, lines = watched(prediction, [50, 40, 2.0, 3.0, 2.5], warm_up=2, every=3)
    for _ in range(4):
        watch.step()
    assert watch.steps_s == pytest.approx([2.0, 3.0])
    assert not lines
    watch.step()
    assert watch.step_time_s == pytest.approx(2.5)
    assert len(lines) == 1
    assert "2.50 s measured" in lines[0]
    assert "outside the 80 % band" in lines[0]


def test_without_a_warm_up_the_first_step_counts_from_the_start(prediction):
    watch, _ = watched(prediction, [1.0, 2.0], warm_up=0)
    watch.step()
    assert watch.steps_s == pytest.approx([2.0])


def test_a_step_as_predicted_is_inside_its_band(prediction):
    watch, _ = watched(prediction, [0.0] + [prediction.step_time_s] * 3, warm_up=1)
    for _ in range(3):
        watch.step()
    assert "0.0%, inside" in watch.line()


def test_the_anchor_corrects_other_predictions(prediction, tmp_path, capsys):
    path = tmp_path / "anchor.yaml"
    slow_s = 1.5 * prediction.step_time_s
    watch, _ = watched(prediction, [0.0] + [slow_s] * 3, warm_up=1, every=2, anchor=path)
    for _ in range(3):
        watch.step()
    keys = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert keys["step_time_s"] == pytest.approx(slow_s, rel=1e-5)
    assert (keys["dp_shard"], keys["micro_batch"]) == (8, 2)
    command = ["predict", "llama-3.2-1b", "--cluster", "h100-sxm", "--seq-len", "4096", "--dp-shard", "8", "--json"]
    times = []
    for more in ([], ["--anchor", str(path)]):
        assert run([*command, *more]) == 0
        times.append(yaml.safe_load(capsys.readouterr().out)["step_time_s"])
    assert times[1] > 1.02 * times[0]


def test_what_is_wrong_is_said(prediction, tmp_path):
    watch, _ = watched(prediction, [1.0], warm_up=1)
    with pytest.raises(forerun.ForerunError, match="no step is measured"):
        watch.write_anchor(tmp_path / "a.yaml")
    with pytest.raises(forerun.ForerunError, match="every >= 1"):
        forerun.StepWatch(prediction, every=0)
    with pytest.raises(forerun.ForerunError, match="train_step"):
        forerun.watch_torchtitan(object(), watch)


@pytest.mark.slow
def test_the_trainer_of_hugging_face_reports(prediction, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16))
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(24)]
    lines, path = [], tmp_path / "anchor.yaml"
    watch = forerun.StepWatch(prediction, anchor=path, warm_up=2, every=2, out=lines.append)
    options = {"output_dir": str(tmp_path), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    arguments = TrainingArguments(**options, max_steps=6, report_to=[], use_cpu=True, save_strategy="no")
    callback = forerun.hugging_face_callback(watch)
    Trainer(model, arguments, train_dataset=rows, callbacks=[callback]).train()
    assert len(watch.steps_s) == 4  # optimizer steps, not micro batches
    assert len(lines) == 2
    assert path.exists()


def test_lightning_reports_optimizer_steps_of_the_first_process(prediction, monkeypatch):
    package, module = ModuleType("lightning"), ModuleType("lightning.pytorch")
    module.Callback = type("Callback", (), {})
    monkeypatch.setitem(sys.modules, "lightning", package)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", module)
    watch, _ = watched(prediction, [1.0] * 9, warm_up=0)
    callback = forerun.lightning_callback(watch)
    assert isinstance(callback, module.Callback)
    for step, first in ((0, True), (1, True), (1, True), (2, True), (3, False)):
        callback.on_train_batch_end(SimpleNamespace(is_global_zero=first, global_step=step), None, None, None, 0)
    assert len(watch.steps_s) == 2


def test_without_lightning_one_line_says_so(prediction, monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(forerun.ForerunError, match="pip install lightning"):
        forerun.lightning_callback(forerun.StepWatch(prediction))


def test_a_step_of_torchtitan_is_noted_and_its_result_kept(prediction):
    class Trainer:
        def train_step(self, batches):
            return next(batches)

    watch, _ = watched(prediction, [1.0] * 9, warm_up=0)
    trainer = Trainer()
    forerun.watch_torchtitan(trainer, watch)
    assert trainer.train_step(iter([7])) == 7
    assert len(watch.steps_s) == 1
