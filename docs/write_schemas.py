"""Write docs/schemas: the JSON Schema of what each command prints with --json, read off real outputs.

    python docs/write_schemas.py [NAME...]

A schema only grows. What it had stays in it, and the command stops where an output has lost a key or changed its type;
such a change needs another SCHEMA_VERSION (interfaces/report/written.py).
"""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
import yaml

import forerun
from forerun.evidence.measure.step import MeasuredStep, figures
from forerun.interfaces.cli.main import run
from forerun.interfaces.report.measured_step import step_record
from forerun.interfaces.report.written import SCHEMA_VERSION, to_json

FOLDER = Path(__file__).parent / "schemas"
_MODEL = "llama-3.1-8b --cluster h100-sxm --seq-len 4096"
_SPACE = f"{_MODEL} --global-batch 32 --stack torchtitan --tp 1 --cp 1 --pp 1 --compile"
_EXPERIMENT = "gpt2-large-ethernet"
COMMANDS = {
    "predict": (
        f"predict {_MODEL} --dp-shard 8 --json",
        f"predict {_MODEL} --dp-shard 8 --compile --every checkpoint=100 --storage 2,100 --json",
        f"predict {_MODEL} --dp-shard 8 --generated-tokens-per-s 2000 --json",
    ),
    "plan": (f"plan {_SPACE} --gpus 8 --json", f"plan {_SPACE} --gpus 8 --pareto --json"),
    "plan-range": (f"plan {_SPACE} --gpus 8,16 --json",),
    "run": ("run llama-3-405b --runs 2 --json",),
    "cluster": ("cluster {jobs} --json",),
    "experiment-run": (f"experiment run {_EXPERIMENT} --json",),
    "experiment-scale": (f"experiment scale {_EXPERIMENT} --nodes 1 2 --json",),
    "experiment-compare": (f"experiment compare {_EXPERIMENT} --devices H100 --json",),
    "experiment-stragglers": ("experiment stragglers stragglers-a100 --json",),
    "models": ("models --json",),
    "clusters": ("clusters --json",),
    "stacks": ("stacks --json",),
    "collective": (
        "collective all_reduce --topology ring:8 --bandwidth 50 --latency 500 --bytes 1MiB --json",
        "collective all_gather --cluster h100-sxm --gpus 16 --bytes 64MiB --json",
    ),
    "astra": (
        "predict gpt2-small --cluster h100-sxm --seq-len 1024 --dp-shard 2 --chakra {traces} --json",
        "astra --workload-configuration {traces}/trace --comm-group-configuration {traces}/comm_group.json"
        " --system-configuration {system} --network-configuration {network} --backend aware --hottest 2 --json",
    ),
    "chakra-validate": (
        "predict gpt2-small --cluster h100-sxm --seq-len 1024 --dp-shard 2 --chakra {traces} --json",
        "chakra validate {traces} --json",
    ),
    "chakra-info": (
        "predict gpt2-small --cluster h100-sxm --seq-len 1024 --dp-shard 2 --chakra {traces} --json",
        "chakra info {traces} --json",
    ),
    "profile-info": ("profile info {profile} --json",),
    "simulate": (
        "profile import {profile} -o {folder}/step.program",
        "simulate --program {folder}/step.program --cluster h100-sxm --json",
    ),
    "diff": (
        "profile import {profile} -o {folder}/before.program",
        "profile import {other} -o {folder}/after.program",
        "diff {folder}/before.program {folder}/after.program --cluster h100-sxm --json",
    ),
    "profile-compare": (
        "profile import {profile} -o {folder}/step.program",
        "profile compare {profile} --program {folder}/step.program --cluster h100-sxm --json",
        "profile compare {other} --program {folder}/step.program --cluster h100-sxm --anchor-out {folder}/a.yaml"
        " --json",
    ),
    "profile-analyze": ("profile analyze {profile} --json",),
    "profile-memory": (
        "predict gpt2-small --cluster h100-sxm --seq-len 512 --memory-snapshot {folder}/memory.pickle --json",
        "profile memory {folder}/memory.pickle --json",
        "profile memory {folder}/memory.pickle --model gpt2-small --cluster h100-sxm --seq-len 512 --json",
    ),
    "stragglers": ("stragglers {steps} --json",),
    "calibrate": ("calibrate h100-sxm --network {nccl} --json",),
    "validate": (
        "validate {measured} --models {architectures} --hardware {hosts} --json",
        "validate {measured} --models {architectures} --hardware {hosts} --with-anchor first --json",
    ),
    "validate-ranks": (
        "validate {measured} --models {architectures} --hardware {hosts} --rank --rank-rows here-1 --json",
    ),
    "measure-step": (
        "profile import {profile} -o {folder}/step.program",
        "measure step {script} --program {folder}/step.program --cluster h100-sxm --json",
    ),
    "fit": (
        "fit {measured} --models {architectures} --hardware {hosts} --json",
        "fit {measured} --models {architectures} --hardware {hosts} --leave-out source --out {folder}/left.csv --json",
        "fit {larger} --models {architectures} --hardware {hosts} --leave-out source --out {folder}/left.csv --json",
    ),
    "doctor": ("doctor --json",),
    "dse": ("dse {space} --out {folder}/explored --json",),
}
"""name of the schema -> commands, of which those of its name print what it describes; others write what those read"""
_OPTIONS = {"plan-range": "plan --gpus 8,16", "validate-ranks": "validate --rank"}
"""schemas of a command with an option: the command and the option"""
_JOBS = """
nodes: 2
jobs:
  - {name: a, gpus: 8, duration_s: 7200, group: research}
  - {name: b, gpus: 16, duration_s: 3600, submit_s: 60}
"""
_EXPLORED = """
workloads:
  small: {din: 512, dout: 512, dmodel: 256, dff: 1024, head: 4, seq: 128, batch: 16, num_stacks: 2}
systems:
  ring:
    system:
      scheduling-policy: LIFO
      endpoint-delay: 10
      active-chunks-per-dimension: 1
      preferred-dataset-splits: 1
      all-reduce-implementation: [ring]
      all-gather-implementation: [ring]
      reduce-scatter-implementation: [ring]
      all-to-all-implementation: [ring]
      roofline-enabled: 1
      local-mem-bw: 3000
      peak-perf: 450
    network: {topology: [Ring], npus_count: [4], bandwidth: 100.0, latency: 50.0}
plan: {npus: 4, dp: [2, 4]}
memory_limit_gib: 64
"""
_PROFILED = (
    ("cpu_op", "aten::mm", 0, 10, {}),
    ("cuda_runtime", "cudaLaunchKernel", 2, 4, {"correlation": 1}),
    ("kernel", "gemm", 8, 20, {"stream": 7, "device": 0, "correlation": 1}),
    ("cuda_runtime", "cudaLaunchKernel", 12, 3, {"correlation": 2}),
    ("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 30, 12, {"stream": 9, "device": 0, "correlation": 2}),
    ("user_annotation", "ProfilerStep#1", 0, 50, {}),
)
"""category, name, start and duration in us, and arguments of the events of a small profile"""
_ARCHITECTURES = """
Small: {n_layers: 16, hidden: 2048, n_heads: 16, n_kv_heads: 8, head_dim: 128, ffn_hidden: 5632, vocab: 32000,
  mlp: swiglu, norm: rmsnorm, bias: false, tied_embeddings: false, pos_emb: rope}
"""
_HOSTS = "clusters:\n  lab: {gpu: H100-SXM, gpus_per_node: 8, intra: NVSwitch, inter_node_gbit_s_per_gpu: 400}\n"
_COLUMNS = (
    "split,tier,framework,software,model,n_layers,hidden,n_heads,n_kv_heads,head_dim,ffn_hidden,mlp,"
    "vocab,seq_len,is_moe,gpu,gpu_mem_gb,n_gpus,gpus_per_node,intra_node,hw_key,"
    "inter_node_gbit_s_per_gpu,outcome,dp_replicate,dp_shard,zero_stage,tp,sp,pp,pp_schedule,"
    "pp_virtual_stages,cp,ep,n_microbatches,micro_batch,grad_accum,global_batch_seqs,precision,"
    "param_dtype,grad_reduce_dtype,activation_checkpointing,torch_compile,attention_kernel,optimizer,"
    "peak_mem_gib,peak_mem_kind,"
    "step_time_s"
)
_VALUES = (
    "open,A,torchtitan FSDP2,torchtitan 2025,Small,16,2048,16,8,128,5632,swiglu,32000,4096,no,H100-SXM,"
    "80,8,8,NVSwitch,lab,400,ok,1,8,3,1,no,1,none,1,1,1,1,1,1,8,bf16,bf16,fp32,none,no,sdpa(flash2),"
    "adamw,24,allocated,"
)
"""the columns of a measured step but for its id and source, and what they hold but for the time"""
_STEP = (
    *(("forward-compute", 0, 0, 0, 1), ("forward-send", 0, 0, 1, 0), ("forward-recv", 0, 1, 0, 1)),
    *(("forward-compute", 0, 1, 1, 1), ("backward-compute", 0, 1, 2, 2), ("backward-send", 0, 1, 4, 0)),
    *(("backward-recv", 0, 0, 1, 3), ("backward-compute", 0, 0, 4, 2)),
    *((name, 0, stage, at, 1) for stage in (0, 1) for name, at in (("optimizer-clip-main-grad", 6), ("optimizer", 7))),
)
"""operation, micro batch, stage, start and duration in s of a step of two stages"""
_MAPS = {
    *("breakdown", "memory_by_category_gib", "counts", "impossible", "impossible_examples", "out_of_memory"),
    *("badput", "badput_s", "failures", "mean_jct_s_by_group", "by_group", "config", "fields"),
    *("by_cause_ps", "by_class_ps", "choices_of", "traits", "kernel_rates", "breakdown_s", "figures"),
    *("nodes_by_type", "metadata", "idle_before_s", "per_rank"),
    *("sources", "stacks", "by_place_gib", "slowdown_by_operation"),
}
"""keys whose objects are tables of names: their keys are no part of the schema"""
_MAPS_OF_MAPS = {"memory_by_source", *(f"step_time_by_{of}" for of in ("class", "device", "gpus", "parameters"))}
_MAPS_OF_MAPS |= {f"step_time_by_{of}" for of in ("stack", "source")}
"""keys whose objects are tables of tables of names"""


class Shrunk(ValueError):
    """An output lost what its schema promises."""


def outputs(name: str) -> list[Any]:
    """Returns what the commands of a schema print."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        files = _files(Path(folder))
        for command in COMMANDS[name]:
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                code = run([word.format(**files) for word in command.split()])
            if code:
                raise SystemExit(f"{command}: exit code {code}")
            if command.startswith(_OPTIONS.get(name, name).partition(" --")[0].replace("-", " ")):
                found.append(json.loads(out.getvalue()))
    return found + (_on_a_gpu() if name == "measure-step" else [])


def _on_a_gpu() -> list[Any]:
    """Returns what `measure step` prints where there is a GPU, of a step as one could measure it."""
    prediction = forerun.predict("gpt2-small", forerun.Plan(seq_len=512), "h100-sxm")
    measured = MeasuredStep(0.02, 2**30, 10, 0.019, 0.022, "NVIDIA H100 80GB HBM3", (("model", 2**28),))
    return [json.loads(to_json(step_record(prediction, measured, figures(prediction, measured))))]


def _files(folder: Path) -> dict[str, Path]:
    """Returns the files that commands name, most of them written into `folder`."""
    texts = {"jobs": ("jobs.yaml", _JOBS), "space": ("space.yaml", _EXPLORED), "profile": ("rank0.json", _profile())}
    texts["other"] = ("other-rank0.json", _profile().replace('"gemm"', '"another_gemm"'))
    explored = yaml.safe_load(_EXPLORED)["systems"]["ring"]
    texts["system"] = ("system.json", json.dumps(explored["system"]))
    texts["network"] = ("network.yml", yaml.safe_dump(explored["network"] | {"npus_count": [2]}))
    texts |= {"nccl": ("nccl.log", _nccl_log()), "measured": ("measured.csv", _measured(_VALUES, 0.2))}
    texts["larger"] = ("larger.csv", _measured(_VALUES.replace(",Small,16,", ",Small,32,"), 0.36))
    texts["script"] = ("train.py", "")
    texts |= {"architectures": ("architectures.yaml", _ARCHITECTURES), "hosts": ("hosts.yaml", _HOSTS)}
    for name, text in texts.values():
        (folder / name).write_text(text, encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(_recorded_steps()), folder / "steps.parquet")
    more = {"folder": folder, "traces": folder / "traces", "steps": folder / "steps.parquet"}
    return {key: folder / name for key, (name, _) in texts.items()} | more


def _nccl_log() -> str:
    """Returns what nccl-tests prints of all-gathers of 8 ranks at 200 GB/s of bus bandwidth and 20 us."""
    lines = ["# Collective test starting: all_gather_perf", "# Using devices"]
    lines += [f"#  Rank  {rank} Group  0 Pid  {rank} on  n1 device  {rank} [0x0] GPU" for rank in range(8)]
    lines.append("# size count type redop root time algbw")
    for size in (2**power for power in range(12, 29)):
        time_us = 20 + size * 0.875 / 200e3
        lines.append(f"{size} {size // 4} float none -1 {time_us:.4f} {size / time_us / 1e3:.2f}")
    return "\n".join(lines) + "\n"


def _measured(values: str, time_s: float) -> str:
    """Returns a table of two steps of each of two sources."""
    lines = [f"id,source_id,{_COLUMNS}"]
    lines += [f"{source}-{n},{source},{values}{time_s * (1 + n / 50)}" for source in ("here", "there") for n in (1, 2)]
    return "\n".join(lines) + "\n"


def _recorded_steps() -> list[dict[str, Any]]:
    """Returns two steps of two replicas, of which the second takes longer."""
    return [
        {
            "dp_rank": replica,
            "stage": stage,
            "rank": 2 * replica + stage,
            "step": step,
            "optype": kind,
            "seq_id": micro_batch,
            "mc": 0 if kind.endswith("compute") else -1,
            "gmc": stage if kind.endswith("compute") else -1,
            "start_ts": start_s * (1.0 + replica),
            "duration": took_s * (1.0 + replica),
        }
        for step in (0, 10)
        for replica in (0, 1)
        for kind, micro_batch, stage, start_s, took_s in _STEP
    ]


def _profile() -> str:
    """Returns a profile as PyTorch's profiler writes it."""
    events = [
        {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": 1, "ts": at_us, "dur": took_us, "args": more}
        for kind, name, at_us, took_us, more in _PROFILED
    ]
    about = {"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 2}}
    return json.dumps({**about, "traceEvents": events})


def schema_of(samples: Sequence[Any], key: str = "") -> dict[str, Any]:
    """Returns the schema of values that stand under one key."""
    types = sorted({_type(each) for each in samples})
    schema: dict[str, Any] = {"type": types[0] if len(types) == 1 else types}
    objects = [each for each in samples if isinstance(each, dict)]
    if objects and key in _MAPS | _MAPS_OF_MAPS:
        if inside := [value for each in objects for value in each.values()]:
            schema["additionalProperties"] = schema_of(inside, min(_MAPS) if key in _MAPS_OF_MAPS else "")
    elif objects:
        names = list(dict.fromkeys(name for each in objects for name in each))
        schema["properties"] = {name: schema_of([e[name] for e in objects if name in e], name) for name in names}
        schema["required"] = [name for name in names if all(name in each for each in objects)]
    if inside := [value for each in samples if isinstance(each, list) for value in each]:
        schema["items"] = schema_of(inside)
    return schema


def merged(old: dict[str, Any], new: dict[str, Any], place: str = "") -> dict[str, Any]:
    """Returns a schema that promises all that the old one did. Raises Shrunk where the new one can't."""
    out = dict(new)
    lost = [name for name in old.get("required", ()) if name not in new.get("required", ()) and "properties" in new]
    if lost:
        raise Shrunk(f"{place or 'the output'} no longer always has {', '.join(lost)}")
    before, now = ({t for t in [s.get("type", [])] for t in (t if isinstance(t, list) else [t])} for s in (old, new))
    if before and not (now <= before or now - before == {"null"} or before == {"null"}):
        raise Shrunk(f"{place or 'the output'} was {' or '.join(sorted(before))} and is {' or '.join(sorted(now))}")
    types = sorted(before | now)
    out["type"] = types[0] if len(types) == 1 else types
    for part in ("items", "additionalProperties"):
        if part in old:
            out[part] = merged(old[part], new[part], f"{place}[]") if part in new else old[part]
    if "properties" in old:
        mine, theirs = new.get("properties", {}), old["properties"]
        both = {n: merged(theirs[n], mine[n], f"{place}.{n}".lstrip(".")) for n in theirs if n in mine}
        out["properties"] = theirs | both | {n: s for n, s in mine.items() if n not in theirs}
        out["required"] = new.get("required", old.get("required", []))
    return out


def document(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema as its file has it."""
    schema["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    title = f"what `forerun {_OPTIONS.get(name, name.replace('-', ' '))} --json` prints"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **schema}


def path_of(name: str) -> Path:
    """Returns the file of a schema."""
    return FOLDER / f"{name}.json"


def _type(value: Any) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return "null" if value is None else names[type(value)]


def main() -> None:
    """Write every schema, or those that are named, grown by what the outputs have now."""
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or COMMANDS:
        schema, path = schema_of(outputs(name)), path_of(name)
        if path.exists():
            old = json.loads(path.read_text(encoding="utf-8"))
            if old["properties"]["schema_version"]["const"] == SCHEMA_VERSION:
                old["properties"]["schema_version"] = {"type": "number"}
                schema = merged(old, schema)
        path.write_text(json.dumps(document(name, schema), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
