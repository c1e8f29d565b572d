"""Which kernel scaled_dot_product_attention takes: torch's rules one by one, and the op that shows in a trace."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from forerun.sources.trace.inside.device import attention_choice
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
        ("a head that is not a multiple of 8", [heads(2, 8, 64, 60)] * 3, {}, HOPPER, False),
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


def takes(backend, *tensors, capability=HOPPER, **options):
    """Whether a kernel is chosen where only it and the products are enabled."""
    with sdpa_kernel([getattr(SDPBackend, backend), SDPBackend.MATH], set_priority=True):
        return choose(*tensors, **options, capability=capability) != "math"


@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (12, 0), (12, 1)])
def test_devices_with_little_shared_memory_have_no_backward_for_wide_heads(capability):
    for head_dim, dropout, trained in [
        (192, 0.0, True),
        (200, 0.0, False),
        (224, 0.0, False),
        (232, 0.0, True),
        (232, 0.1, False),
        (256, 0.1, False),
        (192, 0.1, True),
    ]:
        wide = heads(2, 8, 64, head_dim, grad=True)
        kept = [wide.detach(), wide.detach()]
        for tensors in ([wide, *kept], [*kept, wide]):
            taken = takes("FLASH_ATTENTION", *tensors, dropout_p=dropout, capability=capability)
            assert taken is trained, (head_dim, dropout)
        assert takes("FLASH_ATTENTION", wide.detach(), *kept, dropout_p=dropout, capability=capability)
    for other in ((8, 0), (9, 0), (10, 0)):
        wide = heads(2, 8, 64, 224, grad=True)
        assert takes("FLASH_ATTENTION", wide, wide, wide, capability=other)


@pytest.mark.parametrize(
    ("backend", "oldest"), [("FLASH_ATTENTION", (8, 0)), ("CUDNN_ATTENTION", (8, 0)), ("EFFICIENT_ATTENTION", (5, 0))]
)
def test_kernels_have_an_oldest_and_a_newest_device(backend, oldest):
    half = heads(2, 8, 64, 64, dtype=torch.float16)
    for capability in (oldest, (9, 0), (10, 3), (12, 1)):
        assert takes(backend, half, half, half, capability=capability)
    for capability in ((oldest[0] - 1, 9), (12, 2), (13, 0)):
        assert not takes(backend, half, half, half, capability=capability)


def test_bf16_came_with_ampere():
    for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
        assert takes(backend, Q, Q, Q, capability=AMPERE)
        assert not takes(backend, Q, Q, Q, capability=TURING)


def test_flash_takes_heads_up_to_256():
    for head_dim, taken in ((8, True), (256, True), (264, False)):
        q = heads(2, 8, 64, head_dim)
        assert takes("FLASH_ATTENTION", q, q, q) is taken
        assert takes("CUDNN_ATTENTION", q, q, q) is taken  # on Hopper
        assert takes("CUDNN_ATTENTION", q, q, q, capability=(10, 0)) is (head_dim == 8)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "capability", "taken"),
    [
        (128, 128, (10, 0), True),
        (136, 128, (10, 0), False),
        (128, 136, (10, 0), False),
        (192, 128, (10, 0), True),
        (192, 136, (10, 0), False),
        (192, 128, (12, 0), False),
        (256, 128, (9, 0), True),
        (64, 60, (9, 0), False),
        (64, 72, (9, 0), True),
    ],
)
def test_widths_of_cudnn(head_dim, value_dim, capability, taken):
    q, v = heads(2, 8, 64, head_dim), heads(2, 8, 64, value_dim)
    assert takes("CUDNN_ATTENTION", q, q, v, capability=capability) is taken


@pytest.mark.parametrize(
    ("dtype", "capability", "multiple"),
    [
        (torch.bfloat16, AMPERE, 8),
        (torch.float32, AMPERE, 4),
        (torch.float16, VOLTA, 8),
        (torch.float32, VOLTA, 1),
        (torch.float16, (6, 1), 1),
    ],
)
def test_rows_of_the_efficient_kernel_are_aligned(dtype, capability, multiple):
    for width in range(1, 17):
        q, v = heads(2, 8, 64, width, dtype=dtype), heads(2, 8, 64, 16, dtype=dtype)
        aligned = width % multiple == 0
        assert takes("EFFICIENT_ATTENTION", q, q, v, capability=capability) is aligned
        assert takes("EFFICIENT_ATTENTION", v, v, q, capability=capability) is aligned


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [
        ((64, 96), True),
        ((1, 96), True),
        ((64, 1), True),
        ((64, 64), False),
        ((96, 64), False),
        ((2, 8, 64, 96), True),
        ((2, 1, 1, 96), True),
        ((1, 8, 64, 1), True),
        ((8, 2, 64, 96), False),
        ((2, 8, 64, 8), False),
        ((96,), False),
        ((8, 64, 96), False),
    ],
)
def test_masks_of_cudnn_have_the_sizes_of_the_scores(sizes, fits):
    q, k = heads(2, 8, 64, 32), heads(2, 8, 96, 32)
    assert takes("CUDNN_ATTENTION", q, k, k, attn_mask=heads(*sizes)) is fits


def test_cudnn_takes_one_query_without_dropout_and_heads_that_divide():
    one, two = heads(2, 8, 1, 64), heads(2, 8, 2, 64)
    assert takes("CUDNN_ATTENTION", one, Q, Q)
    assert not takes("CUDNN_ATTENTION", one, Q, Q, dropout_p=0.1)
    assert takes("CUDNN_ATTENTION", two, Q, Q, dropout_p=0.1)
    assert takes("CUDNN_ATTENTION", Q, two, two)
    for key_heads, value_heads, taken in ((2, 4, True), (4, 2, True), (3, 2, False), (2, 3, False), (8, 8, True)):
        k, v = heads(2, key_heads, 64, 64), heads(2, value_heads, 64, 64)
        assert takes("CUDNN_ATTENTION", Q, k, v, enable_gqa=True) is taken
        flash = taken and key_heads == value_heads
        assert takes("FLASH_ATTENTION", Q, k, v, enable_gqa=True) is flash
        assert takes("CUDNN_ATTENTION", Q, k, v) is (key_heads == 8)
    other = heads(3, 8, 64, 64)
    for tensors in ((Q, other, other), (Q, Q, other), (other, Q, Q)):
        assert not takes("FLASH_ATTENTION", *tensors, enable_gqa=True)
        assert not takes("EFFICIENT_ATTENTION", *tensors)


def test_rows_lie_densely():
    turned, single = heads(2, 8, 64, 64).transpose(2, 3), heads(2, 8, 1, 64).transpose(2, 3)
    for tensors in ([turned, Q, Q], [Q, turned, Q], [Q, Q, turned]):
        for backend in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
            assert not takes(backend, *tensors)
    assert single.stride(-1) == 64
    assert takes("FLASH_ATTENTION", *[single] * 3)
    mask = heads(64, 64).t()
    assert not takes("CUDNN_ATTENTION", Q, Q, Q, attn_mask=mask)
    assert not takes("EFFICIENT_ATTENTION", Q, Q, Q, attn_mask=mask)


@pytest.mark.parametrize(("said", "off"), [("1", True), ("ON", True), ("true", True), ("0", False), ("", False)])
def test_cudnn_is_put_last_by_a_variable(said, off, monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", said)
    assert prefers_cudnn(HOPPER) is not off


# -- what torch does around the kernels ----------------------------------------------------------------------------


def test_masks_become_what_is_added_to_scores():
    mask = torch.tensor([[True, False]])
    assert attention_choice._additive(mask, torch.float32, -5.0).tolist() == [[0.0, -5.0]]
    floats = torch.ones(1, 2)
    assert attention_choice._additive(floats, torch.float32, -5.0) is floats
    assert attention_choice._additive(None, torch.float32, -5.0) is None


def test_cudnn_takes_its_lowest_number_for_what_a_mask_hides():
    """torch's convert_boolean_attn_mask_cudnn fills in -65504, the least finite number of fp16."""
    masks = []

    class TakesMask(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._scaled_dot_product_cudnn_attention.default:
                masks.append(args[3])
                nothing = args[0].new_empty(0)
                return (args[0], *[nothing] * 3, 64, 64, *[nothing] * 3)
            return func(*args, **kwargs or {})

    torch._C._set_sdp_priority_order(CUDNN_FIRST)
    mask = torch.ones(64, 64, dtype=torch.bool).tril()
    with TakesMask():
        attention_choice.attend(Q, Q, Q, mask)
    (taken,) = masks
    assert taken.dtype == Q.dtype
    assert set(taken[mask].tolist()) == {0.0}
    assert set(taken[~mask].tolist()) == {torch.tensor(torch.finfo(torch.float16).min, dtype=Q.dtype).item()}


def test_heads_are_padded_to_multiples_of_8_and_masks_to_rows_of_as_many():
    for width, padded in ((60, 64), (64, 64), (57, 64), (1, 8)):
        made = attention_choice._padded(torch.ones(1, 1, 2, width))
        assert made.shape[-1] == padded
        assert made.sum() == 2 * width
    q, k = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 5, 8)
    mask = torch.arange(20.0).reshape(4, 5)
    aligned = attention_choice._aligned(mask, q, k)
    assert aligned.shape == (2, 3, 4, 5)
    assert aligned.stride() == (0, 0, 8, 1)
    assert torch.equal(aligned[1, 2], mask)
    wide, k = torch.ones(4, 16), torch.ones(2, 3, 16, 8)
    assert attention_choice._aligned(wide, q, k).data_ptr() == wide.data_ptr()
    assert attention_choice._aligned(wide[:, :12], q, k[:, :, :12]).data_ptr() == wide.data_ptr()
    turned = torch.ones(16, 4).t()
    assert attention_choice._aligned(turned, q, k).stride() == (0, 0, 24, 1)


@pytest.mark.parametrize(
    ("tensors", "mask", "said"),
    [
        ([Q, Q, heads(2, 8, 64, 64, dtype=torch.float16)], None, "to have the same dtype"),
        ([Q, heads(2, 8, 64, 64, dtype=torch.float16), Q], None, "to have the same dtype"),
        ([heads(64), Q, Q], None, "at least 2 dimensional"),
        ([Q] * 3, heads(64, 64, dtype=torch.float16), "attn_mask dtype to be bool or float"),
    ],
)
def test_torchs_errors_of_wrong_inputs(tensors, mask, said):
    with pytest.raises(RuntimeError, match=said):
        attention_choice.attend(*tensors, mask)


def test_masks_of_other_dtypes_are_taken_with_fp32():
    full = heads(2, 8, 64, 64, dtype=torch.float32)
    attention_choice._check(full, full, full, heads(64, 64))
    attention_choice._check(Q, Q, Q, MASK)
    attention_choice._check(Q, Q, Q, heads(64, 64))
    attention_choice._check(heads(4, 4), heads(4, 4), heads(4, 4), None)


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
