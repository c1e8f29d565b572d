"""What commands print with --json is what docs/schemas promises, and a schema only grows."""

import json
import runpy
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

WRITER = runpy.run_path(str(Path(__file__).parent.parent / "docs" / "write_schemas.py"))
merged, schema_of, Shrunk = WRITER["merged"], WRITER["schema_of"], WRITER["Shrunk"]
BEFORE = {"schema_version": 1, "step_time_s": 1.5, "plan": {"tp": 1, "pp": 2}, "notes": [{"text": "a"}]}


def closed(schema):
    """The same schema, which takes no key that it does not name."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inside = {name: closed(value) for name, value in schema.items()}
    return inside | {"additionalProperties": False} if "required" in schema else inside


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITER["COMMANDS"])
def test_an_output_is_what_its_schema_promises(name):
    schema = json.loads(WRITER["path_of"](name).read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    for output in WRITER["outputs"](name):
        faults = [error.message for error in Draft202012Validator(closed(schema)).iter_errors(output)]
        assert not faults, f"run docs/write_schemas.py: {faults[:3]}"
        assert next(iter(output)) == "schema_version"


def changed(path, value):
    after = json.loads(json.dumps(BEFORE))
    inside = after
    for key in path[:-1]:
        inside = inside[key]
    if value is None:
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return after


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["step_time_s"], None),
        (["plan", "pp"], None),
        (["notes", 0, "text"], None),
        (["step_time_s"], "1.5 s"),
        (["plan"], 3),
    ],
)
def test_a_key_that_is_lost_or_changes_its_type_is_refused(path, value):
    with pytest.raises(Shrunk):
        merged(schema_of([BEFORE]), schema_of([changed(path, value)]))


def test_new_keys_grow_a_schema_and_keep_the_old_ones():
    grown = merged(schema_of([BEFORE]), schema_of([changed(["plan", "cp"], 4)]))
    assert {"tp", "pp", "cp"} == set(grown["properties"]["plan"]["properties"])
    assert merged(grown, schema_of([changed(["plan", "cp"], 4)])) == grown
