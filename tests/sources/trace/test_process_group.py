"""Process groups of any size in one process: what is recorded, what is answered, and DDP on top."""

import json
import pickle
import runpy
import sys
import textwrap
from datetime import timedelta

import pytest
from virtual_process import run_virtual
from warm_process import fork, wait

from forerun.common.errors import ForerunError
from forerun.sources.trace.inside.ranks.stores import FileStore, HashStore, TCPStore

COMPUTE = 0


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_virtual(
        """
        import gc
        import torch.distributed._functional_collectives as functional
        import torch.distributed._symmetric_memory
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        dist.init_process_group("nccl")
        result["world"] = [dist.get_rank(), dist.get_world_size(), dist.get_backend()]
        mesh = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        names = [mesh[name].get_group().label for name in ("dp", "cp", "tp")]
        names += [mesh["dp", "cp"]._flatten("dp_cp").get_group().label, dist.group.WORLD.label]
        result["names"] = names + [dist.new_group([1, 3]).label, dist.new_group([3, 7]).label]
        result["foreign"] = dist.new_group([0, 1]) == dist.GroupMember.NON_GROUP_MEMBER
        result["members"] = [list(mesh[name].get_group().ranks) for name in ("dp", "cp", "tp", "dp_cp")]
        result["coordinate"] = list(mesh.get_coordinate())
        half = dist.new_group([3, 0, 1, 2])

        def part(name, call):
            recorder.start()
            call()
            x.neg_()
            result[name] = nodes()

        x = torch.empty(16, device="cuda")
        wide = torch.empty(128, device="cuda")
        part("sync", lambda: dist.all_reduce(x))
        part("async", lambda: (dist.all_reduce(x, async_op=True), x.abs_())[0].wait())
        part("gather", lambda: dist.all_gather_into_tensor(wide, x))
        part("scatter", lambda: dist.reduce_scatter_tensor(x, wide))
        part("list", lambda: dist.all_gather(list(wide.chunk(8)), x))
        part("broadcast", lambda: dist.broadcast(x, 0))
        part("all_to_all", lambda: dist.all_to_all_single(wide, torch.empty_like(wide)))
        uneven = [2, 0, 1, 3, 0, 4, 1, 1]
        part("uneven", lambda: dist.all_to_all_single(wide[:16], x[:12], [2] * 8, uneven))
        part("barrier", lambda: dist.barrier())
        part("functional", lambda: functional.all_reduce(x, "sum", mesh["tp"]).add(1))
        group = mesh["tp"].get_group()
        reduce = lambda tensor: functional.all_reduce(tensor, "sum", group) + 1
        compiled = torch.compile(reduce, backend="aot_eager", fullgraph=True)
        part("compiled", lambda: compiled(x))
        part("unawaited", lambda: functional.all_gather_single(x, 0, mesh["tp"]))

        def coalesced():
            with dist._coalescing_manager(async_ops=True) as manager:
                dist.all_reduce(x); dist.all_reduce(wide)
            manager.wait()

        part("coalesced", coalesced)

        def batch():
            ops = [dist.P2POp(dist.irecv, x, 2), dist.P2POp(dist.isend, x, 4)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        part("batch", batch)
        part("send", lambda: dist.send(x, 4))
        part("future", lambda: dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0].cos()).wait())
        work = dist.all_reduce(x, async_op=True)
        result["polled"] = [work.is_completed(), work.is_success(), work.exception()]
        result["result"] = [work.result()[0] is x, work.source_rank()]
        part("synchronize", lambda: dist.all_reduce(x, async_op=True).synchronize())
        part("block", lambda: dist.all_reduce(x, async_op=True).block_current_stream())
        sharded = distribute_tensor(torch.empty(8, 8, device="cuda"), mesh["tp"], [Shard(0)])
        symmetric = torch.distributed._symmetric_memory
        symmetric.enable_symm_mem_for_group(mesh["tp"].get_group().group_name)
        left, right = torch.empty(64, 32, device="cuda"), torch.empty(32, 16, device="cuda")
        tp = mesh["tp"].get_group().group_name
        part("fused_gather", lambda: torch.ops.symm_mem.fused_all_gather_matmul(left, [right], 0, tp))
        part("fused_scatter", lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(left, right, "sum", 0, tp))
        part("reshard", lambda: sharded.redistribute(placements=[Shard(1)]))

        def real(call, *tensors):
            call()
            return [t.tolist() for t in tensors]

        ones, four = torch.ones(2), torch.arange(4.0)
        result["answers"] = {
            "sum": real(lambda: dist.all_reduce(ones), ones),
            "max": real(lambda: dist.all_reduce(four, dist.ReduceOp.MAX), four),
            "product": real(lambda: dist.all_reduce(ones, dist.ReduceOp.PRODUCT, group=half), ones),
        }
        gathered, out = torch.zeros(16), torch.zeros(1)
        pair = torch.tensor([1.0, 2.0])
        result["answers"]["gather"] = real(lambda: dist.all_gather_into_tensor(gathered, pair), gathered)
        result["answers"]["scatter"] = real(lambda: dist.reduce_scatter_tensor(out, torch.arange(8.0)), out)
        swapped = torch.zeros(8)
        result["answers"]["all_to_all"] = real(lambda: dist.all_to_all_single(swapped, torch.arange(8.0)), swapped)
        tp = functional.all_reduce(torch.ones(2), "sum", mesh["tp"])
        result["answers"]["functional"] = tp.tolist()
        counts = torch.tensor([1, 2, 3, 4], device="cuda")
        dist.all_reduce(counts)
        result["answers"]["device"] = counts.tolist()
        got = torch.empty(4, dtype=torch.int64, device="cuda")
        dist.reduce_scatter_tensor(got, torch.arange(32, device="cuda"))
        result["answers"]["known"] = got.tolist()
        held = torch.tensor([5, 5], device="cuda")
        dist.all_reduce(torch.empty(2, device="cuda"))
        dist.broadcast(held, 0)
        result["answers"]["kept"] = held.tolist()

        objects = [None] * 8
        recorder.start()
        dist.all_gather_object(objects, {"rank": rank})
        result["objects"] = [objects[0], objects[7], objects[0] is objects[7]]
        result["object_nodes"] = [n[:2] for n in nodes()]
        mine = [{"a": 1}]
        dist.broadcast_object_list(mine, 3)
        part_of = [None]
        dist.scatter_object_list(part_of, list(range(8)), 3)
        result["objects"] += [mine, part_of]
        result["object_bytes"] = {}

        def talk(name, call):
            recorder.start()
            call()
            rows = nodes()
            result["object_bytes"][name] = [row[3] for row in rows if row[4]], [row[5] for row in rows if row[4]]
            result["object_bytes"][name] += (len([row for row in rows if row[0] == "synchronize"]),)

        own, lists, letter = [None] * 8, [None] * 8, [None]
        talk("all_gather", lambda: dist.all_gather_object(own, "abc"))
        talk("gather to another", lambda: dist.gather_object("abc", None, 0))
        talk("gather", lambda: dist.gather_object("abc", lists, 3))
        talk("broadcast", lambda: dist.broadcast_object_list(["abc", 1], 3))
        talk("scatter", lambda: dist.scatter_object_list(letter, list("abcdefgh"), 3))
        talk("on the host", lambda: dist.broadcast_object_list(["abc"], 3, device="cpu"))
        result["gathered"] = [own, lists, letter]
        result["no list"] = fails(lambda: dist.scatter_object_list(letter, None, 3))
        result["any source"] = fails(lambda: dist.recv_object_list([None]))
        result["alone"] = [
            fails(lambda: dist.recv(torch.ones(2), 0)),
            fails(lambda: dist.send_object_list([1], 0)),
            fails(lambda: dist.broadcast_object_list([None], 0)),
        ]
        store = dist.TCPStore("no-such-host.invalid", 1, 8, False)
        store.set("key", "value")
        same = dist.PrefixStore("", dist.TCPStore("no-such-host.invalid", 1, 8, False))
        result["store"] = [store.get("key").decode(), store.add("count", 1), fails(lambda: store.get("other"))]
        gc.collect()  # torch holds the C++ part of the inner store alone
        result["inner store"] = same.add("count", 1)
        """,
        tmp_path_factory.mktemp("group"),
        rank=3,
    )


