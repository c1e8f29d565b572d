"""Traced collectives against those of real processes that run the same script on the CPU over gloo.

Compared is, rank by rank and in the order of issue: kind, bytes (the full buffer), dtype, the global ranks of the
group, and the peer of sends and receives. The real ones are seen by a dispatch mode, and gloo's own flight recorder
counts as many. What is not compared, because it is not the same:

* the order in which the sends and receives of one batch (`batch_isend_irecv`) are listed is the program's in both;
  nothing is reordered here;
* gloo has no reduce-scatter: it runs one as an all-reduce of the whole input. The operation that torch asks for is a
  reduce-scatter in both, and is what is compared;
* DDP's map of used parameters is made on the host and copied, with gloo without a copy: the all-reduce is the same;
* scalars and shapes that stages of a pipeline tell each other go before the first step, which is not compared.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from forerun.program.types import OpKind
from forerun.trace.job import Job
from forerun.trace.launch import Limits, record_script

HERE = Path(__file__).parent
SCRIPT = HERE / "real_parallel.py"
MARK_BYTES = 4 * 1001
"""of the all-reduce before the first way of the script"""
NAMES = ("fsdp", "fsdp_mixed", "fsdp_accumulate", "ddp", "ddp_buckets", "ddp_unused", "tp")
NAMES += ("gpipe", "one_f_one_b", "dynamic", "interleaved", "hsdp", "fsdp_tp", "pp_fsdp")
"""ways of the script in its order"""
OF_TWO, OF_FOUR = NAMES[:11], NAMES[11:]
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "int64": "int64", "int32": "int32"}
STEADY = 4
"""number of the clock's step that ends the third iteration: DDP's buckets have been rebuilt before"""
LIMITS = Limits(time_s=240)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def real(folder: Path, world_size: int, ways, step: int = STEADY) -> list[list[tuple]]:
    """Collectives of each of the real ranks."""
    port, command = (
        free_port(),
        [sys.executable, str(HERE / "real_collectives.py"), str(folder), str(step), str(SCRIPT)],
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
    found = []
    for rank in range(world_size):
        written = json.loads((folder / f"rank{rank}.json").read_text())
        rows = written["rows"]
        assert written["flights"] == sum(row["kind"] not in ("send", "recv") for row in rows), "gloo saw others"
        found.append([tuple(r[k] if k != "dtype" else DTYPES[r[k]] for k in ROW) for r in rows])
        found[-1] = [(*row[:3], tuple(row[3]), row[4]) for row in found[-1]]
    return found


ROW = ("kind", "bytes", "dtype", "ranks", "peer")


def traced(world_size: int, ways, rank: int = 0, step: int = STEADY, alone: bool = False) -> dict[int, list[tuple]]:
    """Collectives of each recorded rank."""
    job = Job("", str(SCRIPT), ("--ways", ",".join(ways)), rank=rank, world_size=world_size, steps=step, alone=alone)
    return {recording.rank: rows_of(recording) for recording in record_script(job, LIMITS)}


def rows_of(one) -> list[tuple]:
    rows = []
    for node in np.flatnonzero(np.isin(one.ops.kind[one.op], (OpKind.COLLECTIVE, OpKind.P2P))).tolist():
        op = int(one.op[node])
        ranks = one.groups[int(one.ops.group[op])][1]
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


@pytest.mark.slow
@pytest.mark.parametrize("way", OF_TWO)
def test_two_ranks_issue_what_was_traced(of_two, way):
    happened, predicted = of_two
    assert sorted(predicted) == [0, 1]
    for rank, rows in predicted.items():
        assert by_way(happened[rank])[way], "the way communicates"
        assert by_way(rows)[way] == by_way(happened[rank])[way]


@pytest.mark.slow
@pytest.mark.parametrize("way", OF_FOUR)
def test_four_ranks_issue_what_was_traced(of_four, way):
    happened, predicted = of_four
    assert sorted(predicted) == [1, 3], "rank 1 and its peer in the pipeline"
    for rank, rows in predicted.items():
        assert by_way(happened[rank])[way], "the way communicates"
        assert by_way(rows)[way] == by_way(happened[rank])[way]
