"""Known values of fake tensors, and what the oracle answers where nobody can know."""

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402

from forerun.common.errors import ForerunError  # noqa: E402
from forerun.sources.trace.inside.kernels import shapes  # noqa: E402
from forerun.sources.trace.inside.values import Oracle, known_value, set_value, share_value  # noqa: E402

aten = torch.ops.aten


class Followed(TorchDispatchMode):
    """Fakes with an oracle that follows every operator, as in a traced process."""

    def __init__(self, oracle):
        super().__init__()
        self.oracle = oracle

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = [*args, *kwargs.values()]
        flat = [one for value in given for one in (value if isinstance(value, (list, tuple)) else [value])]
        with _disable_current_modes():
            self.oracle.follow(func, [one for one in flat if isinstance(one, FakeTensor)], args, kwargs, out)
        return out


@pytest.fixture
def oracle():
    made = Oracle()
    with FakeTensorMode(), Followed(made):
        yield made


def value(tensor):
    with _disable_current_modes():
        known = known_value(tensor)
        return None if known is None else known.tolist()


def weights(*sizes, dtype=torch.float32):
    """A tensor whose value nobody knows."""
    return torch.empty(sizes, dtype=dtype)


# -- values that are known -----------------------------------------------------------------------------------------


def test_what_follows_from_known_values_is_known(oracle):
    a = torch.arange(6)
    assert value(a * 2 + 1) == [1, 3, 5, 7, 9, 11]
    assert value((a > 2).sum()) == 3
    assert value(a + weights(6).long()) is None
    assert [value(part) for part in a.split([2, 4])] == [[0, 1], [2, 3, 4, 5]]
    assert value(torch.cat([a, a[:1]])) == [0, 1, 2, 3, 4, 5, 0]
    counts = torch.zeros_like(a[:3])
    with _disable_current_modes():  # the CPU has no histc of integers, as CUDA has
        oracle.follow(aten.histc.default, [a], (a, 3, 0, 6), {}, counts)
    assert value(counts) == [2, 2, 2]


def test_tensors_that_are_made_of_a_shape_alone_are_known(oracle):
    x = weights(2)
    assert value(torch.zeros_like(x)) == value(x.new_zeros(2)) == [0, 0]
    assert value(torch.ones_like(x)) == value(x.new_ones(2)) == [1, 1]
    assert value(torch.full_like(x, 3)) == value(x.new_full((2,), 3)) == [3, 3]
    assert value(torch.empty_like(x)) is value(x.new_empty(2)) is value(torch.empty(2)) is None


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1 << 16), (torch.int64, 1 << 21), (torch.bool, 1 << 21)])
def test_only_small_tensors_are_computed(oracle, dtype, most):
    assert known_value(torch.ones(most, dtype=dtype)) is not None
    large = torch.ones(most + 1, dtype=dtype)
    assert known_value(large) is None
    assert known_value(large[:1]) is None


def test_views_change_together(oracle):
    whole = torch.arange(6)
    view = whole.view(2, 3)[1]
    whole.add_(10)
    assert value(view) == [13, 14, 15]
    view.zero_()
    assert value(whole) == [10, 11, 12, 0, 0, 0]
    copy = whole.clone()
    view.copy_(weights(3).long())
    assert value(whole) is value(view) is None
    assert value(copy) == [10, 11, 12, 0, 0, 0]
    whole.fill_(7)
    assert value(copy + 1) == [11, 12, 13, 1, 1, 1]


def test_what_an_operator_writes_by_name_is_forgotten(oracle):
    told = []
    oracle.on_write = told.append
    out = torch.zeros(3)
    torch.add(weights(3), 1.0, out=out)
    assert value(out) is None
    assert [one[0] is out for one in told] == [True]
    kept, other = torch.zeros(2), torch.zeros(2)
    oracle.overwritten([kept])
    assert (value(kept), value(other)) == (None, [0, 0])
    assert told[1] == [kept]
    oracle.overwritten([])
    assert len(told) == 2


def test_a_value_is_set_or_shared(oracle):
    x, y, z = weights(2), weights(2), torch.zeros(2)
    with _disable_current_modes():
        pair, many = torch.tensor([1.0, 2.0]), torch.ones((1 << 16) + 1)
    set_value(x, pair)
    share_value(y, x)
    assert value(y) == [1, 2]
    oracle.overwritten([x])
    assert value(x) is value(y) is None
    share_value(z, weights(2))
    assert value(z) is None
    set_value(x, many)
    assert value(x) is None


def test_real_tensors_of_the_host_are_their_own_value():
    tensor = torch.tensor([1, 2])
    assert known_value(tensor) is tensor
    assert known_value(torch.empty(2, device="meta")) is None


