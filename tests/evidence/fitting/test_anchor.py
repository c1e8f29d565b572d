"""A user's own measured steps correct rates, in proportion to what the steps depend on."""

from dataclasses import replace

import pytest

from forerun.answers.analysis.predict import predict_setup
from forerun.answers.analysis.setup import Setup
from forerun.answers.search.search import search
from forerun.common.errors import ForerunError
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.types import KernelRates
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.evidence.fitting.anchor import Anchor, anchored, anchored_rates
from forerun.evidence.fitting.anchor_file import anchored_by_file

MODEL, CLUSTER = load_model("llama-3.1-8b"), load_cluster("h100-sxm")
SETUP = Setup(MODEL, Plan(seq_len=8192, dp_shard=8), CLUSTER)
BUSY_LINKS = Setup(MODEL, Plan(seq_len=8192, dp_shard=4, tp=8), CLUSTER)
STEP = "dp_shard: 8\nseq_len: 8192\n"


PLAIN = KernelRates()
FEW = {"pp": 1, "tp": [1, 2], "cp": 1, "activation_checkpointing": ["none", "full"]}


def seconds(setup: Setup, rates: KernelRates = PLAIN) -> float:
    return predict_setup(replace(setup, cluster=anchored(setup.cluster, rates))).step_time_s


def by_file(tmp_path, text: str, stack: str | None = None):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return anchored_by_file(path, MODEL, CLUSTER, stack)


def test_a_step_that_was_predicted_changes_nothing():
    assert anchored_rates([Anchor(SETUP, seconds(SETUP))]) == KernelRates()


def test_a_slow_step_makes_predictions_slower_but_not_beyond_it():
    measured = 1.08 * seconds(SETUP)
    rates = anchored_rates([Anchor(SETUP, measured)])
    assert seconds(SETUP) < seconds(SETUP, rates) < measured
    twice = anchored_rates([Anchor(SETUP, measured)] * 2)
    assert seconds(SETUP, rates) < seconds(SETUP, twice) < measured
    assert all(rate < 1 for rate in (rates.gemm, rates.attention, rates.memory))
    assert rates.network == pytest.approx(1, abs=0.01), "the step hardly depends on it"


def test_a_step_moves_what_it_depends_on():
    computing = anchored_rates([Anchor(SETUP, 1.1 * seconds(SETUP))])
    communicating = anchored_rates([Anchor(BUSY_LINKS, 1.1 * seconds(BUSY_LINKS))])
    assert computing.network > communicating.network
    assert computing.gemm < communicating.gemm


def test_steps_that_differ_in_their_error_are_explained_together():
    true = KernelRates(network=0.8)
    anchors = [Anchor(setup, seconds(setup, true)) for setup in (SETUP, BUSY_LINKS)]
    rates = anchored_rates(anchors)
    assert rates.network < min(rates.memory, rates.gemm, rates.attention) < 1
    assert rates.network < 0.98
    before, after = (anchors[1].measured_s - seconds(BUSY_LINKS, some) for some in (PLAIN, rates))
    assert 0 < after < 0.8 * before


def test_a_file_says_what_a_step_took(tmp_path):
    time_s = 1.1 * seconds(SETUP)
    by_time = by_file(tmp_path, f"{STEP}step_time_s: {time_s}\n")
    by_tokens = by_file(tmp_path, f"{STEP}tokens_per_s_per_gpu: {8192 / time_s}\n")
    listed = by_file(tmp_path, f"anchors:\n- {{gpus: 8, seq_len: 8192, step_time_s: {time_s}}}\n")
    assert by_time == by_tokens == listed == anchored(CLUSTER, anchored_rates([Anchor(SETUP, time_s)]))
    megatron = by_file(tmp_path, f"{STEP}step_time_s: {time_s}\n", "megatron-core")
    own = by_file(tmp_path, f"{STEP}stack: torchtitan\nstep_time_s: {time_s}\n", "megatron-core")
    assert megatron != own == by_time


def test_bounds_of_a_search_hold_under_corrected_rates(tmp_path):
    where = by_file(tmp_path, f"{STEP}step_time_s: {1.3 * seconds(SETUP)}\n")
    found = [
        search(MODEL, where, 8, 8192, 8, fixed=FEW, keep=1, workers=1, exhaustive=everything)
        for everything in (False, True)
    ]
    plain, exhaustive = (one.best.own_plan() for one in found)
    assert plain == exhaustive
    assert found[0].best.step_time_s > seconds(replace(SETUP, plan=plain))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (STEP, "give one of step_time_s and tokens_per_s_per_gpu"),
        (f"{STEP}step_time_s: 1\ntokens_per_s_per_gpu: 5\n", "give one of"),
        (f"{STEP}step_time_s: -1\n", "step_time_s: expected a number above 0"),
        (f"{STEP}step_time_s: yes\n", "step_time_s: expected a number above 0"),
        (f"{STEP}step_time_s: 1\nspeed: 3\n", "unknown key 'speed'"),
        (f"{STEP}step_time_s: 1\ncluster: a100\n", "it can't correct h100-sxm-80gb"),
        (f"{STEP}step_time_s: 1\ngpus: 12\n", "not 12"),
        (f"{STEP}step_time_s: 1\ngpus: many\n", "gpus: expected a whole number"),
        (f"{STEP}step_time_s: 1\nmodel: 5\n", "model: expected a name"),
        ("step_time_s: 1\n", "seq_len is missing"),
        ("anchors: []\n", "a list of steps"),
        (f"{STEP}anchors: [{{step_time_s: 1}}]\n", "a list of steps"),
        ("anchors: [5]\n", "expected the fields of a plan"),
        ("anchors: [{seq_len: 4096, step_time_s: 1}, {seq_len: 4096}]\n", r"anchors\[1\]: give one of"),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path, text, said):
    with pytest.raises(ForerunError, match=said) as error:
        by_file(tmp_path, text)
    assert "mine.yaml" in str(error.value)
