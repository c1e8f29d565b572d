"""Ring attention with torchtitan's load balance, without it, and striped, from the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).with_name("forerun")
LONG = ("llama-3.1-8b", "--cluster", "h100-sxm", "--seq-len", 131072, "--cp", 8, "--activation-checkpointing", "full")


def forerun(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [str(COMMAND), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)


def predicted(*arguments: object) -> dict:
    done = forerun("predict", *LONG, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_balance_is_worth_nearly_half_of_attention():
    """enable_load_balance off: the last of eight ranks computes 15 / 8 of a balanced rank's attention."""
    usual, off, striped = predicted(), predicted("--cp-load-balance", "none"), predicted("--cp-load-balance", "striped")
    assert usual["plan"]["cp_load_balance"] == "head_tail"
    attention = [each["breakdown"]["attention"] for each in (usual, striped, off)]
    assert attention[2] / attention[0] == pytest.approx(15 / 8, rel=0.05)
    assert attention == sorted(attention)
    assert off["step_time_s"] > 1.3 * usual["step_time_s"]
    assert off["hfu"] * off["step_time_s"] == pytest.approx(usual["hfu"] * usual["step_time_s"])


def test_a_search_tries_the_balances_that_are_listed():
    question = ("--cluster", "h100-sxm", "--gpus", 8, "--seq-len", 65536, "--global-batch", 8)
    fixed = ("--cp", "1,8", "--tp", 1, "--pp", 1, "--micro-batch", 1, "--activation-checkpointing", "full")
    done = forerun("plan", "llama-3.2-1b", *question, *fixed, "--cp-load-balance", "none,head_tail,striped", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    places = {}
    for place, each in enumerate(record["top"]):
        plan = each["plan"]
        if plan["cp"] == 8:
            places.setdefault((plan["zero_stage"], plan["reshard_after_forward"]), {})[plan["cp_load_balance"]] = place
    assert places
    assert all(found["head_tail"] < found.get("none", 99) for found in places.values())
    assert record["counts"]["renamed"] > 0  # with cp 1 the three are one


def test_a_sequence_that_has_no_two_chunks_a_rank_is_refused():
    ask = ("predict", "llama-3.2-1b", "--cluster", "h100-sxm", "--cp", 8, "--seq-len", 8 * 1021)
    done = forerun(*ask)
    assert done.returncode == 2
    assert "seq_len 8168 is not divisible by 2 x cp 8" in done.stderr
    assert forerun(*ask, "--cp-load-balance", "none").returncode == 0
