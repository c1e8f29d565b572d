"""What options become before a command does its work: sizes, times, fields of plans, and what does not go together."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace as Hand
from typing import Annotated

import pytest
import typer

from forerun.common.errors import ForerunError, UnknownName
from forerun.describe.plan.training_loop import TrainingLoop
from forerun.interfaces.cli import (
    option_groups,
    plan_options,
)
from forerun.interfaces.cli.collective import GroupOptions, NetworkOptions, SizeOptions, SystemOptions, _figures
from forerun.interfaces.cli.launch_option import LaunchOptions
from forerun.interfaces.cli.loop_options import LoopOptions
from forerun.interfaces.cli.numbers import memory_left, parse_bytes, parse_duration, share, whole_numbers
from forerun.interfaces.cli.plan_search import Question, Shown, _axes
from forerun.interfaces.cli.post_training_options import PostTrainingOptions
from forerun.interfaces.cli.predict import Beside, Written
from forerun.interfaces.cli.program_options import refuse

# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1), ("1024", 1024), ("7B", 7), ("64MiB", 64 << 20), ("1GB", 10**9), ("0.5KiB", 512), ("1.5KB", 1500),
        (" 3 TB ", 3 * 10**12), ("1024TiB", 1 << 50), ("2GiB", 2 << 30),
    ],
)  # fmt: skip
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["0", "0.3", "1025TiB", "1MiBs", "-1", "1,5", "", "MiB", "1e3", "9" * 21])
def test_what_is_no_size(text):
    with pytest.raises(ForerunError, match="size "):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "time_s"),
    [
        ("90", 90),
        ("90s", 90),
        ("1.5min", 90),
        ("2h", 7200),
        ("366d", 366 * 86_400),
        (" 3 d ", 3 * 86_400),
        ("0.5", 0.5),
    ],
)
def test_durations(text, time_s):
    assert parse_duration(text, "--time-limit") == time_s


@pytest.mark.parametrize("text", ["0", "0.0s", "367d", "366.1d", "-1", "2 weeks", "", "1e3s", "1h30"])
def test_what_is_no_duration(text):
    with pytest.raises(ForerunError, match=r"^--time-limit .*: expected a time such as 90s"):
        parse_duration(text, "--time-limit")


def test_shares():
    assert [share(text, "-x") for text in ("2%", "0.02", "0", "150%", " 1 ")] == [0.02, 0.02, 0.0, 1.5, 1.0]
    for text in ("-1", "-2%", "x", "inf", "nan", ""):
        with pytest.raises(ForerunError, match=r"-x .*: expected a share"):
            share(text, "-x")


def test_the_ends_of_numbers():
    assert whole_numbers("1..1000:1", "-n") == tuple(range(1, 1001))
    with pytest.raises(ForerunError, match="more than 1,000 numbers"):
        whole_numbers("1..1001:1", "-n")
    assert whole_numbers("5..5:1", "-n") == (5,)
    assert whole_numbers("0", "-n") == (0,)
    assert whole_numbers("-3,2", "-n") == (-3, 2)
    assert memory_left("50%", 80.0) == 40.0


# -- groups of options -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Some:
    count: Annotated[int, typer.Option(help="n")]
    name: Annotated[str | None, typer.Option(help="n")] = None
    flag: bool = False


def test_a_group_of_options_becomes_options():
    got = []

    @option_groups.grouped
    def command(one: Some, other: int = 3) -> None:
        """Does it."""
        got.append((one, other))

    parameters = inspect.signature(command).parameters
    assert list(parameters) == ["count", "name", "flag", "other"]
    assert {each.kind for each in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert (parameters["count"].default, parameters["name"].default, parameters["other"].default) == (
        inspect.Parameter.empty, None, 3,
    )  # fmt: skip
    assert (command.__name__, command.__doc__) == ("command", "Does it.")
    command(count=1, name="a", flag=True, other=5)
    assert got == [(Some(1, "a", True), 5)]


def test_a_command_runs_around_its_group():
    said = []

    @contextmanager
    def enter(some):
        said.append(some)
        yield
        said.append("left")

    command = option_groups.around(lambda other: said.append(other), Some, enter)
    assert list(inspect.signature(command).parameters) == ["other", "count", "name", "flag"]
    command(other=7, count=2, name=None, flag=False)
    assert said == [Some(2), 7, "left"]


def test_options_that_differ_from_their_defaults():
    assert option_groups.given(Some(2, "a", False)) == {"count": 2, "name": "a"}
    assert option_groups.given(Some(2, "a", True), "name", "count") == {"flag": True}


def test_options_that_do_not_go_with_another():
    refuse({"a": None, "b": False}, "no")
    with pytest.raises(ForerunError, match=r"^--a-b, --c: no$"):
        refuse({"a_b": 0, "x": None, "c": True}, "no")


# -- plans -------------------------------------------------------------------------------------------------------------


def test_flags_take_values_where_there_are_several_plans():
    given = ["plan", "gpt2", "--compile", "true,false", "--compile", "--tp", "true", "--async-tp", "false"]
    assert plan_options.flags_with_values(given) == [
        "plan", "gpt2", "--compile-values", "true,false", "--compile", "--tp", "true", "--async-tp-values", "false",
    ]  # fmt: skip
    assert plan_options.flags_with_values(["--compile", "true,maybe"]) == ["--compile", "true,maybe"]


def test_fields_of_plans_come_from_a_file_and_from_options(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text("tp: 2\npp: 4\n")
    fields = {"tp": "8", "compile": True, "micro_batch": "1, 2", "async_tp": "true,false", "sequence_parallel": "false"}
    assert plan_options.parse(fields, file, several=True) == {
        "tp": 8, "pp": 4, "compile": True, "micro_batch": [1, 2], "async_tp": [True, False], "sequence_parallel": False,
    }  # fmt: skip
    assert plan_options.parse({"tp": "8"}, None, several=False) == {"tp": 8}
    with pytest.raises(ForerunError):
        plan_options.parse({"tp": "1,2"}, None, several=False)
    assert plan_options.parse({"recompute_modules": "mlp,layernorm"}, None, several=True) == {
        "recompute_modules": ("mlp", "layernorm")
    }


def test_the_plan_that_is_asked_about(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text("tp: 2\nseq_len: 1024\n")
    assert plan_options.plan_asked_about("tp=16, pp = 3,micro-batch=2", 1024) == {"tp": 16, "pp": 3, "micro_batch": 2}
    assert plan_options.plan_asked_about("recompute_modules=mlp,layernorm,tp=2", 1) == {
        "recompute_modules": ("mlp", "layernorm"), "tp": 2,
    }  # fmt: skip
    assert plan_options.plan_asked_about(str(file), 1024) == {"tp": 2}
    with pytest.raises(ForerunError, match="seq_len is 1024, not the search's 2048"):
        plan_options.plan_asked_about(str(file), 2048)
    with pytest.raises(ForerunError, match="a plan has no field 'x'"):
        plan_options.plan_asked_about("x=1", 1)
    with pytest.raises(ForerunError, match="expected fields of a plan"):
        plan_options.plan_asked_about("seq_len=1024", 1024)


def test_help_of_a_field_says_the_default_that_is_used():
    assert plan_options._help("tp", False).endswith(" (default 1).")
    assert not plan_options._help("tp", True).endswith(").")
    assert "(default" not in plan_options._help("compile", False)
    assert plan_options._help("loss_parallel", True).endswith(" (default on).")
    assert [plan_options._plain(value) for value in (True, False, 3, ("a", "b"))] == ["on", "off", "3", "a,b"]
    assert "(default" not in plan_options._help("document_lengths", False)


def test_heat_maps_have_two_axes_that_may_differ():
    assert (_axes("tp, pp"), _axes("micro-batch,tp")) == (("tp", "pp"), ("micro_batch", "tp"))
    for text in ("tp", "tp,tp", "tp,pp,cp", ""):
        with pytest.raises(ForerunError, match="expected two axes"):
            _axes(text)
    shown = Shown(heat=["tp,pp"])
    assert shown.maps == [("tp", "pp")]
    shown.check_heat({"tp": [1, 2], "cp": 4})
    with pytest.raises(ForerunError, match="tp is fixed to 2; name an axis with several values"):
        shown.check_heat({"tp": 2})
    with pytest.raises(ForerunError, match="tpp"):
        Shown(heat=["tpp,pp"]).check_heat({})
    with pytest.raises(ForerunError, match="give --report or --pictures too"):
        shown.check()
    Shown(heat=["tp,pp"], report=Path("page.html")).check()
    assert Shown().maps == []


def test_a_range_takes_more_than_one_search():
    def is_range(gpus, batches):
        return Question.is_range.fget(Hand(gpus=gpus, batches=batches))

    assert [is_range((8,), (64,)), is_range((8, 16), (64,)), is_range((8,), (64, 128))] == [False, True, True]


@pytest.mark.parametrize(("launch", "out", "missing"), [("torchtitan", None, "-out"), (None, Path("x"), "")])
def test_launch_files_need_a_tool_and_a_folder(launch, out, missing):
    with pytest.raises(ForerunError, match=f"give --launch{missing} too$"):
        LaunchOptions(launch, out).check()
    LaunchOptions().check()
    LaunchOptions("torchtitan", Path("x")).check()
    with pytest.raises(UnknownName):
        LaunchOptions("titan", Path("x")).check()


def test_what_needs_the_whole_timeline():
    assert not Written(explain=True, must_fit=True).needs_whole_timeline
    for name in ("trace", "chakra", "memory_snapshot", "report", "allocator"):
        assert Written(**{name: Path("x")}).needs_whole_timeline
    assert [Written(allocator=text).own_settings for text in (None, "default", "a:1")] == ["", "", "a:1"]


def test_what_stands_beside_a_step_has_to_fit_too():
    fits, too_large = Hand(fits=True), Hand(fits=False)
    assert (Beside().fits, Beside(fits, None, None, fits).fits) == (True, True)
    assert (Beside(too_large).fits, Beside(replicas=too_large).fits) == (False, False)
    assert Beside().record() == {}


# -- the loop and the stages around a step -----------------------------------------------------------------------------


def test_a_training_loop_of_options():
    base = TrainingLoop()
    assert LoopOptions().loop(base) == base
    found = LoopOptions("checkpoint=500", "async").loop(base)
    assert (found.checkpoint, found.checkpoint_mode) == (500, "async")
    for options in (LoopOptions(checkpoint_mode="async"), LoopOptions(storage="10")):
        with pytest.raises(ForerunError, match="the run writes no checkpoints; add --every checkpoint=500"):
            options.loop(base)
    assert LoopOptions().where() is None
    assert LoopOptions("checkpoint=5", storage="10,100").where() is not None


def test_stages_of_post_training_need_the_rate_of_generation():
    assert PostTrainingOptions().around() is None
    for name, value in (
        ("generated_share", 0.5),
        ("generation_gib", 3.0),
        ("old_scores", False),
        ("critic", "gpt2-small"),
    ):
        with pytest.raises(ForerunError, match=f"--{name.replace('_', '-')}: give --generated-tokens-per-s too"):
            PostTrainingOptions(**{name: value}).around()
    found = PostTrainingOptions(1000.0, 0.5, old_scores=False).around()
    assert (found.generated_tokens_per_s, found.generated_share, found.old_scores) == (1000.0, 0.5, False)
    assert found.critic is None


# -- collectives -------------------------------------------------------------------------------------------------------


def test_sizes_of_collectives():
    assert SizeOptions(["1KiB", "7"]).bytes() == [1024, 7]
    assert SizeOptions(first="1KiB", last="8KiB").bytes() == [1024, 2048, 4096, 8192]
    assert SizeOptions(["3"], "100", "230", 1.5).bytes() == [3, 100, 150, 225]
    assert SizeOptions(first="1", last="3", factor=1.2).bytes() == [1, 2, 3]
    assert SizeOptions(first="5", last="5").bytes() == [5]
    for options in (SizeOptions(first="1"), SizeOptions(last="1")):
        with pytest.raises(ForerunError, match="give both for a range"):
            options.bytes()
    for options in (SizeOptions(), SizeOptions(first="8", last="4")):
        with pytest.raises(ForerunError, match="no sizes are given"):
            options.bytes()


def test_the_network_of_collectives(tmp_path):
    assert NetworkOptions("ring:8").read().n_npus == 8
    assert NetworkOptions().read_cluster() is None
    with pytest.raises(ForerunError, match="--gpus goes with --cluster"):
        NetworkOptions("ring:8", gpus=4).read_cluster()
    for options in (NetworkOptions("ring:8", cluster="h100-sxm"), NetworkOptions(network=tmp_path, cluster="h100-sxm")):
        with pytest.raises(ForerunError, match="leave out --topology and --network"):
            options.read_cluster()
    assert NetworkOptions(cluster="h100-sxm").read_cluster()[1] == 8
    assert NetworkOptions(cluster="h100-sxm", gpus=4).read_cluster()[1] == 4
    for options in (NetworkOptions(), NetworkOptions("ring:8", tmp_path / "x")):
        with pytest.raises(ForerunError, match="give one network"):
            options.read()
    assert _figures("50, 25", "bandwidth") == [50.0, 25.0]
    with pytest.raises(ForerunError, match="--latency: expected a number or one for each dimension"):
        _figures("50;25", "latency")


def test_the_system_and_the_groups_of_collectives():
    found = SystemOptions(splits=3, active=2, endpoint_delay=7, local_mem_bw=5.0).system()
    assert (found.preferred_dataset_splits, found.active_chunks_per_dimension) == (3, 2)
    assert (found.endpoint_delay, found.local_mem_bw) == (7, 5.0)
    network = NetworkOptions("ring:8").read()
    assert GroupOptions().on(network) == ()
    assert GroupOptions(2, 4).on(network) == ((0, 4), (1, 5), (2, 6), (3, 7))
