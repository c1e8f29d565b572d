"""`forerun astra`: replay Chakra traces as ASTRA-sim does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.astrasim.astra.case import read_case
from forerun.astrasim.astra.hot_links import HotLink, hottest_links
from forerun.astrasim.astra.lower import IssueOrder
from forerun.astrasim.astra.node_kinds import COMM, GPU, kinds_of_ranks
from forerun.astrasim.astra.release import DEFAULT_RELEASE, Release, release_named
from forerun.astrasim.astra.remote_memory import read_remote_memory
from forerun.astrasim.astra.replay import Machine, replay
from forerun.astrasim.astra.rings import DimensionRing, GroupRing, rings_of_groups, rings_of_rank_0
from forerun.astrasim.astra.statistics import RankStatistics
from forerun.astrasim.astra.stdout import output_lines
from forerun.astrasim.astra.streams import StreamReplay, run_streams
from forerun.astrasim.astra.system import read_system
from forerun.astrasim.chakra.groups import read_comm_groups, resolve_groups, with_world
from forerun.astrasim.chakra.trace import CommGroups, RankTrace
from forerun.astrasim.chakra.traces import open_traces
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import Network, read_network
from forerun.core.network.packet_networks import PacketNetwork, htsim_network, ns3_network
from forerun.interfaces.cli.issue_order_option import Order
from forerun.interfaces.cli.option_groups import grouped
from forerun.interfaces.report.written import to_json

_NO_GROUPS = "empty"
"""ASTRA-sim's word for no communicator group file"""
RELEASE_VARIABLE = "FORERUN_ASTRA_RELEASE"


class Backend(str, Enum):
    UNAWARE = "unaware"
    AWARE = "aware"


class Semantics(str, Enum):
    SLOTS = "slots"
    STREAMS = "streams"


@dataclass(frozen=True)
class FileOptions:
    """Names the files of a replay; the options have ASTRA-sim's names."""

    workload_configuration: Annotated[
        str | None, typer.Option(help="Prefix of the traces, which are <prefix>.<rank>.et, plain or with .gz or .zst.")
    ] = None
    comm_group_configuration: Annotated[str, typer.Option(help="JSON file of the communicator groups, or empty.")] = (
        _NO_GROUPS
    )
    system_configuration: Annotated[Path | None, typer.Option(help="System file (JSON).")] = None
    network_configuration: Annotated[Path | None, typer.Option(help="Network file (YAML).")] = None
    remote_memory_configuration: Annotated[Path | None, typer.Option(help="Remote memory file (JSON).")] = None
    logical_topology_configuration: Annotated[
        Path | None,
        typer.Option(
            help="JSON file of the logical dimensions, if the network is ns-3's configuration or file of links."
        ),
    ] = None
    htsim_opts: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--htsim_opts", metavar="-topo FILE", help="htsim file of a fat tree that connects the NPUs of the network."
        ),
    ] = None
    num_queues_per_dim: Annotated[int, typer.Option(min=1, help="Number of queues in each dimension.")] = 1
    injection_scale: Annotated[float, typer.Option(min=0, help="Factor on the endpoint delay.")] = 1.0

    @property
    def is_given(self) -> bool:
        """Returns whether the user names traces, a system or a network."""
        return bool(self.workload_configuration or self.system_configuration or self.network_configuration)

    def machine(self, aware: bool) -> Machine:
        """Returns the machine that the files describe. Raises ForerunError if one is missing or wrong."""
        if self.system_configuration is None or self.network_configuration is None or not self.workload_configuration:
            raise ForerunError(
                "astra: configurations are missing; give --workload-configuration, --system-configuration and"
                " --network-configuration, or a folder with --case"
            )
        network = self._network(self.network_configuration)
        return Machine(
            read_system(self.system_configuration),
            network,
            read_remote_memory(self.remote_memory_configuration),
            aware or isinstance(network, PacketNetwork),
            self.num_queues_per_dim,
            self.injection_scale,
        )

    def _network(self, path: Path) -> Network:
        if self.logical_topology_configuration is not None:
            return ns3_network(path, self.logical_topology_configuration)
        if self.htsim_opts is None:
            return read_network(path)
        option, tree = self.htsim_opts
        if option != "-topo":
            raise ForerunError(
                f"--htsim_opts {option}: only -topo FILE is known; Forerun simulates no protocols of htsim"
            )
        return htsim_network(Path(tree), read_network(path))

    def traces(self, machine: Machine, lenient: bool) -> tuple[list[RankTrace], CommGroups]:
        """Returns the traces of all ranks of a machine, and their groups. Raises ForerunError."""
        n_ranks, tensors = machine.network.n_npus, machine.system.track_local_mem
        found = open_traces(self.workload_configuration or "", n_ranks, tensors=tensors, lenient=lenient)
        file = self.comm_group_configuration
        groups: CommGroups = {} if _NO_GROUPS in file else read_comm_groups(file)
        return resolve_groups([found[rank] for rank in range(n_ranks)], groups)


