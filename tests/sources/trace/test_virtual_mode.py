"""Which tensors of a traced program have data, what a copy between host and device is, and what is recorded of it."""

import pytest
from virtual_process import run_virtual

pytest.importorskip("torch", reason="tracing needs torch")


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_virtual(
        """
        from torch._subclasses.fake_tensor import FakeTensor
        MOST = 1 << 22
        def real(*made):
            return [not isinstance(one, FakeTensor) for one in made]
        result["sizes"] = real(torch.empty(MOST), torch.empty(MOST + 1), torch.zeros(2048, 2048),
                               torch.zeros(2048, 2049), torch.ones(size=(2048, 2049)), torch.full((2, MOST), 1.0),
                               torch.arange(MOST), torch.arange(MOST + 1), torch.empty_strided((2, MOST), (MOST, 1)))
        result["indices"] = real(torch.empty(MOST + 1, dtype=torch.uint16, pin_memory=True),
                                 torch.empty(MOST + 1, dtype=torch.int64), torch.empty(MOST + 1, dtype=torch.int8))
        result["devices"] = real(torch.ones(2), torch.ones(2, device="cuda"), torch.ones(2, device="cpu"))
        result["parameters"] = real(nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="cuda")).data)

        def part(name, call):
            recorder.start()
            out = call()
            table = recorder.ops.build()
            result[name] = [[row[0], bool(node[5]), int(table.bytes_read[node[0]] + table.bytes_written[node[0]])]
                            for row, node in zip(nodes(), recorder._nodes)]
            return out

        host, known = torch.arange(4.0), torch.arange(4.0, device="cuda")
        part("to device", lambda: host.cuda())
        part("to device beside", lambda: host.to("cuda", non_blocking=True))
        back = part("to host", lambda: known.cpu())
        part("to host beside", lambda: known.to("cpu", non_blocking=True))
        half = part("to host in half", lambda: known.to("cpu", torch.float16))
        result["back"] = [real(back), back.tolist(), str(half.dtype), half.tolist()]
        target = torch.zeros(2, 4)
        same = part("into host", lambda: target.copy_(known))
        result["into"] = [same is target, target.tolist(), real(target)]
        weights = torch.empty(4, device="cuda")
        unknown = weights * 2
        result["unknown"] = [unknown.cpu().tolist(), (unknown > 0).cpu().tolist(), unknown[0].item(),
                             (unknown > 0)[0].item(), unknown.long()[0].item()]
        part("into device", lambda: weights.copy_(host))
        result["copied in"] = weights.tolist()
        part("on the device", lambda: torch.empty(4, device="cuda").copy_(known))
        large = torch.empty(MOST + 1, dtype=torch.uint8, device="cuda")
        result["large"] = real(large.cpu(), torch.empty(MOST, dtype=torch.uint8, device="cuda").cpu())
        part("scalar", lambda: known[1].item())
        part("branch", lambda: bool(known[0] > 1))

        mask, matrix = torch.tensor([True, False, True, True], device="cuda"), torch.empty(4, 8, device="cuda")
        def shape(call):
            return list(call().shape)
        result["masked"] = [shape(lambda: matrix[mask]), shape(lambda: matrix[unknown > 0]), known[mask].tolist(),
                            shape(lambda: matrix[mask.cpu()]), shape(lambda: matrix[:, mask.repeat(2)])]
        part("mask", lambda: matrix[mask])
        on_host = mask.cpu()
        part("mask of the host", lambda: matrix[on_host])
        filled, five = torch.zeros(4, device="cuda"), torch.tensor(5.0, device="cuda")
        part("filling", lambda: filled.index_put_((mask,), five))
        result["filled"] = filled.tolist()

        total, bias = torch.zeros(4), nn.Parameter(torch.ones(4))
        with torch.no_grad():
            result["written"] = total.add_(bias) is total
        part("made", lambda: torch.zeros(16, device="cuda"))
        part("made on the host", lambda: torch.zeros(16) + 1)
        part("viewed", lambda: matrix.view(-1).t())
        other = torch.tensor([0.0, 1.0, 2.0, 4.0], device="cuda")
        result["equal"] = [part("compared", lambda: torch.equal(known, known.clone())), torch.equal(known, other),
                           torch.equal(known, known[:2]), torch.equal(unknown, weights)]
        result["close"] = [part("closeness", lambda: torch.allclose(known, known.clone())),
                           torch.allclose(known, other), torch.allclose(known, other, atol=2.0),
                           torch.allclose(unknown, weights)]

        @torch.library.custom_op("forerun_tests::doubled", mutates_args=())
        def doubled(x: torch.Tensor) -> torch.Tensor:
            return x * 2
        part("body", lambda: doubled(matrix))
        library = torch.library.Library("forerun_tests", "FRAGMENT")
        library.define("halves(Tensor x) -> (Tensor, Tensor)")
        library.impl("halves", lambda x: (x[:2].clone(), x[2:].clone()), "CPU")
        one, two = part("tried", lambda: torch.ops.forerun_tests.halves(matrix))
        result["halves"] = [list(one.shape), list(two.shape), str(one.device)]
        result["notes"] = list(recorder.notes)
        library.define("broken(Tensor x) -> Tensor")
        result["no version"] = fails(lambda: torch.ops.forerun_tests.broken(matrix), ForerunError)
        huge = torch.empty(1 << 14, (1 << 12) + 1, device="cuda")
        result["too large"] = fails(lambda: torch.ops.forerun_tests.halves(huge), ForerunError)
        from forerun.sources.trace.inside.mode import operation_of
        try:
            matrix @ matrix
        except RuntimeError as error:
            after = ValueError("of the program")
            after.__cause__ = error
            result["failed"] = [operation_of(error), operation_of(after), operation_of(ValueError("alone"))]

        recorder.start()
        recorder.paused += 1
        hidden = matrix * 2
        recorder.paused -= 1
        shown = matrix * 3
        result["paused"] = [[row[0] for row in nodes()], recorder.memory.follows(hidden.untyped_storage()),
                            recorder.memory.follows(shown.untyped_storage())]
        """,
        tmp_path_factory.mktemp("mode"),
    )


