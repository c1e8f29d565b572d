"""One value of a YAML text changes, and nothing else."""

import pytest
import yaml

from forerun.common.errors import ForerunError
from forerun.evidence.fitting.write import with_value

TEXT = """# head
rate: 0.5  # of what
fitted:
  rate: "on 3 rows, with a # and a 'quote'"
devices:
  # the first
  one:
    clock: 1.0
    source: {clock: *here, other: "a, b: c"}

  two:
    clock: 2.0
kernels: {forward: 0.5, backward: 0.25}
"""


@pytest.mark.parametrize(
    ("path", "value", "old", "new"),
    [
        (("rate",), "0.75", "rate: 0.5  # of what", "rate: 0.75  # of what"),
        (("fitted", "rate"), '"new"', "  rate: \"on 3 rows, with a # and a 'quote'\"", '  rate: "new"'),
        (("devices", "two", "clock"), "3", "    clock: 2.0", "    clock: 3"),
        (("devices", "one", "source", "clock"), "*there", "{clock: *here,", "{clock: *there,"),
        (("kernels", "backward"), "0.3", "backward: 0.25}", "backward: 0.3}"),
    ],
)
def test_a_value_is_replaced(path, value, old, new):
    assert TEXT.count(old) == 1
    assert with_value(TEXT, path, value, "file") == TEXT.replace(old, new)


def test_missing_keys_stand_before_mappings_and_missing_mappings_at_the_end():
    assert with_value(TEXT, ("other",), "1", "file") == TEXT.replace("fitted:", "other: 1\nfitted:")
    assert with_value("a: 1\n", ("fitted", "a"), '"x"', "file") == 'a: 1\nfitted:\n  a: "x"\n'
    assert yaml.safe_load(with_value("a: {b: 1}\nf:\n  g: 2\n", ("f", "h"), "3", "file"))["f"] == {"g": 2, "h": 3}


def test_a_place_that_is_not_there_is_an_error():
    for path in (("devices", "three", "clock"), ("kernels", "sideways"), ("devices", "one")):
        with pytest.raises(ForerunError, match=f"^file: .*{path[-2]}"):
            with_value(TEXT, path, "1", "file")
