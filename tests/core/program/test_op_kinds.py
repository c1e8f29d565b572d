"""What a kind of operation is stands in one place."""

import re
from pathlib import Path

import numpy as np

from forerun.core.cost.op_costs import durations_ps
from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.causes import Cause
from forerun.core.program.groups import CommGroup
from forerun.core.program.kinds import KINDS, N_DETAILS, Attention, Direction, Gemm, OpKind, Scan, Work, columns_of
from forerun.core.program.types import Collective, joined_ops
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.types import KernelRates

SOURCE = Path(__file__).parents[3] / "src" / "forerun"
NAMING = {
    "core/program/kinds.py",  # what they are
    "core/program/types.py",  # their columns by name, in a table
    "core/program/builder.py",  # a method for each
    "core/cost/op_costs.py",  # a time for each
    "core/cost/measured.py",  # where a user's own times of them stand
}


def one_of_each():
    """A table with a row of every kind, in their order."""
    ops = OpTableBuilder()
    ops.gemm("product", 4096, 1024, 512)
    ops.attention("attention", Attention(2, 8, 2, 1024, 2048, 128, 1, 0, 64), "flash3")
    ops.memory("norm", 100, 50)
    ops.collective("gather", Collective.ALL_GATHER, 0, 1000)
    ops.p2p("send", 0, 10, direction=Direction.OUT)
    ops.host_copy("offload", 20, direction=Direction.OUT)
    ops.delay("wait", 99)
    ops.scan("recurrence", Scan(1, 32, 16, 4096, 128, 128, 0), "gated_delta", "bf16", 1e9, (1e6, 1e6), 6)
    return ops.build()


def test_few_files_name_a_kind():
    """All others ask what a kind is like, so that a new kind is written in these files."""
    named = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"\bOpKind\.[A-Z]", path.read_text(encoding="utf-8"))
    }
    assert named == NAMING


def test_every_kind_has_an_entry_a_row_and_a_time():
    table = one_of_each()
    assert list(KINDS) == table.kind.tolist() == list(OpKind)
    time_ps, _ = durations_ps(table, (CommGroup("dp", 8, 1, 8),), load_cluster("h100-sxm"), KernelRates())
    assert (time_ps > 0).all()
    assert time_ps[OpKind.DELAY] == 99


def test_ops_say_what_they_keep_busy():
    table = one_of_each()
    assert table.work.tolist() == [Work.COMPUTE] * 3 + [Work.COMMUNICATION] * 2 + [Work.COPY, Work.DELAY, Work.COMPUTE]
    masks = (table.is_compute, table.is_communication, table.is_host_copy, table.is_delay)
    assert np.sum(masks, axis=0).tolist() == [1] * len(OpKind)
    assert [table.is_gemm[0], table.is_attention[1], table.is_memory_bound[2]] == [True] * 3
    assert np.flatnonzero(table.is_collective).tolist() == [OpKind.COLLECTIVE]
    assert np.flatnonzero(table.is_transfer).tolist() == np.flatnonzero(table.sends).tolist() == [OpKind.P2P]


def test_kinds_count_as_rows_of_the_breakdown():
    causes = {kind.name: KINDS[kind].cause for kind in OpKind}
    assert causes.pop("GEMM") == Cause.MATMUL
    assert causes.pop("ATTENTION") == causes.pop("SCAN") == Cause.ATTENTION
    assert causes.pop("DELAY") == Cause.HOST
    assert set(causes.values()) == {Cause.MEMORY_BOUND}


def test_columns_have_names():
    assert columns_of(Gemm)[:4] == ("m", "n", "k", "batch")
    assert columns_of(KINDS[OpKind.MEMORY].details) == ()
    assert len(columns_of(Attention)) == N_DETAILS == 9
    table = one_of_each()
    assert table.attention(np.array([1])).seq_kv.tolist() == [2048]
    assert table.details_of(0).words("") == "of 4096 x 1024 x 512"
    assert table.details_of(1).words("flash3") == "(flash3, head size 128, 2048 keys)"
    assert table.details_of(2).words("") == ""


def test_rows_come_back_as_they_were_added():
    table, again = one_of_each(), OpTableBuilder()
    assert [again.add(row) for row in table.rows()] == list(range(len(OpKind)))
    assert again.build().rows() == table.rows()
    turned = table.take(range(len(table))[::-1])
    assert turned.rows() == table.rows()[::-1]
    assert joined_ops([table, turned]).rows() == table.rows() + table.rows()[::-1]
    assert OpTableBuilder().build().rows() == []
