"""A framework is one file: what a stack's file may say, and all that one new file brings about."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

import forerun
from forerun.common.errors import ForerunError
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.complete import complete_plan
from forerun.describe.stacks import catalog
from forerun.describe.stacks.catalog import load_stack, named_by, own_stack, stack_names
from forerun.interfaces.report.launch.tools import TOOLS, launch

SHIPPED = Path(catalog.__file__).parent / "frameworks"
EXTENDING = Path(__file__).parents[3] / "docs" / "extending.md"
LLAMA, H100 = load_model("llama-3.1-8b"), load_cluster("h100-sxm")


def written(folder: Path, name: str = "own", **keys: object) -> str:
    """The path of a stack's file with these keys."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"description": "a trainer", "source": "its code", **keys}), encoding="utf-8")
    return str(path)


def test_a_file_states_what_differs_from_the_stack_that_it_extends(tmp_path: Path) -> None:
    base = load_stack("torchtitan")
    own = load_stack(written(tmp_path, extends="torchtitan-0.2", norm="fused", search={"axes": ["tp"]}))
    assert (own.name, own.norm, own.lineage) == ("own", "fused", ("torchtitan-0.2", "torchtitan"))
    assert (own.memory_rate, own.fitted, own.allocator) == (base.memory_rate, base.fitted, base.allocator)
    assert own.search is not None
    assert base.search is not None
    assert (own.search.axes, own.search.schedules) == (("tp",), base.search.schedules)
    assert own.names == (), "a name belongs to one file"
    assert own.family == base.family


def test_a_file_may_extend_one_beside_it(tmp_path: Path) -> None:
    written(tmp_path, "first", norm="fused", fitted={"memory_rate": "here"}, memory_rate=0.7)
    own = load_stack(written(tmp_path, "second", extends="first.yaml", fitted={"network_rate": "there"}))
    assert own.norm == "fused"
    assert own.fitted == {"memory_rate": "here", "network_rate": "there"}


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = written(tmp_path, issue_us=4.0)
    assert load_stack(path).issue_us == 4.0
    Path(path).write_text(Path(path).read_text(encoding="utf-8").replace("4.0", "5.0") + "\n", encoding="utf-8")
    assert load_stack(path).issue_us == 5.0


def test_a_stack_is_read_again_after_a_change_of_the_one_that_it_extends(tmp_path: Path) -> None:
    base, path = written(tmp_path, "first", issue_us=4.0), written(tmp_path, "second", extends="first.yaml")
    assert load_stack(path).issue_us == 4.0
    assert load_stack(path) is load_stack(path), "an unchanged file is read once"
    os.utime(written(tmp_path, "first", issue_us=5.0), ns=(1, 1))
    assert load_stack(path).issue_us == 5.0
    Path(base).unlink()
    with pytest.raises(ForerunError, match=r"first.yaml: No such file"):
        load_stack(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"extends": "torchtitann"}, r"own.yaml: extends: unknown stack 'torchtitann'; did you mean torchtitan"),
        ({"extends": "own.yaml"}, r"own.yaml: extends itself"),
        ({"extends": 3}, r"own.yaml: extends: expected the name of a stack"),
        ({"norms": "fused"}, r"own.yaml: norms: "),
        ({"norm": "quick"}, r"own.yaml: norm: .*'composed', 'fused', 'compiled' or 'aten'"),
        ({"names": [{"framework": "("}]}, r"own.yaml: names.0: .*framework is not a regular expression"),
        (
            {"attention_becomes": {"sdpa": {"hopper": "quick"}}},
            r"own.yaml: .*attention_becomes names 'quick', which is no",
        ),
        ({"search": {"axes": ["tp"]}}, r"own.yaml: search.source: "),
    ],
)
def test_a_mistake_is_one_line_with_the_file_and_the_place(
    tmp_path: Path, keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ForerunError, match=message) as raised:
        load_stack(written(tmp_path, **keys))
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(ForerunError, match=r"nothing.yaml: No such file.*; give a stack of `forerun stacks` or a file"):
        load_stack(str(tmp_path / "nothing.yaml"))


def test_only_files_of_the_user_count_for_what_is_kept(tmp_path: Path) -> None:
    assert own_stack("torchtitan") is None
    assert own_stack(written(tmp_path, issue_us=3.0)) == load_stack(str(tmp_path / "own.yaml"))


@pytest.mark.parametrize("name", stack_names())
def test_a_version_repeats_nothing_of_the_stack_that_it_extends(name: str) -> None:
    own = yaml.safe_load((SHIPPED / f"{name}.yaml").read_text(encoding="utf-8"))
    if "extends" not in own:
        return
    base = load_stack(own["extends"])
    for key, value in own.items():
        if key not in ("extends", "description", "source", "names", "search", "fitted"):
            now = getattr(base, key)
            assert value != (list(now) if isinstance(now, tuple) else now), f"{name}: {key} is as in {base.name}"


@pytest.mark.parametrize("name", stack_names())
def test_a_stack_names_tools_that_there_are(name: str) -> None:
    assert set(load_stack(name).launch) <= set(TOOLS)


