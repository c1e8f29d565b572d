"""Collectives that few programs call: what each records, and what it answers where data is known."""

import pytest
import torch
import torch.distributed as dist
from virtual_process import run_virtual

from forerun.sources.trace.inside.ranks.symmetric import own_chunk, reduced

_Op = dist.ReduceOp


@pytest.mark.parametrize(
    ("op", "size", "expected"),
    [
        (_Op.SUM, 3, [6, 15]),
        (_Op.PRODUCT, 3, [8, 125]),
        (_Op.BXOR, 3, [2, 5]),
        (_Op.BXOR, 4, [0, 0]),
        (_Op.MAX, 3, [2, 5]),
        (_Op.MIN, 3, [2, 5]),
        (_Op.AVG, 3, [2, 5]),
        (_Op.BAND, 4, [2, 5]),
        (_Op.BOR, 4, [2, 5]),
    ],
)
def test_equal_values_are_reduced_as_all_peers_would_reduce_them(op, size, expected):
    assert reduced(torch.tensor([2, 5]), op, size).tolist() == expected


@pytest.mark.parametrize("op", [_Op.SUM, _Op.PRODUCT, _Op.MAX])
def test_booleans_stay_as_they_are_in_every_reduction(op):
    given = torch.tensor([True, False])
    assert reduced(given, op, 2).tolist() == [True, False]


@pytest.mark.parametrize(
    ("rank", "outputs", "expected"),
    [
        (0, [2, 2, 2], [0, 1] * 3),
        (1, [1, 2, 3], [2, 2, 2, 2, 2, 2]),
        (2, [3, 1, 2], [3, 4, 5, 3, 3, 4]),
        (2, [0, 0, 0], []),
        (3, [2, 0, 1], [0, 0, 0]),
    ],
)
def test_every_peer_sends_the_own_chunk_repeated_or_cut(rank, outputs, expected):
    rows = own_chunk(torch.arange(6), [2, 1, 3, 0], rank, outputs)
    assert rows.tolist() == expected
    matrix = own_chunk(torch.arange(12).reshape(6, 2), [2, 1, 3, 0], rank, outputs)
    assert matrix.shape == (len(expected), 2)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_virtual(
        """
        import torch.distributed._functional_collectives as functional
        dist.init_process_group("nccl")
        name = dist.group.WORLD.group_name
        ops, dtensor = torch.ops._c10d_functional, torch.ops._dtensor
        x = torch.empty(16, device="cuda")

        def part(name, call):
            recorder.start()
            call()
            x.neg_()
            result[name] = nodes()

        def awaited(made):
            for one in made if isinstance(made, list) else [made]:
                ops.wait_tensor(one)

        part("functional broadcast", lambda: awaited(ops.broadcast(x, 0, name)))
        part("functional broadcast in place", lambda: awaited(ops.broadcast_(x, 0, name)))
        shapes = {}
        def moved():
            sharded = dtensor.shard_dim_alltoall(torch.empty(4, 16, device="cuda"), 0, 1, name)
            shapes["moved"] = list(sharded.shape)
        part("shard_dim", moved)
        known = dtensor.shard_dim_alltoall(torch.arange(16, device="cuda").reshape(1, 16), 0, 1, name)
        result["moved values"] = known.tolist()
        def sent():
            out = ops.isend(x, 5, 0, name)
            shapes["sent"] = list(out.shape)
            awaited(out)
        part("isend", sent)
        part("irecv", lambda: awaited(ops.irecv(x, 1, 0, name)))
        wide = torch.empty(64, device="cuda")
        def batch():
            out = ops.batch_p2p_ops(["isend", "irecv"], [4, 2], [0, 0], [wide, x], name)
            shapes["batch"] = [list(one.shape) for one in out]
            awaited(out)
        part("batch", batch)
        result["shapes"] = shapes

        part("reduce here", lambda: dist.reduce(x, 3))
        part("reduce", lambda: dist.reduce(x, 0))
        lists = [torch.empty(4, device="cuda") for _ in range(8)]
        part("gather here", lambda: dist.gather(x[:4], lists, 3))
        part("gather", lambda: dist.gather(x[:4], None, 0))
        part("scatter here", lambda: dist.scatter(x[:4], lists, 3))
        part("scatter", lambda: dist.scatter(x[:4], None, 0))
        part("reduce_scatter", lambda: dist.reduce_scatter(x[:4], lists))
        part("all_to_all", lambda: dist.all_to_all(lists, [torch.empty(4, device="cuda") for _ in range(8)]))
        part("any source", lambda: dist.recv(x))
        result["notes"] = list(recorder.notes)

        called = []
        def callback():
            done = dist.all_reduce(x, async_op=True).get_future()
            done.add_done_callback(lambda future: called.append(future.value()[0].cos().shape))
        part("callback", callback)
        result["called"] = len(called)

        def real(call, *tensors):
            call()
            return [t.tolist() for t in tensors]

        mine, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])
        result["reduced"] = [real(lambda: dist.reduce(mine, 3), mine), real(lambda: dist.reduce(other, 0), other)]
        rows = [torch.zeros(2) for _ in range(8)]
        result["gathered"] = real(lambda: dist.gather(torch.tensor([3.0, 4.0]), rows, 3), *rows)
        part_of = torch.zeros(2)
        parts = [torch.full((2,), float(i)) for i in range(8)]
        result["scattered"] = real(lambda: dist.scatter(part_of, parts, 3), part_of)
        out = torch.zeros(2)
        result["reduce scattered"] = real(lambda: dist.reduce_scatter(out, parts), out)
        outs = [torch.zeros(3) for _ in range(8)]
        result["uneven"] = real(lambda: dist.all_gather(outs, torch.tensor([1.0, 2.0, 3.0])), *outs)[7]
        one = [dist.P2POp(dist.isend, x, 4), "no message"]
        result["no messages"] = [fails(lambda: dist.batch_isend_irecv(one)), nodes("send")]
        result["first rank"] = [fails(lambda: dist.scatter_object_list([None])),
                                fails(lambda: dist.broadcast_object_list([None]))]
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.max_ctas = 8
        plain = dist.ProcessGroupNCCL.Options()
        result["options"] = [options.is_high_priority_stream, plain.is_high_priority_stream, options.config.max_ctas,
                             plain._timeout.total_seconds(), dist.ProcessGroupNCCL.Options(kept=3).kept]
        made = [dist.new_group([3, 5], pg_options=options), dist.new_group([3, 6]), dist.new_group([3, 5])]
        result["labels"] = [[one.label, list(one.ranks), one.size()] for one in made]
        held = torch.tensor([4, 4], device="cuda")
        dist.reduce_scatter_tensor(held, torch.empty(16, dtype=torch.int64, device="cuda"))
        result["hidden"] = known_value(held) is None
        """,
        tmp_path_factory.mktemp("rare"),
        rank=3,
    )


