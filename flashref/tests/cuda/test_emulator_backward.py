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
SMALL = {"keys": (32, 16, 2, True, 1), "queries": NARROW}
SHARED = {"keys": (32, 32, 2, True, 2), "queries": NARROW}  # two warps share rows
SQUARE = {"keys": (64, 64, 4, True, 2), "queries": NARROW}  # and warps share the rows of dQ too
BROAD = {"keys": (64, 32, 4, False, 1), "queries": WIDE}
BROAD_SHARED = {"keys": (64, 32, 4, False, 2), "queries": WIDE}
FIRST = None  # the kernels' own choice for a card with memory enough
ways = pytest.mark.parametrize("deterministic", [True, False], ids=["two passes", "one pass"])


def run(do, q, k, v, half="float16", blocks=SMALL, deterministic=False, capability=(9, 0), **rules):
    """Return dq, dk, dv as bits, and the counts."""
    wide = max(q.shape[-1], v.shape[-1]) > 64
    forward = {"half": half, "blocks": WIDE if wide else NARROW, **rules}
    o, lse, _ = emulator.attention(q, k, v, **forward)
    if blocks is FIRST:
        table = kernels.KEYS if deterministic else kernels.ONE_PASS
        d = 128 if wide else 64
        blocks = {"keys": table[d][0], "queries": kernels.QUERIES[d][0]}
    return emulator.attention_backward(
        do, q, k, v, o, lse, half=half, blocks=blocks, deterministic=deterministic,
        capability=capability, **rules,
    )  # fmt: skip


@ways
@pytest.mark.parametrize("blocks", [SMALL, SHARED, BROAD], ids=str)
def test_keys_that_are_missing_in_the_last_block_add_nothing(blocks, deterministic):
    """All scores are far below 0, which is what a missing key would have: its P is infinite."""
    rng = np.random.default_rng(0)
    n_q, n_k, d = 20, 40, 64
    do, q, k, v = (rng.standard_normal((1, 2, n, d)) for n in (n_q, n_q, n_k, n_k))
    q, k = np.full_like(q, 16.0), 1 + 0.3 * k
    arrays = [encode(x.astype(np.float32), "float16") for x in (do, q, k, v)]
    exact = [decode(x, "float16") for x in arrays]
    assert (exact[1] @ exact[2].swapaxes(-1, -2)).min() > 400
    *got, _ = run(*arrays, blocks=blocks, deterministic=deterministic, scale=-1.0)
    gold = flashref.standard_attention_backward(*exact, scale=-1.0)
    for x, y in zip(got, gold, strict=True):
        assert np.linalg.norm(decode(x, "float16") - y) <= 1e-2 * np.linalg.norm(y)


def case(
    n_q=32, n_k=32, d=64, d_v=None, heads=(2, 1), half="float16", seed=0, blocks=SMALL,
    deterministic=False, **rules,
):  # fmt: skip
    """Return the largest relative error of dq, dk, dv, and the counts."""
    arrays = draw(n_q, n_k, d, d_v or d, heads, half, seed)
    *got, counts = run(*arrays, half, blocks, deterministic, **rules)
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


@ways
@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize(
    "n_q, n_k, d, d_v, heads, blocks",
    [
        (32, 32, 64, 64, (2, 1), SMALL),
        (45, 77, 40, 24, (4, 2), SMALL),
        (45, 77, 40, 24, (4, 2), SHARED),
        (77, 45, 32, 64, (3, 1), SMALL),
        (77, 45, 16, 64, (3, 1), SHARED),
        (50, 7, 64, 64, (1, 1), SMALL),
        (40, 1, 8, 8, (2, 2), SMALL),
        (70, 45, 128, 128, (2, 1), BROAD),
        (70, 45, 128, 128, (2, 1), BROAD_SHARED),
        (45, 70, 96, 72, (1, 1), BROAD),
        (45, 70, 96, 72, (1, 1), BROAD_SHARED),
        (70, 130, 64, 64, (2, 1), FIRST),
        (150, 70, 128, 128, (2, 1), FIRST),
    ],
)
def test_right_answers(n_q, n_k, d, d_v, heads, blocks, causal, deterministic):
    error, counts = case(
        n_q, n_k, d, d_v, heads, blocks=blocks, causal=causal, deterministic=deterministic
    )
    assert error <= 1e-3
    assert counts["rows on one bank"] == 1
    assert (counts["bytes added"] == 0) == (deterministic or counts["mma"] == 0)