@dataclass(frozen=True)
class AcceptedOptions:
    """Accepts options of ASTRA-sim that change nothing here, so that its command lines run."""

    comm_scale: Annotated[float, typer.Option(help="Accepted without effect, as in ASTRA-sim.", hidden=True)] = 1.0
    compute_scale: Annotated[float, typer.Option(help="Accepted without effect, as in ASTRA-sim.", hidden=True)] = 1.0
    rendezvous_protocol: Annotated[
        str, typer.Option(help="Only false is accepted; the rendezvous protocol is not simulated.", hidden=True)
    ] = "false"
    logging_configuration: Annotated[
        str, typer.Option(help="Accepted without effect; nothing is logged.", hidden=True)
    ] = _NO_GROUPS
    logging_folder: Annotated[str, typer.Option(help="Accepted without effect; nothing is logged.", hidden=True)] = (
        "log"
    )


@grouped
def astra(
    files: FileOptions,
    accepted: AcceptedOptions,
    case: Annotated[
        Path | None,
        typer.Option(help="Replay a case folder, which holds traces, systems and networks, instead of single files."),
    ] = None,
    backend: Annotated[
        Backend | None,
        typer.Option(
            help="Congestion-unaware (closed form, the default) or congestion-aware (messages queue at links)."
        ),
    ] = None,
    release: Annotated[
        str,
        typer.Option(
            envvar=RELEASE_VARIABLE, help="ASTRA-sim release whose results and output to reproduce, such as 2025-03."
        ),
    ] = DEFAULT_RELEASE,
    issue_order: Annotated[
        Order | None,
        typer.Option(
            help="Order in which ready nodes are issued, instead of the release's order: by node number, or hashed."
        ),
    ] = None,
    semantics: Annotated[
        Semantics,
        typer.Option(
            help="How operations share a device: slots as in ASTRA-sim, or CUDA streams for traces of real training."
        ),
    ] = Semantics.SLOTS,
    hottest: Annotated[int, typer.Option(min=0, help="Number of busiest links to list (congestion-aware only).")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of ASTRA-sim's lines.")
    ] = False,
) -> None:
    """Replay Chakra execution traces on a network and reproduce the results of ASTRA-sim."""
    if accepted.rendezvous_protocol.lower() not in ("false", "0"):
        raise ForerunError("--rendezvous-protocol: Forerun doesn't simulate it; leave it out")
    aware = None if backend is None else backend is Backend.AWARE
    build = release_named(release)
    how = _How(semantics, build, build.order(issue_order.policy if issue_order else None), hottest)
    if case is not None:
        if files.is_given:
            raise ForerunError("--case brings its own traces, system and network; leave the configuration options out")
        _replay_case(case, aware, how, as_json)
        return
    machine = files.machine(bool(aware))
    if isinstance(machine.network, PacketNetwork) and backend is Backend.UNAWARE:
        raise ForerunError("--backend unaware: the network is given link by link, so that every link is a queue")
    outcome = _replayed(*files.traces(machine, lenient=semantics is Semantics.STREAMS), machine, how)
    if as_json:
        print(to_json(outcome.record()))
    else:
        outcome.print_lines(build)


@dataclass(frozen=True)
class _How:
    """Holds the options of a replay."""

    semantics: Semantics
    release: Release
    order: IssueOrder
    hottest: int
    """busiest links to list"""