def comm(answers, part):
    """The part's communication, and its last kernel."""
    rows = answers[part]
    talk = [row for row in rows if row[4]]
    return talk, rows[-1]


def test_the_world_is_as_torchrun_says(answers):
    assert answers["world"] == [3, 8, "nccl"]
    assert answers["coordinate"] == [0, 1, 1]


def test_groups_have_names_that_people_can_read(answers):
    assert answers["names"] == ["dp", "cp", "tp", "dp_cp", "world", "group", "group#2"]
    assert answers["members"] == [[3, 7], [1, 3], [2, 3], [1, 3, 5, 7]]
    assert answers["foreign"]


def test_a_synchronous_collective_runs_on_the_current_stream(answers):
    (node,), last = comm(answers, "sync")
    assert node[:6] == ["all_reduce", COMPUTE, [], 64, "world", "fp32"]
    assert last[2] == []


def test_an_asynchronous_collective_has_its_groups_stream(answers):
    (node,), last = comm(answers, "async")
    assert node[1] not in (COMPUTE, last[1])
    absolute = next(row for row in answers["async"] if row[0] == "abs_")
    assert absolute[2] == [], "it does not wait"
    assert last[2] == [node[7]], "the one after wait() does"


@pytest.mark.parametrize(
    ("part", "name", "nbytes"),
    [
        ("gather", "all_gather", 512),
        ("list", "all_gather", 512),
        ("scatter", "reduce_scatter", 512),
        ("broadcast", "broadcast", 64),
        ("all_to_all", "all_to_all", 512),
        ("uneven", "all_to_all", 48),
        ("barrier", "barrier", 4),
        ("coalesced", "all_reduce", 576),
        ("functional", "all_reduce", 64),
        ("unawaited", "all_gather", 128),
        ("compiled", "all_reduce", 64),
        ("reshard", "all_to_all", 128),
        ("fused_gather", "all_gather", 2 * 64 * 32 * 4),
        ("fused_scatter", "reduce_scatter", 64 * 16 * 4),
    ],
)
def test_a_collective_is_one_node_of_the_whole_buffer(answers, part, name, nbytes):
    (node,), _ = comm(answers, part)
    assert (node[0], node[3]) == (name, nbytes)