@ways
@pytest.mark.parametrize("scale", [-0.3, 0.3, 1.0])
def test_any_scale(scale, deterministic):
    assert case(33, 20, causal=True, scale=scale, deterministic=deterministic)[0] <= 1e-3


@ways
def test_scale_zero(deterministic):
    """P is uniform, dQ and dK are exactly 0."""
    assert case(33, 20, causal=True, scale=0.0, deterministic=deterministic)[0] <= 1e-3


@ways
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d, blocks", [(64, SMALL), (40, SHARED), (128, BROAD)])
def test_bfloat16(d, blocks, causal, deterministic):
    rules = {"causal": causal, "blocks": blocks, "deterministic": deterministic}
    assert case(45, 50, d, half="bfloat16", **rules)[0] <= 8e-3


@pytest.mark.parametrize("name", ["ONE_PASS", "KEYS", "QUERIES"])
@pytest.mark.parametrize("columns, which", [(c, i) for c in (64, 128) for i in range(3)])
def test_every_block_size(name, columns, which):
    own = "queries" if name == "QUERIES" else "keys"
    blocks = (SMALL if columns == 64 else BROAD) | {own: getattr(kernels, name)[columns][which]}
    rules = {"causal": True, "blocks": blocks, "deterministic": name != "ONE_PASS"}
    assert case(70, 75, columns, heads=(1, 1), **rules)[0] <= 1e-3


@ways
def test_ten_seeds(deterministic):
    for seed in range(10):
        rules = {"causal": (False, True, "top-left")[seed % 3], "deterministic": deterministic}
        blocks = SMALL if seed % 2 else SHARED
        assert case(45, 50, 32, seed=seed, blocks=blocks, **rules)[0] <= 1e-3


@pytest.mark.parametrize("d, blocks", [(40, SMALL), (64, SHARED), (128, BROAD)])
def test_additions_one_float_at_a_time(d, blocks):
    """As a card of capability 8 adds: other places in between, but the same numbers."""
    arrays = draw(45, 50, d, d, (2, 1), "float16", 0)
    new, old = (run(*arrays, blocks=blocks, capability=c, causal=True) for c in ((9, 0), (8, 0)))
    for x, y in zip(new, old, strict=True):
        assert x == y if isinstance(x, dict) else (x == y).all()


@ways
def test_the_order_of_the_blocks(deterministic, monkeypatch):
    """A GPU promises none: in two passes no bit depends on it, in one pass the last ones of dQ."""
    arrays = draw(64, 128, 32, 32, (2, 1), "float16", 0)
    sums, empty = [], emulator._Run.empty

    def keep(self, shape):
        sums.append(empty(self, shape))
        return sums[-1]

    monkeypatch.setattr(emulator._Run, "empty", keep)
    forwards = run(*arrays, deterministic=deterministic)
    in_order = sums[-1]
    monkeypatch.setattr(emulator._Run, "order", lambda self, grid: [*np.ndindex(*grid)][::-1])
    backwards = run(*arrays, deterministic=deterministic)
    for x, y in zip(forwards[1:3], backwards[1:3], strict=True):
        np.testing.assert_array_equal(x, y)
    if deterministic:
        np.testing.assert_array_equal(forwards[0], backwards[0])
        return
    x, y = (a[:, :, :64] for a in (in_order, sums[-1]))  # without what pads them
    assert x.shape == (1, 2, 64, 64) and (x != y).any()
    assert np.abs(x - y).max() <= 1e-6 * np.abs(x).max()


@ways
def test_several_sequences(deterministic):
    """A batch of two gives what each gives alone."""
    one, two = (draw(20, 33, 16, 16, (2, 1), "float16", seed) for seed in (0, 1))
    both = [np.concatenate(pair) for pair in zip(one, two, strict=True)]
    both, one, two = (run(*x, deterministic=deterministic)[:3] for x in (both, one, two))
    for x, y, z in zip(both, one, two, strict=True):
        np.testing.assert_array_equal(x, np.concatenate([y, z]))


@ways
def test_nothing_to_sum(deterministic):
    """No keys: dq is 0. No queries: dk and dv are."""
    dq, dk, dv, _ = run(*draw(5, 0, 8, 8, (1, 1), "float16", 0), deterministic=deterministic)
    assert (dq == 0).all() and dk.size == dv.size == 0
    dq, dk, dv, _ = run(*draw(0, 5, 8, 8, (1, 1), "float16", 0), deterministic=deterministic)
    assert (dk == 0).all() and (dv == 0).all() and dq.size == 0


NAN = encode(np.array([np.nan, np.inf, -np.inf]), "float16")


