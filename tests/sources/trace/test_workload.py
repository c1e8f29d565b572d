"""What a step trains on: tokens and samples, by known answers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from forerun.sources.trace.inside.workload import Workload  # noqa: E402
from forerun.sources.trace.job import Job  # noqa: E402
from forerun.sources.trace.launch import Limits, record_script  # noqa: E402

LINEAR = torch.nn.Linear(2, 2)
GENERATES = """
import torch
model = torch.nn.Sequential(torch.nn.Embedding(100, 8), torch.nn.Linear(8, 8)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    for _ in range(2):
        model(torch.zeros(4, 16, dtype=torch.long, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    for n in range(1, 30):
        model(torch.zeros(1, n, dtype=torch.long, device="cuda"))
"""


def given(*calls, module=LINEAR):
    work = Workload()
    for args in calls:
        work.given(module, args, {})
    return work


@pytest.mark.parametrize(
    ("args", "samples"),
    [
        ((torch.zeros(4, 3, 8, 8),), 4),
        ((None, torch.zeros(5, 2)), 5),
        (({"pixel_values": torch.zeros(6, 3, 8, 8), "labels": torch.zeros(6)},), 6),
        (([torch.zeros(3, 8, 9), torch.zeros(3, 9, 8)],), 2),
        (([torch.zeros(9, 3, 8, 8), torch.zeros(9)], 0), 9),  # inputs and labels, and the number of the batch
        (([torch.zeros(8, 5), torch.zeros(8, 5)],), 8),  # two views
        ((torch.tensor(3.0), torch.zeros(7, 2)), 7),
        (("text", 1), 0),
    ],
)
def test_samples_are_the_leading_dimension_of_the_first_tensor(args, samples):
    assert given(args).samples == samples


def test_micro_batches_add_up():
    assert given((torch.zeros(4, 2),), (torch.zeros(4, 2),)).samples == 8


def test_of_several_modules_the_one_that_sees_a_batch_once_counts():
    work, generator = given(*3 * [(torch.zeros(4, 3, 8, 8),)]), torch.nn.Linear(2, 2)
    work.given(generator, (torch.zeros(4, 100),), {})
    assert work.samples == 4


def test_modules_without_parameters_to_train_do_not_count():
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    assert given((torch.zeros(4, 2),), module=frozen).samples == 0
    assert given((torch.zeros(4, 2),), module=torch.nn.ReLU()).samples == 0


def test_labels_of_images_are_no_tokens():
    work = given((torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)))
    work.looked_up("labels", 4)
    assert (work.tokens, work.samples) == (0, 4)


def test_tokens_are_those_of_one_matrix():
    work = given((torch.zeros(4, 16, dtype=torch.long),))
    for weight in ["words", *map(str, range(12))]:
        work.looked_up(weight, 64)
    assert (work.tokens, work.samples) == (64, 4)
    work.clear()
    assert (work.tokens, work.samples) == (0, 0)


def test_only_what_is_trained_is_evaluated():
    work = Workload()
    work.evaluated(torch.nn.Linear(2, 2).requires_grad_(False))
    assert not work.evaluates
    work.evaluated(LINEAR)
    assert work.evaluates
    work.clear()
    assert not work.evaluates


def test_texts_that_a_program_generates_with_gradients_are_no_tokens_of_the_step():
    work = Workload()
    work.looked_up("words", 64, (100, 8))
    work.looked_up("words", 1000, (100, 8))
    work.looked_up("frozen", 200, (50, 8))
    assert work.tokens == 1064, "no gradient is known, as in compiled code"
    work.trained((100, 8), 64)
    assert work.tokens == 64
    work.looked_up("frozen", 2000, (50, 8))
    assert work.tokens == 2200, "a frozen embedding has no gradient, and its tokens count"


def test_only_lookups_with_a_gradient_count_in_a_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(GENERATES, encoding="utf-8")
    (recording,) = record_script(Job("", str(script)), Limits(60))
    assert recording.meta["tokens"] == 2 * 4 * 16