SYNC, BESIDE = True, False


def test_tensors_of_the_host_are_real_up_to_a_size(answers):
    assert answers["sizes"] == [True, False, True, False, False, False, True, False, False]
    assert answers["indices"] == [True, True, False], "buffers into which a program reads its data"
    assert answers["devices"] == [True, False, True]
    assert answers["parameters"] == [False, False], "so that modules can move them"
    assert answers["large"] == [False, True]


def test_the_host_waits_for_copies_that_are_not_asynchronous(answers):
    for part, name, waits in (
        ("to device", "_to_copy", SYNC),
        ("to device beside", "_to_copy", BESIDE),
        ("to host", "_to_copy", SYNC),
        ("to host beside", "_to_copy", BESIDE),
        ("to host in half", "_to_copy", SYNC),
        ("into host", "copy_", SYNC),
        ("into device", "copy_", SYNC),
        ("scalar", "_local_scalar_dense", SYNC),
    ):
        assert answers[part] == [[name, waits, 0]], part
    assert answers["on the device"] == [["copy_", BESIDE, 2 * 4 * 4]]
    assert [row[:2] for row in answers["branch"]] == [["gt", BESIDE], ["_local_scalar_dense", SYNC]]


def test_copies_to_the_host_have_the_known_values_or_the_oracles(answers):
    assert answers["back"] == [[True], [0, 1, 2, 3], "torch.float16", [0, 1, 2, 3]]
    assert answers["written"], "what writes to a tensor returns it"
    assert answers["into"] == [True, [[0, 1, 2, 3]] * 2, [True]]
    assert answers["unknown"] == [[1] * 4, [False] * 4, 1, False, 1]


def test_a_mask_selects_what_it_says_and_everything_where_it_is_unknown(answers):
    assert answers["masked"] == [[3, 8], [4, 8], [0, 2, 3], [3, 8], [4, 6]]
    assert answers["filled"] == [5, 0, 5, 5]


def test_the_host_waits_for_the_indices_of_a_mask_on_the_device(answers):
    rows, mask = 3 * 8 * 4, 4
    assert answers["mask"] == [["nonzero", SYNC, 3 * mask], ["index", BESIDE, 2 * rows + mask]]
    assert answers["mask of the host"] == [["copy_", SYNC, 0], ["index", BESIDE, 2 * rows + 3 * 8]]
    assert answers["filling"] == [["index_put_", BESIDE, 4 * 4 + mask + 4 * 4]], "one kernel, without indices"


def test_tensors_are_compared_by_their_known_values(answers):
    assert answers["equal"] == [True, False, False, True]
    copied, compared, reduced, read = answers["compared"]
    assert copied[0] == "clone"
    assert compared == ["eq", BESIDE, 2 * 16 + 4]
    assert reduced == ["all", BESIDE, 4 + 1]
    assert read == ["_local_scalar_dense", SYNC, 0]


def test_closeness_is_known_of_known_values_and_true_of_others(answers):
    assert answers["close"] == [True, False, True, True]
    names, waits = zip(*[row[:2] for row in answers["closeness"]], strict=True)
    assert names[0] == "clone"
    assert names[-2:] == ("all", "_local_scalar_dense"), "as ATen composes it: close elements, all of them, one flag"
    assert waits == (*[BESIDE] * (len(names) - 1), SYNC)


def test_what_is_made_on_the_device_is_a_kernel_and_what_is_made_on_the_host_is_none(answers):
    assert answers["made"] == [["zeros", BESIDE, 64]]
    assert answers["made on the host"] == []
    assert answers["viewed"] == []


def test_operators_without_a_fake_version_run_their_code_or_on_the_cpu(answers):
    assert answers["body"] == [["mul", BESIDE, 2 * 4 * 8 * 4]]
    assert answers["tried"] == [["halves", BESIDE, 2 * 4 * 8 * 4]]
    assert answers["halves"] == [[2, 8], [2, 8], "cuda:0"]
    assert answers["notes"] == ["no rule for forerun_tests.halves.default: it costs the bytes that it reads and writes"]


def test_what_can_not_be_run_anywhere_says_what_to_do(answers):
    for part, reason in (
        (
            "no version",
            "it doesn't run on the CPU (Could not run 'forerun_tests::broken' with arguments from the 'CPU'",
        ),
        ("too large", "its inputs are too large to run it on the CPU"),
    ):
        assert f"torch has no fake version of it, and {reason}" in answers[part]
        assert answers[part].endswith("register one with torch.library.register_fake")
        assert len(answers[part]) < 300


def test_an_error_is_of_the_operation_that_raised_it_or_of_the_program(answers):
    assert answers["failed"] == ["aten.mm.default", "aten.mm.default", ""]


def test_nothing_is_recorded_while_paused(answers):
    assert answers["paused"] == [["mul"], False, True]
