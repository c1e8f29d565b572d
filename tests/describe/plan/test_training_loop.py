"""What a training loop does every n steps, as people write it and as Programs keep it."""

import pytest

from forerun.common.errors import ForerunError
from forerun.describe.plan.training_loop import TrainingLoop


def test_a_loop_that_does_nothing_is_false():
    assert not TrainingLoop()
    assert TrainingLoop(gc=50)


def test_text_goes_over_what_the_loop_does_already():
    loop = TrainingLoop(checkpoint=500, gc=50, checkpoint_mode="async").with_every("gc=0, metrics=10,memory-snapshot=7")
    assert loop == TrainingLoop(checkpoint=500, metrics=10, memory_snapshot=7, checkpoint_mode="async")


def test_settings_read_back_to_the_same_loop():
    loop = TrainingLoop(checkpoint=500, profile=100, profiler_active=2, checkpoint_mode="async_with_pinned_mem")
    assert TrainingLoop.of_settings(loop.settings()) == loop
    assert TrainingLoop().settings() == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gcc=3", "no periodic work is called 'gcc', did you mean gc"),
        ("gc", "expected a number of steps for gc, as in gc=100"),
        ("gc=-1", "expected a number of steps for gc"),
        ("", "no periodic work is called ''"),
    ],
)
def test_a_mistake_names_what_is_wrong(text, message):
    with pytest.raises(ForerunError, match=message):
        TrainingLoop().with_every(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gc": -1}, "gc must be a whole number of at least 0, got -1"),
        ({"gc": 1.5}, "gc must be a whole number"),
        ({"checkpoint_mode": "pinned"}, "checkpoint_mode must be one of disabled, async, async_with_pinned_mem"),
        ({"profile": 2, "profiler_active": 3}, "profiler_active 3 is more than the 2 steps from one trace to the next"),
        ({"other": 1}, "unknown settings: other"),
    ],
)
def test_settings_that_no_loop_has_are_refused(settings, message):
    with pytest.raises(ForerunError, match=message):
        TrainingLoop.of_settings(settings)