def test_a_barrier_holds_the_host(answers):
    (node,), _ = comm(answers, "barrier")
    waits = [row for row in answers["barrier"] if row[0] == "synchronize"]
    assert [row[2] for row in waits] == [[node[7]]]


def test_a_functional_collective_is_awaited_when_it_is_used(answers):
    (node,), last = comm(answers, "functional")
    add = next(row for row in answers["functional"] if row[0] == "add")
    assert node[4] == "tp"
    assert node[1] != COMPUTE
    assert add[2] == [node[7]]
    (free,), last = comm(answers, "unawaited")
    assert free[7] not in last[2]


@pytest.mark.parametrize("part", ["fused_gather", "fused_scatter"])
def test_a_fused_product_runs_beside_its_collective(answers, part):
    (node,), last = comm(answers, part)
    product = next(row for row in answers[part] if row[0].startswith("fused_"))
    assert node[1] != product[1] == COMPUTE
    assert product[2] == []
    assert last[2] == [node[7]]


def test_the_messages_of_a_batch_share_the_groups_stream(answers):
    (recv, send), last = comm(answers, "batch")
    assert (recv[0], recv[6], send[0], send[6]) == ("recv", 2, "send", 4)
    assert recv[1] == send[1] == comm(answers, "async")[0][0][1]
    assert recv[4] == send[4] == "world"
    assert last[2] == [max(recv[7], send[7])]