def talk(answers, part):
    """Name, bytes and peer of a part's only communication, and whether its last kernel waits for it."""
    rows = answers[part]
    (row,) = [row for row in rows if row[4]]
    return row[0], row[3], row[6], rows[-1][2] == [row[7]]


@pytest.mark.parametrize(
    ("part", "name", "nbytes"),
    [
        ("functional broadcast", "broadcast", 64),
        ("functional broadcast in place", "broadcast", 64),
        ("shard_dim", "all_to_all", 4 * 16 * 4),
        ("reduce here", "reduce", 64),
        ("reduce", "reduce", 64),
        ("gather here", "gather", 8 * 16),
        ("gather", "gather", 8 * 16),
        ("scatter here", "scatter", 8 * 16),
        ("scatter", "scatter", 8 * 16),
        ("reduce_scatter", "reduce_scatter", 8 * 16),
        ("all_to_all", "all_to_all", 8 * 16),
    ],
)
def test_a_collective_moves_the_whole_buffer_and_is_awaited(answers, part, name, nbytes):
    found, size, peer, waits = talk(answers, part)
    assert (found, size, peer) == (name, nbytes, -1)
    node, last = next(row for row in answers[part] if row[4]), answers[part][-1]
    assert waits or node[1] == last[1], "the next kernel waits for it or is on its stream"


@pytest.mark.parametrize(
    ("part", "name", "peer"), [("isend", "send", 5), ("irecv", "recv", 1), ("any source", "recv", 4)]
)
def test_a_message_has_its_peer_and_is_awaited(answers, part, name, peer):
    assert talk(answers, part) == (name, 64, peer, True)


def test_a_receive_from_any_source_is_noted(answers):
    assert "a receive from any source is traced as one from the next rank of its group" in answers["notes"]


def test_what_is_sent_has_no_result_and_what_is_received_keeps_its_shape(answers):
    assert answers["shapes"] == {"moved": [32, 2], "sent": [0], "batch": [[0], [16]]}


def test_the_messages_of_a_functional_batch_run_side_by_side(answers):
    messages = [row for row in answers["batch"] if row[4]]
    assert [(row[0], row[3], row[6]) for row in messages] == [("send", 256, 4), ("recv", 64, 2)]
    assert len({row[1] for row in messages}) == 1
    assert answers["batch"][-1][2] == [messages[-1][7]]


def test_a_callback_runs_on_a_stream_of_its_own(answers):
    assert answers["called"] == 1
    cos = next(row for row in answers["callback"] if row[0] == "cos")
    reduction = next(row for row in answers["callback"] if row[4])
    assert cos[2] == [reduction[7]]
    assert cos[1] not in (0, reduction[1])


def test_known_data_is_answered_as_if_peers_held_the_same(answers):
    assert answers["reduced"] == [[[8.0, 16.0]], [[1.0, 2.0]]], "only the root has the sum"
    assert answers["gathered"] == [[3.0, 4.0]] * 8
    assert answers["scattered"] == [[3.0, 3.0]]
    assert answers["reduce scattered"] == [[24.0, 24.0]]
    assert answers["uneven"] == [1.0, 2.0, 3.0]
    assert answers["moved values"] == [[6, 7]] * 8


def test_unknown_data_makes_its_results_unknown(answers):
    assert answers["hidden"]


def test_options_of_nccl_are_kept_and_groups_have_names_of_their_own(answers):
    high, plain, ctas, timeout_s, kept = answers["options"]
    assert (high, plain, ctas, kept) == (True, False, 8, 3)
    assert timeout_s == 1800
    assert answers["labels"] == [["group", [3, 5], 2], ["group#2", [3, 6], 2], ["group#3", [3, 5], 2]]


def test_objects_come_from_the_first_rank_unless_another_is_named(answers):
    assert all("rank 0" in refused for refused in answers["first rank"]), answers["first rank"]


def test_a_batch_of_anything_but_messages_is_refused_whole(answers):
    refused, sent = answers["no messages"]
    assert "P2POp" in refused
    assert sent == []
