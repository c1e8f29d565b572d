"""Imports between wings and rooms point one way, and stand at the top of a module."""

import ast
import re
import runpy
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parent.parent / "src" / "forerun"
WINGS = [
    ["common"],
    ["describe"],
    ["core"],
    ["sources", "astrasim"],
    ["answers"],
    ["evidence"],
    ["interfaces"],
]
"""from the ground up; wings of one floor don't know each other"""
ROOMS = {
    "common": [
        ["version", "errors", "units", "arrays", "former_names", "execution_trace"],
        ["admission"],
        ["files", "native", "processes", "content", "records", "own_code"],
        ["jit", "ray_cluster", "toml_files", "parsed_yaml", "array_files", "shown"],
        ["yaml_files", "workers", "interned"],
        ["build_ahead"],
        ["shipped"],
    ],
    "describe": [["cluster", "model", "kernels"], ["stacks"], ["plan"], ["recipe"]],
    "core": [["program"], ["engine"], ["network"], ["cost", "memory"]],
    "sources": [["symbolic", "trace", "profile"]],
    "astrasim": [["chakra", "messages"], ["stage"], ["astra"], ["dse"]],
    "answers": [
        ["analysis"],
        ["search", "diff", "jobs", "stragglers", "profile"],
        ["experiment", "comparison", "goodput"],
    ],
    "evidence": [["measure", "validation", "public_profiles"], ["fitting", "traced"]],
    "interfaces": [
        ["report"],
        ["notebook", "starts"],
        ["api", "experiments", "whole_runs", "jobs", "watch", "serve"],
        ["cli"],
        ["pytest_plugin"],
    ],
}
"""the rooms of each wing, from the ground up"""
WING_FLOOR = {wing: floor for floor, wings in enumerate(WINGS) for wing in wings}
FLOOR = {
    f"{wing}.{room}": floor for wing, floors in ROOMS.items() for floor, rooms in enumerate(floors) for room in rooms
}
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")
"""all but the package itself, which imports what it offers when it is used"""
LAZY = {
    SOURCE / "common" / "jit.py": {"numba", "event", "types", "typeof_impl"},
    SOURCE / "common" / "ray_cluster.py": {"ray"},
    SOURCE / "answers" / "analysis" / "history.py": {"pandas"},
    SOURCE / "describe" / "model" / "meta_device.py": {"torch", "transformers"},
    SOURCE / "common" / "shown.py": {"pandas"},
    SOURCE / "interfaces" / "watch.py": {"TrainerCallback", "Callback"},
    SOURCE / "evidence" / "measure" / "fit.py": {"scipy.optimize"},
    SOURCE / "evidence" / "measure" / "samples.py": {"pandas"},
    SOURCE / "evidence" / "measure" / "microbench.py": {"torch", "torch.distributed", "torch.nn.attention"},
    SOURCE / "astrasim" / "dse" / "tables.py": {"pyarrow", "pyarrow.csv", "pyarrow.parquet"},
    SOURCE / "answers" / "stragglers" / "recorded_steps.py": {"pyarrow", "pyarrow.parquet"},
    SOURCE / "interfaces" / "report" / "drawing.py": {
        *("matplotlib", "matplotlib.figure", "matplotlib.text", "matplotlib.ticker", "matplotlib.backends.backend_agg")
    },
    SOURCE / "interfaces" / "report" / "pictures.py": {"matplotlib.collections"},
}
"""imports inside a function: of what may not be installed, and of numba, which takes long and is rarely needed"""


def room_of(path: Path) -> str:
    """`wing.room` of a module; the wing alone for what introduces it."""
    wing, room = path.relative_to(SOURCE).with_suffix("").parts[:2]
    return wing if room == "__init__" else f"{wing}.{room}"


