"""The formulas of collective algorithms, against what the algorithms send and against counting by hand."""

import numpy as np
import pytest

from forerun.core.network import formulas
from forerun.core.network import group_traffic as traffic
from forerun.core.network.group_traffic import Layout
from forerun.core.program.types import Collective

ALL_REDUCE, ALL_GATHER, ALL_TO_ALL = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.ALL_TO_ALL


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 8), (2, 4), (4, 1), (3, 8)])
def test_an_exchange_sends_what_its_messages_do(nodes, ranks):
    near, far = np.zeros(nodes * ranks), np.zeros(nodes * ranks)
    for src, dst, weight in traffic.direct(Layout(nodes * ranks, 1, ranks, 0, nodes * ranks)):
        same = src // ranks == dst // ranks
        np.add.at(near, src[same], weight[same])
        np.add.at(far, src[~same], weight[~same])
    expected = formulas.exchanged(nodes, ranks)
    assert near == pytest.approx(np.full(nodes * ranks, expected[0]))
    assert far == pytest.approx(np.full(nodes * ranks, expected[1]))
    assert sum(expected) == pytest.approx(formulas.passes(ALL_GATHER, nodes * ranks))


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(ranks):
    halves = formulas.passes(Collective.REDUCE_SCATTER, ranks) + formulas.passes(ALL_GATHER, ranks)
    assert formulas.passes(ALL_REDUCE, ranks) == pytest.approx(halves) == pytest.approx(2 * (ranks - 1) / ranks)
    assert formulas.passes(ALL_REDUCE, ranks) < formulas.TREE_PASSES
