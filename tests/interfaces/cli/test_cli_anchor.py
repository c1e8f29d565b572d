"""`--anchor`: a user's own measured step on the command line."""

import json

QUESTION = ("predict", "llama-3.1-8b", "--cluster", "h100-sxm", "--dp-shard", 8, "--seq-len", 4096, "--json")


def test_an_anchor_corrects_a_prediction(forerun, tmp_path):
    plain = json.loads(forerun(*QUESTION).stdout)
    (tmp_path / "mine.yaml").write_text(f"dp_shard: 8\nseq_len: 4096\nstep_time_s: {1.1 * plain['step_time_s']}\n")
    mine = json.loads(forerun(*QUESTION, "--anchor", "mine.yaml").stdout)
    assert plain["step_time_s"] < mine["step_time_s"] < 1.1 * plain["step_time_s"]
    assert any(line.startswith("rates, by measured steps: gemm x 0.9") for line in mine["explain"])


def test_an_anchor_that_is_wrong_is_bad_input(forerun, tmp_path):
    (tmp_path / "mine.yaml").write_text("dp_shard: 8\nseq_len: 4096\n")
    done = forerun(*QUESTION, "--anchor", "mine.yaml")
    assert done.returncode == 2
    assert done.stderr.strip() == "error: mine.yaml: give one of step_time_s and tokens_per_s_per_gpu"


def test_an_anchor_holds_for_every_plan_of_a_search(forerun, tmp_path):
    (tmp_path / "mine.yaml").write_text("dp_shard: 8\nseq_len: 4096\nstep_time_s: 0.5\n")
    question = ("plan", "llama-3.2-1b", *QUESTION[2:4], "--gpus", 8, "--seq-len", 4096, "--global-batch", 8, "--tp", 2)
    limits = ("--micro-batch", 1, "--pp", 1, "--activation-checkpointing", "none", "--workers", 1, "--json")
    plain, mine = (
        json.loads(forerun(*question, *limits, *more).stdout)["runtime_histogram"][0]
        for more in ((), ("--anchor", "mine.yaml"))
    )
    assert mine["from_s"] > 1.02 * plain["from_s"]


def test_a_search_says_which_plan_to_measure(forerun):
    question = ("plan", "llama-3.2-1b", *QUESTION[2:4], "--gpus", 8, "--seq-len", 4096, "--global-batch", 8, "--pp", 1)
    limits = ("--tp", "1,2", "--micro-batch", 1, "--activation-checkpointing", "none", "--workers", 1, "--top", 3)
    found = json.loads(forerun(*question, *limits, "--suggest-anchor", "--json").stdout)
    assert found["suggested_anchor"] in (1, 2, 3)
    said = forerun(*question, *limits, "--suggest-anchor").stdout
    assert f"place {found['suggested_anchor']} is most informative about the other places" in said
