"""Writes the job file of a cluster's scheduler, which starts launch.sh on every node of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun.interfaces.report.launch.torchrun import nodes_of

if TYPE_CHECKING:
    from forerun.interfaces.report.launch.translation import Translation


_LARGER = {"A100": "80GB", "V100": "32GB"}
"""devices with two sizes of memory; SkyPilot names the larger one with its size (`sky show-gpus`)"""


@dataclass(frozen=True)
class _Job:
    title: str
    nodes: int
    gpus_per_node: int
    device: str
    """the device's name in Forerun, such as a100-sxm-80gb"""

    @property
    def accelerator(self) -> str:
        """Returns the device as SkyPilot calls it: H100, A100 (of 40 GB), A100-80GB, RTX4090."""
        family, *rest = self.device.upper().split("-")
        if family == "RTX":
            return family + "".join(rest)
        larger = _LARGER.get(family)
        return f"{family}-{larger}" if larger in rest else family


def _slurm(job: _Job) -> str:
    return f"""\
#!/usr/bin/env bash
# {job.title}.
# Start it in this folder: sbatch slurm.sbatch [arguments of launch.sh]
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={job.gpus_per_node}
set -euo pipefail
export NNODES="$SLURM_JOB_NUM_NODES" GPUS_PER_NODE={job.gpus_per_node}
export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
srun bash -c 'NODE_RANK="$SLURM_NODEID" exec bash launch.sh "$@"' launch "$@"
"""


def _skypilot(job: _Job) -> str:
    return f"""\
# {job.title}.
# Start it in this folder: sky launch skypilot.yaml
resources:
  accelerators: {job.accelerator}:{job.gpus_per_node}
num_nodes: {job.nodes}
workdir: .
run: |
  export NNODES="$SKYPILOT_NUM_NODES" NODE_RANK="$SKYPILOT_NODE_RANK" GPUS_PER_NODE="$SKYPILOT_NUM_GPUS_PER_NODE"
  export MASTER_ADDR="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"
  bash launch.sh
"""


def _ray(job: _Job) -> str:
    return f"""\
# {job.title}.
# Start it in this folder: ray job submit --working-dir . -- python ray_job.py [arguments of launch.sh]

import os
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES, GPUS_PER_NODE = {job.nodes}, {job.gpus_per_node}


@ray.remote(num_cpus=1, num_gpus=GPUS_PER_NODE, max_retries=0)
def run_node(rank, address, arguments):
    place = {{"NNODES": NODES, "GPUS_PER_NODE": GPUS_PER_NODE, "NODE_RANK": rank, "MASTER_ADDR": address}}
    environment = os.environ | {{name: str(value) for name, value in place.items()}}
    subprocess.run(["bash", "launch.sh", *arguments], env=environment, check=True)


@ray.remote(num_cpus=0)
def address_of_node():
    return ray.util.get_node_ip_address()


ray.init()
group = placement_group([{{"CPU": 1, "GPU": GPUS_PER_NODE}}] * NODES, strategy="STRICT_SPREAD")
ray.get(group.ready())
on = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank) for rank in range(NODES)]
first = ray.get(address_of_node.options(scheduling_strategy=on[0]).remote())
ray.get([run_node.options(scheduling_strategy=on[rank]).remote(rank, first, sys.argv[1:]) for rank in range(NODES)])
"""


_WRITERS: dict[str, tuple[str, Callable[[_Job], str], str]] = {
    "slurm": ("slurm.sbatch", _slurm, "add your cluster's lines for partition, account, time and container"),
    "skypilot": ("skypilot.yaml", _skypilot, "add setup and cloud; `sky show-gpus` lists the names of accelerators"),
    "ray": ("ray_job.py", _ray, "every node needs the training program"),
}
"""scheduler -> the name of its job file, the function that writes it, and the user's remaining tasks"""
SCHEDULERS = tuple(_WRITERS)


def write_job(t: Translation, scheduler: str) -> tuple[str, str]:
    """Returns the name and the text of the job file of `scheduler`, one of SCHEDULERS; a remark names the user's
    remaining tasks.
    """
    name, writer, left = _WRITERS[scheduler]
    nodes, per_node = nodes_of(t.plan.world_size, t.cluster.node_size)
    t.remark(f"{name} starts launch.sh on every node; {left}")
    return name, writer(_Job(t.title, nodes, per_node, t.cluster.device.name))
