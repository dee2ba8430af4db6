"""The `tensor_core` kernel itself, without a GPU: run in NumPy, counted, and wounded.

The answers come from `flashref.standard_attention` in float64 on the same rounded inputs.
"""

import importlib.util
import inspect

import numpy as np
import pytest

import flashref

pytest.importorskip("numba", reason="the GPU kernels are Numba's")

from flashref.cuda import emulator, fragments, ptx, tensor_core, tensor_core_backward
from flashref.tests.cuda.emulated import decode, encode, wound

SMALL = (32, 16, 2, True)  # queries, keys, warps, Q in registers
WIDE = (64, 16, 4, False)  # more than 64 columns


def case(n_q=32, n_k=32, d=64, d_v=None, heads=(2, 1), half="float16", seed=0, **options):
    """Return errors of o (relative, by norm) and lse (absolute), and the counts."""
    rng = np.random.default_rng(seed)
    shapes = ((1, heads[0], n_q, d), (1, heads[1], n_k, d), (1, heads[1], n_k, d_v or d))
    q, k, v = (encode(rng.standard_normal(s).astype(np.float32), half) for s in shapes)
    o, lse, counts = emulator.attention(q, k, v, half=half, **options)
    rules = {name: options[name] for name in ("causal", "scale") if name in options}
    exact = [decode(x, half) for x in (q, k, v)]
    gold, lse_gold = flashref.standard_attention(*exact, return_lse=True, **rules)
    o, seen = decode(o, half), np.isfinite(lse_gold)
    assert np.isfinite(o).all() and (np.isfinite(lse) == seen).all()
    assert (o[~seen] == 0).all() and np.isneginf(lse[~seen]).all()
    error = np.linalg.norm(o - gold) / max(np.linalg.norm(gold), 1e-30)
    return error, np.abs(lse[seen] - lse_gold[seen]).max(initial=0), counts


@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize(
    "n_q, n_k, d, d_v, blocks",
    [
        (32, 32, 64, 64, SMALL),
        (45, 77, 40, 24, SMALL),
        (45, 23, 32, 64, SMALL),
        (1, 50, 64, 64, SMALL),
        (40, 1, 8, 8, SMALL),
        (70, 45, 128, 128, WIDE),
        (20, 50, 96, 72, (64, 32, 4, True)),
        (70, 130, 64, 64, tensor_core.BLOCKS[64][0]),
        (130, 70, 128, 128, tensor_core.BLOCKS[128][0]),
    ],
)
def test_right_answers(n_q, n_k, d, d_v, blocks, causal):
    error, lse_error, counts = case(n_q, n_k, d, d_v, blocks=blocks, causal=causal)
    assert error <= 1e-3 and lse_error <= 1e-5
    assert counts["rows on one bank"] == 1


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.0])
def test_any_scale(scale):
    error, lse_error, _ = case(33, 20, causal=True, scale=scale, blocks=SMALL)
    assert error <= 1e-3 and lse_error <= 1e-5


@pytest.mark.parametrize("blocks", [SMALL, (32, 32, 2, False)])
def test_bfloat16(blocks):
    error, lse_error, _ = case(33, 20, half="bfloat16", causal=True, blocks=blocks)
    assert error <= 8e-3 and lse_error <= 1e-5


def test_what_nobody_sees_has_no_effect():
    """Keys beyond the last that any query of the block sees may hold anything, NaN too."""
    rng = np.random.default_rng(0)
    q, k, v = (encode(rng.standard_normal((1, 1, n, 64)), "float16") for n in (20, 40, 40))
    clean = emulator.attention(q, k, v, half="float16", blocks=SMALL, causal="top-left")
    k[:, :, 20:], v[:, :, 20:] = encode(np.array([np.nan, np.inf]), "float16")
    got = emulator.attention(q, k, v, half="float16", blocks=SMALL, causal="top-left")
    np.testing.assert_array_equal(got[0], clean[0])
    np.testing.assert_array_equal(got[1], clean[1])


def test_ten_seeds():
    for seed in range(10):
        assert case(45, 50, seed=seed, blocks=SMALL, causal=True)[0] <= 1e-3


