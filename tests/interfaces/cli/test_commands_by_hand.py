"""What single commands make of their options, limits of the process, and completion, by known answers."""

from __future__ import annotations

import inspect
import signal
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace as Hand

import pytest

from forerun.answers.jobs.placement import Shape
from forerun.common.errors import ForerunError, UnknownName
from forerun.interfaces.cli import (
    chakra,
    code_option,
    completion,
    diff,
    experiment,
    main,
    process,
    process_limits,
    simulate,
    stage,
    trace,
)
from forerun.interfaces.cli.cluster import Nodes
from forerun.interfaces.cli.exit_codes import LIMIT_REACHED, NOTHING_FITS, WORSE
from forerun.interfaces.cli.experiment_source import EXAMPLES, SourceOptions

# -- clusters, traces, stages, differences -----------------------------------------------------------------------------


def test_options_change_the_cluster_of_jobs(tmp_path):
    @dataclass(frozen=True)
    class Jobs:
        shape: Shape
        policies: tuple[str, ...]
        placement: str

    asked = Jobs(Shape(2, 3, 4, 3), ("fifo",), "packed")
    assert Nodes().changed(asked) == asked
    found = Nodes(nodes=6, gpus_per_node=8, switches=9, policy="srtf,fifo,srtf").changed(asked)
    assert (found.shape, found.policies, found.placement) == (Shape(9, 6, 8, 3), ("srtf", "fifo"), "packed")
    with pytest.raises(UnknownName):
        Nodes(policy="nothing").changed(asked)
    with pytest.raises(ForerunError, match="a trace has no cluster; give --nodes"):
        Nodes().of_trace(tmp_path)


def job(script=None, **run):
    return trace._job(trace.ScriptOptions("train.py", **(script or {})), trace.RunOptions(**run))


def test_the_job_that_is_traced():
    found = job({"arguments": ["8"], "module": True}, world_size=4, rank=2, steps=5, expert_skew=0.5)
    assert (found.target, found.arguments, found.is_module) == ("train.py", ("8",), True)
    assert (found.world_size, found.rank, found.alone, found.steps, found.expert_skew) == (4, 2, True, 5, 0.5)
    usual = job()
    assert (usual.rank, usual.alone, usual.world_size, usual.is_module, usual.arguments) == (0, False, 1, False, ())
    assert job(rank=0, world_size=1).alone
    for run, problem in (
        ({"rank": 1, "all_roles": True, "world_size": 2}, "--rank and --all-roles exclude each other"),
        ({"rank": 4, "world_size": 4}, "there is no such rank; choose one of 0 to 3"),
    ):
        with pytest.raises(ForerunError, match=problem):
            job(**run)
    with pytest.raises(ForerunError, match="--module and --torchtitan exclude each other"):
        job({"module": True, "torchtitan": True})
    with pytest.raises(ForerunError, match="--override goes with --torchtitan"):
        job({"override": ["a.b=1"]})


def test_flags_say_which_generation_of_stage_is_meant():
    assert not stage._is_first({"dp": 1})
    assert stage._is_first({"din": 8, "comm_group_file": "x"})
    assert not stage._is_first({"dvocal": 8})
    with pytest.raises(ForerunError, match="--din: give --comm_group_file too"):
        stage._is_first({"din": 8})
    with pytest.raises(ForerunError, match="--din, --comm_group_file are of STAGE's first generation, --dvocal of its"):
        stage._is_first({"din": 8, "comm_group_file": "x", "dvocal": 8})


@pytest.mark.parametrize(
    ("bounds", "slowdown", "growth", "code"),
    [
        ({}, 9.0, 9.0, 0),
        ({"max_slowdown": "2%"}, 0.02, None, 0),
        ({"max_slowdown": "2%"}, 0.021, None, WORSE),
        ({"max_growth": "0.5"}, 9.0, 0.5, 0),
        ({"max_growth": "0.5"}, 0.0, 0.51, WORSE),
        ({"must_fit": True, "max_slowdown": "2%"}, 0.0, 0.0, NOTHING_FITS),
    ],
)
def test_how_much_worse_a_change_may_be(bounds, slowdown, growth, code):
    found = Hand(slowdown=slowdown, growth=growth, after=Hand(fits=not bounds.get("must_fit")))
    assert diff.Bounds(**bounds).code(found) == code
    assert diff.Bounds(must_fit=True).code(Hand(slowdown=0, growth=0, after=Hand(fits=True))) == 0


