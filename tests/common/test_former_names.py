"""Imports of before the wings work, in a process of their own, and leave no trace in `forerun`."""

import subprocess
import sys

import pytest

from forerun.common.former_names import NOW, name_now

PROGRAM = """
import warnings
warnings.simplefilter("always")
import forerun
from forerun.describe.plan.plan import Plan
with warnings.catch_warnings(record=True) as caught:
    from forerun.plan.plan import Plan as former
    from forerun.trace.marks import mark_step
    from forerun.network.links import deliver
    from forerun.search import search as module
    from forerun.errors import ForerunError
assert former is Plan and mark_step is forerun.mark_step and ForerunError is forerun.ForerunError
assert deliver.__module__ == "forerun.astrasim.messages.links"
assert module.__name__ == module.__spec__.name == "forerun.answers.search.search"
assert callable(forerun.search) and callable(forerun.trace)
texts = [str(each.message) for each in caught]
assert "forerun.plan.plan is forerun.describe.plan.plan now" in texts, texts
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_former_names_import_the_modules_of_today():
    done = run("-c", PROGRAM)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_module_that_never_was_is_not_found():
    done = run("-c", "import forerun.plan.no_such_module")
    assert "ModuleNotFoundError: No module named 'forerun.plan.no_such_module'" in done.stderr


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ("forerun.errors", "forerun.common.errors"),
        ("forerun.trace.inside.world", "forerun.sources.trace.inside.world"),
        ("forerun.engine.slots", "forerun.astrasim.messages.slots"),
        ("forerun.engine.simulate", "forerun.core.engine.simulate"),
        ("forerun.describe.plan", None),
        ("forerun.nothing", None),
        ("numpy.linalg", None),
    ],
)
def test_what_a_former_name_is_now(former, now):
    assert name_now(former) == now


def test_every_name_of_today_exists():
    done = run("-c", f"from importlib.util import find_spec\nassert all(map(find_spec, {list(NOW.values())!r}))")
    assert (done.returncode, done.stderr) == (0, "")
