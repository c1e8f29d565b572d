"""Sparse tensors have as many elements as on the CPU, and operations on them cost the bytes of these elements."""

import pytest
from virtual_process import run_virtual

pytest.importorskip("torch", reason="tracing needs torch")
PLACES = ([[0, 3, 3, 1, 0], [1, 0, 0, 2, 2]], [[2, 2, 0, 1, 3], [1, 1, 0, 2, 2]])


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_virtual(
        f"""
        from forerun.core.program.types import Category
        places = {PLACES!r}
        CALLS = {{
            "made": lambda a, b, d: a,
            "coalesced": lambda a, b, d: a.coalesce(),
            "twice coalesced": lambda a, b, d: a.coalesce().coalesce(),
            "sum": lambda a, b, d: a + b,
            "sum coalesced": lambda a, b, d: (a + b).coalesce(),
            "difference": lambda a, b, d: a - b,
            "summed into": lambda a, b, d: a.clone().add_(b, alpha=2),
            "scaled": lambda a, b, d: a * 3,
            "halved": lambda a, b, d: a.coalesce() / 2,
            "negative": lambda a, b, d: -a,
            "copied": lambda a, b, d: a.clone(),
            "in half": lambda a, b, d: a.to(torch.float16),
            "emptied": lambda a, b, d: a.clone().zero_(),
            "overwritten": lambda a, b, d: a.clone().copy_(b.coalesce()),
            "transposed": lambda a, b, d: a.t(),
            "dense": lambda a, b, d: a.to_dense(),
            "added to dense": lambda a, b, d: d + a,
            "added into dense": lambda a, b, d: d.clone().add_(a, alpha=-1),
            "masked": lambda a, b, d: d.sparse_mask(a.coalesce()),
            "product": lambda a, b, d: a @ d.t(),
            "product by its function": lambda a, b, d: torch.sparse.mm(a, d.t()),
            "product added": lambda a, b, d: torch.addmm(torch.ones(4, 4, device=d.device), a, d.t()),
        }}

        def said(out):
            sparse = out.layout is torch.sparse_coo
            tail = [out._nnz(), out.is_coalesced(), list(out._indices().shape), list(out._values().shape),
                    out.sparse_dim(), out.dense_dim()] if sparse else []
            return [list(out.shape), str(out.dtype), *tail]

        def inputs(device):
            made = [torch.sparse_coo_tensor(torch.tensor(p, device=device), torch.ones(5, device=device), (4, 3))
                    for p in places]
            return *made, torch.ones(4, 3, device=device)

        result["calls"] = {{name: [said(call(*inputs(device))) for device in ("cpu", "cuda")]
                           for name, call in CALLS.items()}}
        result["moved"] = [said(t.cuda().cpu()) + [str(t.cuda().device)] for t in inputs("cpu")[:2]]

        def rows(call):
            recorder.start()
            out = call()
            table = recorder.ops.build()
            return [[table.name[n[0]], int(table.flops[n[0]]), int(table.bytes_read[n[0]]),
                     int(table.bytes_written[n[0]])] for n in recorder._nodes]

        a, b, d = inputs("cuda")
        wide = torch.ones(3, 64, device="cuda")
        sorted_a = a.coalesce()
        result["product"] = [row for row in rows(lambda: torch.sparse.mm(sorted_a, wide)) if row[0] == "sparse_mm"]
        try:
            a.coalesce().sin_().cumsum(0)
        except ForerunError as error:
            result["unknown"] = str(error)

        result["steps"] = {{}}
        for name, layer, optimizer in (
            ("sgd", nn.EmbeddingBag(1000, 16, sparse=True, mode="sum"), lambda p: torch.optim.SGD(p, 0.1)),
            ("adam", nn.Embedding(1000, 16, sparse=True), torch.optim.SparseAdam),
            ("adagrad", nn.EmbeddingBag(1000, 16, sparse=True, mode="mean"), torch.optim.Adagrad),
        ):
            layer.cuda()
            update = optimizer(layer.parameters())
            for _ in range(2):
                held = recorder.memory.allocated_bytes
                words = (torch.arange(128) % 10).reshape(32, 4).cuda()
                loss = layer(words).sum()
                loss.backward()
                del words, loss
                gradient = layer.weight.grad
                update.step()
                counts = [gradient._nnz(), gradient.coalesce()._nnz()]
                before = recorder.memory.allocated_bytes
                layer.weight.grad = gradient = None
                result["steps"][name] = [*counts, before - recorder.memory.allocated_bytes]
            result["steps"][name].append(recorder.memory.allocated_bytes - held)
        """,
        tmp_path_factory.mktemp("sparse"),
    )


def test_every_operation_returns_what_it_returns_on_the_cpu(answers):
    assert len(answers["calls"]) == 22
    for name, (real, traced) in answers["calls"].items():
        assert traced == real, name


def test_sparse_tensors_move_with_their_elements(answers):
    for found in answers["moved"]:
        assert found[:6] == [[4, 3], "torch.float32", 5, False, [2, 5], [5]]
        assert found[-1] == "cuda:0"


def test_a_product_reads_a_row_for_each_element(answers):
    ((name, flops, read, written),) = answers["product"]
    assert (name, flops, written) == ("sparse_mm", 2 * 4 * 64, 4 * 64 * 4)
    assert read == 4 * 64 * 4 + 4 * 2 * 8 + 4 * 4


def test_the_gradient_of_an_embedding_is_as_large_as_its_lookups(answers):
    for found in answers["steps"].values():
        assert found == [128, 10, 128 * (16 * 4 + 8), 0]


def test_an_operation_that_nobody_knows_is_named(answers):
    assert answers["unknown"].startswith("aten.cumsum.default: can't be traced with sparse tensors")
