"""`forerun predict --generated-tokens-per-s`: the stages around the update, and one line for bad input."""

import json

import pytest

PLAN = ("predict", "llama-3.2-1b", "--cluster", "h100-sxm", "--seq-len", "1024", "--dp-shard", "8")


def test_the_stages_stand_below_the_update(forerun):
    done = forerun(*PLAN, "--generated-tokens-per-s", "1000", "--generation-gib", "100", "--must-fit")
    assert done.returncode == 3
    assert "generation" in done.stdout
    assert "whole step (does not fit in 79.2 GiB)" in done.stdout
    record = json.loads(forerun(*PLAN, "--generated-tokens-per-s", "1000", "--json").stdout)
    stages = record["post_training"]["stages"]
    assert stages[0] | {"device_gib": 0} == {"name": "generation", "time_s": 1.024, "device_gib": 0}
    assert stages[-1]["time_s"] == record["step_time_s"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--critic", "llama-3.2-1b"), "--critic: give --generated-tokens-per-s too"),
        (("--generated-tokens-per-s", "0"), "generated tokens per second must be above 0, got 0"),
        (("--generated-tokens-per-s", "9", "--critic", "nothing"), "nothing"),
        (("--generated-tokens-per-s", "9", "--pp", "2"), "runs without pipelines"),
    ],
)
def test_wrong_stages_are_one_line(options, message, forerun):
    done = forerun(*PLAN, *options)
    assert done.returncode in (2, 3)
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
