"""What-if rows are simulations of a better machine."""

from dataclasses import replace

import pytest
from saved_programs import H100, MODEL, plan_of, program_of

from forerun.answers.analysis.predict_program import predict_program
from forerun.answers.analysis.setup import RankKind, Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.answers.analysis.what_if import sensitivities, sensitivities_of_program
from forerun.core.cost.measured import Curve, Measured, NetworkProfile
from forerun.core.network.network_file import Network, NetworkDim
from forerun.core.network.on_topology import load_network
from forerun.core.network.patterns import NoNetwork
from forerun.core.program.types import Collective
from forerun.describe.cluster.catalog import load_cluster

PLANS = {
    "DDP": dict(dp_replicate=16, zero_stage=0),
    "FSDP": dict(dp_shard=16),
    "TP": dict(dp_shard=4, tp=4, activation_checkpointing="full"),
    "PP": dict(dp_shard=2, pp=2, n_microbatches=8),
    "offload": dict(dp_shard=8, offload="optimizer"),
    "one GPU": dict(),
}
NETWORKS = {"links": None, "topology": "switch:8@450/300ns,fat-tree:4@50/700ns"}


def setup_of(name, network=None):
    return Setup(MODEL, plan_of(**PLANS[name]), H100, network=network and load_network(network))


def rows_of(setup):
    return {row.label: row for row in sensitivities(setup, simulate_setup(setup))}


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("name", PLANS)
def test_a_better_machine_is_never_slower_and_rows_come_by_gain(name, network):
    setup = setup_of(name, network)
    base = simulate_setup(setup)
    rows = sensitivities(setup, base)
    changes = [row.change for row in rows]
    assert changes == sorted(changes)
    assert changes[-1] <= 1e-3
    for row in rows:
        assert row.change == pytest.approx(row.step_time_s / base.prediction.step_time_s - 1)
    assert rows == sensitivities(setup, base)


def test_twice_as_fast_is_a_cluster_with_twice_the_figures():
    setup = setup_of("TP")
    rows, device = rows_of(setup), H100.device
    doubled = {
        "HBM twice as fast": replace(H100, device=replace(device, memory_bytes_per_s=2 * device.memory_bytes_per_s)),
        "matrix units twice as fast": replace(
            H100, device=replace(device, peak_flops={name: 2 * peak for name, peak in device.peak_flops.items()})
        ),
        "network twice as fast": replace(
            H100, links=tuple(replace(link, bytes_per_s=2 * link.bytes_per_s) for link in H100.links)
        ),
        "inter-node links twice as fast": replace(
            H100, links=(H100.links[0], replace(H100.links[1], bytes_per_s=2 * H100.links[1].bytes_per_s))
        ),
    }
    for label, cluster in doubled.items():
        assert rows[label].step_time_s == simulate_setup(replace(setup, cluster=cluster)).prediction.step_time_s, label


def test_twice_as_fast_are_also_links_that_a_topology_names_by_itself():
    def rail(node_gbps, rail_gbps, latency_ns):
        options = (("node_bandwidth_gbps", node_gbps), ("node_latency_ns", latency_ns))
        dim = NetworkDim("Rail", (8, 4), rail_gbps, latency_ns, options)
        return replace(setup_of("TP"), network=Network((dim,), gib=False))

    rows = rows_of(rail(450, 50, 600))
    assert rows["network twice as fast"].step_time_s == simulate_setup(rail(900, 100, 600)).prediction.step_time_s
    assert rows["network latency halved"].step_time_s == simulate_setup(rail(450, 50, 300)).prediction.step_time_s


@pytest.mark.parametrize("name", ["DDP", "FSDP", "TP", "PP"])
def test_a_free_network_is_the_pattern_of_an_ideal_one(name):
    setup = setup_of(name)
    free = rows_of(setup)["free network"]
    assert free.step_time_s == simulate_setup(replace(setup, pattern=NoNetwork())).prediction.step_time_s
    assert free.change < 0


def test_gpus_without_peer_access_could_have_it():
    staged = load_cluster("rtx4090")
    direct = replace(staged, links=(replace(staged.links[0], peer_to_peer=True), *staged.links[1:]))
    before, after = (Setup(MODEL, plan_of(dp_shard=4), cluster) for cluster in (staged, direct))
    rows, others = rows_of(before), rows_of(after)
    assert rows["peer access"].step_time_s == simulate_setup(after).prediction.step_time_s
    assert rows["free network"].step_time_s == others["free network"].step_time_s
    exposed_s = simulate_setup(before).prediction.exposed_comm_s
    saved_s = simulate_setup(before).prediction.step_time_s - rows["network twice as fast"].step_time_s
    assert saved_s == pytest.approx(exposed_s / 2, rel=0.1)
    assert "peer access" not in others


def test_a_free_network_takes_measured_collectives_away():
    curve = Curve((1e3, 1e9), (1e-3, 1.0))
    shapes = [(kind, 16, 1) for kind in Collective]
    setup = replace(setup_of("FSDP"), measured=Measured(network=NetworkProfile(dict.fromkeys(shapes, curve))))
    free = rows_of(setup)["free network"]
    assert free.step_time_s == rows_of(setup_of("FSDP"))["free network"].step_time_s
    assert free.change < -0.5


def test_only_what_applies_is_asked():
    alone = rows_of(setup_of("one GPU"))
    assert not [label for label in alone if "network" in label or "link" in label or "contention" in label]
    assert "host link twice as fast" in rows_of(setup_of("offload"))
    in_a_node = rows_of(setup_of("offload"))
    assert "network latency halved" not in in_a_node
    assert not [label for label in in_a_node if label.startswith(("intra", "inter"))]
    assert "all GPUs sound" not in in_a_node


def test_a_slow_link_and_sound_ones():
    sound = setup_of("FSDP")
    rows = rows_of(replace(sound, slow_links=3.0))
    assert rows["all links sound"].step_time_s == simulate_setup(sound).prediction.step_time_s


def test_a_slow_gpu_and_sound_ones():
    sound = setup_of("DDP")
    rows = rows_of(replace(sound, kinds=(RankKind("slow", 1, slowdown=1.5),)))
    assert rows["all GPUs sound"].change < -0.2
    assert rows["all GPUs sound"].step_time_s == pytest.approx(simulate_setup(sound).prediction.step_time_s)


def test_no_host_work_between_steps_saves_what_the_stack_says():
    setup = setup_of("one GPU")
    base = simulate_setup(setup).prediction.step_time_s
    assert base - rows_of(setup)["no host work between steps"].step_time_s == pytest.approx(
        setup.stack.step_us * 1e-6, rel=0.01
    )


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("name", ["FSDP", "TP", "PP"])
def test_a_saved_program_has_the_rows_of_its_plan(name, network):
    setup = setup_of(name, network)
    program = program_of(setup.plan)
    base = predict_program(program, H100, network=setup.network)
    found = {row.label: row for row in sensitivities_of_program(program, H100, base, network=setup.network)}
    expected = rows_of(setup)
    assert expected.keys() - found.keys() == {"no host work between steps"}
    assert {label: row.step_time_s for label, row in found.items()} == {
        label: expected[label].step_time_s for label in found
    }
