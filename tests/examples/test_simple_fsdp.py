"""SimpleFSDP on gloo processes does what one process does alone on all samples, and what PyTorch's FSDP2 does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the SimpleFSDP example needs PyTorch")

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[2] / "examples" / "simple_fsdp"
RANKS = Path(__file__).with_name("simple_fsdp_ranks.py")
LIMIT_S = 300
# Parameters of the models in the checks: 2 layers, compiled 1, of 9 weights, and 3 others. The embedding's weight is
# not needed in backward.
WEIGHTS, COMPILED_WEIGHTS = 2 * 9 + 3, 9 + 3


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(EXAMPLE), "OMP_NUM_THREADS": "1", **more}


def run_ranks(world: int, directory: Path) -> dict:
    """What `world` processes found together."""
    command = [sys.executable, str(RANKS)]
    logs = [directory / f"rank{rank}.log" for rank in range(world)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            arguments = [*command, str(rank), str(world), str(directory)]
            processes.append(subprocess.Popen(arguments, env=environment(), stdout=out, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world, "\n".join(log.read_text()[-3000:] for log in logs)
    return json.loads((directory / "found.json").read_text())


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_ranks(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return run_ranks(4, tmp_path_factory.mktemp("four"))


@pytest.fixture
def found(request):
    """All that the processes of a mode found: hybrid_shard runs on 2 x 2."""
    return request.getfixturevalue("four" if request.getfixturevalue("mode") == "hybrid_shard" else "two")


every_mode = pytest.mark.parametrize("mode", ["replicate", "fully_shard", "hybrid_shard"])


@every_mode
def test_training_is_that_of_one_process(found, mode):
    training = found[f"{mode}/training"]
    assert training["loss"] < 1e-6
    assert training["gradients"] < 1e-5
    assert training["parameters"] < 1e-4  # AdamW's division makes rounding differences of small gradients larger


@pytest.mark.parametrize("mode", ["replicate", "fully_shard"])
def test_tied_weights_train_as_one_parameter(two, mode):
    assert two[f"{mode}/tied"]["gradients"] < 1e-5
    assert two[f"{mode}/tied"]["parameters"] < 1e-4


@every_mode
@pytest.mark.parametrize(
    "variant", ["odd shapes", "full checkpoint", "selective checkpoint", "compiled, none checkpoint"]
)
def test_one_step_is_that_of_one_process(found, mode, variant):
    step = found[f"{mode}/{variant}"]
    assert step["loss"] < 1e-6
    assert step["gradients"] < 5e-6


@pytest.mark.parametrize(
    "variant",
    [
        "compiled, full checkpoint",
        "compiled, selective checkpoint",
        "compiled, none checkpoint, kept",
        "compiled blocks",
    ],
)
def test_one_compiled_step_is_that_of_one_process(two, variant):
    assert two[f"fully_shard/{variant}"]["gradients"] < 5e-6


@every_mode
def test_bf16_weights_are_close_to_fp32(found, mode):
    step = found[f"{mode}/bf16"]
    assert step["loss"] < 2e-3
    assert 1e-5 < step["gradients"] < 0.05
    assert step["dtypes"] == ["torch.float32"]
    assert step["logits"] == "torch.bfloat16"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "all bf16"])
def test_gradients_are_bitwise_those_of_fsdp2(two, precision):
    assert two[f"fsdp2/{precision}"] == {"loss": 0.0, "gradients": 0.0}


def test_hybrid_gradients_are_bitwise_those_of_fsdp2(four):
    assert four["fsdp2/bf16"] == {"loss": 0.0, "gradients": 0.0}


@pytest.mark.parametrize("world", ["two", "four"])
def test_resharded_weights_do_not_outlive_the_forward(world, request):
    memory = request.getfixturevalue(world)["memory/none, resharded"]
    assert memory["live_bytes"] == 0
    assert memory["gathers_forward"] == WEIGHTS
    assert memory["gathers_backward"] == WEIGHTS - 1
    assert memory["live_bytes_in_the_end"] == 0


def test_kept_weights_live_until_backward_unless_checkpointed(two):
    kept = two["memory/none, kept"]
    assert kept["live_bytes"] > 50_000
    assert kept["gathers_backward"] == 0
    for how in ("full", "selective"):
        memory = two[f"memory/{how}, kept"]
        assert memory["live_bytes"] < kept["live_bytes"] / 5  # the output's weight and norm are in no block
        assert memory["gathers_backward"] == 2 * 9
    for memory in (value for name, value in two.items() if name.startswith("memory/")):
        assert memory["live_bytes_in_the_end"] == 0


def test_compiled_graphs_hold_the_collectives(two):
    for how in ("none", "full", "selective"):
        forward, backward = two[f"fully_shard/compiled, {how} checkpoint"]["graphs"]
        assert forward == {"all_gather_into_tensor": COMPILED_WEIGHTS}
        assert backward == {"all_gather_into_tensor": COMPILED_WEIGHTS - 1, "reduce_scatter_tensor": COMPILED_WEIGHTS}
    forward, backward = two["fully_shard/compiled, none checkpoint, kept"]["graphs"]
    assert forward == {"all_gather_into_tensor": COMPILED_WEIGHTS}
    assert backward == {"reduce_scatter_tensor": COMPILED_WEIGHTS}


def test_hybrid_scatters_gradients_before_replicas_reduce_them(four):
    whole = 8 * 8 * 4
    assert four["collectives"] == [
        ["all_gather_into_tensor", whole // 2],
        ["reduce_scatter_tensor", whole],
        ["all_reduce", whole // 2],
    ]


def test_state_keeps_its_names_and_is_sharded(two):
    state = two["state"]
    assert state["names"]
    assert state["parameters"] == 0.0
    assert state["shards"] == ["(Shard(dim=0),)"]
    assert state["local_share"] == 0.5


def test_all_ranks_start_with_the_first_ranks_weights(two):
    assert two["first rank's weights"] == 0.0


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("mode", "ValueError: unknown mode 'zero3': use one of replicate, fully_shard, hybrid_shard"),
        ("mesh", "ValueError: mode 'hybrid_shard' needs a mesh of 2 dimension(s), this one has 1"),
        ("lstm", "ValueError: module '1' (LSTM) keeps its weights in a list of its own"),
        ("twice", "ValueError: module 'model' (Linear) has a parameter 'weight' that is a DTensor already"),
        ("changed", "RuntimeError: a sharded parameter was changed in place between forward and backward"),
    ],
)
def test_what_cannot_work_is_refused(two, case, text):
    assert two["refusals"][case].startswith(text)


def test_a_refused_model_stays_as_it_was(two):
    assert two["refusals"]["untouched"] == "<class 'torch.nn.parameter.Parameter'>"


SMALL = ["--layers", "1", "--dim", "32", "--heads", "4", "--seq-len", "16", "--batch", "2", "--steps", "3"]
SCRIPT = str(EXAMPLE / "train.py")


def run_script(command: list[str], **more: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_script_trains_on_one_process():
    out = run_script([SCRIPT, *SMALL, "--device", "cpu", "--mode", "fully_shard", "--tied", "--compile", "aot_eager"])
    assert [line.split(":")[0] for line in out.splitlines()[:3]] == ["step 0", "step 1", "step 2"]
    assert "tokens/s on 1 rank(s)" in out


def test_the_script_trains_on_two_processes():
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = ["--mode", "hybrid_shard", "--shard-size", "2", "--kv-heads", "2", "--checkpoint", "selective"]
    precision = ["--param-dtype", "bfloat16", "--reduce-dtype", "float32"]
    out = run_script([*torchrun, SCRIPT, *SMALL, *flags, *precision, "--device", "cpu"])
    assert out.count("loss") == 3
    assert "tokens/s on 2 rank(s)" in out