def test_products_and_bytes_are_those_of_the_algorithm():
    """4 n_q n_k d operations, 4096 a product; Q once, K and V once for each block of queries."""
    n_q, n_k, d, heads = 64, 48, 64, 2
    _, _, counts = case(n_q, n_k, d, heads=(heads, 1), blocks=SMALL)
    assert counts["mma"] * 4096 == 4 * n_q * n_k * d * heads
    assert counts["bytes copied"] == 2 * heads * (n_q * d + n_q // 32 * n_k * 2 * d)


def test_causal_skips_what_nobody_sees():
    """64 × 64 in tiles of 32 × 16: the first block needs 2 of 4 tiles, the second all."""
    _, _, dense = case(64, 64, blocks=SMALL)
    _, _, causal = case(64, 64, blocks=SMALL, causal=True)
    assert causal["mma"] * 8 == dense["mma"] * 6


SYNC = "cuda.syncthreads()"


@pytest.mark.parametrize(
    "module, healthy, broken, error",
    [
        ("tensor_core", f"done with the last one\n            {SYNC}", "done", emulator.Race),
        ("tensor_core", f"ptx.copy_wait()\n        {SYNC}", "ptx.copy_wait()", emulator.Race),
        ("tensor_core", "ptx.copy_wait()  #", "pass  #", AssertionError),  # it is not there yet
        ("fragments", "(chunk ^ (r & 7)) << 4", "chunk << 4", AssertionError),  # one side only
        ("fragments", "ptx.ldmatrix_trans(", "ptx.ldmatrix(", AssertionError),
        ("tensor_core", "if start + BC > full:", "if False:", AssertionError),
        ("tensor_core", "l[row] * correction + total", "l[row] + total", AssertionError),
        ("tensor_core", "O[x] *= correction", "pass", AssertionError),
        ("tensor_core", "if negative:", "if False:", AssertionError),
        ("tensor_core", "(n // NEXT & 1) * (2 * TILE)", "0",  # one buffer for two
         (AssertionError, ValueError)),
        ("tensor_core", "* float32(LN_2)", "", AssertionError),
    ],
)  # fmt: skip
def test_what_is_broken_is_seen(module, healthy, broken, error, monkeypatch):
    wound(monkeypatch, module, (healthy, broken))
    with pytest.raises(error):
        found = case(45, 50, causal=True, scale=-0.3, blocks=SMALL)
        assert found[0] <= 1e-3 and found[1] <= 1e-5


def test_without_the_swizzle_eight_rows_meet_on_one_bank(monkeypatch):
    both_sides = (
        ("(chunk ^ (r & 7)) << 4", "chunk << 4"),
        ("uint32((odd ^ (row & 7)) << 4)", "uint32(odd << 4)"),
    )
    wound(monkeypatch, "fragments", *both_sides)
    error, _, counts = case(blocks=SMALL)
    assert error <= 1e-3, "slower, not wrong"
    assert counts["rows on one bank"] == 8


def test_blocks_that_do_not_fit_the_warps_are_refused():
    with pytest.raises(ValueError, match="do not fit 2 warps at 128 columns"):
        case(d=128, blocks=SMALL)


def test_fragments_are_where_ptx_says():
    """mma, ldmatrix and pack against the layouts written down in `ptx`."""
    block = emulator.Block(32, 4 * 128)
    rng = np.random.default_rng(0)
    A = rng.integers(-8, 8, (16, 16)).astype(np.float16)
    B = rng.integers(-8, 8, (16, 8)).astype(np.float16)
    quarters = np.stack([A[:8, :8], A[8:, :8], A[:8, 8:], A[8:, 8:]])  # a0, a1, a2, a3
    block.shared[:] = quarters.reshape(-1).view(np.uint8)
    lanes = np.arange(32)
    a = block.ldmatrix(lanes * 16)
    block.shared[:256] = B.reshape(-1).view(np.uint8)  # 16 rows of 8: two matrices, b0 and b1
    b = block.ldmatrix_trans(lanes % 16 * 16)[:2]
    d = block.mma_f16(*a, *b, 0.0, 0.0, 0.0, 1.0)
    g, t = lanes // 4, lanes % 4
    product = A.astype(np.float64) @ B.astype(np.float64)
    np.testing.assert_array_equal(d[0], product[g, 2 * t])
    np.testing.assert_array_equal(d[1], product[g, 2 * t + 1])
    np.testing.assert_array_equal(d[2], product[g + 8, 2 * t])
    np.testing.assert_array_equal(d[3], product[g + 8, 2 * t + 1] + 1)
    np.testing.assert_array_equal(a[1], block.pack_f16(A[g + 8, 2 * t], A[g + 8, 2 * t + 1]))


def test_bfloat16_rounds_to_nearest_even():
    x = np.array([1.0, 1.00390625, 1.01171875, -3.14159, 3e38, np.nan], np.float32)
    got = (emulator.to_bf16(x) << 16).view(np.float32)
    np.testing.assert_array_equal(got[:3], [1.0, 1.0, 1.015625])
    assert abs(got[3] + 3.14159) <= 2**-7 and np.isfinite(got[4]) and np.isnan(got[5])


def test_the_emulator_knows_every_instruction_of_tensor_core():
    source = "".join(map(inspect.getsource, (fragments, tensor_core, tensor_core_backward)))
    used = {name for name in dir(ptx) if f"ptx.{name}" in source}
    assert len(used) > 15 and used <= set(dir(emulator.Block))
    assert importlib.util.find_spec("flashref.cuda.emulator")