def test_growth_of_a_program_without_memory_can_not_be_bounded():
    with pytest.raises(ForerunError, match="the program before says no memory"):
        diff.Bounds(max_growth="2%").code(Hand(slowdown=0.0, growth=None, after=Hand(fits=True)))


def test_a_rank_class_has_a_name_and_a_number():
    program = Hand(rank_classes=[Hand(name="stage 0"), Hand(name="7"), Hand(name="last")])
    assert [simulate._number(program, text) for text in ("last", "0", "7", "2")] == [2, 0, 1, 2]
    for text in ("3", "-1", "first"):
        with pytest.raises(ForerunError):
            simulate._number(program, text)


def test_figures_of_chakra_traces():
    nodes = {"collective": 1200, "send": 3, "recv": 4}
    figures = Hand(
        nodes=Counter({**nodes, "compute": 11_138}), num_ops=1_000_000, tensor_bytes=2000,
        comm_bytes=Counter({"dp": 5000}), depth=1001,
    )  # fmt: skip
    assert chakra._figures(figures) == ["12,345", "1,000,000", "2,000", "1,200", "7", "5,000", "1,001"]
    assert (chakra._source(["a"]), chakra._source(["a", "b"])) == ("a", ["a", "b"])


# -- experiments -------------------------------------------------------------------------------------------------------


def test_values_of_an_option_may_follow_each_other():
    several = {"--set", "--nodes"}
    assert experiment.spread(["x", "--nodes", "1", "2", "4", "--strong", "y", "--set", "a=1", "b=2"], several) == [
        "x", "--nodes", "1", "--nodes", "2", "--nodes", "4", "--strong", "y", "--set", "a=1", "--set", "b=2",
    ]  # fmt: skip
    assert experiment.spread(["--out", "x", "y"], several) == ["--out", "x", "y"]


def test_which_experiment_is_meant():
    comparison = next(each for each in EXAMPLES.values() if each.patterns)
    plain = next(each for each in EXAMPLES.values() if not each.patterns and not each.nodes)
    assert SourceOptions("a.yaml").chosen().source == "a.yaml"
    assert SourceOptions(config=Path("a.yaml")).chosen().nodes == ()
    assert SourceOptions(preset="small", scaling=True).chosen().nodes == (1, 2, 4, 8, 16)
    assert SourceOptions(scaling=True, nodes=[3]).chosen().source == "medium"
    assert SourceOptions("a.yaml", scaling=True, nodes=[3, 4]).chosen().nodes == (3, 4)
    found = SourceOptions(example=comparison.number).chosen()
    assert (found.shipped, found.patterns) == (comparison.path, comparison.patterns)
    assert SourceOptions(example=plain.number, scaling=True).chosen().nodes == (1, 2, 4, 8, 16)
    for options, problem in (
        (SourceOptions(), "no experiment is named"),
        (SourceOptions("a", preset="small"), r"FILE\|PRESET and --preset each name an experiment"),
        (SourceOptions("a", nodes=[1]), "--nodes goes with --scaling"),
        (SourceOptions(example=comparison.number, scaling=True), "is a comparison; leave out --scaling"),
    ):
        with pytest.raises(ForerunError, match=problem):
            options.chosen()


