"""`forerun stage` with the flags of the first generation, and how it tells the generations apart."""

import json

import numpy as np
import pytest

from forerun.astrasim.chakra.reader import read_rank
from forerun.astrasim.stage.first_generation import StageArgs, generate
from forerun.astrasim.stage.second_generation import SecondStageArgs, generate_second
from forerun.interfaces.cli.main import run

SIZES = ("--dmodel", "32", "--dff", "64", "--batch", "4", "--seq", "8", "--head", "4", "--num_stacks", "2")
FIRST = (*SIZES, "--din", "40", "--dout", "48", "--comm_group_file", "groups.json")
FIRST_ARGS = StageArgs(
    dp=2, pp=2, weight_sharded=True, din=40, dout=48, dmodel=32, dff=64, batch=4, seq=8, head=4, num_stacks=2
)


def stage(folder, *flags):
    return run(["stage", "--output_dir", str(folder), *flags])


def test_the_first_generation_writes_a_file_a_rank_and_the_groups(tmp_path):
    folder = tmp_path / "a" / "b"
    assert stage(folder, "--output_name", "w", *FIRST, "--dp", "2", "--pp", "2", "--weight_sharded", "True") == 0
    made = generate(FIRST_ARGS)
    assert {path.name for path in folder.iterdir()} == {"groups.json", *(f"w.{rank}.et" for rank in range(4))}
    assert json.loads((folder / "groups.json").read_text()) == {
        name: list(ranks) for name, ranks in made.groups.items()
    }
    for rank in range(4):
        read, own = read_rank(folder / f"w.{rank}.et", names=True), made.rank(rank, names=True)
        assert read.names == own.names
        for column in ("node_id", "num_ops", "tensor_size", "comm_size", "comm_tag", "peer", "data", "ctrl"):
            assert np.array_equal(getattr(read, column), getattr(own, column))


def test_a_name_may_say_where_the_rank_goes_and_that_files_are_compressed(tmp_path):
    assert stage(tmp_path, "--output_name", "rank%d-of-2.et.zst", *FIRST, "--tp", "2") == 0
    assert {path.name for path in tmp_path.iterdir()} == {"groups.json", "rank0-of-2.et.zst", "rank1-of-2.et.zst"}
    assert len(read_rank(tmp_path / "rank1-of-2.et.zst")) == len(read_rank(tmp_path / "rank0-of-2.et.zst"))


def test_flags_of_the_second_generation_are_enough_to_mean_it(tmp_path, capsys):
    flags = ("--output_name", "w", *SIZES, "--kvhead", "2", "--dvocal", "48", "--micro_batch", "2")
    assert stage(tmp_path, *flags, "--dp", "2", "--print_gpu_vram", "yes") == 0
    made = generate_second(
        SecondStageArgs(
            dp=2, dmodel=32, dff=64, batch=4, seq=8, head=4, num_stacks=2, kvhead=2, dvocal=48, micro_batch=2
        )
    )
    *lines, summary = capsys.readouterr().out.splitlines()
    assert lines == made.footprint_lines()
    assert summary.endswith("traces of 2 ranks, 5 communicator groups in w.json")
    assert {path.name for path in tmp_path.iterdir()} == {"w.json", "w.0.et", "w.1.et"}
    assert read_rank(tmp_path / "w.0.et", names=True).names == made.rank(0, names=True).names


def test_flags_that_both_have_mean_the_second(tmp_path):
    assert stage(tmp_path, "--output_name", "w.%d.et", *SIZES) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"w.json", "w.0.et"}


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--din", "8", "--kvhead", "2"), ("--din", "--kvhead", "first generation", "second")),
        (("--din", "8"), ("--din", "--comm_group_file")),
        ((*FIRST, "--dp", "0"), ("--dp 0", "at least 1")),
        ((*FIRST, "--dp", "two"), ("--dp", "whole number")),
        ((*FIRST, "--pp", "9"), ("--pp 9", "--pp 4")),
        ((*FIRST, "--weight_sharded", "perhaps"), ("--weight_sharded", "perhaps")),
        ((*FIRST, "--chakra_schema_version", "v0.0.1"), ("v0.0.1", "v0.0.4")),
        (("--model_type", "bert"), ("bert", "llama")),
        ((*FIRST, "--dmodell", "8"), ("--dmodell",)),
    ],
)
def test_bad_flags_are_one_line_and_leave_nothing(flags, parts, tmp_path, capsys):
    folder = tmp_path / "new"
    assert stage(folder, "--output_name", "w", *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert part in line
    assert not folder.exists()


def test_a_folder_that_cant_be_made_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert stage(tmp_path / "file" / "folder", "--output_name", "w", *FIRST) == 2
    assert "can't be made" in capsys.readouterr().err
