"""A small exploration as a YAML file."""

import copy

import yaml

RING = ["ring", "ring"]
SMALL = {
    "workloads": {
        "tiny": {
            "din": 512, "dout": 512, "dmodel": 256, "dff": 1024, "head": 8, "seq": 64, "batch": 64, "num_stacks": 2,
        }
    },
    "systems": {
        "torus": {
            "system": {
                "roofline-enabled": 1, "local-mem-bw": 300, "peak-perf": 45, "preferred-dataset-splits": 4,
                "all-reduce-implementation": RING, "all-gather-implementation": RING,
                "reduce-scatter-implementation": RING, "all-to-all-implementation": RING,
            },
            "network": {"topology": ["Ring", "Ring"], "npus_count": [4, 2], "bandwidth": 50.0, "latency": 500.0},
        }
    },
    "plan": {"weight_sharded": [False, True], "activation_recompute": [False, True]},
}  # fmt: skip
POINTS = 40
"""10 factorisations of 8 into dp x tp x sp, twice two flags"""


def changed(*changes):
    """SMALL with changes: (keys with dots, value), a value of None takes the key away."""
    data = copy.deepcopy(SMALL)
    for path, value in changes:
        *parents, last = path.split(".")
        place = data
        for key in parents:
            place = place.setdefault(key, {})
        if value is None:
            del place[last]
        else:
            place[last] = value
    return data


def write(folder, data, name="space.yaml"):
    path = folder / name
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return path