@ways
@pytest.mark.parametrize("blocks", [SMALL, SHARED])
def test_keys_that_nobody_sees_have_no_effect(blocks, deterministic):
    """They may hold anything; their own gradients are 0."""
    rules = {"causal": "top-left", "blocks": blocks, "deterministic": deterministic}
    arrays = draw(20, 40, 64, 64, (1, 1), "float16", 0)
    clean = run(*arrays, **rules)
    for x in arrays[2:]:
        x[:, :, 20:] = np.resize(NAN, x[:, :, 20:].shape)
    got = run(*arrays, **rules)
    for x, y in zip(got[:3], clean[:3], strict=True):
        np.testing.assert_array_equal(x, y)
    assert (got[1][:, :, 20:] == 0).all() and (got[2][:, :, 20:] == 0).all()


@ways
@pytest.mark.parametrize("blocks", [SMALL, SHARED])
def test_queries_that_see_nothing_have_no_effect(blocks, deterministic):
    """Nor has their gradient of the loss."""
    rules = {"causal": True, "blocks": blocks, "deterministic": deterministic}
    arrays = draw(50, 20, 64, 64, (2, 1), "float16", 0)
    clean = run(*arrays, **rules)
    for x in arrays[:2]:
        x[:, :, :30] = np.resize(NAN, x[:, :, :30].shape)
    got = run(*arrays, **rules)
    for x, y in zip(got[:3], clean[:3], strict=True):
        np.testing.assert_array_equal(x, y)
    assert (got[0][:, :, :30] == 0).all()


@ways
def test_an_lse_whose_exponential_overflows(deterministic):
    """A column of 30s adds 159 to every score, which leaves P as it was."""
    arrays = draw(40, 40, 32, 32, (1, 1), "float16", 0)
    for x in arrays[1:3]:
        x[..., 0] = encode(30.0, "float16")
    got = run(*arrays, deterministic=deterministic)
    gold = flashref.standard_attention_backward(*(decode(x, "float16") for x in arrays))
    for x, y in zip(got[:3], gold, strict=True):  # column 0 of dq and dk is 30 times a sum near 0
        x, y = decode(x, "float16")[..., 1:], y[..., 1:]
        assert np.linalg.norm(x - y) <= 1e-3 * np.linalg.norm(y)


