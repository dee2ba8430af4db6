"""Block-sparse `tensor_core`, without a GPU: the lists, and the kernels themselves in NumPy.

The answers come from `flashref.block_sparse_attention` in float64 on the same rounded inputs.
"""

import numpy as np
import pytest

import flashref

pytest.importorskip("numba", reason="the GPU kernels are Numba's")

from flashref.cuda import emulator, tensor_core, tensor_core_backward
from flashref.cuda.block_mask import TILE, BlockMask
from flashref.tests.cuda.emulated import decode, draw, encode, wound
from flashref.tests.oracle import Gold

NARROW, WIDE = (32, 16, 2, True), (64, 16, 4, False)  # up to 64 columns, and 128
SMALL = {"keys": (32, 16, 2, True, 1), "queries": NARROW}
SHARED = {"keys": (32, 32, 2, True, 2), "queries": NARROW}  # two warps share rows
BROAD = {"keys": (64, 32, 4, False, 2), "queries": WIDE}
ways = pytest.mark.parametrize("deterministic", [True, False], ids=["two passes", "one pass"])


def run(do, q, k, v, tiles, half="float16", deterministic=False, keys=SMALL, **rules):
    """Return o, lse, dq, dk, dv, and the counts of forward and backward."""
    wide = max(q.shape[-1], v.shape[-1]) > 64
    rules |= {"half": half, "tiles": tiles}
    o, lse, forward = emulator.attention(q, k, v, blocks=WIDE if wide else NARROW, **rules)
    rules |= {"blocks": BROAD if wide else keys, "deterministic": deterministic}
    *got, backward = emulator.attention_backward(do, q, k, v, o, lse, **rules)
    return o, lse, *got, forward, backward


def case(
    n_q=150, n_k=200, d=32, d_v=None, blocks=(64, 64), share=0.5, heads=(2, 1), half="float16",
    seed=0, mask=None, deterministic=False, keys=SMALL, **rules,
):  # fmt: skip
    """Return the largest relative error of o and the gradients; tiles are drawn if not given."""
    if mask is None:
        shape = -(-n_q // blocks[0]), -(-n_k // blocks[1])
        mask = np.random.default_rng(seed).random(shape) < share
    arrays = draw(n_q, n_k, d, d_v or d, heads, half, seed)
    o, lse, *got, forward, backward = run(
        *arrays, BlockMask(mask, *blocks, n_q, n_k), half, deterministic, keys, **rules
    )
    do, *qkv = (decode(x, half) for x in arrays)
    rules |= {"block_mask": mask, "block_q": blocks[0], "block_k": blocks[1]}
    o_gold, lse_gold = flashref.block_sparse_attention(*qkv, return_lse=True, **rules)
    gold = flashref.block_sparse_attention_backward(do, *qkv, o_gold, lse_gold, **rules)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(lse_gold))
    seen = np.isfinite(lse_gold)
    assert np.abs(lse[seen] - lse_gold[seen]).max(initial=0) <= 1e-5
    assert forward["rows on one bank"] == backward["rows on one bank"] == 1
    alone = Gold(*qkv, **rules)  # whom nobody sees, or who sees nobody
    zeros = alone.empty_rows, alone.empty_rows, alone.unseen_keys, alone.unseen_keys
    errors = []
    for x, y, zero in zip((o, *got), (o_gold, *gold), zeros, strict=True):
        x = decode(x, half)
        assert np.isfinite(x).all() and (x[zero] == 0).all()
        errors.append(np.linalg.norm(x - y) / max(np.linalg.norm(y), 0.05 * np.sqrt(y.size), 1))
    return max(errors)


@ways
@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize(
    "n_q, n_k, d, d_v, blocks",
    [
        (128, 128, 64, 64, (64, 64)),
        (200, 150, 32, 32, (64, 64)),
        (150, 200, 40, 24, (64, 64)),
        (150, 200, 32, 32, (128, 64)),
        (70, 300, 32, 32, (64, 128)),
        (70, 150, 128, 96, (64, 64)),
    ],
)
def test_right_answers(n_q, n_k, d, d_v, blocks, causal, deterministic):
    assert case(n_q, n_k, d, d_v, blocks, causal=causal, deterministic=deterministic) <= 1e-3


@ways
def test_seeds(deterministic):
    for seed in range(1, 9):
        rules = {"causal": (False, True, "top-left")[seed % 3], "scale": (None, -0.3)[seed % 2]}
        rules |= {"deterministic": deterministic, "keys": SHARED}
        assert case(seed=seed, share=0.4, d=16, **rules) <= 1e-3


def test_bfloat16():
    assert case(half="bfloat16", causal=True) <= 8e-3


