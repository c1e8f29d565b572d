"""The module of each kernel: the one that runs, and in backward the one whose forward made the autograd node."""

import pytest
from virtual_process import run_virtual

pytest.importorskip("torch", reason="tracing needs torch")


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_virtual(
        """
        from forerun.sources.trace.inside.modules import Modules
        modules = Modules()
        recorder.module_of_node, recorder.module_depth = modules.current, lambda: len(modules.stack)

        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
            def forward(self, x):
                x = self.inner(x) * self.scale  # outside of inner again
                return self.inner(x).sin()

        model = nn.Sequential(nn.Linear(4, 4), Twice(), nn.ReLU()).cuda()
        other = nn.Linear(4, 2).cuda()
        def step():
            recorder.start()
            out = model(torch.ones(2, 4, device="cuda"))
            loss = other(out.cos()).sum()
            split = recorder.n_nodes
            loss.backward()
            rows = [[row[0], modules.paths[node[3]]] for row, node in zip(nodes(), recorder._nodes)]
            kernels = ("addmm", "mul", "sin", "cos", "relu", "sum", "mm", "threshold_backward", "neg")
            return [[row for row in part if row[0] in kernels] for part in (rows[:split], rows[split:])]
        result["forward"], result["backward"] = step()
        modules.forget_sequence()
        result["again"] = step() == [result["forward"], result["backward"]]
        result["roots"] = [type(one).__name__ for one in modules.roots]
        result["seen"] = modules.backward_seen
        result["stack"] = modules.stack
        seen = []
        modules.at_forward = lambda: seen.append("forward")
        modules.at_root = lambda module, args, kwargs: seen.append([type(module).__name__, len(args), len(kwargs)])
        model(torch.ones(2, 4, device="cuda"))
        other(torch.ones(2, 4, device="cuda"))
        result["called"] = list(seen)
        result["failed"] = fails(lambda: model("text"))
        result["after"] = modules.stack
        """,
        tmp_path_factory.mktemp("modules"),
    )


def test_a_forward_kernel_belongs_to_the_innermost_module_that_runs(answers):
    assert answers["forward"] == [
        ["addmm", "0"],
        ["addmm", "1.inner"],
        ["mul", "1"],
        ["addmm", "1.inner"],
        ["sin", "1"],
        ["relu", "2"],
        ["cos", ""],
        ["addmm", "Linear"],
        ["sum", ""],
    ]


def test_a_backward_kernel_belongs_to_the_module_that_made_its_node(answers):
    linear = ["mm", "mm", "sum"]
    expected = [
        *[[name, "Linear"] for name in linear],
        *[[name, ""] for name in ("sin", "neg", "mul")],
        ["threshold_backward", "2"],
        *[[name, "1"] for name in ("cos", "mul")],
        *[[name, "1.inner"] for name in linear],
        *[[name, "1"] for name in ("mul", "mul", "sum")],
        *[[name, "1.inner"] for name in linear],
        *[[name, "0"] for name in ("mm", "sum")],
    ]
    assert answers["backward"] == expected


def test_another_step_has_the_same_modules(answers):
    assert answers["again"]
    assert answers["roots"] == ["Sequential", "Linear"]
    assert answers["seen"]


def test_only_calls_from_outside_are_roots_and_a_failure_leaves_nothing_running(answers):
    assert answers["called"] == ["forward", ["Sequential", 1, 0], "forward", ["Linear", 1, 0]]
    assert answers["failed"]
    assert answers["stack"] == answers["after"] == []
