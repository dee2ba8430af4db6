"""The backward kernels of `tensor_core` themselves, without a GPU: run in NumPy, and wounded.

The answers come from `flashref.standard_attention_backward` in float64 on the same rounded inputs;
o and lse come from the emulated forward pass.
"""

import numpy as np
import pytest

import flashref

pytest.importorskip("numba", reason="the GPU kernels are Numba's")

from flashref.cuda import emulator
from flashref.cuda import tensor_core_backward as kernels
from flashref.tests.cuda.emulated import decode, draw, encode, wound
from flashref.tests.oracle import Gold

NARROW, WIDE = (32, 16, 2, True), (64, 16, 4, False)  # for the forward pass: up to 64 columns, 128
SMALL = {"keys": NARROW, "queries": NARROW}
BROAD = {"keys": (64, 32, 4, False), "queries": WIDE}
FIRST = {d: {"keys": kernels.KEYS[d][0], "queries": kernels.QUERIES[d][0]} for d in (64, 128)}


def run(do, q, k, v, half="float16", blocks=SMALL, tiles=None, **rules):
    """Return dq, dk, dv as bits, and the counts."""
    wide = max(q.shape[-1], v.shape[-1]) > 64
    forward = {"half": half, "blocks": WIDE if wide else NARROW, "tiles": tiles, **rules}
    o, lse, _ = emulator.attention(q, k, v, **forward)
    return emulator.attention_backward(
        do, q, k, v, o, lse, half=half, blocks=blocks, tiles=tiles, **rules
    )


def case(
    n_q=32, n_k=32, d=64, d_v=None, heads=(2, 1), half="float16", seed=0, blocks=SMALL, **rules
):
    """Return the largest relative error of dq, dk, dv, and the counts."""
    arrays = draw(n_q, n_k, d, d_v or d, heads, half, seed)
    *got, counts = run(*arrays, half, blocks, **rules)
    do, *qkv = (decode(x, half) for x in arrays)
    gold = flashref.standard_attention_backward(do, *qkv, **rules)
    alone = Gold(*qkv, **rules)  # whom nobody sees, or who sees nobody
    errors = []
    for name, x, y in zip(("dq", "dk", "dv"), got, gold, strict=True):
        x, zero = decode(x, half), alone.empty_rows if name == "dq" else alone.unseen_keys
        assert np.isfinite(x).all(), f"{name} has what is not finite, or was not written"
        assert (x[zero] == 0).all(), f"{name} must be exactly 0 somewhere, and is not"
        # with one key, dq and dk are 0 and rounding is all there is: the floor is a small entry
        errors.append(np.linalg.norm(x - y) / max(np.linalg.norm(y), 0.05 * np.sqrt(y.size), 1))
    return max(errors), counts


@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize(
    "n_q, n_k, d, d_v, heads, blocks",
    [
        (32, 32, 64, 64, (2, 1), SMALL),
        (45, 77, 40, 24, (4, 2), SMALL),
        (77, 45, 32, 64, (3, 1), SMALL),
        (50, 7, 64, 64, (1, 1), SMALL),
        (40, 1, 8, 8, (2, 2), SMALL),
        (70, 45, 128, 128, (2, 1), BROAD),
        (45, 70, 96, 72, (1, 1), BROAD),
        (70, 130, 64, 64, (2, 1), FIRST[64]),
        (150, 70, 128, 128, (2, 1), FIRST[128]),
    ],
)
def test_right_answers(n_q, n_k, d, d_v, heads, blocks, causal):
    error, counts = case(n_q, n_k, d, d_v, heads, blocks=blocks, causal=causal)
    assert error <= 1e-3
    assert counts["rows on one bank"] == 1


@pytest.mark.parametrize("scale", [-0.3, 0.3, 1.0])
def test_any_scale(scale):
    assert case(33, 20, causal=True, scale=scale)[0] <= 1e-3


def test_scale_zero():
    """P is uniform, dQ and dK are exactly 0."""
    assert case(33, 20, causal=True, scale=0.0)[0] <= 1e-3


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d, blocks", [(64, SMALL), (40, SMALL), (128, BROAD)])
def test_bfloat16(d, blocks, causal):
    assert case(45, 50, d, half="bfloat16", causal=causal, blocks=blocks)[0] <= 8e-3


