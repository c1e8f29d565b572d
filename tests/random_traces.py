"""Small execution traces, written by hand or drawn at random."""

import numpy as np
from hypothesis import strategies as st

from forerun.astrasim.chakra.trace import CommType, NodeKind, RankTrace

KINDS = (CommType.ALL_REDUCE, CommType.ALL_GATHER, CommType.REDUCE_SCATTER, CommType.ALL_TO_ALL)


def comp(ops=1000, size=1000, after=(), **more):
    return {"kind": NodeKind.COMP, "num_ops": ops, "tensor_size": size, "after": after, **more}


def collective(kind, size, group=None, after=(), **more):
    return {"kind": NodeKind.COLLECTIVE, "comm_type": kind, "comm_size": size, "group": group, "after": after, **more}


def send(to, size, tag=0, after=()):
    return {"kind": NodeKind.SEND, "peer": to, "comm_size": size, "comm_tag": tag, "after": after}


def recv(source, size, tag=0, after=()):
    return {"kind": NodeKind.RECV, "peer": source, "comm_size": size, "comm_tag": tag, "after": after}


def trace(nodes, ids=None):
    """A RankTrace of nodes as made by the functions above; `after` holds positions in the list."""
    n = len(nodes)
    names = list(dict.fromkeys(node["group"] for node in nodes if node.get("group") is not None))
    tensors = list(dict.fromkeys(t for node in nodes for side in ("inputs", "outputs") for t in node.get(side, ())))

    def column(key, default, dtype):
        return np.array([node.get(key, default) for node in nodes], dtype)

    def lists(key, table=None):
        rows = [[table.index(x) if table is not None else x for x in node.get(key, ())] for node in nodes]
        pointer = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
        return pointer, np.array([x for row in rows for x in row], np.int32)

    data_ptr, data = lists("after")
    ctrl_ptr, ctrl = lists("after_ctrl")
    input_ptr, input_tensor = lists("inputs", tensors)
    output_ptr, output_tensor = lists("outputs", tensors)
    return RankTrace(
        node_id=np.arange(1, n + 1, dtype=np.int64) if ids is None else np.array(ids, np.int64),
        kind=column("kind", NodeKind.COMP, np.int8),
        is_cpu=column("is_cpu", False, np.bool_),
        duration_us=column("duration_us", 0, np.int64),
        num_ops=column("num_ops", 0, np.int64),
        tensor_size=column("tensor_size", 0, np.int64),
        comm_type=column("comm_type", CommType.NONE, np.int8),
        comm_size=column("comm_size", 0, np.int64),
        comm_tag=column("comm_tag", 0, np.int64),
        peer=column("peer", -1, np.int32),
        group=np.array([names.index(g) if (g := node.get("group")) is not None else -1 for node in nodes], np.int32),
        priority=column("priority", 0, np.int32),
        data_ptr=data_ptr,
        data=data,
        ctrl_ptr=ctrl_ptr,
        ctrl=ctrl,
        input_ptr=input_ptr,
        input_tensor=input_tensor,
        output_ptr=output_ptr,
        output_tensor=output_tensor,
        tensor_bytes=np.array([size for _, size in tensors], np.int64),
        group_names=tuple(names),
        tensor_names=tuple(name for name, _ in tensors),
    )


@st.composite
def programs(draw, n_ranks=4, groups=None, messages=True):
    """Traces of all ranks, and how they may fail: every rank runs the same nodes, but for messages between pairs."""
    groups = groups or {}
    of_rank = [[] for _ in range(n_ranks)]
    names = [None, *groups]
    for step in range(draw(st.integers(1, 12))):
        what = draw(st.sampled_from(["comp", "comp", "collective", "message" if messages else "comp"]))
        back = draw(st.integers(1, 3))
        after = tuple(range(max(0, step - back), step)) if draw(st.booleans()) else ()
        if what == "comp":
            node = comp(draw(st.integers(1, 10**7)), draw(st.integers(1, 10**6)), after)
            for nodes in of_rank:
                nodes.append(node)
        elif what == "collective":
            kind, size = draw(st.sampled_from(KINDS)), draw(st.integers(1000, 10**7))
            name = draw(st.sampled_from(names))
            for rank, nodes in enumerate(of_rank):
                mine = None if name is None else next(g for g in groups if g[0] == name[0] and rank in groups[g])
                nodes.append(collective(kind, size, mine, after))
        else:
            half, size = n_ranks // 2, draw(st.integers(1, 10**6))
            for rank, nodes in enumerate(of_rank):
                nodes.append(
                    send(rank + half, size, step, after) if rank < half else recv(rank - half, size, step, after)
                )
    return [trace(nodes) for nodes in of_rank]