def test_a_message_alone_has_a_stream_for_its_pair(answers):
    (send,), _ = comm(answers, "send")
    assert (send[4], send[6]) == ("p2p world 3-4", 4)
    assert send[1] not in (COMPUTE, comm(answers, "async")[0][0][1])


def test_a_program_that_polls_a_collective_goes_on(answers):
    """All that a peer would do is done at once, so a loop until `is_completed()` ends."""
    assert answers["polled"] == [True, True, None]
    assert answers["result"] == [True, -1]


@pytest.mark.parametrize("part", ["synchronize", "block"])
def test_other_ways_to_wait_for_a_collective_are_waits_of_the_stream(answers, part):
    (node,), last = comm(answers, part)
    assert node[1] != COMPUTE
    assert last[2] == [node[7]]


def test_callbacks_of_a_future_have_a_stream_of_their_own(answers):
    (node,), last = comm(answers, "future")
    cosine = next(row for row in answers["future"] if row[0] == "cos")
    assert cosine[1] not in (COMPUTE, node[1])
    assert cosine[2] == [node[7]]
    assert cosine[7] in last[2]


def test_known_data_is_answered_as_if_peers_held_the_same(answers):
    found = answers["answers"]
    assert found["sum"] == [[8.0, 8.0]]
    assert found["max"] == [[0.0, 1.0, 2.0, 3.0]]
    assert found["product"] == [[8.0**4, 8.0**4]]
    assert found["gather"] == [[1.0, 2.0] * 8]
    assert found["scatter"] == [[24.0]]
    assert found["all_to_all"] == [[3.0] * 8]
    assert found["functional"] == [2.0, 2.0]
    assert found["device"] == [8, 16, 24, 32]
    assert found["known"] == [96, 104, 112, 120]
    assert found["kept"] == [5, 5]


def test_objects_are_copies_of_this_ranks(answers):
    assert answers["objects"] == [{"rank": 3}, {"rank": 3}, False, [{"a": 1}], [3]]
    assert [name for name, _ in answers["object_nodes"]] == ["all_gather_object", "synchronize"] * 2


def test_objects_travel_as_their_sizes_and_their_pickles(answers):
    size = len(pickle.dumps("abc"))
    pair, letters = len(pickle.dumps(["abc", 1])), len(pickle.dumps(list("abcdefgh")))
    assert answers["object_bytes"] == {
        "all_gather": [[8 * 8, 8 * size], ["int64", "uint8"], 2],
        "gather to another": [[8 * 8, 8 * size], ["int64", "uint8"], 2],
        "gather": [[8 * 8, 8 * size], ["int64", "uint8"], 2],
        "broadcast": [[2 * 8, pair], ["int64", "uint8"], 2],
        "scatter": [[8, letters], ["int64", "uint8"], 2],
        "on the host": [[], [], 0],
    }
    assert answers["gathered"] == [["abc"] * 8, ["abc"] * 8, ["d"]]
    assert "source rank must provide non-None scatter_object_input_list" in answers["no list"]
    assert "recv_object_list from any source: name the source rank" in answers["any source"]


