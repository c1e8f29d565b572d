"""Imports between rooms point one way, and stand at the top of a module."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "forerun"
LEVELS = [
    {"errors", "units"},
    {"files", "jit", "processes", "content", "records"},
    {"ray_cluster"},
    {"cluster", "model"},
    {"plan"},
    {"program"},
    {"engine"},
    {"network"},
    {"cost", "memory"},
    {"symbolic", "trace", "chakra"},
    {"stage"},
    {"astra"},
    {"analysis"},
    {"measure", "search", "validation", "dse"},
    {"experiment", "fitting"},
    {"report"},
    {"api", "experiments"},
    {"cli"},
]
LEVEL = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")
"""all but the package itself, which imports what it offers when it is used"""
LAZY = {
    SOURCE / "ray_cluster.py": {"ray"},
    SOURCE / "analysis" / "history.py": {"pandas"},
    SOURCE / "search" / "result.py": {"pandas"},
    SOURCE / "experiment" / "result.py": {"pandas"},
    SOURCE / "measure" / "fit.py": {"scipy.optimize"},
    SOURCE / "measure" / "samples.py": {"pandas"},
    SOURCE / "measure" / "microbench.py": {"torch", "torch.distributed", "torch.nn.attention"},
    SOURCE / "dse" / "tables.py": {"pyarrow", "pyarrow.parquet"},
    SOURCE / "report" / "pareto_plot.py": {
        f"matplotlib.{part}" for part in ("figure", "ticker", "backends.backend_agg")
    },
    SOURCE / "report" / "drawing.py": {
        *("matplotlib", "matplotlib.figure", "matplotlib.text", "matplotlib.ticker", "matplotlib.backends.backend_agg")
    },
    SOURCE / "report" / "page.py": {"plotly.offline"},
}
"""imports inside a function: of what may not be installed"""


def room_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0].removesuffix(".py")


def imported_rooms(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("forerun.")}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_room_imports_only_rooms_below_it(path):
    room = room_of(path)
    assert room in LEVEL, f"give room {room} a level"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for other in imported_rooms(tree) - {room, "__version__"}:
        assert LEVEL[other] < LEVEL[room], f"{room} imports {other}, which is not below it"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_import_hides_in_a_function(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    hidden = {
        alias.name
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert hidden <= LAZY.get(path, set())


def test_the_rule_would_notice_an_import_upwards():
    assert imported_rooms(ast.parse("from forerun.cli.main import main\nimport forerun.engine.jit")) == {
        "cli",
        "engine",
    }
    assert LEVEL["cli"] > LEVEL["engine"]
