"""Programs that start their ranks themselves, as processes of `multiprocessing.Process` or under mpiexec."""

import textwrap

import pytest

from forerun.common.errors import ForerunError
from forerun.core.program.types import OpKind
from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits, record_script

pytest.importorskip("torch", reason="tracing needs torch")

LIMITS = Limits(60)
TRAIN = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn

def train(model, steps=5):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        model(torch.ones(8, 16, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

def rank_of(rank, size, fails_at=-1):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29512")
    dist.init_process_group("nccl", rank=rank, world_size=size)
    torch.cuda.set_device(rank)
    if rank == fails_at:
        raise ValueError(f"rank {rank} is odd")
    train(nn.parallel.DistributedDataParallel(nn.Linear(16, 16).cuda(), device_ids=[rank]))

def start(function, *arguments, join=True):
    started = [mp.Process(target=function, args=(rank, *arguments)) for rank in range(4)]
    for process in started:
        process.start()
    for process in started if join else ():
        process.join()

"""


def recorded(folder, code, world_size=4, rank=0):
    script = folder / "train.py"
    script.write_text(TRAIN + textwrap.dedent(code), encoding="utf-8")
    job = Job("", str(script), world_size=world_size, rank=rank)
    (recording,) = record_script(job, LIMITS)
    return recording


def collectives(recording):
    """Group and bytes of each collective."""
    return [
        (len(recording.groups[int(recording.ops.group[op])][1]), int(recording.ops.bytes_comm[op]))
        for op in recording.op.tolist()
        if recording.ops.kind[op] == OpKind.COLLECTIVE
    ]


@pytest.mark.parametrize("rank", [0, 2])
def test_one_of_the_processes_is_the_traced_rank(tmp_path, rank):
    recording = recorded(tmp_path, 'mp.set_start_method("spawn"); start(rank_of, 4)', rank=rank)
    assert collectives(recording) == [(4, 4 * (16 * 16 + 16))]
    assert recording.rank == rank
    said = f"the program starts its ranks with multiprocessing.Process; rank {rank} is traced"
    assert recording.meta["notes"] == [said]


def test_a_program_may_leave_its_processes_running(tmp_path):
    assert collectives(recorded(tmp_path, "start(rank_of, 4, join=False)")) == [(4, 4 * (16 * 16 + 16))]


def test_a_traced_rank_that_trains_too_little_ends_the_trace(tmp_path):
    with pytest.raises(ForerunError, match="no process that it started recorded the step either"):
        recorded(tmp_path, "start(lambda rank: dist.init_process_group('nccl', rank=rank, world_size=4))")


def test_the_last_process_stands_for_a_rank_that_the_program_does_not_start(tmp_path):
    recording = recorded(tmp_path, "start(rank_of, 4)", world_size=8, rank=5)
    assert collectives(recording) == [(4, 4 * (16 * 16 + 16))]
    assert "the program makes a process group of 4 ranks; --world-size says 8" in recording.meta["notes"]


def test_a_failure_of_the_traced_rank_ends_the_trace_at_once(tmp_path):
    with pytest.raises(ForerunError, match=r"ValueError: rank 0 is odd at .*train\.py:\d+") as failed:
        recorded(tmp_path, "start(rank_of, 4, 0)")
    assert "\n" not in str(failed.value)


def test_processes_that_share_a_model_on_the_device_are_traced(tmp_path):
    code = """
        model = nn.Linear(16, 16).cuda()
        assert model.share_memory().weight.is_shared()
        start(lambda rank: train(model))
    """
    recording = recorded(tmp_path, code, world_size=1)
    assert sum(recording.ops.kind[op] == OpKind.GEMM for op in recording.op.tolist()) == 2


def test_a_process_beside_the_training_is_not_the_training(tmp_path):
    code = """
        model = nn.Linear(16, 16).cuda()
        train(model, 1)
        start(lambda rank: train(nn.Sequential(model, nn.Linear(16, 4).cuda()), 1))
        train(model, 1)
    """
    recording = recorded(tmp_path, code, world_size=1)
    assert sum(recording.ops.kind[op] == OpKind.GEMM for op in recording.op.tolist()) == 2


def test_ranks_that_make_no_process_group_train_alone(tmp_path):
    recording = recorded(tmp_path, "train(nn.Linear(16, 16).cuda())")
    assert recording.meta["notes"] == ["the program makes no process group: each of the 4 ranks trains alone"]


@pytest.fixture(name="mpi4py")
def _mpi4py(tmp_path):
    """A package whose extension can't be loaded, as where there is no library of an MPI."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')", encoding="utf-8")


@pytest.mark.usefixtures("mpi4py")
def test_ranks_that_mpi_numbers_are_those_of_the_run(tmp_path):
    code = """
        import numpy as np
        from mpi4py import MPI
        world = MPI.COMM_WORLD
        rank, size = world.Get_rank(), world.size
        total, gathered = np.zeros(3), np.zeros((size, 3))
        world.Allreduce(np.arange(3.0), total, op=MPI.SUM)
        world.Allgather([np.arange(3.0), MPI.DOUBLE], gathered)
        node = world.Split_type(MPI.COMM_TYPE_SHARED)
        assert (rank, size) == (9, 12) and world.bcast("here", root=9) == "here"
        assert world.allreduce(2) == 24 and world.allreduce(2.0, op=MPI.MAX) == 2.0
        assert world.allgather((1, 2)) == [(1, 2)] * 12 and world.gather(1) is None
        assert total.tolist() == [0, 12, 24] and gathered.tolist() == [[0, 1, 2]] * 12
        assert (node.rank, node.size, MPI.COMM_SELF.size) == (1, 4, 1)
        world.Barrier()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        dist.init_process_group("nccl")
        train(nn.parallel.DistributedDataParallel(nn.Linear(16, 16).cuda()))
    """
    recording = recorded(tmp_path, code, world_size=12, rank=9)
    assert collectives(recording) == [(12, 4 * (16 * 16 + 16))]


@pytest.mark.usefixtures("mpi4py")
@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("world.bcast(None, root=1)", "only rank 1 has this data"),
        ("world.Split(0, 0)", "uses Split of a communicator of mpi4py, which is not traced"),
        ("MPI.Win", "uses MPI.Win of mpi4py, which is not traced"),
        ("world.Allreduce(torch.ones(2), torch.ones(2))", "a buffer of type Tensor; only numpy arrays"),
    ],
)
def test_what_mpi_is_not_traced_for_is_one_line(tmp_path, call, said):
    with pytest.raises(ForerunError, match=said):
        recorded(tmp_path, f"from mpi4py import MPI\nworld = MPI.COMM_WORLD\n{call}")
