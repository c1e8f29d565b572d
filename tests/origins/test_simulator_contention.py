"""A capacity planner asks: what happens when two kinds of parallelism use one network at the same time?

The layers of a mixture of experts gather their parameters (FSDP) while their experts exchange tokens. Where both cross
one slow network they share it; where each has a network of its own (tensor parallelism in the node, data parallelism
between nodes) neither touches the other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from forerun.analysis.predict import simulate
from forerun.analysis.reading import Simulation
from forerun.cluster.catalog import load_cluster
from forerun.engine.sharing import FULL
from forerun.engine.simulate import simulate as run_engine
from forerun.model.catalog import load_model
from forerun.plan.plan import Plan
from forerun.program.types import F64, Stream
from forerun.units import PS_PER_S

CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
COMMAND = Path(sys.executable).with_name("forerun")
OUTWARD = 1
"""the link that a GPU sends to other nodes over, among those of a cluster with two levels"""


def cluster_file(folder: Path, gpus_per_node: int) -> Path:
    """A100s on 10 Gbit/s Ethernet between nodes."""
    path = folder / f"slow-{gpus_per_node}.yaml"
    links = {"intra_node": {"kind": "nvswitch", "gb_s": 300}, "inter_node": {"kind": "ethernet", "gbit_s_per_gpu": 10}}
    known = {"device": "a100-80gb-sxm", "gpus_per_node": gpus_per_node, "host_gb_s": 25}
    path.write_text(yaml.safe_dump({"name": path.stem, **known, **links}), encoding="utf-8")
    return path


def predicted(folder: Path, cluster: Path, *options: object) -> dict[str, Any]:
    """What `forerun predict` says."""
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    words = ["predict", "config.json", "--cluster", cluster.name, *options, "--seq-len", 2048, "--json"]
    command = [str(COMMAND), *map(str, words)]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    out: dict[str, Any] = json.loads(done.stdout)
    return out


def simulated(folder: Path, cluster: Path, plan: Plan) -> Simulation:
    return simulate(load_model(folder / "config.json"), plan, load_cluster(cluster))


def step_alone_s(simulation: Simulation) -> float:
    """The step if every collective took the time that it takes alone."""
    costs = simulation.costs
    rates = (costs.slow_compute, costs.slow_network, costs.network_op)
    return run_engine(simulation.flat, costs.duration_ps, costs.issue_ps, *rates).end_of_step_ps / PS_PER_S


def on_the_network(simulation: Simulation, *streams: Stream) -> tuple[F64, float]:
    """Seconds alone, and the mean share of the network that they take, of all that runs on `streams`."""
    flat, demand = simulation.flat, simulation.costs.demand
    assert demand is not None
    mine = flat.op[np.isin(flat.stream, streams)]
    seconds = simulation.costs.duration_ps[mine] / PS_PER_S
    large = seconds > 1e-3
    return seconds, float(np.average(demand.share[mine, OUTWARD][large] / FULL, weights=seconds[large]))


def test_gathers_and_experts_on_one_slow_network_take_as_much_longer_as_their_bytes_imply(tmp_path: Path) -> None:
    cluster = cluster_file(tmp_path, 1)
    told = predicted(tmp_path, cluster, "--gpus", 8, "--dp-shard", 8, "--ep", 4)
    simulation = simulated(tmp_path, cluster, Plan(seq_len=2048, dp_shard=8, ep=4))
    alone_s = step_alone_s(simulation)
    assert told["step_time_s"] == pytest.approx(simulation.prediction.step_time_s)
    assert told["step_time_s"] > alone_s

    # Gathers and reductions are the longer chain. All of the exchange of tokens runs beside it, and together they ask
    # for more than the network has: what is beyond it is what the chain is late by.
    tokens, asked_by_tokens = on_the_network(simulation, Stream.EP)
    chain, asked_by_chain = on_the_network(simulation, Stream.GATHER, Stream.REDUCE)
    assert tokens.sum() < chain.sum() < alone_s
    beyond = asked_by_tokens + asked_by_chain - 1
    assert 0.1 < beyond < 1
    late_s = told["step_time_s"] - alone_s
    assert late_s == pytest.approx(tokens.sum() * beyond, rel=0.1)
    # Both of them are late by that, the one in sight and the other behind it.
    assert told["shared_links_s"] == pytest.approx(2 * late_s, rel=0.05)
    assert any(line.startswith("shared_links_s: ") for line in told["explain"])


def test_the_network_never_carries_more_than_it_can(tmp_path: Path) -> None:
    cluster = cluster_file(tmp_path, 1)
    predicted(tmp_path, cluster, "--gpus", 8, "--dp-shard", 8, "--ep", 8)
    simulation = simulated(tmp_path, cluster, Plan(seq_len=2048, dp_shard=8, ep=8))
    flat, demand, timeline = simulation.flat, simulation.costs.demand, simulation.timeline
    assert demand is not None
    sent = demand.share[flat.op, OUTWARD] / FULL * simulation.costs.duration_ps[flat.op]
    moving = np.flatnonzero(sent)
    for begin in np.unique(timeline.start_ps[moving]).tolist():
        inside = moving[timeline.start_ps[moving] >= begin]
        order = inside[np.argsort(timeline.end_ps[inside])]
        room = timeline.end_ps[order] - begin
        assert (np.cumsum(sent[order]) <= room * (1 + 1e-9) + 1000).all()


def test_two_networks_do_not_touch_each_other(tmp_path: Path) -> None:
    cluster = cluster_file(tmp_path, 8)
    told = predicted(tmp_path, cluster, "--gpus", 32, "--tp", 8, "--dp-replicate", 4, "--zero-stage", 0)
    simulation = simulated(tmp_path, cluster, Plan(seq_len=2048, tp=8, dp_replicate=4, zero_stage=0))
    assert told["shared_links_s"] == 0
    assert told["step_time_s"] == pytest.approx(step_alone_s(simulation))
    assert not any(line.startswith("shared_links_s") for line in told["explain"])


def test_a_network_file_is_shared_as_the_links_of_a_cluster(tmp_path: Path) -> None:
    cluster = cluster_file(tmp_path, 1)
    plan = ("--gpus", 8, "--dp-shard", 8, "--ep", 4)
    links, routed = (predicted(tmp_path, cluster, *plan, *more) for more in ((), ("--network", "switch:8@1.25/10us")))
    assert routed["shared_links_s"] == pytest.approx(links["shared_links_s"], rel=0.1)
    faster = replace(load_cluster(cluster), links=load_cluster("a100-80gb-sxm").links)
    assert simulate(
        load_model(tmp_path / "config.json"), Plan(seq_len=2048, dp_shard=8, ep=4), faster
    ).prediction.step_time_s < min(links["step_time_s"], routed["step_time_s"])