# -- what nobody knows ---------------------------------------------------------------------------------------------


def test_the_host_reads_one_and_false(oracle):
    assert [oracle.scalar(weights(1, dtype=dtype)) for dtype in (torch.float32, torch.int64, torch.bool)] == [
        1.0,
        1,
        False,
    ]
    assert type(oracle.scalar(weights(1))) is float
    assert type(oracle.scalar(weights(1, dtype=torch.int32))) is int
    known, seven = torch.arange(3), torch.full((1,), 7)
    copies = [oracle.on_host(one) for one in (weights(2), weights(2, dtype=torch.bool), known)]
    with _disable_current_modes():
        assert oracle.scalar(seven) == 7
        assert [copy.tolist() for copy in copies] == [[1, 1], [False, False], [0, 1, 2]]
        copies[-1].zero_()
    assert value(known) == [0, 1, 2]
    assert value((weights(3) > 0).all()) is True
    assert value((weights(3, 2) > 0).all(1)) == [True] * 3
    assert value((weights(3) > 0).any()) is None


@pytest.mark.parametrize("size", [4, 3000])
def test_numbers_are_finite_in_tensors_of_any_size(oracle, size):
    x = torch.empty(size, size)
    finite, none = torch.isfinite(x), x.isinf().logical_or(x.isnan())
    answers = [finite.all(), finite.float().min(), none.any(), none.float().max(), torch.isnan(x).sum(), (x != x).any()]
    mixed = none.float() + torch.arange(size)  # differs from place to place
    others, counted = x == torch.empty(size, size), finite.sum()
    with _disable_current_modes():
        assert [known_value(one).item() for one in answers] == [True, 1.0, False, 0.0, 0, False]
        assert known_value(others) is None
        assert (known_value(mixed) is None) == (known_value(counted) is None) == (size > 1000)
        assert size > 1000 or known_value(counted).item() == size * size


def test_choices_are_made_in_turn(oracle):
    scores = weights(4, 6)
    assert value(scores.topk(2)[1]) == [[0, 1], [2, 3], [4, 5], [0, 1]]
    assert value(scores.topk(2, 0)[1]) == [[0, 2, 0, 2, 0, 2], [1, 3, 1, 3, 1, 3]]
    assert value(scores.topk(2)[0]) is None
    assert value(scores.argmax(1)) == [0, 1, 2, 3]
    assert value(scores.argmin(0)) == [0, 1, 2, 3, 0, 1]
    assert value(scores.argmax()) == 0
    assert value(scores.sort()[1]) == [[0, 1, 2, 3, 4, 5]] * 4
    assert value(scores.sort(0)[1]) == [[row] * 6 for row in range(4)]
    assert value(weights(6).sort(descending=True)[1]) == [0, 1, 2, 3, 4, 5]
    assert value(weights(2, 3, 2).sort(descending=True)[1])[0] == [[0, 1]] * 3
    assert value(scores.sort(dim=0, stable=True)[1]) == [[row] * 6 for row in range(4)]
    assert value(torch.multinomial(scores, 1)) == [[0], [1], [2], [3]]
    assert value(torch.multinomial(weights(6), 3)) == [0, 1, 2]
    assert value(torch._is_all_true(weights(3) > 0)) is True
    known = torch.arange(6) * -1
    assert value(known.topk(2)[1]) == [0, 1]
    assert value(known.argmin()) == 5


def test_skewed_choices_follow_zipf():
    rows, experts = 20000, 8
    chosen = Oracle(skew=1.0).choices((rows, 1), experts)
    share = torch.bincount(chosen.flatten(), minlength=experts) / rows
    zipf = 1 / torch.arange(1, experts + 1)
    assert torch.allclose(share, zipf / zipf.sum(), atol=0.02)
    several = Oracle(skew=1.0).choices((100, 3), experts)
    assert several.shape == (100, 3)
    assert all(len(set(row)) == 3 for row in several.tolist())
    assert int(several.max()) < experts
    every = Oracle(skew=2.0).choices((5, experts), experts)
    assert all(sorted(row) == list(range(experts)) for row in every.tolist())
    assert Oracle().choices((), 4).shape == ()
    assert Oracle().choices((3, 0), 4).shape == (3, 0)


def shaped(oracle, func, *args, **kwargs):
    """The real result of an operator, as numbers where it has some."""
    with _disable_current_modes():
        found = oracle.shape_of(func, args, kwargs)
        first = found[0] if isinstance(found, tuple) else found
        return first if first is None or first.is_meta else first.tolist()


