"""Mutations of inputs: of the data that a file holds, of its text, and of its bytes."""

from __future__ import annotations

import copy
import io
import json
import pickle
import zipfile
from random import Random
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import yaml

_ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        7,
        64,
        10**5,
        10**9,
        10**18,
        2**53 + 1,
        2**63 - 1,
        2**63,
        2**64,
        -(2**63),
        2**200,
    ),
    *(0.0, -0.0, 0.5, 1e-30, -1e-30, 1e30, 1e300, 5e-324, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        " ",
        "x",
        "1",
        "1e9",
        "nan",
        "-1",
        "a" * 5000,
        "\u0000",
        "\ud800",
        "\u202e",
        "\U0001f600",
        "../x",
        "/",
        "/dev/zero",
    ),
    *([], [[]], [None], [1, 2, 3], {}, {"a": 1}, {"": {}}, [0] * 2000, "1.5 GB/s", "2024-01-01", "file.py:f"),
)


def mutated_data(data: Any, random: Random) -> Any:
    """A copy of `data` with one to three changes."""
    data = copy.deepcopy(data)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        data = _changed(data, random)
    return data


def _changed(data: Any, random: Random) -> Any:
    places = [
        (holder, key)
        for holder in _holders(data)
        for key in (holder if isinstance(holder, dict) else range(len(holder)))
    ]
    if not places:
        return random.choice(_ODD)
    holder, key = random.choice(places)
    match random.randrange(9):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[f"{key}{random.choice('xs_ ')}"] = holder.pop(key)
        case 2 if isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        case 3:
            other, place = random.choice(places)
            if place in other if isinstance(other, dict) else place < len(other):
                holder[key] = copy.deepcopy(other[place])
        case 4 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = _scaled(holder[key], random)
        case 5:
            for _ in range(random.choice((1, 3, 90))):
                holder[key] = [holder[key]] if random.random() < 0.5 else {"a": holder[key]}
        case 6 if isinstance(holder, dict):
            holder[str(random.choice(_ODD))[:50]] = random.choice(_ODD)
        case _:
            holder[key] = copy.deepcopy(random.choice(_ODD))
    return data


def _holders(data: Any) -> list[Any]:
    found, waiting = [], [data]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list):
            found.append(one)
            waiting += one.values() if isinstance(one, dict) else one
    return found


def _scaled(value: float, random: Random) -> float:
    factor = random.choice((-1, 0.1, 2, 3, 10, 1000, 1e6, 1e-6, 1e12))
    scaled = value * factor
    return int(scaled) if isinstance(value, int) else scaled


def written(name: str, data: Any) -> bytes:
    """The file `name` that holds `data`; text and bytes are the file itself."""
    if isinstance(data, bytes):
        return data
    if isinstance(data, str) and not name.endswith((".json", ".yaml", ".yml", ".csv")):
        return data.encode("utf-8", "surrogatepass")
    if name.endswith(".pickle"):
        return pickle.dumps(data)
    if name.endswith(".parquet"):
        return _parquet(data)
    if name.endswith(".csv"):
        rows = data if isinstance(data, list) else [[data]]
        text = "\n".join(",".join(map(str, row)) if isinstance(row, list) else str(row) for row in rows)
    elif name.endswith(".json"):
        text = json.dumps(data, default=str)
    else:
        text = yaml.safe_dump(data, sort_keys=False, allow_unicode=False)
    return text.encode("utf-8", "surrogatepass")


def _parquet(rows: Any) -> bytes:
    """A table of `rows`; where Parquet has no such rows, a table of their texts."""
    made = io.BytesIO()
    records = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    try:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), made)
        return made.getvalue()
    except (pyarrow.ArrowException, OverflowError, UnicodeError, TypeError, ValueError):
        texts = [
            {str(key)[:99].encode("ascii", "replace").decode(): ascii(value)[:99] for key, value in row.items()}
            for row in records
        ]
        table = pyarrow.Table.from_pylist(texts)
    pyarrow.parquet.write_table(table, made)
    return made.getvalue()


def mutated_bytes(content: bytes, random: Random) -> bytes:
    """`content` with a change that knows nothing of its meaning."""
    at = random.randrange(len(content) + 1)
    to = min(len(content), at + random.randrange(1, 30))
    match random.randrange(9):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + bytes([random.randrange(256)]) + content[at + 1 :]
        case 2:
            return content[:at] + content[to:]
        case 3:
            return content[:at] + content[at:to] * random.choice((2, 50)) + content[to:]
        case 4:
            return b"\xef\xbb\xbf" + content
        case 5:
            return content.decode("utf-8", "replace").encode(random.choice(("utf-16", "utf-32", "latin-1")), "replace")
        case 6:
            return (
                content[:at]
                + random.choice((b"&a ", b"*a", b"<<: *a", b"!!int ", b"[", b"{", b"- ", b"\t", b"#"))
                + content[at:]
            )
        case 7:
            return _bomb(random) + content
        case _:
            return content.replace(b"\n", random.choice((b"\r\n", b"\r", b"\n\n", b"\x00")))


def _bomb(random: Random) -> bytes:
    what, wide = random.choice(("[x, x]", "{k: 1}")), random.randrange(2, 12)
    lines = [f"a0: &a0 {what}"]
    for level in range(1, random.randrange(2, 15)):
        inner = ", ".join([f"*a{level - 1}"] * wide)
        lines.append(f"a{level}: &a{level} " + (f"[{inner}]" if what[0] == "[" else f"{{<<: [{inner}]}}"))
    return "\n".join(lines).encode() + b"\n"


def mutated_program(content: bytes, random: Random) -> bytes:
    """A saved program with a change of its header, of an array, or of its bytes."""
    if random.random() < 0.2:
        return mutated_bytes(content, random)
    with np.load(io.BytesIO(content)) as file:
        arrays = dict(file)
    if random.random() < 0.6:
        header = mutated_data(json.loads(arrays["header"].tobytes()), random)
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    else:
        name = random.choice(sorted(arrays))
        array = arrays[name] = arrays[name].copy()
        odd = random.choice((0, -1, 1, 7, 2**31, 2**62, -(2**62), 1e300, float("nan"), float("inf")))
        match random.randrange(4):
            case 0:
                del arrays[name]
            case 1:
                arrays[name] = array[: random.randrange(len(array) + 1)]
            case 2:
                arrays[name] = array.astype(random.choice((np.float64, np.int8, np.complex128, "U3")))
            case _:
                if array.size:
                    with np.errstate(all="ignore"):
                        array.flat[random.randrange(array.size)] = np.float64(odd).astype(array.dtype)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.save(member, array)
            file.writestr(f"{name}.npy", member.getvalue())
    return made.getvalue()