def test_stores_of_one_address_share_what_they_hold(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    one, same, other = TCPStore("a.invalid", 1), TCPStore("a.invalid", 1), TCPStore("a.invalid", 2)
    one.set("key", "value")
    assert (same.get("key"), one.clone().get("key"), other.num_keys()) == (b"value", b"value", 0)
    assert (one.add("count", 2), same.add("count", 1), one.get("count")) == (8, 12, b"12")  # by all four ranks
    one.append("key", b"s")
    one.append("new", "x")
    assert one.multi_get(["key", "new"]) == [b"values", b"x"]
    one.multi_set(["a", "b"], ["1", b"2"])
    assert (one.list_keys(), one.num_keys()) == (["key", "count", "new", "a", "b"], 5)
    assert (one.delete_key("a"), one.delete_key("a"), one.num_keys()) == (True, False, 4)
    assert one.check(["nobody set it"])
    assert (one.host, one.port) == ("a.invalid", 1)
    assert one.timeout == timedelta(seconds=300)
    one.set_timeout(timedelta(seconds=5))
    assert one.timeout == timedelta(seconds=5)
    assert FileStore("place").path == "place"
    first, second = HashStore(), HashStore()
    first.set("key", "value")
    assert second.num_keys() == 0
    with pytest.raises(ForerunError, match=r"store.get\('key'\): only another rank sets this key"):
        second.get("key")


def test_a_store_compares_before_it_sets():
    store = HashStore()
    assert store.compare_set("key", "other", "new") == b"other"  # not there, so the caller's expectation comes back
    assert store.num_keys() == 0
    assert store.compare_set("key", "", "new") == b"new"
    assert store.compare_set("key", "other", "newer") == b"new"
    assert store.compare_set("key", b"new", "newer") == b"newer"
    assert store.compare_set("key", "", "newest") == b"newer"


def test_what_only_a_peer_has_is_refused_by_name(answers):
    recv, send, broadcast = answers["alone"]
    assert recv.startswith("ForerunError: recv: only rank 0 has this data")
    assert send.startswith("ForerunError: send_object_list: only rank 0 has this data")
    assert broadcast.startswith("ForerunError: broadcast_object_list")
    value, count, other = answers["store"]
    assert (value, count) == ("value", 8)
    assert answers["inner store"] == 8
    assert "store.get('other'): only another rank sets this key" in other


def test_the_size_of_the_world_costs_nothing(tmp_path):
    took = run_virtual(
        """
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
        worlds = []
        for backend in ("nccl", "gloo", None, "cpu:gloo,cuda:nccl"):
            dist.init_process_group(backend)
            devices = [str(device) for device in dist.group.WORLD._device_types]
            worlds.append([dist.group.WORLD.label, dist.get_backend(), devices])
            whole = init_device_mesh("cuda", (world,)).get_group()
            result.setdefault("meshes", []).append([whole is dist.group.WORLD, whole.label])
            dist.destroy_process_group()
        result["worlds"] = worlds
        begin = time.process_time()
        dist.init_process_group(init_method="tcp://no-such-host.invalid:1", rank=rank, world_size=world)
        mesh = init_device_mesh("cuda", (world // 16, 2, 8), mesh_dim_names=("dp", "cp", "tp"))
        mesh["dp", "cp"]._flatten("dp_cp")
        DeviceMesh("cuda", torch.arange(world).reshape(-1, 8), mesh_dim_names=("rows", "columns"))
        dist.new_group(list(range(1024)))
        result["setup_s"] = time.process_time() - begin
        result["sizes"] = [mesh[name].size() for name in ("dp", "cp", "tp", "dp_cp")]
        """,
        tmp_path,
        rank=16_000,
        world_size=16_384,
    )
    assert took["sizes"] == [1024, 2, 8, 2048]
    assert took["setup_s"] < 1.0
    # torch gives a mesh of all ranks a group with NCCL where that of all ranks has Gloo alone
    assert took["meshes"] == [[True, "world"], [False, "world#2"], [True, "world"], [True, "world"]]
    assert took["worlds"] == [
        ["world", "nccl", ["cuda"]],
        ["world", "gloo", ["cpu", "cuda"]],
        ["world", "undefined", ["cuda"]],
        ["world", "cpu:gloo,cuda:nccl", ["cpu", "cuda"]],
    ]


# -- DistributedDataParallel -----------------------------------------------------------------------------------------

_MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.a, self.b = nn.Linear(600, 600), nn.Linear(600, 2000), nn.Linear(2000, 2000)
        self.c, self.first, self.norm = nn.Linear(2000, 600), nn.Linear(600, 600), nn.BatchNorm1d(600)

    def forward(self, x):
        x = torch.relu(self.b(torch.relu(self.a(self.first(x)))))
        return self.norm(self.last(self.c(x)))

def buckets(**options):
    "Names of the parameters in each bucket of the third step, in order of their all-reduces."
    torch.manual_seed(0)
    net = Net().to(device)
    ddp = nn.parallel.DistributedDataParallel(net, **options)
    names = {id(p): name for name, p in net.named_parameters()}
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    seen = []
    def hook(_, bucket):
        seen.append([names[id(p)] for p in bucket.parameters()])
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda f: f.value()[0] if isinstance(f.value(), list) else f.value())
    ddp.register_comm_hook(None, hook)
    for _ in range(3):
        seen.clear()
        ddp(torch.randn(8, 600, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen

WAYS = [{}, {"bucket_cap_mb": 4}, {"bucket_cap_mb": 1, "gradient_as_bucket_view": True}, {"static_graph": True}]
"""


@pytest.mark.slow
def test_ddp_fills_its_buckets_as_two_real_processes_do(tmp_path):
    real = textwrap.dedent("""
        import json, os, sys
        import torch, torch.distributed as dist
        from torch import nn
        torch.set_num_threads(1)
        device = "cpu"
        rank = int(sys.argv[1])
        store = dist.FileStore(sys.argv[2] + "/store", 2)
        dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    """)
    real += _MODEL + "\nprint(json.dumps([buckets(**way) for way in WAYS]))\n"
    (tmp_path / "real.py").write_text(real)
    printed = [tmp_path / f"rank{rank}.txt" for rank in range(2)]
    processes = []
    for rank, path in enumerate(printed):

        def run(rank=rank):
            sys.argv = ["real.py", str(rank), str(tmp_path)]
            runpy.run_path(str(tmp_path / "real.py"), run_name="__main__")

        with path.open("wb") as sink:
            processes.append(fork(run, sink.fileno(), {"GLOO_SOCKET_IFNAME": "lo"}))
    assert [wait(process, 120) for process in processes] == [0, 0]
    found = [json.loads(path.read_text().splitlines()[-1]) for path in printed]
    assert found[0] == found[1]
    body = (
        'device = "cuda"\ndist.init_process_group("nccl")\n' + _MODEL + "\nresult['b'] = [buckets(**w) for w in WAYS]\n"
    )
    traced = run_virtual(body, tmp_path, world_size=2)["b"]
    assert [len(way) for way in traced] == [2, 4, 5, 2]
    assert traced == found[0]


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    body = 'device = "cuda"\ndist.init_process_group("nccl", device_id=torch.device("cuda", 0))\n' + _MODEL
    body += textwrap.dedent("""
        from contextlib import nullcontext
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        def steps(hook=None, accumulate=False, builtin=None, **options):
            net = Net().cuda()
            ddp = nn.parallel.DistributedDataParallel(net, device_ids=[0], **options)
            if hook:
                ddp.register_comm_hook(None, getattr(default_hooks, hook))
            if builtin:
                ddp._register_builtin_comm_hook(builtin)
            optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
            for _ in range(3):
                recorder.start()
                for micro in range(1 + accumulate):
                    with ddp.no_sync() if accumulate and not micro else nullcontext():
                        ddp(torch.randn(8, 600, device="cuda")).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return nodes()

        half = dist.split_group(split_ranks=[list(range(8)), list(range(8, 16))])
        result["split"] = [list(half.ranks), half.rank(), dist.get_global_rank(half, 5)]
        mesh = torch.distributed.init_device_mesh("cuda", (4, 4), mesh_dim_names=("replicate", "shard"))
        result["mesh"] = [list(mesh[name].get_group().ranks) for name in ("replicate", "shard")]
        recorder.start()
        dist.send(torch.empty(4, device="cuda"), 9)
        dist.all_reduce(torch.empty(4, device="cuda"), async_op=True).wait()
        result["bound"] = nodes("send", "all_reduce")
        result["plain"] = steps()
        result["view"] = steps(gradient_as_bucket_view=True)
        result["bf16"] = steps(hook="bf16_compress_hook")
        result["fp16"] = steps(hook="fp16_compress_hook")
        result["builtin"] = steps(builtin=dist.BuiltinCommHookType.FP16_COMPRESS)
        result["static"] = steps(static_graph=True)
        result["unused"] = steps(find_unused_parameters=True)
        layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        layers = nn.SyncBatchNorm.convert_sync_batchnorm(layers).cuda()
        net = nn.parallel.DistributedDataParallel(layers, device_ids=[0])
        recorder.start()
        net(torch.randn(2, 3, 16, 16, device="cuda")).sum().backward()
        result["norm"] = nodes()
        result["no_sync"] = steps(accumulate=True)
        """)
    return run_virtual(body, tmp_path_factory.mktemp("ddp"), world_size=16)


def test_groups_bound_to_a_device_are_split(ddp):
    assert ddp["split"] == [list(range(8)), 0, 5]
    assert ddp["mesh"] == [[0, 4, 8, 12], [0, 1, 2, 3]]


def test_a_group_bound_to_a_device_has_one_stream_for_all(ddp):
    send, reduce = ddp["bound"]
    assert send[1] == reduce[1] != COMPUTE
    assert send[4] == "world"


def gradients(rows):
    return [row for row in rows if row[0] == "all_reduce"]


def test_gradients_are_reduced_while_backward_goes_on(ddp):
    first, second = gradients(ddp["plain"])
    assert (first[3], second[3]) == (1447200, 27060800)
    assert first[1] == second[1] != COMPUTE
    between = [row for row in ddp["plain"] if first[7] < row[7] < second[7] and row[0] == "mm"]
    assert between
    assert all(first[7] not in row[2] for row in between)
    after = [row for row in ddp["plain"] if row[7] > second[7]]
    assert second[7] in after[0][2], "the optimizer waits"


def test_buffers_are_broadcast_before_forward(ddp):
    sent = [row for row in ddp["plain"] if row[0] == "broadcast"]
    assert [row[3] for row in sent] == [4800, 8]


def test_a_gradient_that_is_a_view_is_not_copied_back(ddp):
    last = gradients(ddp["plain"])[-1][7], gradients(ddp["view"])[-1][7]
    copies = [
        [r for r in ddp[way] if r[0] == "copy_" and r[7] > at] for way, at in zip(("plain", "view"), last, strict=True)
    ]
    assert len(copies[0]) == 12
    assert copies[1] == []


@pytest.mark.parametrize("way", ["bf16", "fp16", "builtin"])
def test_hooks_compress_what_is_sent(ddp, way):
    first, second = gradients(ddp[way])
    assert (first[3], second[3]) == (1447200 / 2, 27060800 / 2)
    assert first[5] == ("bf16" if way == "bf16" else "fp16")
    restored = [row for row in ddp[way] if row[0] == "copy_" and first[7] in row[2]]
    assert restored
    assert restored[0][1] not in (COMPUTE, first[1]), "on a stream of its own"


def test_synchronised_batch_norm_gathers_its_statistics(ddp):
    talk = [(row[0], row[3], row[1]) for row in ddp["norm"] if row[4] and row[0] != "broadcast"]
    statistics = 16 * (2 * 8 + 1) * 4
    assert talk[:2] == [("all_gather", statistics, COMPUTE), ("all_reduce", 2 * 8 * 4, COMPUTE)]
    assert [name for name, *_ in talk[2:]] == ["all_reduce"]


def test_other_ways_of_ddp_run(ddp):
    assert [row[3] for row in gradients(ddp["static"])] == [1447200, 27060800]
    assert [row[3] for row in gradients(ddp["no_sync"])] == [1447200, 27060800]
    *of_gradients, used = gradients(ddp["unused"])
    assert sum(row[3] for row in of_gradients) == 28508000
    assert (used[3], used[5]) == (48, "int32")
