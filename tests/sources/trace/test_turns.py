"""A step of a program with several optimizers is the shortest repeating sequence of their steps."""

import pytest

pytest.importorskip("torch", reason="tracing needs torch")

from forerun.core.program.kinds import OpKind
from forerun.sources.trace.inside.turns import Turns
from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits, record_script


def turns_of(steps):
    turns = Turns()
    ends = [turns.stepped(ord(one)) for one in steps]
    return ["".join(map(chr, turn)) for turn in turns.all], turns.period(), ends


@pytest.mark.parametrize(
    ("steps", "turns", "period"),
    [
        ("aa", ["a", "a"], 1),
        ("dgdg", ["dg", "dg"], 1),
        ("dgdddddgdddddg", ["dg", "dddddg", "dddddg"], 1),
        ("dddddgdddddg", ["dddddg", "dddddg"], 1),
        ("dggdgg", ["dg", "g", "dg", "g"], 2),
        ("mabmab", ["mab", "mab"], 1),
        ("qqalalqqalal", ["qqal", "al", "qqal", "al"], 2),
        ("dgddg", ["dg", "ddg"], 0),
    ],
)
def test_turns_end_with_the_optimizer_that_steps_first_last(steps, turns, period):
    found = turns_of(steps)
    assert (found[0], found[1]) == (turns, period)
    assert found[2][-1]


def test_an_optimizer_that_steps_first_late_makes_one_turn_of_all_before_it():
    turns, period, ends = turns_of("dddgdg")
    assert (turns, period) == (["dddg", "dg"], 0)
    assert ends == [True, True, True, True, False, True]


SCRIPT = """
import torch

def model(width):
    made = torch.nn.Linear(width, width, bias=False).cuda()
    return made, torch.optim.Adam(made.parameters())

(often, first), (rarely, second) = model(64), model(32)

def train(network, optimizer):
    network(torch.ones(8, network.in_features, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

"""


def products(tmp_path, code, **settings):
    """The FLOPs of products of the networks of width 64 and 32 in the recorded step, in products of each."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT + code, encoding="utf-8")
    (recording,) = record_script(Job("", str(script), **settings), Limits(time_s=60))
    ops, op = recording.ops, recording.op
    flops = ops.flops[op][ops.kind[op] == OpKind.GEMM].tolist()
    return tuple(flops.count(2.0 * 8 * width * width) for width in (64, 32)), recording.meta["notes"]


def test_a_generator_that_steps_every_fifth_time_ends_the_step(tmp_path):
    code = """
for batch in range(40):
    train(often, first)
    if batch % 5 == 0:
        train(rarely, second)
"""
    assert products(tmp_path, code) == ((10, 2), [])


def test_steps_that_alternate_are_recorded_together(tmp_path):
    code = """
for batch in range(40):
    train(often, first)
    train(rarely, second)
    train(rarely, second)
"""
    assert products(tmp_path, code) == ((2, 4), [])


def test_an_optimizer_that_never_steps_is_named(tmp_path):
    code = """
for batch in range(40):
    train(often, first)
"""
    count, notes = products(tmp_path, code)
    assert count == (2, 0)
    assert notes == [
        "an optimizer (Adam of 1 tensors) did not step yet: its steps are not in the recorded step",
    ]
    assert products(tmp_path, code + "del second", steps=1)[0] == (2, 0)


def test_a_program_that_ends_early_is_recorded_all_the_same(tmp_path):
    code = """
for count in (1, 2, 3):
    for batch in range(count):
        train(often, first)
    train(rarely, second)
"""
    count, notes = products(tmp_path, code)
    assert count == (6, 2)
    assert notes == ["the steps of the program's optimizers show no repeating sequence; its last steps are recorded"]


def test_an_optimizer_of_the_same_parameters_is_not_waited_for(tmp_path):
    code = """
replaced = torch.optim.SGD(often.parameters(), lr=0.1)
del second
for batch in range(2):
    train(often, first)
"""
    assert products(tmp_path, code) == ((2, 0), [])


def test_weights_that_a_forward_pass_normalizes_end_no_step(tmp_path):
    code = """
class Normalized(torch.nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.copy_(self.weight / self.weight.norm())
        return super().forward(x)

network = Normalized(64, 64, bias=False).cuda()
optimizer = torch.optim.Adam(network.parameters())
del second, first
for batch in range(4):
    for micro_batch in range(3):
        network(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    assert products(tmp_path, code) == ((6, 0), [])
