"""Profiles as text: what is written is read back, line by line as a person would write it."""

from dataclasses import replace

import pytest
import yaml

from forerun.core.cost.profile import load_profile, parse_profile, profile_names
from forerun.core.cost.profile_text import profile_text, written_over

H100 = load_profile("h100")


@pytest.mark.parametrize("name", profile_names())
def test_what_is_written_is_read_back(name):
    profile = load_profile(name)
    text = profile_text(profile, ["# one", "# two"])
    assert text.startswith("# one\n# two\nsource: ")
    assert text.endswith("\n")
    assert parse_profile({"name": name, **yaml.safe_load(text)}, "here") == profile


def test_a_constant_has_a_line_of_its_own_and_a_row_of_a_table_one():
    entry = replace(H100.gemm["bf16"], p_tflops=650.0, launch_us=2.5, odd_rows=0.0, source='a "quoted" \\ one')
    gemm = {"zz": entry, "fp8": replace(entry, odd_rows=0.25), "aa": entry, "bf16": entry}
    lines = profile_text(replace(H100, gemm=gemm, calibrated=True), []).splitlines()
    assert [line.strip(" :") for line in lines if line in ("  zz:", "  fp8:", "  aa:", "  bf16:")] == [
        "bf16",
        "fp8",
        "aa",
        "zz",
    ]
    assert lines[1] == "calibrated: true"
    assert lines[2].startswith("reference: {")
    assert lines[2].endswith("}, hbm_gb_s: 3350}")
    assert "    p_tflops: 650" in lines
    assert "    launch_us: 2.5" in lines
    assert '    source: "a \\"quoted\\" \\\\ one"' in lines
    assert sum("odd_rows" in line for line in lines) == 1
    heads = [
        line.split(":")[0].strip() for line in lines if line.startswith("    ") and line.split(":")[0].strip().isdigit()
    ]
    assert heads == sorted(heads, key=int)
    assert all("{" in line for line in lines if line.split(":")[0].strip() in heads)


def test_a_profile_that_was_not_measured_says_so_and_leaves_collectives_out():
    text = profile_text(replace(H100, calibrated=False, collectives=None), [])
    assert "calibrated: false\n" in text
    assert "collectives" not in text


def test_the_file_of_a_device_keeps_all_but_its_kernels():
    old = "name: mine\nmemory: 80\n\nkernels:\n  name: h100\n  source: old\n"
    new = written_over(old, H100, "h100")
    assert new.startswith("name: mine\nmemory: 80\n\nkernels:\n  name: h100\n  source: ")
    assert "source: old" not in new
    assert parse_profile(yaml.safe_load(new)["kernels"], "here") == H100


def test_the_file_of_a_profile_keeps_its_first_comments_or_gets_some():
    kept = written_over("# mine\n# more\nsource: old\n# inside\n", H100, "h100")
    assert kept.startswith("# mine\n# more\nsource: ")
    assert "# inside" not in kept
    first, second, *_ = written_over("", H100, "h100").splitlines()
    assert first.startswith("# Kernel constants of the h100. Forms: cost/gemm.py")
    assert second.startswith("# Rates are stated as measured on the reference")