def imported_rooms(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {".".join(name.split(".")[1:3]) for name in names if name.startswith("forerun.")}


def is_below(other: str, room: str) -> bool:
    """Whether `room` may import `other`: from a lower wing, or from a lower floor of its own."""
    wing, others = room.split(".")[0], other.split(".")[0]
    return FLOOR[other] < FLOOR[room] if wing == others else WING_FLOOR[others] < WING_FLOOR[wing]


class Facts(NamedTuple):
    """What the rules ask of one module."""

    rooms: set[str]
    """the rooms that it imports"""
    hidden: set[str]
    """what it imports inside of functions"""
    loads: set[str]
    """the calls that open or parse what comes in"""


@cache
def facts() -> dict[Path, Facts]:
    """The facts of every module, each of which is parsed once and its tree not kept."""
    trees = ((path, ast.parse(path.read_text(encoding="utf-8"))) for path in MODULES)
    return {path: Facts(imported_rooms(tree), imported_in_functions(tree), loads(tree)) for path, tree in trees}


def test_a_room_imports_only_rooms_below_it():
    imported = {path: found.rooms - {room_of(path)} for path, found in facts().items()}
    rooms = {path: room_of(path) for path in MODULES}
    assert {room for room in rooms.values() if room not in WING_FLOOR} == set(FLOOR), "every room has a floor"
    introduce = {path: others for path, others in imported.items() if rooms[path] in WING_FLOOR}
    assert not any(introduce.values()), "a module that introduces a wing imports nothing"
    upwards = [
        f"{path.relative_to(SOURCE)} imports {other}, which is not below {rooms[path]}"
        for path, others in imported.items()
        if path not in introduce
        for other in others
        if not is_below(other, rooms[path])
    ]
    assert upwards == []


def test_every_wing_says_in_one_sentence_what_it_is():
    wings = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert wings == set(WING_FLOOR)
    assert len(wings) <= 8
    for wing in wings:
        says = ast.get_docstring(ast.parse((SOURCE / wing / "__init__.py").read_text(encoding="utf-8")))
        assert says
        assert says.endswith(".")
        assert "\n" not in says


def imported_in_functions(tree: ast.AST) -> set[str]:
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return {
        alias.name
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }


def test_no_import_hides_in_a_function():
    hidden = {path: found.hidden - LAZY.get(path, set()) for path, found in facts().items()}
    assert {path: names for path, names in hidden.items() if names} == {}


def test_the_picture_of_the_design_page_is_of_these_imports():
    drawing = runpy.run_path(str(SOURCE.parents[1] / "docs" / "draw_wings.py"))
    known = drawing["arrows"]()
    picture = drawing["PICTURE"].read_text(encoding="utf-8")
    drawn = set(re.findall(r'id="(\w+) imports (\w+)"', picture))
    assert drawn == {arrow for arrow in known if not drawing["told_by_others"](arrow, known)}
    for wing, inside in drawing["wings"]().items():
        assert f">{wing}</text>" in picture
        assert f">{', '.join(inside)}</text>" in picture, f"run docs/draw_wings.py: {wing} holds {inside}"


def test_the_rule_would_notice_an_import_upwards():
    tree = ast.parse("from forerun.interfaces.cli.main import main\nimport forerun.core.engine.jit")
    assert imported_rooms(tree) == {"interfaces.cli", "core.engine"}
    assert is_below("core.engine", "interfaces.cli")
    assert not is_below("interfaces.cli", "core.engine")
    assert is_below("core.engine", "core.cost")
    assert not is_below("core.cost", "core.engine")
    assert not is_below("astrasim.astra", "sources.trace")
    assert not is_below("sources.trace", "astrasim.astra")


READERS = {
    *(
        f"common/{name}.py"
        for name in ("admission", "array_files", "yaml_files", "toml_files", "records", "shipped", "content")
    ),
}
"""the modules that read: all that comes in goes through these"""
OF_ITS_OWN = {
    "common/files.py": "what it has just written",
    "common/build_ahead.py": "the package's own YAML files, and what it writes of them",
    "interfaces/cli/process_limits.py": "what the system tells of its processes",
    "common/parsed_yaml.py": "what the build of the package writes",
    "common/native": "what the build of the package writes: object code, its index, the types that it compiles for",
    "sources/trace/job.py": "the two sides of a traced run exchange these files",
    "sources/trace/module_request.py": "as above",
    "sources/trace/remains.py": "what a killed process printed, and files of the kernel",
    "sources/trace/inside": "the traced process reads the data files of its own folder, and of the installed torch",
    "describe/model/meta_device.py": "what a process that Forerun starts prints",
    "evidence/traced/checkout.py": "a checkout that git made and hashes verify",
    "interfaces/pytest_plugin.py": "an archive that git writes",
    "interfaces/serve/exports.py": "an archive that it writes",
    "sources/profile/read.py": "a text between quotes that it has cut out of a file that `admission.opened` opens",
    "astrasim/chakra/traces.py": "a tar file that `admission.opened` opens",
}
"""what is no input of a user, and why"""
LOADING = {
    *(
        "yaml.load",
        "yaml.safe_load",
        "yaml.load_all",
        "yaml.safe_load_all",
        "yaml.full_load",
        "json.load",
        "json.loads",
    ),
    *("np.load", "np.loadtxt", "np.genfromtxt", "csv.reader", "csv.DictReader", "pickle.load", "pickle.loads"),
    *("zipfile.ZipFile", "tarfile.open", "sqlite3.connect", "pandas.read_csv", "open"),
}


def loads(tree: ast.AST) -> set[str]:
    """The calls that open or parse what comes in."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in LOADING or name.endswith((".read_text", ".read_bytes")):
            found.add(name)
        modes = [
            part.value for part in (*node.args, *(k.value for k in node.keywords)) if isinstance(part, ast.Constant)
        ]
        if name.endswith(".open") and any(mode in ("r", "rb", "rt") for mode in modes):
            found.add(name)
    return found


def test_what_comes_in_goes_through_the_admission_layer():
    found = {path.relative_to(SOURCE).as_posix(): one.loads for path, one in facts().items()}
    inputs = {name for name in found if name not in READERS and not name.startswith(tuple(OF_ITS_OWN))}
    assert {name: found[name] for name in inputs if found[name]} == {}


def test_the_rule_would_notice_a_reader():
    assert loads(ast.parse("yaml.safe_load(Path(p).read_text()); path.open('rb'); open(p)")) == {
        *("yaml.safe_load", "Path(p).read_text", "path.open", "open")
    }
    assert loads(ast.parse("path.open('wb'); files.open(p); plan.open('dp')")) == set()


def test_no_two_test_files_have_one_name():
    """pytest imports those of folders without __init__.py by their name alone, and refuses a second one."""
    tests = Path(__file__).parent
    files = [path for path in tests.rglob("*.py") if path.name != "conftest.py"]
    names = Counter(path.stem for path in files if not (path.parent / "__init__.py").exists())
    assert [name for name, times in names.items() if times > 1] == []
