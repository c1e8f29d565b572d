"""The memory of the device before the first step."""

import pytest
from virtual_process import run_virtual

pytest.importorskip("torch", reason="tracing needs torch")
KIB = 1 << 10


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_virtual(
        """
        from forerun.sources.trace import marks
        from forerun.sources.trace.inside.stages import Stages
        def bytes_of(kib):
            return torch.empty(kib << 10, dtype=torch.uint8, device="cuda")
        kept = bytes_of(4)
        stages = Stages()
        peak = bytes_of(64)
        del peak
        torch.cuda.reset_peak_memory_stats()
        result["after a reset"] = [torch.cuda.max_memory_allocated(), stages.most_bytes()]
        model = nn.Linear(16, 16, bias=False).cuda()
        result["before"] = stages.knows("optimizer made")
        torch.optim.SGD(model.parameters(), lr=0.1)
        more = bytes_of(8)
        torch.optim.SGD(model.parameters(), lr=0.1)
        for listener in marks.stage_listeners:
            listener("loaded")
        result["found"] = stages.found
        result["known"] = [stages.knows("optimizer made"), stages.knows("first forward")]
        torch.cuda.memory.reset_peak_memory_stats()
        large = bytes_of(128)
        del large
        stages.restart()
        result["restarted"] = stages.most_bytes()
        """,
        tmp_path_factory.mktemp("stages"),
    )


def test_a_stage_has_what_is_allocated_and_the_most_until_then(answers):
    made, loaded = answers["found"]
    assert made == ["optimizer made", 5 * KIB, 68 * KIB], "only the first optimizer"
    assert loaded == ["loaded", 13 * KIB, 68 * KIB]
    assert answers["before"] is False
    assert answers["known"] == [True, False]


def test_resets_of_the_program_hide_no_peak(answers):
    assert answers["after a reset"] == [4 * KIB, 68 * KIB]
    assert answers["restarted"] == 13 * KIB