@ways
def test_all_tiles_are_dense_attention_bit_by_bit(deterministic):
    """But not the same walk where causal: lists hold whole tiles, the dense pass may start later.

    Without a causal rule the two walks are one, so the bits are.
    """
    arrays = draw(100, 130, 32, 32, (2, 1), "float16", 0)
    tiles = BlockMask(np.ones((2, 3), bool), 64, 64, 100, 130)
    sparse, dense = (run(*arrays, x, deterministic=deterministic) for x in (tiles, None))
    for x, y in zip(sparse[:5], dense[:5], strict=True):
        np.testing.assert_array_equal(x, y)


@ways
def test_no_tile_at_all(deterministic):
    assert case(100, 100, mask=np.zeros((2, 2), bool), deterministic=deterministic) == 0


@ways
def test_absent_tiles_are_never_loaded(deterministic):
    """A quarter of the tiles: a quarter of the products, and of the bytes but for a block's own."""
    n, d = 256, 32
    arrays = draw(n, n, d, d, (1, 1), "float16", 0)
    eye = BlockMask(np.eye(4, dtype=bool), 64, 64, n, n)
    every = BlockMask(np.ones((4, 4), bool), 64, 64, n, n)
    own = {"forward": n * 2 * d, "backward": 2 * n * 2 * d}  # Q; K and V
    own["backward"] *= 2 if deterministic else 1  # and Q and dO in the second pass
    sparse, dense = (run(*arrays, x, deterministic=deterministic)[-2:] for x in (eye, every))
    for s, all_of_it, mine in zip(sparse, dense, own.values(), strict=True):
        assert s["mma"] * 4 == all_of_it["mma"]
        assert (s["bytes copied"] - mine) * 4 == all_of_it["bytes copied"] - mine
        assert s["bytes added"] * 4 == all_of_it["bytes added"]


@ways
def test_nan_in_absent_tiles_stays_there(deterministic):
    """Queries and keys without tiles may hold anything; all else has the same bits as before."""
    mask = np.array([[True, False, True], [False, False, False], [True, False, False]])
    tiles = BlockMask(mask, 64, 64, 192, 192)
    arrays = draw(192, 192, 32, 32, (1, 1), "float16", 0)
    clean = run(*arrays, tiles, deterministic=deterministic)
    for x in arrays:
        x[:, :, 64:128] = encode(np.nan, "float16")
    got = run(*arrays, tiles, deterministic=deterministic)
    for x, y in zip(got[:5], clean[:5], strict=True):
        np.testing.assert_array_equal(x, y)
    for x in (got[0], *got[2:5]):
        assert (x[:, :, 64:128] == 0).all()


@ways
def test_nan_of_queries_that_see_nothing_within_a_tile(deterministic):
    """Bottom-right causal with more queries than keys: the first 70 queries see no key."""
    mask = np.array([[True], [True], [True]])
    tiles = BlockMask(mask, 64, 64, 134, 64)
    arrays = draw(134, 64, 32, 32, (1, 1), "float16", 0)
    clean = run(*arrays, tiles, causal=True, deterministic=deterministic)
    for x in arrays[:2]:
        x[:, :, :70] = encode(np.nan, "float16")
    got = run(*arrays, tiles, causal=True, deterministic=deterministic)
    for x, y in zip(got[:5], clean[:5], strict=True):
        np.testing.assert_array_equal(x, y)


