"""Which kernel scaled_dot_product_attention takes: torch's rules one by one, and the op that shows in a trace."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from forerun.sources.trace.inside.device.attention_choice import choose, prefers_cudnn

HOPPER, AMPERE, ADA, TURING, VOLTA = (9, 0), (8, 0), (8, 9), (7, 5), (7, 0)
CUDNN_FIRST = [3, 1, 2, 0, 4]
TORCHS_OWN = [1, 2, 0, 3, 4]


@pytest.fixture(autouse=True)
def torchs_own_order():
    yield
    torch._C._set_sdp_priority_order(TORCHS_OWN)


def heads(*sizes, dtype=torch.bfloat16, grad=False):
    return torch.empty(sizes, dtype=dtype, device="meta", requires_grad=grad)


Q = heads(2, 8, 64, 64)


def test_flash_is_first_and_cudnn_where_it_is_put_first():
    assert choose(Q, Q, Q, is_causal=True, capability=AMPERE) == "flash"
    torch._C._set_sdp_priority_order(CUDNN_FIRST)
    assert choose(Q, Q, Q, is_causal=True, capability=HOPPER) == "cudnn"


@pytest.mark.parametrize(
    ("capability", "first"),
    [((9, 0), True), ((10, 0), True), ((10, 3), True), ((8, 0), False), ((8, 9), False), ((12, 0), False)],
)
def test_cudnn_is_preferred_on_hopper_and_data_centre_blackwell(capability, first, monkeypatch):
    assert prefers_cudnn(capability) is first
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert not prefers_cudnn(capability)


MASK = torch.zeros(64, 64, dtype=torch.bool, device="meta")


@pytest.mark.parametrize(
    ("why", "tensors", "options", "expected"),
    [
        ("fp32 is for the efficient kernel", [heads(2, 8, 64, 64, dtype=torch.float32)] * 3, {}, "efficient"),
        ("flash takes no mask", [Q] * 3, {"attn_mask": MASK}, "efficient"),
        ("fp64 is for none", [heads(2, 8, 64, 64, dtype=torch.float64)] * 3, {}, "math"),
        ("three dims are for none", [heads(8, 64, 64)] * 3, {}, "math"),
        ("a head of 512 is too wide for flash", [heads(2, 8, 64, 512)] * 3, {}, "efficient"),
        ("flash pads heads", [heads(2, 8, 64, 60)] * 3, {}, "flash"),
        ("rows of 4 elements are not aligned", [heads(2, 8, 64, 60)] * 3, {"attn_mask": MASK}, "math"),
        ("values of another width", [Q, Q, heads(2, 8, 64, 32)], {}, "efficient"),
        ("causal and not square", [Q, heads(2, 8, 96, 64), heads(2, 8, 96, 64)], {"is_causal": True}, "efficient"),
        ("not square", [Q, heads(2, 8, 96, 64), heads(2, 8, 96, 64)], {}, "flash"),
        ("grouped heads said so", [Q, heads(2, 2, 64, 64), heads(2, 2, 64, 64)], {"enable_gqa": True}, "flash"),
        ("grouped heads unsaid", [Q, heads(2, 2, 64, 64), heads(2, 2, 64, 64)], {}, "math"),
        (
            "grouped and masked: not the efficient kernel",
            [Q, heads(2, 2, 64, 64), heads(2, 2, 64, 64)],
            {"enable_gqa": True, "attn_mask": MASK},
            "cudnn",
        ),
        ("no keys", [Q, heads(2, 8, 0, 64), heads(2, 8, 0, 64)], {}, "math"),
        ("last dim not dense", [heads(2, 8, 64, 64).transpose(2, 3)] * 3, {}, "math"),
        ("dropout", [Q] * 3, {"dropout_p": 0.1}, "flash"),
        ("mixed dtypes", [Q, Q, heads(2, 8, 64, 64, dtype=torch.float16)], {}, "math"),
    ],
)
def test_the_rules_of_flash_and_efficient_attention_on_ampere(why, tensors, options, expected):
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if expected == "cudnn":
        backends.insert(2, SDPBackend.CUDNN_ATTENTION)
    with sdpa_kernel(backends, set_priority=True):
        assert choose(*tensors, **options, capability=AMPERE) == expected


@pytest.mark.parametrize(
    ("why", "tensors", "options", "capability", "taken"),
    [
        ("Hopper's wide heads", [heads(2, 8, 64, 256)] * 3, {}, HOPPER, True),
        ("Ampere's are not wide", [heads(2, 8, 64, 256)] * 3, {}, AMPERE, False),
        ("DeepSeek's heads on Blackwell", [heads(2, 8, 64, 192)] * 2 + [heads(2, 8, 64, 128)], {}, (10, 0), True),
        ("a head that is no multiple of 8", [heads(2, 8, 64, 60)] * 3, {}, HOPPER, False),
        ("a boolean mask for all", [Q] * 3, {"attn_mask": MASK}, HOPPER, True),
        ("a mask of 3 dims", [Q] * 3, {"attn_mask": MASK[None]}, HOPPER, False),
        ("a mask with a gradient", [Q] * 3, {"attn_mask": heads(64, 64, grad=True)}, HOPPER, False),
        ("one key", [Q, heads(2, 8, 1, 64), heads(2, 8, 1, 64)], {}, HOPPER, False),
        ("fp32", [heads(2, 8, 64, 64, dtype=torch.float32)] * 3, {}, HOPPER, False),
        ("Turing", [heads(2, 8, 64, 64, dtype=torch.float16)] * 3, {}, TURING, False),
    ],
)
def test_the_rules_of_cudnn(why, tensors, options, capability, taken):
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], set_priority=True):
        assert (choose(*tensors, **options, capability=capability) == "cudnn") is taken


def test_older_devices_and_wide_heads_that_are_trained():
    half = heads(2, 8, 64, 64, dtype=torch.float16)
    assert choose(half, half, half, capability=TURING) == "efficient"
    assert choose(Q, Q, Q, capability=VOLTA) == "math"
    wide = heads(2, 8, 64, 224, grad=True)
    assert choose(wide, wide, wide, capability=ADA) == "efficient"
    assert choose(wide, wide, wide, capability=AMPERE) == "flash"
    with torch.no_grad():
        assert choose(wide, wide, wide, capability=ADA) == "flash"


def test_switches_are_honoured_and_none_left_is_torchs_error():
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert choose(Q, Q, Q) == "efficient"
    with sdpa_kernel(SDPBackend.MATH):
        assert choose(Q, Q, Q) == "math"
    wide = heads(2, 8, 64, 512)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
        choose(wide, wide, wide)
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], set_priority=True):
            assert choose(Q, Q, Q) == "math"
    finally:
        torch.use_deterministic_algorithms(False)


INSTALLED = """
    import json, os
    import torch
    import torch.nn.functional as F
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils._python_dispatch import TorchDispatchMode
    from forerun.sources.trace.inside.device.attention_choice import install
    from forerun.sources.trace.inside.device.machine import VirtualCuda

    device = VirtualCuda(8, lambda stream: 7, lambda event, stream: 0, lambda: 0)
    device.install()
    FakeTensorMode.avoid_device_init = property(lambda mode: True)
    real = torch.randn(1, 2, 8, 8)
    before = F.scaled_dot_product_attention(real, real, real)
    install((9, 0))
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if func is torch.ops.aten.scaled_dot_product_attention.default:
                with self:
                    return func.decompose(*args, **kwargs)
            seen.append(func._schema.name.removeprefix("aten::"))
            return func(*args, **kwargs)

    def ops(function, *args, **kwargs):
        seen.clear()
        out = function(*args, **kwargs)
        if out.requires_grad:
            out.sum().backward()
        names = [n for n in seen if "attention" in n or n in ("bmm", "constant_pad_nd", "slice", "where")]
        return names, list(out.shape)

    attend = F.scaled_dot_product_attention
    found = {}
    with FakeTensorMode(), Seen():
        def heads(*sizes, grad=True):
            return torch.empty(sizes, dtype=torch.bfloat16, device="cuda", requires_grad=grad)
        q, k = heads(2, 8, 64, 64), heads(2, 8, 61, 64)
        mask = torch.ones(64, 61, dtype=torch.bool, device="cuda")
        found["default"] = ops(attend, q, q, q, is_causal=True)
        for backend in ("FLASH", "EFFICIENT", "CUDNN"):
            with sdpa_kernel(getattr(SDPBackend, backend + "_ATTENTION")):
                found[backend] = ops(attend, q, q, q, is_causal=True)
        with sdpa_kernel(SDPBackend.MATH):
            found["MATH"] = ops(attend, q, q, q)
        with torch.no_grad():
            found["no_grad"] = ops(attend, q, q, q)
        with torch.inference_mode():
            still = heads(2, 8, 64, 64, grad=False)
            found["inference"] = ops(attend, still, still, still)
        odd = heads(2, 8, 64, 60)
        found["padded"] = ops(attend, odd, odd, odd)
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), torch.no_grad():
            found["masked"] = ops(attend, q, k, k, attn_mask=mask)
    with Seen():
        found["cpu"] = ops(attend, real, real, real)
        with torch.inference_mode():
            found["cpu inference"] = ops(attend, real, real, real)
    found["equal"] = bool(torch.equal(before, attend(real, real, real)))
    print(json.dumps(found), flush=True)
    os._exit(0)
"""


def test_the_chosen_op_shows_in_a_trace_and_the_cpu_keeps_its_own():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(INSTALLED)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)

    def both(kind):
        return [f"_scaled_dot_product_{kind}_attention", f"_scaled_dot_product_{kind}_attention_backward"]

    size = [2, 8, 64, 64]
    assert found["default"] == [both("cudnn"), size]
    for kind in ("FLASH", "EFFICIENT", "CUDNN"):
        assert found[kind] == [both(kind.lower()), size]
    assert found["MATH"] == [["bmm"] * 6, size]
    assert found["no_grad"] == found["inference"] == [both("cudnn")[:1], size]
    forward, backward = both("flash")
    pads = ["constant_pad_nd"] * 3
    assert found["padded"] == [[*pads, forward, "slice", backward, *pads], [2, 8, 64, 60]]
    assert found["masked"] == [["where", "constant_pad_nd", "slice", both("efficient")[0]], size]
    own = ["_scaled_dot_product_flash_attention_for_cpu"]
    assert [name for name in found["cpu"][0] if "attention" in name] == own
    assert [name for name in found["cpu inference"][0] if "attention" in name] == own
    assert found["equal"]