@dataclass(frozen=True)
class _Outcome:
    statistics: tuple[RankStatistics, ...]
    links: tuple[HotLink, ...] = ()
    rings_of_rank_0: tuple[DimensionRing, ...] = ()
    group_rings: tuple[GroupRing, ...] = ()
    kinds: tuple[tuple[str, ...], ...] = ()

    def record(self) -> dict[str, Any]:
        ranks = {
            str(rank): {name: value for name, value in asdict(of_rank).items() if value is not None}
            for rank, of_rank in enumerate(self.statistics)
        }
        return {"per_rank": ranks, **({"hottest_links": [asdict(link) for link in self.links]} if self.links else {})}

    def print_lines(self, release: Release) -> None:
        now = datetime.now()
        rings = self.rings_of_rank_0, self.group_rings
        print("\n".join(output_lines(release, self.statistics, now, *rings, self.kinds)))
        for link in self.links:
            print(f"link {link.source} -> {link.target}: busy {link.busy:.1%}, {link.size_bytes} bytes")


def _replayed(traces: Sequence[RankTrace], groups: CommGroups, machine: Machine, how: _How) -> _Outcome:
    if how.hottest and not machine.aware:
        raise ForerunError("--hottest: add --backend aware, because only congestion keeps links busy")
    if how.semantics is Semantics.STREAMS:
        if machine.aware or how.order != "ascending":
            raise ForerunError(
                "--semantics streams has neither --backend aware nor the issue order of another build; leave them out"
            )
        return _Outcome(_statistics_of(run_streams(traces, groups, machine)))
    if any(trace.stream is not None or trace.process_groups for trace in traces):
        print(
            "note: the traces are PyTorch's, with streams or process groups; hardware slots run one kernel at a time,"
            " --semantics streams runs them as recorded",
            file=sys.stderr,
        )
    build = how.release
    traces, groups = with_world(traces, groups, build.world)
    machine = replace(machine, own_group_algorithms=build.group_algorithm == "own")
    result = replay(traces, groups, machine, how.order)
    if isinstance(machine.network, PacketNetwork):
        least_ns = replay(traces, groups, replace(machine, network=machine.network.hurried()), how.order).wall_ns
        print(
            f"note: links forward whole messages, which takes {result.wall_ns:,} ns; with packets the"
            f" replay takes between {least_ns:,} ns and this time, apart from headers, losses and"
            " congestion control",
            file=sys.stderr,
        )
    kinds = kinds_of_ranks(result) if build.kinds_as_run else []
    if build.kinds_as_run and not {GPU, COMM}.issuperset(chain(*kinds)):
        print("note: this release of ASTRA-sim aborts if a rank has host or memory nodes", file=sys.stderr)
    return _Outcome(
        result.statistics,
        hottest_links(machine.network, result.run, result.wall_ns, how.hottest) if how.hottest else (),
        tuple(rings_of_rank_0(machine.system, machine.network)),
        tuple(rings_of_groups(result, traces, groups)),
        tuple(kinds),
    )


def _statistics_of(found: StreamReplay) -> tuple[RankStatistics, ...]:
    """Returns the statistics of a replay, and says on stderr how many kernels have no time in the traces.

    Raises ForerunError if no kernel has one, and nothing else takes time.
    """
    if found.untimed:
        what = f"{found.untimed:,} of {found.kernels:,} compute nodes have neither duration_micros nor num_ops"
        if not found.timeline.end_of_step_ps:
            raise ForerunError(f"{what}, and nothing else takes time; convert the traces with the profile's durations")
        print(f"warning: {what}, so that they take no time", file=sys.stderr)
    return found.statistics


def _replay_case(folder: Path, aware: bool | None, how: _How, as_json: bool) -> None:
    """Replays every system of a case; one that can't be simulated doesn't stop the others."""
    case = read_case(folder, aware)
    systems: dict[str, Any] = {}
    for name, machine in case.machines.items():
        try:
            outcome = _replayed(case.traces, case.comm_groups, machine, how)
        except ForerunError as error:
            systems[name] = {"ok": False, "error": str(error), "per_rank": {}}
        else:
            systems[name] = {"ok": True, **outcome.record()}
        if not as_json:
            print(f"# {name}: {systems[name].get('error', 'finished')}")
            if systems[name]["ok"]:
                outcome.print_lines(how.release)
    if as_json:
        print(to_json({"systems": systems}))
