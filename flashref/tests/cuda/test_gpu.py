"""The same suite on a card, where there is one; and the arrays of the libraries that live there."""

import numpy as np
import pytest

import flashref
from flashref.tests.cuda import suite

pytest.importorskip("numba", reason="the GPU kernels are Numba's")
from flashref.cuda.device import FallbackWarning
from flashref.tests.cuda import card

STATUS = flashref.cuda.status()
pytestmark = pytest.mark.skipif(not STATUS.usable or STATUS.simulated, reason=str(STATUS))


@pytest.mark.parametrize("rung", ["naive", "tiled", "registers"])
def test_right_answers(rung):
    assert list(suite.problems(rung, None)) == []


@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize("d", [32, 40, 64, 96, 128])
@pytest.mark.parametrize("n_q, n_k", [(1, 1), (5, 3), (17, 1), (113, 203), (203, 113), (257, 129)])
def test_tensor_core(n_q, n_k, d, causal):
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal(shape).astype(np.float16)
        for shape in ((2, 4, n_q, d), (2, 2, n_k, d), (2, 2, n_k, d))
    )
    rules = {"causal": causal, "kernel": "tensor_core"}
    o, lse = flashref.cuda.flash_attention_2(q, k, v, return_lse=True, **rules)
    exact = (x.astype(np.float64) for x in (q, k, v))
    gold, lse_gold = flashref.standard_attention(*exact, causal=causal, return_lse=True)
    assert o.dtype == np.float16 and lse.dtype == np.float32
    assert np.linalg.norm(o - gold) <= 1e-3 * np.linalg.norm(gold)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(lse_gold))
    seen = np.isfinite(lse_gold)
    assert np.abs(lse[seen] - lse_gold[seen]).max(initial=0) <= 1e-4


@pytest.mark.parametrize("kernel", ["hopper", "hopper bf16", "hopper steps"])
def test_hopper(kernel):
    """A seed of `card`, which has more; elsewhere `tensor_core` answers, and a warning says why."""
    if STATUS.compute_capability == (9, 0):
        if "bf16" in kernel:
            pytest.importorskip("ml_dtypes", reason="NumPy's bfloat16")
        found = card.run([kernel], range(1), card.AXES["n"] + card.MORE_SIZES)
        assert found["failed"] == []
        return
    x = np.ones((70, 64), np.float16)
    with pytest.warns(FallbackWarning, match="exactly compute capability 9.0"):
        o = flashref.cuda.flash_attention_2(x, x, x, kernel="hopper")
    np.testing.assert_array_equal(o, x)