@ways
def test_products_and_bytes_are_those_of_the_algorithm(deterministic):
    """Products of 2 n_q n_k d operations, 7 or 5; a pass loads its own rows once, others often."""
    n_q, n_k, d, heads = 64, 96, 64, 2
    _, counts = case(n_q, n_k, d, heads=(heads, 1), deterministic=deterministic)
    products = 7 if deterministic else 5
    assert counts["mma"] * 4096 == products * 2 * n_q * n_k * d * heads
    numbers, row = 8, 2 * 2 * d  # bytes of L and D, and of Q and dO or K and V
    by_keys = n_k * row + n_k // 32 * heads * n_q * (row + numbers)
    by_queries = heads * (n_q * row + n_q // 32 * n_k * row)
    assert counts["bytes copied"] == by_keys + (by_queries if deterministic else 0)
    dq = heads * n_q * d * 4  # in float32, which each block of keys adds up
    assert counts["bytes added"] == (0 if deterministic else n_k // 32 * dq)


@ways
def test_causal_skips_what_nobody_sees(deterministic):
    """64 × 64, blocks of 32 over tiles of 16: of 4 tiles, a block needs 4 or 2, in both passes."""
    _, dense = case(64, 64, deterministic=deterministic)
    _, causal = case(64, 64, causal=True, deterministic=deterministic)
    assert causal["mma"] * 8 == dense["mma"] * 6


def broken(deterministic, blocks=SMALL):
    """Return whether the wounded kernels give the right answers."""
    rules = {"causal": True, "scale": -0.3, "deterministic": deterministic, "blocks": blocks}
    return case(77, 85, 40, 56, **rules)[0] > 1e-3


STEP = "done with the last one\n            cuda.syncthreads()"
EXCHANGE = "P and dS are here\n                cuda.syncthreads()"
ZEROS = "ptx.store_f32x4(here + uint64(16), zero, zero, zero, zero, inside)"
OUTSIDE = (AssertionError, IndexError)


@ways
@pytest.mark.parametrize(
    "healthy, wounded, error",
    [
        (STEP, "done", emulator.Race),
        ("cuda.syncthreads()\n            for step in", "for step in", emulator.Race),
        ("ptx.copy_wait()  #", "pass  #", AssertionError),  # the tile is not there yet
        ("stages + (n & 1) * STAGE", "stages", AssertionError),  # one buffer for two
        ("hide(S, dP, ahead + row - mine)", "pass", AssertionError),
        ("ahead + row - mine", "ahead - mine", AssertionError),
        ("ahead + BC > 1", "ahead + BC > 33", AssertionError),
        ("S[x] * scale2 - L0", "S[x] * scale2", AssertionError),
        ("(dP[x + 1] - D1)", "(dP[x + 1] - D0)", AssertionError),
        ("e, g = int32(0), int32(g + 1)", "e, g = int32(0), int32(g + 2)", OUTSIDE),
        ("store_rows(dK, scale", "store_rows(dK, float32(1)", AssertionError),
        ("store_rows(dV, float32(1)", "store_rows(dV, scale", AssertionError),
        ("int32(first - offset - start)", "int32(first - start)", AssertionError),
        ("first - offset if first - offset > 0 else 0", "first", AssertionError),
        ("int32(thread < BR)", "1", AssertionError),  # over the end of the stage
        ("start + thread < n_q, 8, 0", "True, 8, 0", OUTSIDE),
        ("add_mine(dV, P,", "add_mine(dV, dS,", AssertionError),
        ("add_mine(dK, dS, A, Q_mine,", "add_mine(dK, dS, A, dS_ij,", AssertionError),
        ("L * float32(LOG2_E)", "L", AssertionError),
        ("x0 * y0 + x1 * y1", "x0 * y0", AssertionError),
        ("total += cuda.shfl_xor_sync(0xFFFFFFFF, total, 4)", "pass", AssertionError),
    ],
)  # fmt: skip
def test_what_is_broken_is_seen(healthy, wounded, error, deterministic, monkeypatch):
    wound(monkeypatch, "tensor_core_backward", (healthy, wounded))
    with pytest.raises(error):
        assert not broken(deterministic)


@pytest.mark.parametrize(
    "healthy, wounded",
    [
        ("stages + (n // NEXT & 1) * (2 * TILE)", "stages"),
        ("hide(dP, start, first + row, n_k, offset)", "pass"),
        ("dP[x] = S[x] * (dP[x] - D_i[row])", "dP[x] = S[x] * dP[x]"),
        ("store_rows(dQ, scale", "store_rows(dQ, float32(1)"),
        ("add_product(dQ, dP, A, K_j)", "add_product(dQ, dP, A, V_j)"),
        ("(x // 2) * 16 + (lane >> 2) + 8 * (x % 2)", "(lane >> 2)"),
    ],
)
def test_what_is_broken_in_the_second_pass_is_seen(healthy, wounded, monkeypatch):
    wound(monkeypatch, "tensor_core_backward", (healthy, wounded))
    with pytest.raises(AssertionError):
        assert not broken(deterministic=True)


@pytest.mark.parametrize(
    "healthy, wounded, error",
    [
        (EXCHANGE, "\n                pass", emulator.Race),
        ("if ADD_DQ:  # no thread adds", "if False:  # no thread adds", AssertionError),
        (ZEROS, "pass", AssertionError),
        ("numbers[m] * scale", "numbers[m]", AssertionError),
        ("4 * n + m if ADD_DQ == 4", "4 * m + n if ADD_DQ == 4", AssertionError),
        ("g * (16 * ADD_DQ)", "g * 16", AssertionError),
        ("to + uint64(8 * half_tile * dq.strides[2])", "to", AssertionError),
        ("(since & -16)", "since", OUTSIDE),  # tiles that begin within a fragment
        ("g * s_step", "0", AssertionError),  # all heads in one
        ("int64(start) * (2 * ROW)", "0", AssertionError),
        ("warp // Q_WARPS * Q_PAIRS", "0", AssertionError),
        ("mt * (32 * ROW) + n * 512", "mt * (32 * ROW)", AssertionError),
        ("rows + keys.columns - 16", "rows - 16", OUTSIDE),
        ("store_fragments(dS, dS_ij", "store_fragments(P, dS_ij", AssertionError),
        ("add_dq(dQ, (dS_ij, row * 2)", "add_dq(dQ, (dS_ij, 0)", AssertionError),
    ],
)
def test_what_is_broken_in_one_pass_is_seen(healthy, wounded, error, monkeypatch):
    wound(monkeypatch, "tensor_core_backward", (healthy, wounded))
    with pytest.raises(error):
        assert not (broken(False) or broken(False, SQUARE))


@ways
@pytest.mark.parametrize(
    "healthy, wounded, error",
    [
        (EXCHANGE, "\n                pass", emulator.Race),
        ("store_fragments(P, P_ij, row, mine // 8)", "pass", AssertionError),
        ("dS_ij, row, mine // 8", "dS_ij, row, 0", AssertionError),
        ("add_other(dK, (dS_ij, row, other // 8)", "add_other(dK, (P_ij, row, 0)", AssertionError),
        ("add_other(dV, (P_ij, row, other // 8)", "add_other(dV, (P_ij, row, 0)", AssertionError),
        ("Q_i + other * ROW", "Q_i", AssertionError),
        ("Q_i + 2 * TILE + mine * 8", "Q_i + 2 * TILE", AssertionError),
        ("ahead + row - mine", "ahead + row", AssertionError),
        ("uint64(pair * 32)", "uint64(0)", AssertionError),
        ("d_v - pair * 16", "d_v", (AssertionError, IndexError)),
    ],
)
def test_what_is_broken_where_warps_share_rows_is_seen(
    healthy, wounded, error, deterministic, monkeypatch
):
    wound(monkeypatch, "tensor_core_backward", (healthy, wounded))
    with pytest.raises(error):
        assert not broken(deterministic, SHARED)


@pytest.mark.parametrize(
    "module, healthy, wounded, check",
    [
        ("tensor_core_backward", "stop = keys_seen(last, n_k, offset)", "stop = n_k",
         test_keys_that_nobody_sees_have_no_effect),
        ("fragments", "(not SINCE or first >= since)", "True",
         test_queries_that_see_nothing_have_no_effect),
        ("fragments", "+ i * STEP >= since, some", "+ i * STEP >= 0, some",
         test_queries_that_see_nothing_have_no_effect),
    ],
)  # fmt: skip
def test_a_nan_that_spreads_is_seen(module, healthy, wounded, check, monkeypatch):
    wound(monkeypatch, module, (healthy, wounded))
    with pytest.raises(AssertionError):
        check(SMALL, False)


@ways
@pytest.mark.parametrize(
    "healthy, wounded, error",
    [
        ("(chunk ^ (r & 7)) << 4", "chunk << 4", AssertionError),
        ("((n * 16) ^ toggle)", "n * 16", AssertionError),
        ("there + 8 * ROW", "there + 7 * ROW", AssertionError),
        ("pack(C[2 * x], C[2 * x + 1])", "pack(C[2 * x + 1], C[2 * x])", AssertionError),
        ("(lane >> 4) + chunk", "lane >> 4", AssertionError),
        ("(lane >> 4) + 2 * pair", "lane >> 4", AssertionError),
        ("c < columns, i, n) < n", "c < columns, i, n) < n + 8", OUTSIDE),
    ],
)
def test_what_is_broken_in_fragments_is_seen(healthy, wounded, error, deterministic, monkeypatch):
    wound(monkeypatch, "fragments", (healthy, wounded))
    with pytest.raises(error):
        assert not broken(deterministic, SHARED)


@pytest.mark.parametrize(
    "healthy, wounded",
    [
        ("P[y], P[y + 1]", "P[y + 1], P[y]"),  # two passes
        ("ptx.ldmatrix_trans(chunks_of(here, toggle, step * 16, mt))",
         "ptx.ldmatrix(chunks_of(here, toggle, step * 16, mt))"),
        ("odd + chunk)", "odd)"),
    ],
)  # fmt: skip
def test_what_is_broken_in_the_fragments_of_dq_is_seen(healthy, wounded, monkeypatch):
    wound(monkeypatch, "fragments", (healthy, wounded))
    with pytest.raises(AssertionError):
        assert not broken("P[y]" in healthy, SQUARE)


def test_d_of_wide_heads_needs_sixteen_lanes(monkeypatch):
    wound(monkeypatch, "tensor_core_backward", ("if LANES == 16:", "if False:"))
    with pytest.raises(AssertionError):
        assert case(20, 20, 128, blocks=BROAD)[0] <= 1e-3


@pytest.mark.parametrize(
    "keys",
    [
        (32, 16, 2, True, 1),
        (64, 64, 4, False, 3),
        (64, 16, 4, False, 2),
        (128, 16, 16, False, 1),
        (64, 96, 4, False, 1),
        (64, 96, 4, False, 2),
        (64, 64, 4, False, 4),  # wrong numbers, once
    ],
)
def test_blocks_that_do_not_fit_the_warps_are_refused(keys):
    with pytest.raises(ValueError, match=f"do not fit {keys[2]} warps at 128 columns"):
        case(d=128, blocks={"keys": keys})
