"""Public profiles as tables: replays, extrapolations beside what was measured there, and what is not there."""

from dataclasses import replace

import pytest
from profile_files import host, kernel, launch, write_profile

from forerun.evidence.public_profiles.judge import Listed, Pair, PublicProfiles, judge, public_profiles
from forerun.evidence.public_profiles.tables import lines_of, main

H100, MI300X = ({"name": name, "totalGlobalMem": gib << 30} for name, gib in (("NVIDIA H100", 80), ("AMD MI300X", 192)))
LISTED = PublicProfiles(
    {
        "here": Listed("a step", ("one/here.json",)),
        "there": Listed("its twin", ("one/there.json.gz",), trains=False),
        "large": Listed("a large one", ("two/0.json", "two/1.json")),
    },
    (Pair("here", "there", "mi300x"), Pair("large", "here", "h100-sxm", 8)),
)


@pytest.fixture
def folder(tmp_path):
    """Two steps of a kernel of 3,000 us on an H100, and of 2,000 us on an MI300X."""
    (tmp_path / "one").mkdir()
    for name, device, took in (("here.json", H100, 3000), ("there.json.gz", MI300X, 2000)):
        events = []
        for step, start in ((4, 0), (5, 5000)):
            events.append(host(f"ProfilerStep#{step}", start, 100, "user_annotation"))
            events.append(launch(start + 10, 5, step))
            events.append(kernel("vectorized_elementwise_kernel", start + 20, took, step))
        write_profile(tmp_path / "one" / name, events, deviceProperties=[device])
    return tmp_path


def test_steps_replay_and_pairs_are_held_to_the_other_machine(folder):
    judged = judge(LISTED, folder)
    (replayed,) = judged.replays
    assert (replayed.what, replayed.device, replayed.steps) == ("a step", "h100-sxm-80gb", 2)
    assert replayed.worst < 1e-6
    (found,) = judged.extrapolations
    assert (found.cluster, found.gpus) == ("mi300x", 1)
    assert found.band_s[0] < found.predicted_s < found.band_s[1]
    assert found.error == pytest.approx(found.predicted_s / found.measured_s - 1)
    assert found.predicted_s < found.profiled_s  # an MI300X streams faster


def test_what_is_not_there_is_named(folder, capsys):
    lines = lines_of(judge(LISTED, folder))
    assert lines[-1] == "left out: a large one: two/0.json is not there"
    assert sum(line.startswith("| ") for line in lines) == 6
    assert main([str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "has none of the files" in error
    assert main([str(folder / "nowhere")]) == 2
    assert "not a folder" in capsys.readouterr().err


def test_without_a_pair_there_is_no_mean(folder):
    assert not any("mean error" in line for line in lines_of(judge(replace(LISTED, extrapolations=()), folder)))


def test_the_shipped_list_names_only_what_it_has():
    known = public_profiles()
    assert all(one.files for one in known.profiles.values())
    assert {pair.profile for pair in known.extrapolations} <= known.profiles.keys()
