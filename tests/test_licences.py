"""The check of licences accepts permissive ones and names every other."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "packaging"))

from licences import is_permissive, unknown


@pytest.mark.parametrize(
    ("licence", "permissive"),
    [
        ("MIT", True),
        ("BSD-2-Clause AND Apache-2.0 WITH LLVM-exception", True),
        ("License :: OSI Approved :: BSD License", True),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only", False),
        ("MIT AND GPL-3.0-only", False),
        ("(MIT OR Apache-2.0)", True),
        ("", False),
    ],
)
def test_a_licence_is_permissive_where_all_its_parts_are(licence, permissive):
    assert is_permissive(licence) == permissive


def test_each_component_without_a_permissive_licence_is_named():
    bill = {
        "components": [
            {"name": "a", "version": "1", "licenses": [{"license": {"id": "MIT"}}]},
            {"name": "b", "version": "2", "licenses": [{"expression": "AGPL-3.0-only"}]},
            {"name": "c", "version": "3"},
            {"name": "protobuf", "version": "4"},
        ]
    }
    assert list(unknown(bill)) == ["b 2: AGPL-3.0-only", "c 3: no licence"]
