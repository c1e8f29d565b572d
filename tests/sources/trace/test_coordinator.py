"""Real data between traced ranks: the coordinator alone, and pipeline stages that find their shapes out."""

import os
import socket
import struct
import threading
import time

import numpy as np
import pytest

from forerun.common.errors import ForerunError
from forerun.sources.trace.coordinator import VARIABLE, Coordinator
from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits, record_script

mailboxes = pytest.importorskip("forerun.sources.trace.inside.ranks.mailbox")


class Ranks:
    """Ranks that are threads of this process: `programs[rank](mailbox)` is what each does."""

    def __init__(self, programs):
        self.programs, self.results, self.threads, self.order = programs, {}, {}, []
        self.coordinator = Coordinator(self.start)

    def start(self, rank):
        self.order.append(rank)
        connection = socket.socket(fileno=self.coordinator.connect(rank))
        self.threads[rank] = threading.Thread(target=self._live, args=(rank, connection), daemon=True)
        self.threads[rank].start()

    def _live(self, rank, connection):
        try:
            self.results[rank] = self.programs[rank](mailboxes.Mailbox(rank, connection))
        except ForerunError as error:
            self.results[rank] = error
        finally:
            connection.close()

    def run(self, first=0, timeout_s=20.0):
        self.start(first)
        over = set()
        deadline = time.monotonic() + timeout_s
        while len(over) < len(self.threads):
            assert time.monotonic() < deadline, "ranks hang"
            self.coordinator.poll(0.01)
            for rank, thread in list(self.threads.items()):
                if rank not in over and not thread.is_alive():
                    over.add(rank)
                    self.coordinator.ended(rank)
        self.coordinator.close()
        return self.results


def test_a_message_starts_the_rank_it_goes_to():
    ranks = Ranks({0: lambda box: box.send(5, "key", b"hello"), 5: lambda box: box.receive(0, "key")})
    assert ranks.run() == {0: None, 5: b"hello"}
    assert ranks.order == [0, 5]


def test_a_receive_starts_the_rank_it_asks():
    ranks = Ranks({0: lambda box: box.receive(3, "key"), 3: lambda box: box.send(0, "key", b"later")})
    assert ranks.run() == {0: b"later", 3: None}


def test_messages_are_told_apart_by_key_and_may_overtake():
    def sender(box):
        for i in range(100):
            box.send(1, f"k{i}", b"%d" % i)

    ranks = Ranks({0: sender, 1: lambda box: [box.receive(0, f"k{i}") for i in reversed(range(100))]})
    assert ranks.run()[1] == [b"%d" % i for i in reversed(range(100))]


@pytest.mark.parametrize("size", [0, 1, 5 << 20])
def test_data_arrives_whole(size):
    data = np.random.default_rng(0).bytes(size)
    ranks = Ranks({0: lambda box: box.send(1, "big", data), 1: lambda box: box.receive(0, "big") == data})
    assert ranks.run()[1] is True


def test_large_data_goes_both_ways_at_once():
    data = bytes(4 << 20)

    def swap(peer):
        def program(box):
            for i in range(3):
                box.send(peer, str(i), data)
            return sum(len(box.receive(peer, str(i))) for i in range(3))

        return program

    assert Ranks({0: swap(1), 1: swap(0)}).run() == {0: 12 << 20, 1: 12 << 20}


def test_what_is_for_all_can_be_had_by_all_and_twice():
    def source(box):
        box.send(-1, "all", b"news")

    def reader(box):
        return box.receive(0, "all"), box.receive(0, "all")

    def first(box):
        box.send(2, "wake", b"")
        return reader(box)

    ranks = Ranks({0: source, 1: first, 2: reader})
    assert ranks.run(first=1) == {0: None, 1: (b"news",) * 2, 2: (b"news",) * 2}


def test_ranks_that_wait_for_each_other_are_told():
    ranks = Ranks(
        {0: lambda box: box.receive(1, "a"), 1: lambda box: box.receive(2, "b"), 2: lambda box: box.receive(0, "c")}
    )
    results = ranks.run()
    assert all(isinstance(result, ForerunError) for result in results.values())
    assert "all traced ranks wait: rank 0 for rank 1, rank 1 for rank 2, rank 2 for rank 0" in str(results[0])


def test_a_peer_that_ended_without_sending_is_named():
    ranks = Ranks({0: lambda box: box.receive(1, "a"), 1: lambda box: None})
    assert "rank 1: that rank's program ended without sending it" in str(ranks.run()[0])
    late = Ranks({0: lambda box: (box.send(1, "x", b""), time.sleep(0.2), box.receive(1, "a")), 1: lambda box: None})
    assert "rank 1: that rank's program ended" in str(late.run()[0])


