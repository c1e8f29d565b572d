"""A training script's step as a test: it runs on a machine without a GPU.

Run it in the root of the repository: `pytest examples/ci`.
"""

import pytest

SCRIPT = "examples/simple_fsdp/train.py"
ARGUMENTS = ("--device", "cuda", "--mode", "fully_shard", "--layers", "4", "--dim", "1024", "--seq-len", "2048")


@pytest.fixture(scope="module")
def step(training_step):
    return training_step(SCRIPT, *ARGUMENTS, world_size=8, cluster="h100-sxm")


def test_the_step_fits(step):
    step.assert_fits("80GiB")


def test_the_step_is_at_most_two_percent_slower_than_the_last_commit(step):
    step.assert_no_slower_than("HEAD", by="2%")


def test_the_step_takes_no_more_memory_than_the_last_commit(step):
    step.assert_no_larger_than("HEAD", by="1%")