def test_code_of_a_file_is_said_once_or_refused(capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(code_option, "before_own_code", asked.append)
    code_option._watched(code_option.CodeOptions())
    code_option._watched(code_option.CodeOptions(no_code=True))
    says, refuses = asked
    for what in ("a names x.py", "a names x.py", "a names y.py"):
        says(what)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["warning: a names x.py", "warning: a names y.py"]
    with pytest.raises(ForerunError, match=r"a names x\.py, and --no-code refuses it"):
        refuses("a names x.py")


# -- the process -------------------------------------------------------------------------------------------------------


def test_limits_of_a_process_are_told_when_they_are_passed(monkeypatch):
    clock, used = Hand(now=100.0), Hand(size=0)
    looks = []
    monkeypatch.setattr(process_limits.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(process_limits, "used_bytes", lambda: used.size)
    monkeypatch.setattr(process_limits, "can_tick", lambda: True)

    @contextmanager
    def ticking(look, every_s, first_after_s):
        looks.append((look, every_s, first_after_s))
        yield

    monkeypatch.setattr(process_limits, "ticking", ticking)
    with process_limits._within(process_limits.ProcessLimits("90s", "2GiB"), "plan"):
        ((look, every_s, first_s),) = looks
        assert (every_s, first_s) == (0.2, 0.2)
        clock.now, used.size = 189.9, 2 << 30
        look()
        used.size += 1
        with pytest.raises(
            process.LimitReached, match=r"more memory than --memory-limit-process 2GiB \(2.00 GiB\); with"
        ):
            look()
        clock.now = 199.8
        look()  # the command has ten seconds for cleaning up
        clock.now = 199.9
        with pytest.raises(process.LimitReached) as reached:
            look()
    assert str(reached.value) == (
        "the command took longer than --time-limit 90s; with --store the same command goes on from what it had finished"
    )
    assert reached.value.code == LIMIT_REACHED
    looks.clear()
    with process_limits._within(process_limits.ProcessLimits(), "plan"):
        pass
    assert looks == []
    with process_limits._within(process_limits.ProcessLimits(time_limit="1"), "fit"):
        clock.now += 1.0
        with pytest.raises(process.LimitReached, match=r"--time-limit 1$"):
            looks[0][0]()
    monkeypatch.setattr(process_limits, "can_tick", lambda: False)
    with (
        pytest.raises(ForerunError, match="no free SIGALRM"),
        process_limits._within(process_limits.ProcessLimits("1"), "fit"),
    ):
        pass


def test_memory_of_a_process_that_has_ended_is_none():
    assert process_limits._proportional_bytes(1 << 30) == 0
    assert process_limits.used_bytes() > 1 << 20


def test_what_an_encoding_lacks_is_written_as_json_does():
    with pytest.raises(UnicodeEncodeError) as error:
        "a\u20ac\U0001f600b".encode("ascii")
    assert process._escaped(error.value) == ("\\u20ac\\ud83d\\ude00", 3)
    with pytest.raises(UnicodeDecodeError):
        process._escaped(UnicodeDecodeError("ascii", b"\xff", 0, 1, "x"))


def test_signals_end_the_process_with_their_code():
    assert (process.Ended(signal.SIGTERM).code, str(process.Ended(signal.SIGHUP))) == (143, "ended by SIGHUP")
    with pytest.raises(process.Ended):
        process._end(signal.SIGTERM, None)


# -- completion --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, None),
        ({"COMP_WORDS": "forerun plan gpt"}, ["plan", "gpt"]),
        ({"_TYPER_COMPLETE_ARGS": "forerun predict 'a b'"}, ["predict", "a b"]),
        ({"COMP_WORDS": "forerun plan 'a b"}, ["plan", "'a", "b"]),
        ({"_TYPER_COMPLETE_ARGS": "", "COMP_WORDS": "forerun x"}, ["x"]),
    ],
)
def test_words_that_a_shell_completes(environment, words):
    assert completion.words_to_complete(environment) == words


@pytest.mark.parametrize(
    ("line", "is_name"),
    [
        ("forerun plan gpt", True), ("forerun predict gpt", True), ("forerun plan -", False),
        ("forerun plan x --cluster h", True), ("forerun plan x --cluster ", True), ("forerun run x --stack t", True),
        ("forerun plan x y", False), ("forerun validate x", False), ("forerun plan x --cluster h ", False),
    ],
)  # fmt: skip
def test_where_only_the_name_of_a_preset_is_completed(line, is_name):
    environment = {"COMP_WORDS": line}
    words = completion.words_to_complete(environment)
    assert bool(completion.names_a_preset(words, environment)) == is_name


def test_presets_and_values_that_begin_with_what_is_typed():
    assert all(name.startswith("gpt2-") for name in completion.models("gpt2-"))
    assert "gpt2-small" in completion.models("gpt2")
    assert completion.clusters("h100-s") == ["h100-sxm"]
    assert completion.clusters("nothing") == []
    assert completion.of_field("zero_stage")("") == ["0", "1", "2", "3"]
    assert completion.of_field("zero_stage")("1,2,") == ["1,2,0", "1,2,1", "1,2,2", "1,2,3"]
    assert "torchtitan" in completion.of_field("stack")("torch")


@pytest.mark.parametrize("name", ["experiment", "measure", "plan"])
def test_a_command_that_is_loaded_again_is_the_same(name):
    """A group of commands and a command alone, each with the limits of a process once."""

    def options(command):
        parts = getattr(command, "registered_commands", None)
        callbacks = [command] if parts is None else [part.callback for part in parts]
        return [list(inspect.signature(each).parameters) for each in callbacks]

    first = options(main._load.__wrapped__(name))
    assert options(main._load.__wrapped__(name)) == first
    assert all(each.count("time_limit") == 1 for each in first)