def test_what_was_sent_before_the_end_still_arrives():
    def reader(box):
        box.send(1, "wake", b"")
        time.sleep(0.2)
        return box.receive(1, "last")

    assert Ranks({0: reader, 1: lambda box: box.send(0, "last", b"words")}).run()[0] == b"words"


def test_a_rank_that_hears_from_all_others_is_refused():
    started = []

    def start(rank):
        started.append(rank)
        os.close(coordinator.connect(rank))

    coordinator = Coordinator(start, most_ranks=4)
    box = mailboxes.Mailbox(0, socket.socket(fileno=coordinator.connect(0)))
    for rank in range(1, 6):
        box.send(rank, "key", b"")
    with pytest.raises(ForerunError, match="rank 4: more than 4 ranks exchange data"):
        coordinator.poll(1.0)
    assert started == [1, 2, 3]
    coordinator.close()


def test_a_message_that_is_none_is_refused():
    coordinator = Coordinator(lambda rank: None)
    with socket.socket(fileno=coordinator.connect(0)) as child:
        child.sendall(struct.pack("<cqqII", b"?", 0, 0, 0, 0))
        with pytest.raises(ForerunError, match="rank 0: sent a message that can't be read"):
            coordinator.poll(1.0)
    coordinator.close()


def test_a_parent_that_is_gone_is_an_error_not_a_hang():
    coordinator = Coordinator(lambda rank: None)
    box = mailboxes.Mailbox(0, socket.socket(fileno=coordinator.connect(0)))
    coordinator.close()
    with pytest.raises(ForerunError, match="the tracing process is gone"):
        box.receive(1, "key")


def test_the_environment_names_the_descriptor():
    coordinator = Coordinator(lambda rank: None)
    descriptor = coordinator.connect(4)
    assert coordinator.environment(4) == {VARIABLE: str(descriptor)}
    os.close(descriptor)
    coordinator.close()


# -- with torch ----------------------------------------------------------------------------------------------------

STAGES = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("nccl")
torch.cuda.set_device(rank)

shape = torch.tensor([8, 16 + rank], device="cuda") if rank == 0 else torch.empty(2, dtype=torch.int64, device="cuda")
if rank:
    dist.recv(shape, rank - 1)
if rank < world - 1:
    dist.send(shape, rank + 1)
assert shape.tolist() == [8, 16], shape

host = torch.arange(3.0) + rank
got = torch.zeros(3)
after, before = (rank + 1) % world, (rank - 1) % world
receiving = dist.irecv(got, before)
dist.isend(host, after).wait()
receiving.wait()
assert got.tolist() == [before, before + 1, before + 2], got

names = [f"run-{rank}"] if rank == 0 else [None]
dist.broadcast_object_list(names, 0)
assert names == ["run-0"]

width = 32 * (rank + 1)
stage_module = nn.Linear(32 * max(rank, 1), width).cuda()
stage = PipelineStage(stage_module, rank, world, torch.device("cuda"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda out, target: (out - target).square().mean())
optimizer = torch.optim.SGD(stage_module.parameters(), 0.1)
for _ in range(2):
    if rank == 0:
        schedule.step(torch.randn(8, 32, device="cuda"))
    elif rank == world - 1:
        schedule.step(target=torch.randn(8, width, device="cuda"), losses=[])
    else:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_stages_of_a_pipeline_learn_their_shapes_from_each_other(tmp_path):
    script = tmp_path / "stages.py"
    script.write_text(STAGES)
    recordings = record_script(Job(folder="", target=str(script), world_size=3), Limits(time_s=200))
    assert [r.rank for r in recordings] == [0, 1, 2]
    messages = []
    for recording in recordings:
        rows = [
            (recording.ops.name[op], p, recording.ops.bytes_comm[op])
            for op, p in zip(recording.op, recording.peer, strict=True)
        ]
        messages.append([(name, int(peer), float(size)) for name, peer, size in rows if name in ("send", "recv")])
    forward, wider = 2 * 32 * 4.0, 2 * 64 * 4.0
    assert sorted(messages[0]) == [("recv", 1, forward)] * 4 + [("send", 1, forward)] * 4
    middle = (
        [("recv", 0, forward)] * 4 + [("recv", 2, wider)] * 4 + [("send", 0, forward)] * 4 + [("send", 2, wider)] * 4
    )
    assert sorted(messages[1]) == middle
    assert sorted(messages[2]) == [("recv", 1, wider)] * 4 + [("send", 1, wider)] * 4


@pytest.mark.slow
def test_stages_that_wait_for_each_other_are_told(tmp_path):
    script = tmp_path / "deadlock.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.recv(torch.zeros(2), 1 - dist.get_rank())\n"
    )
    with pytest.raises(ForerunError, match=r"all traced ranks wait.*deadlock\.py:3"):
        record_script(Job(folder="", target=str(script), world_size=2), Limits(time_s=100))
