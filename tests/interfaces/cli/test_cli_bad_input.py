"""Bad input gives one line, exit code 2, and leaves nothing behind."""

import json
from pathlib import Path

import pytest

CONFIG = Path(__file__).parents[3] / "examples" / "llama-3.1-8b" / "config.json"
GOOD_CONFIG = json.loads(CONFIG.read_text())
PLAN = ("--cluster", "h100-sxm", "--gpus", 8, "--seq-len", 4096, "--global-batch", 16)

FILES = {
    "truncated.json": CONFIG.read_text()[:200],
    "wrong_key.json": json.dumps({**GOOD_CONFIG, "hiden_size": 1}),
    "wrong_type.json": json.dumps({**GOOD_CONFIG, "num_hidden_layers": "32"}),
    "unknown_architecture.json": json.dumps({"model_type": "nonesuch", "architectures": ["NonesuchForCausalLM"]}),
    "empty.json": "",
    "list.json": "[1, 2]",
    "wrong_device.yaml": "device: h900\n",
    "wrong_cluster_key.yaml": "device: h100-sxm\ngpu_per_node: 8\n",
    "wrong_cluster_type.yaml": "device: h100-sxm\ngpus_per_node: many\n",
    "broken.yaml": "device: [h100-sxm\n",
    "wrong_plan_key.yaml": "seq_len: 4096\ntpp: 8\n",
    "wrong_plan_type.yaml": "seq_len: 4096\ntp: '8'\n",
    "impossible_plan.yaml": "seq_len: 4096\ntp: 3\n",
}