@pytest.mark.parametrize("table", [kernels.KEYS, kernels.QUERIES], ids=["keys", "queries"])
@pytest.mark.parametrize("columns, which", [(c, i) for c in (64, 128) for i in range(3)])
def test_every_block_size(table, columns, which):
    own = "keys" if table is kernels.KEYS else "queries"
    blocks = (SMALL if columns == 64 else BROAD) | {own: table[columns][which]}
    assert case(70, 75, columns, heads=(1, 1), causal=True, blocks=blocks)[0] <= 1e-3


def test_ten_seeds():
    for seed in range(10):
        assert case(45, 50, 32, seed=seed, causal=(False, True, "top-left")[seed % 3])[0] <= 1e-3


def test_several_sequences():
    """A batch of two gives what each gives alone."""
    one, two = (draw(20, 33, 16, 16, (2, 1), "float16", seed) for seed in (0, 1))
    both = [np.concatenate(pair) for pair in zip(one, two, strict=True)]
    for x, y, z in zip(run(*both)[:3], run(*one)[:3], run(*two)[:3], strict=True):
        np.testing.assert_array_equal(x, np.concatenate([y, z]))


def test_nothing_to_sum():
    """No keys: dq is 0. No queries: dk and dv are."""
    dq, dk, dv, _ = run(*draw(5, 0, 8, 8, (1, 1), "float16", 0))
    assert (dq == 0).all() and dk.size == dv.size == 0
    dq, dk, dv, _ = run(*draw(0, 5, 8, 8, (1, 1), "float16", 0))
    assert (dk == 0).all() and (dv == 0).all() and dq.size == 0


NAN = encode(np.array([np.nan, np.inf, -np.inf]), "float16")


def test_keys_that_nobody_sees_have_no_effect():
    """They may hold anything; their own gradients are 0."""
    arrays = draw(20, 40, 64, 64, (1, 1), "float16", 0)
    clean = run(*arrays, causal="top-left")
    for x in arrays[2:]:
        x[:, :, 20:] = np.resize(NAN, x[:, :, 20:].shape)
    got = run(*arrays, causal="top-left")
    for x, y in zip(got[:3], clean[:3], strict=True):
        np.testing.assert_array_equal(x, y)
    assert (got[1][:, :, 20:] == 0).all() and (got[2][:, :, 20:] == 0).all()


def test_queries_that_see_nothing_have_no_effect():
    """Nor has their gradient of the loss."""
    arrays = draw(50, 20, 64, 64, (2, 1), "float16", 0)
    clean = run(*arrays, causal=True)
    for x in arrays[:2]:
        x[:, :, :30] = np.resize(NAN, x[:, :, :30].shape)
    got = run(*arrays, causal=True)
    for x, y in zip(got[:3], clean[:3], strict=True):
        np.testing.assert_array_equal(x, y)
    assert (got[0][:, :, :30] == 0).all()


def test_an_lse_whose_exponential_overflows():
    """A column of 30s adds 159 to every score, which leaves P as it was."""
    arrays = draw(40, 40, 32, 32, (1, 1), "float16", 0)
    for x in arrays[1:3]:
        x[..., 0] = encode(30.0, "float16")
    got = run(*arrays)
    gold = flashref.standard_attention_backward(*(decode(x, "float16") for x in arrays))
    for x, y in zip(got[:3], gold, strict=True):  # column 0 of dq and dk is 30 times a sum near 0
        x, y = decode(x, "float16")[..., 1:], y[..., 1:]
        assert np.linalg.norm(x - y) <= 1e-3 * np.linalg.norm(y)