def test_shapes_that_depend_on_data_are_those_of_known_values(oracle):
    a = torch.arange(6)
    assert shaped(oracle, aten.nonzero.default, a > 3) == [[4], [5]]
    assert shaped(oracle, aten.masked_select.default, weights(2, 6), a > 1).numel() == 8
    assert shaped(oracle, aten._unique2.default, a // 2) == [0, 1, 2]
    assert shaped(oracle, aten.repeat_interleave.Tensor, a[:3]) == [1, 2, 2]
    assert shaped(oracle, aten.bincount.default, a // 4) == [4, 2]
    assert shaped(oracle, aten.bincount.default, a // 4, None, 3) == [4, 2, 0]
    assert shaped(oracle, aten.bincount.default, a // 4, minlength=4) == [4, 2, 0, 0]
    assert shaped(oracle, aten.add.Tensor, a, a) is None


def test_masks_of_unknown_values_select_everything_and_counts_are_equal(oracle):
    mask = weights(2, 3, dtype=torch.bool)
    assert len(shaped(oracle, aten.nonzero.default, mask)) == 6
    picked = shaped(oracle, aten.masked_select.default, weights(4, 2, 3, dtype=torch.bfloat16), mask)
    assert (picked.numel(), picked.dtype) == (24, torch.bfloat16)
    unknown = weights(6, dtype=torch.int64)
    assert shaped(oracle, aten._unique2.default, unknown) == [0, 1, 2, 3, 4, 5]
    assert len(shaped(oracle, aten.repeat_interleave.Tensor, unknown)) == 6
    assert len(shaped(oracle, aten.repeat_interleave.Tensor, unknown, output_size=18)) == 18
    assert len(shaped(oracle, aten.repeat_interleave.Tensor, unknown, output_size=3)) == 6
    assert shaped(oracle, aten.bincount.default, unknown, None, 3) == [2, 2, 2]
    assert shaped(oracle, aten.bincount.default, unknown) == [6]


# -- operators without a fake version ------------------------------------------------------------------------------


def test_shapes_of_fused_recurrent_cells_are_those_of_cuda():
    gates, hx = torch.empty(4, 144), torch.empty(4, 48)
    out, workspace = shapes._gru_cell(gates, gates, hx)
    assert (out.shape, workspace.shape) == ((4, 48), (4, 5 * 48))  # RNN.cu keeps five values of each output
    for has_bias in (True, False):
        *gradients, of_state, first, second = shapes._gru_cell_backward(hx, workspace, has_bias)
        assert [one.shape for one in (*gradients, of_state)] == [(4, 144), (4, 144), (4, 48)]
        assert [one if one is None else one.shape for one in (first, second)] == [(144,) if has_bias else None] * 2


@pytest.fixture
def shapes_installed():
    shapes.install()
    yield
    shapes._installed.pop()._destroy()


@pytest.mark.usefixtures("shapes_installed")
def test_torch_finds_the_shapes_of_fused_recurrent_cells():
    gates, hx = torch.empty(4, 144, device="meta"), torch.empty(4, 48, device="meta")
    out, workspace = aten._thnn_fused_gru_cell(gates, gates, hx)
    assert (out.shape, workspace.shape) == ((4, 48), (4, 240))
    *gradients, first, second = aten._thnn_fused_gru_cell_backward(out, workspace, True)
    assert [one.shape for one in gradients] == [(4, 144), (4, 144), (4, 48)]
    assert [first.shape, second.shape] == [(144,), (144,)]


def test_an_operator_is_tried_with_zeros_and_known_values_on_the_cpu():
    with FakeTensorMode():
        known, unknown = torch.empty(3), torch.empty(3, dtype=torch.float64)
    set_value(known, torch.tensor([1.0, 2.0, 3.0]))
    assert shapes.tried_on_cpu(aten.mul.Tensor, (known, known), {}).tolist() == [1, 4, 9]
    assert shapes.tried_on_cpu(aten.add.Tensor, (unknown, known), {"alpha": 2}).tolist() == [2, 4, 6]
    where = shapes.tried_on_cpu(aten.zeros.default, ([2],), {"device": torch.device("meta")})
    assert where.device.type == "cpu"
    large = torch.empty((1 << 25) + 1, device="meta")
    with pytest.raises(ForerunError, match=r"aten.add.Tensor: .*its inputs are too large to run it on the CPU"):
        shapes.tried_on_cpu(aten.add.Tensor, (large, large), {})
    with pytest.raises(ForerunError, match=r"aten.mm.default: .*doesn't run on the CPU \(.+\); register one with"):
        shapes.tried_on_cpu(aten.mm.default, (unknown, unknown), {})