BAD = [
    (("plan", "truncated.json", *PLAN), "truncated.json"),
    (("plan", "wrong_key.json", *PLAN), "hiden_size"),
    (("plan", "wrong_type.json", *PLAN), "num_hidden_layers"),
    (("plan", "unknown_architecture.json", *PLAN), "nonesuch"),
    (("plan", "empty.json", *PLAN), "empty.json"),
    (("plan", "list.json", *PLAN), "list.json"),
    (("plan", "missing.json", *PLAN), "missing.json"),
    (("plan", "llama-9", *PLAN), "llama-9"),
    (("plan", "llama-3.1-8b", "--cluster", "h900", *PLAN[2:]), "h800-sxm"),
    (("plan", "llama-3.1-8b", "--cluster", "wrong_device.yaml", *PLAN[2:]), "unknown device 'h900'"),
    (("plan", "llama-3.1-8b", "--cluster", "wrong_cluster_key.yaml", *PLAN[2:]), "gpu_per_node"),
    (("plan", "llama-3.1-8b", "--cluster", "wrong_cluster_type.yaml", *PLAN[2:]), "gpus_per_node"),
    (("plan", "llama-3.1-8b", "--cluster", "broken.yaml", *PLAN[2:]), "broken.yaml"),
    (("plan", "llama-3.1-8b", "--cluster", "missing.yaml", *PLAN[2:]), "missing.yaml"),
    (("plan", "llama-3.1-8b", *PLAN, "--tp", 3), "do not divide 8 GPUs"),
    (("plan", "llama-3.1-8b", *PLAN, "--tp", "two"), "--tp: expected a whole number"),
    (("plan", "llama-3.1-8b", *PLAN, "--tp", "1,,2"), "--tp: expected a whole number, got ''"),
    (("plan", "llama-3.1-8b", *PLAN, "--tp", 0), "tp must be a whole number of at least 1"),
    (("plan", "llama-3.1-8b", *PLAN, "--precision", "bf17"), "--precision: expected one of"),
    (("plan", "llama-3.1-8b", *PLAN, "--stack", "torch"), "unknown stack"),
    (("plan", "llama-3.1-8b", *PLAN, "--objective", "speed"), "objective must be one of"),
    (("plan", "llama-3.1-8b", *PLAN, "--memory-limit", 500), "memory limit of 500"),
    (("plan", "llama-3.1-8b", *PLAN, "--max-tp", 0), "max_tp must be at least 1"),
    (("plan", "llama-3.1-8b", *PLAN, "--plan-file", "wrong_plan_key.yaml"), "unknown key 'tpp'; did you mean tp?"),
    (("plan", "llama-3.1-8b", *PLAN, "--csv", "nowhere/all.csv"), "nowhere"),
    (("plan", "llama-3.1-8b", *PLAN[:2], "--gpus", 0, *PLAN[4:]), "gpus must be at least 1"),
    (("plan", "llama-3.1-8b", *PLAN[:2], "--gpus", "x", *PLAN[4:]), "--gpus"),
    (("plan", "llama-3.1-8b"), "--cluster"),
    (("plan", "llama-3.1-8b", *PLAN, "--quick"), "--quick"),
    (("plan",), "model"),
    (("predict", "llama-3.1-8b", *PLAN, "--tp", 3), "3 does not divide 8 GPUs"),
    (("predict", "llama-3.1-8b", *PLAN, "--optimizer", "muonn"), "--optimizer: expected one of adamw, adam, sgd"),
    (("predict", "llama-3.1-8b", *PLAN, "--optimizer", "soap"), "soap needs whole matrices: use zero_stage 0 to 2"),
    (("predict", "llama-3.1-8b", *PLAN, "--frozen-dtype", "nf4"), "frozen_dtype nf4 needs frozen weights"),
    (
        ("predict", "llama-3.1-8b", *PLAN, "--lora-rank", 8, "--lora-targets", "wq"),
        "--lora-targets: expected a list",
    ),
    (("predict", "llama-3.1-8b", *PLAN, "--pp", 3, "--dp-shard", 1), "= 3 GPUs, not 8"),
    (("predict", "llama-3.1-8b", *PLAN, "--micro-batch", 3), "global batch 16 is not a multiple"),
    (("predict", "llama-3.1-8b", *PLAN, "--ep", 8), "is dense"),
    (("predict", "llama-3.1-8b", *PLAN, "--attention", "quick"), "attention must be one of"),
    (("predict", "llama-3.1-8b", *PLAN, "--plan-file", "wrong_plan_type.yaml"), "tp: expected a whole number, got '8'"),
    (("predict", "llama-3.1-8b", *PLAN[:2], "--plan-file", "impossible_plan.yaml"), "not divisible by tp 3"),
    (("predict", "llama-3.1-8b", *PLAN, "--plan-file", "missing.yaml"), "missing.yaml"),
    (("predict", "llama-3.1-8b", *PLAN, "--trace", "nowhere/step.json"), "nowhere/step.json"),
    (("predict", "llama-3.1-8b", "--cluster", "h100-sxm"), "seq_len is missing"),
    (("predict", "llama-3.1-8b", *PLAN[:2], "--seq-len", "8k"), "--seq-len: expected a whole number, got '8k'; see"),
    (("predict", "llama-3.1-8b", *PLAN, "--json", "out.json"), "unexpected argument out.json; see forerun predict"),
    (("predict", "llama-3.1-8b", *PLAN, "--dp-shrad", 8), "--dp-shrad; similar options: --dp-shard"),
    (("predict", "llama-3.1-8b", *PLAN[:2], "--seq-len", 64, "--gpus", 4, "--tp", 8), ": tp 8 does not divide 4 GPUs"),
    (("predict", "llama-3.1-8b", "--cluster", "h1000"), "unknown cluster or file 'h1000'; did you mean h100-sxm"),
    (("predict", "llama-3.1-8b", *PLAN, "--stack", "titan"), "forerun stacks lists the"),
    (("plan", "llama-3.1-8b", *PLAN[:4]), "--seq-len, --global-batch missing; a search for a model needs --gpus"),
    (("plann",), "did you mean 'plan'? see forerun --help"),
    (("serve", "--port", 99999999), "--port"),
    (("simulate", "--program", "broken.yaml", *PLAN[:2]), "not a saved Program (BadZipFile); write it again with"),
    (("models", "--all"), "--all"),
    (("nonsense",), "nonsense"),
    (("--nonsense",), "--nonsense"),
]


@pytest.mark.parametrize(("arguments", "names"), BAD, ids=lambda value: " ".join(map(str, value))[:60])
def test_bad_input_is_one_line(forerun, tmp_path, arguments, names):
    for file_name, text in FILES.items():
        (tmp_path / file_name).write_text(text)
    done = forerun(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert names in done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)