def test_products_and_bytes_are_those_of_the_algorithm():
    """Seven products of 2 n_q n_k d operations; each pass loads its own rows once, others often."""
    n_q, n_k, d, heads = 64, 96, 64, 2
    _, counts = case(n_q, n_k, d, heads=(heads, 1))
    assert counts["mma"] * 4096 == 7 * 2 * n_q * n_k * d * heads
    numbers, row = 8, 2 * 2 * d  # bytes of L and D, and of Q and dO or K and V
    by_keys = n_k * row + n_k // 32 * heads * n_q * (row + numbers)
    by_queries = heads * (n_q * row + n_q // 32 * n_k * row)
    assert counts["bytes copied"] == by_keys + by_queries


def test_causal_skips_what_nobody_sees():
    """64 × 64, blocks of 32 over tiles of 16: of 4 tiles, a block needs 4 or 2, in both passes."""
    _, dense = case(64, 64)
    _, causal = case(64, 64, causal=True)
    assert causal["mma"] * 8 == dense["mma"] * 6


STEP = "done with the last one\n            cuda.syncthreads()"


@pytest.mark.parametrize(
    "healthy, broken, error",
    [
        (STEP, "done", emulator.Race),
        ("cuda.syncthreads()\n            for step in", "for step in", emulator.Race),
        ("ptx.copy_wait()  #", "pass  #", AssertionError),  # the tile is not there yet
        ("stages + (n & 1) * STAGE", "stages", AssertionError),  # one buffer for two
        ("stages + (n // NEXT & 1) * (2 * TILE)", "stages", AssertionError),
        ("hide(S, first_query, last, first + row, offset)", "pass", AssertionError),
        ("hide(dP, first_query, last, first + row, offset)", "pass", AssertionError),
        ("hide(dP, start, first + row, n_k, offset)", "pass", AssertionError),
        ("S[x] * scale2 - L0", "S[x] * scale2", AssertionError),
        ("(dP[x + 1] - D1)", "(dP[x + 1] - D0)", AssertionError),
        ("dP[x] = S[x] * (dP[x] - D_i[row])", "dP[x] = S[x] * dP[x]", AssertionError),
        ("e, g = 0, g + 1", "e, g = 0, g + 2", AssertionError),  # a head is left out
        ("store_rows(dK, scale", "store_rows(dK, float32(1)", AssertionError),
        ("store_rows(dQ, scale", "store_rows(dQ, float32(1)", AssertionError),
        ("store_rows(dV, float32(1)", "store_rows(dV, scale", AssertionError),
        ("least = key - offset - start", "least = key - start", AssertionError),
        ("first - offset if first - offset > 0 else 0", "first", AssertionError),
        ("int32(thread < BR)", "1", AssertionError),  # over the end of the stage
        ("start + thread < after, 8, 0", "True, 8, 0", (AssertionError, IndexError)),
        ("add_product(dQ, dP, A, K_j)", "add_product(dQ, dP, A, V_j)", AssertionError),
        ("add_product(dV, S, A, dO_i)", "add_product(dV, dP, A, dO_i)", AssertionError),
        ("L * float32(LOG2_E)", "L", AssertionError),
        ("x0 * y0 + x1 * y1", "x0 * y0", AssertionError),
        ("total += cuda.shfl_xor_sync(0xFFFFFFFF, total, 4)", "pass", AssertionError),
        ("(x // 2) * 16 + (lane >> 2) + 8 * (x % 2)", "(lane >> 2)", AssertionError),
    ],
)  # fmt: skip
def test_what_is_broken_is_seen(healthy, broken, error, monkeypatch):
    wound(monkeypatch, "tensor_core_backward", (healthy, broken))
    with pytest.raises(error):
        assert case(77, 85, 40, 56, causal=True, scale=-0.3)[0] <= 1e-3


@pytest.mark.parametrize(
    "healthy, broken, error",
    [
        ("(chunk ^ (r & 7)) << 4", "chunk << 4", AssertionError),
        ("P[y], P[y + 1]", "P[y + 1], P[y]", AssertionError),
        ("c < columns, i, n) < n", "c < columns, i, n) < n + 8", (AssertionError, IndexError)),
    ],
)
def test_what_is_broken_in_fragments_is_seen(healthy, broken, error, monkeypatch):
    wound(monkeypatch, "fragments", (healthy, broken))
    with pytest.raises(error):
        assert case(77, 85, 40, 56, causal=True, scale=-0.3)[0] <= 1e-3


def test_d_of_wide_heads_needs_sixteen_lanes(monkeypatch):
    wound(monkeypatch, "tensor_core_backward", ("if LANES == 16:", "if False:"))
    with pytest.raises(AssertionError):
        assert case(20, 20, 128, blocks=BROAD)[0] <= 1e-3


def test_blocks_that_do_not_fit_the_warps_are_refused():
    with pytest.raises(ValueError, match="do not fit 2 warps at 128 columns"):
        case(d=128)
