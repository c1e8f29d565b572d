"""Small traces made by hand, and where reference traces are."""

from dataclasses import fields
from pathlib import Path

import numpy as np

from forerun.astrasim.chakra.schema import AttributeProto, GlobalMetadata, Node
from forerun.astrasim.chakra.trace import NodeKind
from forerun.astrasim.chakra.writer import message_writer

GOLDEN = Path(__file__).parents[4] / "shared" / "golden"


def attribute(name, field, value):
    """An attribute whose value has the type of `field`, as int64_val."""
    made = AttributeProto(name=name)
    if field.endswith("_list"):
        getattr(made, field).SetInParent()
        getattr(made, field).values.extend(value)
    else:
        setattr(made, field, value)
    return made


def node(number, kind, /, name="", data=(), ctrl=(), duration=0, **attributes):
    """A node with int64, text or boolean-list attributes."""
    made = Node(id=number, name=name or f"node{number}", type=int(kind), duration_micros=duration)
    made.data_deps.extend(data)
    made.ctrl_deps.extend(ctrl)
    for key, value in attributes.items():
        field = {str: "string_val", list: "bool_list", float: "double_val"}.get(type(value), "int64_val")
        made.attr.append(attribute(key, field, value))
    return made


def comp(number, **extra):
    return node(number, NodeKind.COMP, **{"num_ops": 10, "tensor_size": 20, **extra})


def send(number, dst, **extra):
    return node(number, NodeKind.SEND, **{"comm_size": 8, "comm_tag": 5, "comm_dst": dst, **extra})


def recv(number, src, **extra):
    return node(number, NodeKind.RECV, **{"comm_size": 8, "comm_tag": 5, "comm_src": src, **extra})


def collective(number, group="", **extra):
    return node(number, NodeKind.COLLECTIVE, **{"comm_size": 64, "comm_type": 0, "pg_name": group, **extra})


def write(path, nodes, metadata=None):
    """A trace file of `nodes`."""
    with message_writer(path) as put:
        put((metadata or GlobalMetadata(version="0.0.4")).SerializeToString())
        for one in nodes:
            put(one.SerializeToString())
    return path


def write_run(folder, *ranks):
    """Traces of several ranks; their prefix."""
    for rank, nodes in enumerate(ranks):
        write(folder / f"w.{rank}.et", nodes)
    return folder / "w"


def assert_equal(one, other):
    """Two RankTraces are the same, column by column."""
    for field in fields(one):
        mine, its = getattr(one, field.name), getattr(other, field.name)
        assert np.array_equal(mine, its) if isinstance(mine, np.ndarray) else mine == its, field.name