@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize("d", [32, 40, 64, 96, 128])
@pytest.mark.parametrize("n_q, n_k", [(17, 20), (113, 203), (203, 113), (257, 129)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_tensor_core_backward(deterministic, n_q, n_k, d, causal):
    rng = np.random.default_rng(0)
    q, k, v, do = (
        rng.standard_normal(shape).astype(np.float16)
        for shape in ((2, 4, n_q, d), (2, 2, n_k, d), (2, 2, n_k, d), (2, 4, n_q, d))
    )
    o, lse = flashref.cuda.flash_attention_2(q, k, v, causal=causal, return_lse=True)
    got = flashref.cuda.flash_attention_2_backward(
        do, q, k, v, o, lse, causal=causal, deterministic=deterministic
    )
    exact = (x.astype(np.float64) for x in (do, q, k, v))
    gold = flashref.standard_attention_backward(*exact, causal=causal)
    for x, y in zip(got, gold, strict=True):
        assert x.dtype == np.float16
        assert np.linalg.norm(x - y) <= 1e-3 * np.linalg.norm(y)


@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype, close", [("float32", 1e-5), ("float16", 1e-3)])
def test_gradients_are_those_of_finite_differences(dtype, close, deterministic, causal):
    """Along random directions: no formula of a backward pass is in what is compared."""
    rng = np.random.default_rng(0)
    q, k, v, do = (
        rng.standard_normal(shape).astype(dtype)
        for shape in ((4, 130, 64), (2, 200, 64), (2, 200, 64), (4, 130, 64))
    )
    o, lse = flashref.cuda.flash_attention_2(q, k, v, causal=causal, return_lse=True)
    rules = {"causal": causal, "deterministic": deterministic}
    gradients = flashref.cuda.flash_attention_2_backward(do, q, k, v, o, lse, **rules)
    exact = [x.astype(np.float64) for x in (q, k, v)]

    def loss(which, step):
        moved = [x + step if i == which else x for i, x in enumerate(exact)]
        return (do * flashref.standard_attention(*moved, causal=causal)).sum()

    for which, gradient in enumerate(gradients):
        for _ in range(3):
            direction = rng.standard_normal(gradient.shape)
            e = 1e-5 * direction
            slope = (loss(which, e) - loss(which, -e)) / 2e-5
            size = np.linalg.norm(gradient.astype(np.float64)) * np.linalg.norm(direction)
            assert abs((gradient * direction).sum(dtype=np.float64) - slope) <= close * size


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("block_q, block_k", [(64, 64), (128, 128), (128, 64)])
def test_block_sparse(block_q, block_k, d, causal):
    rng = np.random.default_rng(0)
    n_q, n_k = 400, 470
    q, k, v, do = (
        rng.standard_normal(shape).astype(np.float16)
        for shape in ((4, n_q, d), (2, n_k, d), (2, n_k, d), (4, n_q, d))
    )
    mask = rng.random((-(-n_q // block_q), -(-n_k // block_k))) < 0.4
    mask[1] = False  # queries without tiles
    rules = {"block_mask": mask, "block_q": block_q, "block_k": block_k, "causal": causal}
    o, lse = flashref.cuda.block_sparse_attention(q, k, v, return_lse=True, **rules)
    got = flashref.cuda.block_sparse_attention_backward(do, q, k, v, o, lse, **rules)
    exact = [x.astype(np.float64) for x in (q, k, v)]
    o_gold, lse_gold = flashref.block_sparse_attention(*exact, return_lse=True, **rules)
    gold = flashref.block_sparse_attention_backward(
        do.astype(np.float64), *exact, o_gold, lse_gold, **rules
    )
    for x, y in zip((o, *got), (o_gold, *gold), strict=True):
        assert np.linalg.norm(x - y) <= 1e-3 * np.linalg.norm(y)


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # PyTorch's own thread, its first
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_pytorch_tensors_are_used_where_they_lie(dtype):
    torch = pytest.importorskip("torch", reason="PyTorch's tensors")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    q, k, v = (
        torch.randn(2, 70, 4, 64, device="cuda", dtype=getattr(torch, dtype)).transpose(1, 2)
        for _ in range(3)
    )
    with torch.cuda.stream(torch.cuda.Stream()):
        o, lse = flashref.cuda.flash_attention_2(q, k, v, return_lse=True)
        exact = [x.double() for x in (q, k, v)]
        gold = torch.nn.functional.scaled_dot_product_attention(*exact)
        close = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
        assert o.dtype == q.dtype and o.device == q.device and lse.dtype == torch.float32
        assert (o - gold).norm() <= close * gold.norm()
        leaves = [x.requires_grad_() for x in exact]
        do = torch.randn_like(o)
        expected = torch.autograd.grad(
            torch.nn.functional.scaled_dot_product_attention(*leaves), leaves, do.double()
        )
        got = flashref.cuda.flash_attention_2_backward(do, q, k, v, o, lse)
        for x, y in zip(got, expected, strict=True):
            assert x.dtype == q.dtype and (x - y).norm() <= 2 * close * y.norm()


def test_what_requires_grad_is_refused():
    torch = pytest.importorskip("torch", reason="PyTorch's tensors")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    q = torch.randn(1, 1, 8, 64, device="cuda", requires_grad=True)
    with pytest.raises(TypeError, match="q requires grad"):
        flashref.cuda.flash_attention_2(q, q.detach(), q.detach())