def test_every_tool_launches_a_stack() -> None:
    assert {tool for name in stack_names() for tool in load_stack(name).launch} == set(TOOLS)


def test_one_new_file_predicts_searches_launches_and_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the file is new."""
    search = {"source": "its README", "axes": ["cp"], "zero_stages": [3]}
    names = [{"framework": "quicktrain", "software": "2026"}]
    keys: dict[str, object] = {"cp_method": "ulysses", "optimizer_impl": "loop", "issue_us": 60.0}
    written(tmp_path, "quicktrain", **keys, search=search, names=names, launch=["accelerate"], attention="sdpa")
    monkeypatch.setenv(catalog.OWN_FOLDER, str(tmp_path))
    assert "quicktrain" in stack_names()
    assert named_by({"framework": "QuickTrain (FSDP2)", "software": "October 2026"}) == "quicktrain"
    assert named_by({"framework": "QuickTrain (FSDP2)", "software": "2024"}) != "quicktrain"
    plan = forerun.Plan(seq_len=4096, dp_shard=4, cp=2, stack="quicktrain")
    assert (plan.cp_method, plan.optimizer_impl) == ("ulysses", "loop")
    slow = forerun.predict(LLAMA, plan, H100).step_time_s
    written(tmp_path, "quicker", extends="quicktrain", issue_us=1.0)
    quick = forerun.Plan(seq_len=4096, dp_shard=4, cp=2, stack=str(tmp_path / "quicker.yaml"))
    assert slow > 1.02 * forerun.predict(LLAMA, quick, H100).step_time_s
    found = forerun.search(LLAMA, H100, 8, 8192, 8, fixed={"stack": "quicktrain", "micro_batch": 1})
    assert {each.plan.tp for each in found.ranked} == {1}
    assert {each.plan.cp_method for each in found.ranked} == {"ulysses"}
    ready = launch(forerun.Plan(seq_len=4096, dp_shard=8, stack="quicktrain"), LLAMA, H100, "accelerate")
    assert "stack" in ready.implied
    other = launch(forerun.Plan(seq_len=4096, dp_shard=8, stack="quicktrain"), LLAMA, H100, "deepspeed")
    assert "stack" in other.noted


@pytest.mark.parametrize(
    ("stack", "fields"),
    [
        ("torchtitan", {"cp_method": "allgather", "optimizer_impl": "fused", "sequence_parallel": True}),
        ("torchtitan-2024", {"optimizer_impl": "foreach", "selective_policy": "op"}),
        ("megatron-core", {"cp_method": "ring", "sequence_parallel": False, "selective_policy": "attention"}),
        ("deepspeed", {"cp_method": "ulysses", "sequence_parallel": False, "optimizer_impl": "fused"}),
    ],
)
def test_a_plan_takes_what_it_leaves_open_from_its_stack(stack: str, fields: dict[str, object]) -> None:
    plan = forerun.Plan(seq_len=512, stack=stack)
    assert {name: getattr(plan, name) for name in fields} == fields
    stated = {"cp_method": "ring", "sequence_parallel": True, "optimizer_impl": "loop", "selective_policy": "mlp"}
    plan = forerun.Plan(seq_len=512, stack=stack, **stated)  # type: ignore[arg-type]
    assert {name: getattr(plan, name) for name in stated} == stated


def test_zero_2_is_what_the_framework_makes_of_it() -> None:
    fsdp = forerun.Plan(seq_len=512, dp_shard=8, zero_stage=2)
    assert (fsdp.zero_stage, fsdp.reshard_after_forward) == (3, "never")
    assert forerun.Plan(seq_len=512, zero_stage=2, reshard_after_forward="always").reshard_after_forward == "always"
    zero = forerun.Plan(seq_len=512, dp_shard=8, zero_stage=2, stack="deepspeed")
    assert (zero.zero_stage, zero.reshard_after_forward) == (2, "default")


@pytest.mark.parametrize(("stack", "batch"), [("torchtitan-2024", (4, 4)), ("torchtitan", (1, 16))])
def test_the_micro_batches_of_a_pipeline_are_the_frameworks(stack: str, batch: tuple[int, int]) -> None:
    plan = complete_plan({"seq_len": 512, "pp": 4, "dp_shard": 2, "stack": stack}, global_batch=32)
    assert (plan.micro_batch, plan.n_microbatches) == batch
    plan = complete_plan({"seq_len": 512, "pp": 4, "dp_shard": 2, "stack": stack, "micro_batch": 2}, global_batch=32)
    assert (plan.micro_batch, plan.n_microbatches) == (2, 8)


def test_the_recipe_of_the_docs_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```(yaml|python) stack=my-trainer\n(.*?)```", EXTENDING.read_text(encoding="utf-8"), re.S)
    assert [kind for kind, _ in blocks] == ["yaml", "python"]
    (tmp_path / "my-trainer.yaml").write_text(blocks[0][1], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks[1][1], str(EXTENDING), "exec"), {})
    monkeypatch.setenv(catalog.OWN_FOLDER, str(tmp_path))
    assert named_by({"framework": "MyTrainer", "software": "2026-10"}) == "my-trainer"
