"""torchtitan's trainer as the traced program: what is refused, what settings become, and traces of its own models."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import pytest
import standin_torchtitan

from forerun.common.errors import ForerunError
from forerun.core.program.kinds import OpKind
from forerun.core.program.storage import load
from forerun.core.program.types import Collective
from forerun.interfaces.cli.main import run
from forerun.sources.trace import titan
from forerun.sources.trace.inside.titan.data import Batches, assign, checked, end_of_text, flat, parsed
from forerun.sources.trace.job import Failure, Job


def trace(folder: Path, *arguments: str, path: Path | None = None) -> tuple[str, Path]:
    """What `forerun trace --torchtitan` says, and the Program that it wrote."""
    program = folder / "step.program"
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()) as said:
        patch.chdir(folder)
        if path is not None:
            patch.syspath_prepend(path)
        code = run(["trace", "-o", str(program), "--torchtitan", *arguments])
    assert code == (0 if program.is_file() else 2), said.getvalue()
    return said.getvalue(), program


def counts(path: Path, kind: OpKind) -> dict[tuple[str, int], int]:
    """How often each collective or kernel of `kind` runs in a step of rank class 0, by name and group."""
    program = load(path)
    times = np.zeros(len(program.ops), int)
    for block in program.rank_classes[0].block:
        np.add.at(times, program.blocks[int(block)].op, 1)
    ops = program.ops
    found: dict[tuple[str, int], int] = {}
    for op in np.flatnonzero((ops.kind == kind) & (times > 0)).tolist():
        name = Collective(int(ops.collective[op])).name if kind == OpKind.COLLECTIVE else ops.name[op]
        found[name, int(ops.group[op])] = found.get((name, int(ops.group[op])), 0) + int(times[op])
    return found


def flops(path: Path, kind: OpKind, rank_class: int = 0) -> float:
    """FLOPs of all kernels of `kind` in a step of a rank class."""
    program = load(path)
    total = 0.0
    for block in program.rank_classes[rank_class].block:
        op = program.blocks[int(block)].op
        total += float(program.ops.flops[op][program.ops.kind[op] == kind].sum())
    return total


# -- versions and settings -----------------------------------------------------------------------------------------


def made_checkout(files, folder, monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    for name in ["__init__.py", "train.py", *files]:
        (folder / "torchtitan" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "torchtitan" / name).touch()
    monkeypatch.setattr(titan, "version", missing)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize(("files", "release"), [(["protocols/train_spec.py"], 0), ([], 1)])
def test_a_checkout_on_the_path_is_known_by_its_structure(files, release, tmp_path, monkeypatch):
    made_checkout(["components/dataloader.py", *files], tmp_path, monkeypatch)
    assert titan.installed_version() == titan.SUPPORTED[release]


def test_a_checkout_after_the_last_version_is_traced_as_that(tmp_path, monkeypatch):
    made_checkout(["components/data/loader.py"], tmp_path, monkeypatch)
    assert titan.installed_version() == titan.AFTER


def test_missing_torchtitan_is_one_clear_line(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(titan, "version", missing)
    with pytest.raises(ForerunError, match=r"^--torchtitan: torchtitan is not installed here; supported: 0\.2\.2"):
        titan.installed_version()


@pytest.mark.parametrize(
    ("found", "supported"),
    [("0.2.2", True), ("0.3.0", True), ("0.3.0+local", True), ("0.1.0", False), ("0.2.20", False), ("0.4.0", False)],
)
def test_versions_are_refused_by_name(monkeypatch, found, supported):
    monkeypatch.setattr(titan, "version", lambda _: found)
    if supported:
        assert titan.installed_version() == found
    else:
        with pytest.raises(ForerunError, match=rf"torchtitan {found} can't be traced; supported: 0\.2\.2, 0\.3\.0"):
            titan.installed_version()


def test_overrides_become_flags():
    settings = ["parallelism.tensor_parallel_degree=8", "job.description=a=b"]
    assert titan.flags_of(settings) == ("--parallelism.tensor_parallel_degree=8", "--job.description=a=b")


@pytest.mark.parametrize(
    "wrong", ["parallelism.tensor_parallel_degree", "=8", "parallelism..x=1", "--compile.enable=1"]
)
def test_an_override_names_a_setting_and_a_value(wrong):
    with pytest.raises(ForerunError, match=r"is not section\.key=value"):
        titan.flags_of([wrong])


def test_a_job_runs_torchtitan_with_its_own_arguments_last(monkeypatch):
    monkeypatch.setattr(titan, "version", lambda _: "0.2.2")
    asked = Job("", target="llama3", world_size=64, steps=3)
    job = titan.torchtitan_job(asked, ["llama3_8b", "activation-checkpoint:none"], ["training.seq_len=2048"])
    assert job.arguments == ("llama3", "llama3_8b", "--training.seq_len=2048", "activation-checkpoint:none")
    assert (job.is_module, job.world_size, job.steps, job.name) == (True, 64, 3, "torchtitan llama3_8b")


@pytest.mark.parametrize("arguments", [(), ("--training.seq_len=1",)])
def test_a_configuration_has_to_be_named(arguments):
    with pytest.raises(ForerunError, match="name a module and a configuration"):
        titan.torchtitan_job(Job("", target="llama3"), arguments, ())


@dataclass
class Inner:
    degree: int = 1
    enable: bool = False


@dataclass
class Settings:
    part: Inner = field(default_factory=Inner)
    name: str = ""


def test_booleans_are_switches_and_the_rest_is_as_it_was():
    flags = ["--part.enable=True", "--part.enable=false", "--part.degree=3", "--part.degree", "4", "--part.no-enable"]
    assert checked(Settings(), flags, "it") == [
        "--part.enable",
        "--part.no_enable",
        "--part.degree=3",
        "--part.degree",
        "4",
        "--part.no-enable",
    ]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--part.degre=2", r"^it: there is no setting part\.degre; did you mean degree\?$"),
        ("--pard.degree=2", r"^it: there is no setting pard; did you mean part\?$"),
        ("--zzz=2", r"^it: there is no setting zzz; known: part, name$"),
    ],
)
def test_an_unknown_setting_is_named_with_the_nearest(flag, message):
    with pytest.raises(ForerunError, match=message):
        checked(Settings(), [flag], "it")


def test_assign_leaves_out_what_is_not_there():
    settings = Settings()
    assign(settings, {"part.degree": 5, "part.other": 1, "absent.degree": 2})
    assert settings == Settings(part=Inner(degree=5))


def test_what_a_command_line_says_is_told_in_one_line():
    def refuse():
        print("╭─ Parsing error ─╮\n│ invalid choice: 'x' │\n╰─────╯\nsee --help", file=sys.stderr)
        raise SystemExit(2)

    with pytest.raises(ForerunError, match=r"^it: Parsing error invalid choice: 'x'$"):
        parsed(refuse, "it")


def test_batches_are_next_tokens_of_one_document():
    first, second = [batch for batch, _ in zip(Batches(100, 4, 16, positions=True), range(2), strict=False)]
    inputs, labels = first
    assert inputs["input"].shape == labels.shape == (4, 16)
    assert (inputs["input"][:, 1:] == labels[:, :-1]).all()
    assert inputs["positions"].tolist() == [list(range(16))] * 4
    assert end_of_text(100) == 99
    assert 0 <= int(labels.min()) < int(labels.max()) < 99
    assert (inputs["input"] != second[0]["input"]).any()
    assert set(next(iter(Batches(100, 4, 16, positions=False)))[0]) == {"input"}
    inputs, labels = flat(first)
    assert inputs["input"].shape == labels.shape == (64,)
    assert inputs["positions"].tolist() == list(range(16)) * 4


def test_long_failures_are_cut():
    error = Failure("word " * 1000).error("it")
    assert len(str(error)) < 700
    assert str(error).endswith("[...]")


# -- a package in torchtitan's place -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_step_is_a_call_of_train_step(tmp_path):
    standin_torchtitan.install(tmp_path / "path")
    settings = ("--override", "training.seq_len=32", "--override", "compile.enable=True")
    _, program = trace(tmp_path, "llama3", "llama3_debugmodel", "--world-size", "8", *settings, path=tmp_path / "path")
    meta = load(program).meta
    assert meta["name"] == "torchtitan llama3_debugmodel"
    assert [name for name, _ in counts(program, OpKind.COLLECTIVE)] == ["BROADCAST", "ALL_REDUCE"]
    assert set(counts(program, OpKind.COLLECTIVE).values()) == {1}
    tokens = 8 * 32
    assert flops(program, OpKind.GEMM) == 6 * tokens * 32 * 512


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("llama3", "llama3_80b"), "llama3 has no configuration llama3_80b; did you mean llama3_8b"),
        pytest.param(("lama", "lama_8b"), "model lama: TrainSpec lama is not registered.", marks=pytest.mark.long),
        (
            ("llama3", "llama3_debugmodel", "--override", "training.sequence=3"),
            "there is no setting training.sequence; did you mean seq_len?",
        ),
        pytest.param(
            ("llama3", "llama3_debugmodel", "--override", "training.seq_len=long"),
            "long is not a number",
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_torchtitan_does_not_know_is_one_line(tmp_path, arguments, message):
    standin_torchtitan.install(tmp_path / "path")
    said, _ = trace(tmp_path, *arguments, path=tmp_path / "path")
    assert said.startswith("error: torchtitan llama3" if arguments[0] == "llama3" else "error: torchtitan lama")
    assert message in " ".join(said.split())
    assert "Traceback" not in said


def test_another_version_is_refused_before_anything_runs(tmp_path):
    standin_torchtitan.install(tmp_path / "path", "0.1.0")
    said, _ = trace(tmp_path, "llama3", "llama3_8b", path=tmp_path / "path")
    refusal = "error: --torchtitan: torchtitan 0.1.0 can't be traced; supported: 0.2.2, 0.3.0"
    assert " ".join(said.split()) == refusal


# -- torchtitan itself ---------------------------------------------------------------------------------------------


def _missing() -> str:
    try:
        return "" if version("torchtitan") in titan.SUPPORTED else f"torchtitan {version('torchtitan')} is installed"
    except PackageNotFoundError:
        return f"torchtitan is not installed; tested: {', '.join(titan.SUPPORTED)}"


installed = pytest.mark.skipif(bool(_missing()), reason=_missing() or "installed")

LAYERS, WIDTH, HIDDEN, VOCABULARY, TOKENS, LENGTH, RANKS = 6, 256, 768, 2048, 8 * 2048, 2048, 8
"""of torchtitan's llama3 debug model, and of its settings"""
PER_TOKEN = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN) + WIDTH * VOCABULARY
MODES = {
    "fsdp": (),
    "hsdp": ("parallelism.data_parallel_replicate_degree=2",),
    "tp": ("parallelism.tensor_parallel_degree=2",),
    "cp": ("parallelism.context_parallel_degree=2",),
    "compile": ("compile.enable=true",),
}


@installed
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_products_are_those_of_the_model(tmp_path, mode):
    """Without recomputation matmul FLOPs are 6 N per token, whatever the parallelism."""
    off = "activation_checkpoint.mode=none" if version("torchtitan").startswith("0.2") else "activation-checkpoint:none"
    settings = [f"--override={one}" for one in MODES[mode]]
    settings += [f"--override={off}"] if "=" in off else ["--", off]
    said, program = trace(tmp_path, "llama3", "llama3_debugmodel", "--world-size", str(RANKS), *settings)
    assert program.is_file(), said
    split = 2 if mode in ("tp", "cp") else 1
    assert flops(program, OpKind.GEMM) == pytest.approx(6 * PER_TOKEN * TOKENS / split, rel=1e-6)
    assert load(program).rank_classes[0].n_ranks == RANKS
    kinds = {name for name, _ in counts(program, OpKind.COLLECTIVE)}
    assert {"ALL_GATHER", "REDUCE_SCATTER", "ALL_REDUCE"} <= kinds