@ways
def test_nan_of_keys_that_no_query_of_their_tiles_sees(deterministic):
    """The tile of queries from 64 on is not there, and those before see no key from 74 on."""
    tiles = BlockMask(np.array([[True], [False]]), 64, 128, 100, 110)
    arrays = draw(100, 110, 32, 32, (1, 1), "float16", 0)
    clean = run(*arrays, tiles, causal=True, deterministic=deterministic)
    for x in arrays[2:]:
        x[:, :, 74:] = encode(np.nan, "float16")
    got = run(*arrays, tiles, causal=True, deterministic=deterministic)
    for x, y in zip(got[:5], clean[:5], strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("own", ["queries", "keys"])
def test_lists_name_every_tile_once(own, rows):
    n_q, n_k, block_q, block_k = 300, 500, 64, 128
    mask = np.random.default_rng(0).random((5, 4)) < 0.5
    first_of, starts = BlockMask(mask, block_q, block_k, n_q, n_k).lists(own, rows)
    assert first_of.dtype == starts.dtype == np.int32
    seen = np.repeat(np.repeat(mask, block_q, 0), block_k, 1)[:n_q, :n_k]
    seen = seen if own == "queries" else seen.T
    block = block_q if own == "queries" else block_k
    found = np.zeros(seen.shape, int)
    for i in range(len(first_of) - 1):
        mine = starts[first_of[i] : first_of[i + 1]]
        assert (np.diff(mine) > 0).all()
        for start in mine:
            found[i * block : (i + 1) * block, start : start + rows] += 1
    np.testing.assert_array_equal(found, seen)


def test_a_mask_that_comes_again_finds_its_lists():
    mask = np.eye(3, dtype=bool)
    one, two = (BlockMask(mask.copy(), 64, 64, 192, 192).lists("keys", 32) for _ in range(2))
    assert one is two
    mask[0, 1] = True
    assert BlockMask(mask, 64, 64, 192, 192).lists("keys", 32) is not one


def test_each_kernel_has_blocks_whose_sides_divide_a_tile():
    """So every mask that is let in has a kernel; blocks of 128 × 128 have the best ones."""
    of = tensor_core_backward
    for table in (tensor_core.BLOCKS, of.ONE_PASS, of.KEYS, of.QUERIES):
        for options in table.values():
            assert any(TILE % x[0] == 0 and TILE % x[1] == 0 for x in options)
            assert 128 % options[0][0] == 0 and 128 % options[0][1] == 0


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"mask": np.ones((2, 2))}, TypeError, "has dtype float64; it must be bool"),
        ({"mask": np.ones((2, 3), bool)}, ValueError, "ask for (2, 2), one mask for all heads"),
        ({"mask": np.ones((4, 2, 2), bool)}, ValueError, "shape (4, 2, 2)"),
        ({"block_q": 48}, ValueError, "block_q=48 must be a multiple of 64"),
        ({"block_k": 0}, ValueError, "block_k=0 must be a multiple of 64"),
        ({"block_k": 64.0}, TypeError, "block_k=64.0 must be an integer"),
        ({"block_q": True}, TypeError, "block_q=True must be an integer"),
    ],
)
def test_masks_that_are_refused(change, error, words):
    given = {"mask": np.ones((2, 2), bool), "block_q": 64, "block_k": 64} | change
    x = np.ones((100, 16), np.float16)
    rules = {"block_q": given["block_q"], "block_k": given["block_k"]}
    with pytest.raises(error) as caught:
        flashref.cuda.block_sparse_attention(x, x, x, given["mask"], **rules)
    assert words in str(caught.value)


def test_only_halves():
    x, mask = np.ones((64, 16), np.float32), np.ones((1, 1), bool)
    with pytest.raises(TypeError, match="tensor_core takes float16 or bfloat16"):
        flashref.cuda.block_sparse_attention(x, x, x, mask, block_q=64, block_k=64)
    with pytest.raises(TypeError, match="tensor_core takes float16 or bfloat16"):
        flashref.cuda.block_sparse_attention_backward(
            x, x, x, x, x, x[:, 0], mask, block_q=64, block_k=64
        )


@pytest.mark.parametrize(
    "module, healthy, broken, ways",
    [
        ("tensor_core", "starts[n] if SPARSE else n\n", "n\n", (False,)),
        ("tensor_core", "starts[n + 1] if SPARSE else n + BC", "starts[n]", (False,)),
        ("tensor_core", "int32(0)) > least", "int32(0)) > 0", (False,)),
        ("tensor_core", "first_of[first // block_q + 1]", "first_of[first // block_q] + 1",
         (False,)),
        ("tensor_core_backward", "starts[begin + e]", "starts[begin]", (True, False)),
        ("tensor_core_backward", "starts[n] if SPARSE else n\n", "n\n", (True,)),
        ("tensor_core_backward", "starts[n + 1] if SPARSE else n + BC", "starts[n]", (True,)),
        ("tensor_core_backward", "first_of[first // block_k + 1]", "first_of[-1]", (True, False)),
        ("tensor_core_backward", "last = starts[after - 1] + BR - 1 if", "last = 0 if",
         (True, False)),
    ],
)  # fmt: skip
def test_what_is_broken_is_seen(module, healthy, broken, ways, monkeypatch):
    wound(monkeypatch, module, (healthy, broken))
    mask = np.array([[1, 0, 1], [0, 1, 0], [0, 0, 0], [1, 1, 1]], bool)
    for deterministic in ways:
        rules = {"causal": True, "scale": -0.3, "deterministic": deterministic}
        with pytest.raises(AssertionError):
            assert case(250, 180, 32, mask=mask, **rules) <= 1e-3


def test_a_nan_that_spreads_is_seen(monkeypatch):
    wound(monkeypatch, "tensor_core_backward", ("int32(n_q - 1 if last >= n_q else last)", "n_q"))
    with pytest.raises(AssertionError):
        test_nan_of_keys_that_no_query_of_their_tiles_sees(False)
