"""Traced collectives against those of real processes that run the same script on the CPU over gloo.

Compared is, rank by rank and in the order of issue: kind, bytes (the full buffer), dtype, the global ranks of the
group, and the peer of sends and receives; nothing is reordered. The real ones are seen by a dispatch mode, and gloo's
own flight recorder counts as many. What is not the same:

* gloo has no reduce-scatter: it runs one as an all-reduce of the whole input. The operation that torch asks for is a
  reduce-scatter in both, and is what is compared;
* DDP's map of used parameters is made on the host and copied, with gloo without a copy: the all-reduce is the same;
* NCCL's barrier is an all-reduce of one float, and is traced as one; gloo's is taken for the same;
* in the second iteration rank 0 of DDP tells the others its rebuilt buckets by two small broadcasts of integers, once
  in a run; the trace rebuilds between the first two iterations and leaves them out, so that its second is like all
  that follow;
* scalars and shapes that stages of a pipeline tell each other go before the first step, which is not compared.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from forerun.core.program.kinds import OpKind
from forerun.core.program.types import Collective
from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits, record_script

pytestmark = [pytest.mark.long, pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")]
HERE = Path(__file__).parent
SCRIPT = HERE / "real_parallel.py"
MARK_BYTES = 4 * 1001
"""of the all-reduce before the first way of the script"""
NAMES = ("fsdp", "fsdp_mixed", "fsdp_accumulate", "ddp", "ddp_buckets", "ddp_unused", "tp")
NAMES += ("gpipe", "one_f_one_b", "dynamic", "interleaved", "zero1", "fsdp1", "by_hand")
NAMES += ("hsdp", "fsdp_tp", "pp_fsdp")
"""ways of the script in its order"""
OF_TWO, OF_FOUR = NAMES[:14], NAMES[14:]
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "int64": "int64", "int32": "int32"}
KINDS = {
    "all_reduce": Collective.ALL_REDUCE,
    "barrier": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "gather": Collective.ALL_GATHER,
    "scatter": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "all_to_all": Collective.ALL_TO_ALL,
    "broadcast": Collective.BROADCAST,
    "reduce": Collective.BROADCAST,
    "send": Collective.SEND_RECV,
    "recv": Collective.SEND_RECV,
}
"""what a collective is costed as"""
REBUILDING, STEADY = 3, 4
"""numbers of the clock's steps that end the second iteration, in which DDP rebuilds its buckets, and the third"""
LIMITS = Limits(time_s=240)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def real(folder: Path, world_size: int, ways) -> list[dict[int, list[tuple]]]:
    """Collectives of each of the real ranks, by the clock's step that ends what they are of."""
    port, command = (
        free_port(),
        [sys.executable, str(HERE / "real_collectives.py"), str(folder), str(STEADY), str(SCRIPT)],
    )
    command += ["--device", "cpu", "--ways", ",".join(ways)]
    shared = {"WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    shared |= {"TORCH_FR_BUFFER_SIZE": 20000}
    ranks = []
    for rank in range(world_size):
        variables = {key: str(value) for key, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        log = (folder / f"rank{rank}.txt").open("wb")
        ranks.append(subprocess.Popen(command, env=os.environ | variables, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0] * world_size, (folder / f"rank{int(np.argmax(np.abs(codes)))}.txt").read_text()[-3000:]
    written = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]
    return [{step: rows_written(**steps[str(step)]) for step in (REBUILDING, STEADY)} for steps in written]


def rows_written(rows: list[dict], flights: int) -> list[tuple]:
    assert flights == sum(row["kind"] not in ("send", "recv") for row in rows), "gloo counts others"
    return [
        ("barrier", 4, "fp32", tuple(row["ranks"]), -1)
        if row["kind"] == "barrier"
        else (row["kind"], row["bytes"], DTYPES[row["dtype"]], tuple(row["ranks"]), row["peer"])
        for row in rows
    ]


def traced(world_size: int, ways, rank: int = 0, step: int = STEADY) -> dict[int, list[tuple]]:
    """Collectives of each recorded rank."""
    job = Job("", str(SCRIPT), ("--ways", ",".join(ways)), rank=rank, world_size=world_size, steps=step)
    return {recording.rank: rows_of(recording) for recording in record_script(job, LIMITS)}


def rows_of(one) -> list[tuple]:
    rows = []
    for node in np.flatnonzero(np.isin(one.ops.kind[one.op], (OpKind.COLLECTIVE, OpKind.P2P))).tolist():
        op = int(one.op[node])
        ranks = one.groups[int(one.ops.group[op])][1]
        assert one.ops.collective[op] == KINDS[one.ops.name[op]]
        rows.append((one.ops.name[op], int(one.ops.bytes_comm[op]), one.ops.dtype[op], ranks, int(one.peer[node])))
    return rows


def by_way(rows) -> dict[str, list[tuple]]:
    """What follows each mark, by the name of the way."""
    out: dict[str, list[tuple]] = {}
    for row in rows:
        number = (row[1] - MARK_BYTES) // 4
        if row[0] == "all_reduce" and 0 <= number < len(NAMES):
            out[NAMES[number]] = mine = []
        else:
            mine.append(row)
    return out


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    return real(tmp_path_factory.mktemp("two"), 2, OF_TWO), traced(2, OF_TWO)


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    return real(tmp_path_factory.mktemp("four"), 4, OF_FOUR), traced(4, OF_FOUR, rank=1)


def agree(happened, predicted, way):
    for rank, rows in predicted.items():
        assert by_way(happened[rank][STEADY])[way], "the way communicates"
        assert by_way(rows)[way] == by_way(happened[rank][STEADY])[way]


@pytest.mark.parametrize("way", OF_TWO)
def test_two_ranks_issue_what_was_traced(of_two, way):
    happened, predicted = of_two
    assert sorted(predicted) == [0, 1]
    agree(happened, predicted, way)


@pytest.mark.parametrize("way", OF_FOUR)
def test_four_ranks_issue_what_was_traced(of_four, way):
    happened, predicted = of_four
    assert sorted(predicted) == [1, 3], "rank 1 and its peer in the pipeline"
    agree(happened, predicted, way)


def test_buckets_are_rebuilt_before_the_second_iteration(of_two):
    happened, _ = of_two
    second, steady = (by_way(happened[0][step])["ddp"] for step in (REBUILDING, STEADY))
    assert [row[0] for row in second[:2]] == ["broadcast", "broadcast"]
    assert {row[2] for row in second[:2]} == {"int32"}
    assert second[2:] == steady
    assert by_way(traced(2, ["ddp"], step=REBUILDING)[0])["ddp"] == steady
