"""Finding the traces of a run in every place where they may be."""

import gzip
import io
import tarfile

import pytest
import zstandard
from trace_building import comp, write, write_run

from forerun.astrasim.chakra.traces import find_traces, open_traces, trace_files
from forerun.common.errors import ForerunError


@pytest.fixture
def run(tmp_path):
    """A folder of four ranks of which two are alike."""
    folder = tmp_path / "et"
    folder.mkdir()
    write_run(folder, [comp(1)], [comp(1), comp(2)], [comp(1)], [comp(3)])
    return folder


def archive(path, folder, pack=lambda data: data, twice=False):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(folder, arcname=".")
        if twice:
            tar.add(folder / "w.0.et", arcname="w.0.et")
    path.write_bytes(pack(buffer.getvalue()))
    return path


def lengths(traces):
    return [len(traces[rank]) for rank in range(len(traces))]


def test_prefix(run):
    (run / "notes.txt").write_text("")
    (run / "other.0.et").write_bytes(b"")
    (run / "w.01.et").write_bytes(b"")
    assert find_traces(run / "w") == [run / f"w.{rank}.et" for rank in range(4)]
    assert find_traces(run / "w", 2) == [run / "w.0.et", run / "w.1.et"]


def test_ranks_are_in_the_order_of_numbers(tmp_path):
    prefix = write_run(tmp_path, *[[comp(rank)] for rank in range(12)])
    assert [path.name for path in find_traces(prefix)][9:] == ["w.9.et", "w.10.et", "w.11.et"]


def test_compressed_files_are_found(tmp_path):
    write(tmp_path / "a.b.0.et.gz", [comp(1)])
    write(tmp_path / "a.b.1.et.zst", [comp(1)])
    assert lengths(open_traces(tmp_path / "a.b")) == [1, 1]


@pytest.mark.parametrize(
    ("remove", "add", "n_ranks", "complaint"),
    [
        ("w.2.et", None, None, "rank 2 has no trace"),
        ("w.0.et", None, None, "rank 0 has no trace"),
        (None, None, 5, "rank 4 has no trace"),
        (None, "w.1.et.gz", None, "two traces of rank 1"),
        (None, "w.ALL_RANKS.et", 4, "two traces of rank 0"),
        (None, "w.ALL_RANKS.et", None, "say how many"),
    ],
)
def test_missing_and_doubled_ranks(run, remove, add, n_ranks, complaint):
    if remove:
        (run / remove).unlink()
    if add:
        write(run / add, [comp(1)])
    with pytest.raises(ForerunError, match=complaint):
        open_traces(run, n_ranks)
    with pytest.raises(ForerunError, match=complaint):
        find_traces(run / "w", n_ranks)


@pytest.mark.parametrize("inside", [".", "et", "et/w"])
def test_folder_or_the_folder_around_it(run, inside):
    traces = open_traces(run.parent / inside if inside != "." else run)
    assert lengths(traces) == [1, 2, 1, 1]
    assert list(traces.available) == [0, 1, 2, 3]


def test_ranks_with_the_same_bytes_share_a_trace(run):
    traces = open_traces(run)
    assert traces[0] is traces[2]
    assert traces[0] is not traces[3]


def test_one_file_for_all_ranks(tmp_path):
    write(tmp_path / "w.ALL_RANKS.et", [comp(1)])
    traces = open_traces(tmp_path, 64)
    assert len(traces) == 64
    assert all(traces[rank] is traces[0] for rank in range(64))


def test_only_rank_0_is_kept(tmp_path):
    write(tmp_path / "et_rank0.et.zst", [comp(1)])
    traces = open_traces(tmp_path, 64)
    assert (len(traces), list(traces.available), len(traces[0])) == (64, [0], 1)
    with pytest.raises(ForerunError, match="no trace of rank 3"):
        traces[3]


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.zst"])
def test_tar_files_are_read_where_they_are(run, suffix):
    pack = {"tar": bytes, "tar.gz": gzip.compress, "tar.zst": zstandard.compress}[suffix]
    path = archive(run.parent / f"et.{suffix}", run, pack)
    for name in ("w.0.et", "w.1.et", "w.2.et", "w.3.et"):
        (run / name).unlink()
    run.rmdir()
    for place in (path, run.parent):
        traces = open_traces(place)
        assert lengths(traces) == [1, 2, 1, 1]
        assert traces[0] is traces[2]
    assert sorted(run.parent.iterdir()) == [path]


def test_bad_tar_files(run):
    whole = archive(run.parent / "run.tar.zst", run, zstandard.compress).read_bytes()
    path = run.parent / "bad.tar.zst"
    for content in (whole[:100], whole[:-10], zstandard.compress(b"no tar" * 500), b"no tar" * 500):
        path.write_bytes(content)
        with pytest.raises(ForerunError, match="bad"):
            open_traces(path)
    with pytest.raises(ForerunError, match=r"it holds w\.0\.et twice"):
        open_traces(archive(path, run, twice=True))


def test_folders_without_traces_or_with_two_runs(run):
    write(run / "v.0.et", [comp(1)])
    with pytest.raises(ForerunError, match=r"several runs \(v, w\)"):
        open_traces(run)
    empty = run / "empty"
    empty.mkdir()
    for place in (empty, empty / "w"):
        with pytest.raises(ForerunError, match="no traces; expected files"):
            open_traces(place)
    with pytest.raises(ForerunError, match="can't be read"):
        open_traces(run / "nowhere" / "w")


def test_single_files_keep_the_rank_in_their_name(run):
    assert trace_files(run / "w.3.et") == ({3: run / "w.3.et"}, False)
    assert trace_files([run / "w.3.et", run / "w.1.et"]) == ({3: run / "w.3.et", 1: run / "w.1.et"}, False)
    assert trace_files([run / "x.et", run / "w.1.et"]) == ({0: run / "x.et", 1: run / "w.1.et"}, False)
    assert trace_files(run.parent)[1]
