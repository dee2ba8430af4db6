"""Faults on purpose: each must turn a small suite red, or the suite would be hollow.

A fault is one place in the source of one module, changed. The package is imported once more with
that module wounded, and checked; every check passes on the healthy package and is seen to fail.
"""

import contextlib
import importlib
import importlib.util
import sys
import warnings
from importlib.machinery import SourceFileLoader

import numpy as np
import pytest

import flashref
from flashref.tests.oracle import Gold
from flashref.tests.rungs import Rung
from flashref.tests.test_traffic import by_hand

INF, NAN = np.inf, np.nan


class Wounded(SourceFileLoader):
    """Loads a module from its source with one place changed, and keeps no byte code of it."""

    def __init__(self, name, path, healthy, broken):
        super().__init__(name, path)
        self.healthy, self.broken = healthy.encode(), broken.encode()

    def get_data(self, path):
        source = super().get_data(path)
        found = source.count(self.healthy)
        assert found == 1, f"stale sabotage, {found} times in {path}: {self.healthy.decode()}"
        return source.replace(self.healthy, self.broken)

    def path_stats(self, path):
        raise OSError("no byte code, neither read nor written")

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            return importlib.util.spec_from_file_location(name, self.path, loader=self)
        return None


def wounded_package(module, healthy, broken):
    """Return a second flashref whose module has `broken` in the place of `healthy`."""
    name = f"flashref.{module}"
    finder = Wounded(name, importlib.import_module(name).__file__, healthy, broken)
    ours = {name: sys.modules.pop(name) for name in _loaded()}
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module("flashref")
    finally:
        sys.meta_path.remove(finder)
        for name in _loaded():
            del sys.modules[name]
        sys.modules.update(ours)


def _loaded():
    return [name for name in sys.modules if name.partition(".")[0] == "flashref"]


# The small suite ----------------------------------------------------------------------------------


def draw(rng, lead_q=(), lead_kv=(), n_q=5, n_k=7, d=3, d_v=4, std=1.0):
    """Return q, k, v, do; wide scores make the running maximum move."""
    shapes = [(*lead_q, n_q, d), (*lead_kv, n_k, d), (*lead_kv, n_k, d_v), (*lead_q, n_q, d_v)]
    return [std * rng.standard_normal(shape) for shape in shapes]


def problems():
    """Return (arrays, options) that together exercise every rule."""
    rng = np.random.default_rng(0)
    mask = rng.random((5, 7)) < 0.6
    mask[:, :3] = False  # a first tile that nobody sees
    mask[2] = False  # a row that sees nothing
    bias = np.where(rng.random((5, 7)) < 0.8, rng.standard_normal((5, 7)), -INF)
    poisoned = draw(rng)
    poisoned[1][6], poisoned[2][6] = NAN, INF  # key 6, and row 2 of q and do: seen by nobody
    poisoned[0][2], poisoned[3][2] = INF, NAN
    hidden = np.ones((5, 7), bool)
    hidden[:, 6] = hidden[2] = False
    return {
        "plain": (draw(rng), {}),
        "wide": (draw(rng, std=5.0), {"scale": 0.7}),
        "far below 0": (draw(rng), {"bias": np.full(7, -2000.0)}),
        "far above 0": (draw(rng), {"bias": np.full(7, 2000.0)}),
        "causal": (draw(rng), {"causal": True}),
        "more queries": (draw(rng, n_q=7, n_k=5), {"causal": True}),
        "top-left": (draw(rng), {"causal": "top-left", "alibi_slopes": 0.5}),
        "window": (draw(rng, n_q=9, n_k=9), {"window": (2, 1)}),
        "mask": (draw(rng), {"mask": mask}),
        "bias": (draw(rng), {"bias": bias, "softcap": 2.0, "alibi_slopes": 0.3}),
        "softcap": (draw(rng, std=2.0), {"softcap": 1.5, "causal": True, "scale": 2.0}),
        "dropout": (draw(rng), {"dropout_p": 0.4, "seed": 3}),
        "heads": (
            draw(rng, (2, 4), (2, 2)),
            {"alibi_slopes": [0.5, 0.25, 0.1, 0], "dropout_p": 0.3, "seed": 1},
        ),
        "poison": (poisoned, {"mask": hidden, "softcap": 5.0}),
        "poison behind a bias": (poisoned, {"bias": np.where(hidden, 0.5, -INF)}),
    }


PROBLEMS = problems()
BLOCKS = [(2, 3), (1, 1), (4, 2), (16, 16)]


def tile_masks(q, k, blocks):
    """Return a block mask with holes, an empty row and an empty column among them."""
    tiles = np.ones((-(-q.shape[-2] // blocks[0]), -(-k.shape[-2] // blocks[1])), bool)
    tiles[0, -1] = False
    tiles[1:2] = False
    return tiles


def settings(package, name):
    """Yield (rung, arrays, options for the rung, gold) for every problem and choice of blocks."""
    for blocks in BLOCKS if name != "standard_attention" else [()]:
        rung = Rung(name, blocks, package)
        for (q, k, v, do), options in PROBLEMS.values():
            rules = dict(options)
            if name == "block_sparse_attention":
                options = options | {"block_mask": tile_masks(q, k, blocks)}
                rules = options | {"block_q": blocks[0], "block_k": blocks[1]}
            if rules.pop("seed", None) is not None:
                shape = (*q.shape[:-1], k.shape[-2])
                keep = flashref.dropout_keep(options["seed"], shape, options["dropout_p"])
                rules["keep"] = keep
            yield rung, (q, k, v, do), options, Gold(q, k, v, **rules)


def close(got, want):
    """Assert equality: NaN and infinities in the same places first, then 1e-9 of each number."""
    got, finite = np.asarray(got), np.isfinite(want)
    assert got.shape == want.shape
    np.testing.assert_array_equal(got[~finite], want[~finite])
    assert np.isfinite(got[finite]).all()
    got, want = got[finite], want[finite]
    assert (np.abs(got - want) <= 1e-9 * np.maximum(1, np.abs(want))).all()


def check_forward(package, name):
    for rung, (q, k, v, _), options, gold in settings(package, name):
        o, lse = rung.forward(q, k, v, **options)
        close(o, gold.o)
        close(lse, gold.lse)


def check_backward(package, name):
    """With the right o and lse, so that no fault of the forward pass is needed."""
    for rung, (q, k, v, do), options, gold in settings(package, name):
        got = rung.backward(do, q, k, v, gold.o, gold.lse, **options)
        for gradient, want in zip(got, gold.backward(do), strict=True):
            close(gradient, want)


def check_per_pair(package, name):
    """NaN where row 1 sees it spoils row 1, and of the keys those that row 1 has a part in."""
    mask = np.array([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]], bool)
    arrays = draw(np.random.default_rng(6), n_q=3, n_k=4)
    for blocks in BLOCKS if name != STANDARD else [()]:
        clean = Rung(name, blocks, flashref).run(*arrays, mask=mask)
        for which, row in ((0, 1), (1, 2), (2, 2), (3, 1)):  # q_1, k_2, v_2, do_1
            spoilt = [x.copy() for x in arrays]
            spoilt[which][row] = NAN
            got = Rung(name, blocks, package).run(*spoilt, mask=mask)
            assert which == 3 or np.isnan(got.o[1]).all()
            for x, want in zip(got[:3], clean[:3], strict=True):  # o, lse, dq
                close(x[[0, 2]], want[[0, 2]])
            for x, want in zip(got[3:], clean[3:], strict=True):  # dk, dv
                close(x[[0, 3]], want[[0, 3]])


def check_traffic(package, name):
    """A causal 13 x 17 in tiles of 4 x 5, all visited but three; element for element."""
    rng = np.random.default_rng(1)
    q, k, v, do = draw(rng, n_q=13, n_k=17)
    blocks = () if name == "standard_attention" else (4, 5)
    rung, there, back = Rung(name, blocks, package), package.Memory(), package.Memory()
    o, lse = rung.forward(q, k, v, causal=True, memory=there)
    rung.backward(do, q, k, v, o, lse, causal=True, memory=back)
    # off = 4: rows 0-3 see keys up to 7, rows 4-7 up to 11, rows 8-11 up to 15, row 12 all
    t, u = 2 * 4 + 3 * 4 + 4 * 4 + 4 * 1, 10 + 15 + 17 + 17
    measured = (there.loads, there.stores), (back.loads, back.stores)
    assert measured == by_hand(name, 13, 17, 3, 4, t, u)
    if blocks:
        assert there.peak_sram == (4 + 5) * (3 + 4) + 4 * 5 + 2 * 4


def check_closed_forms(package, _):
    tiles = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 1], [1, 0, 0, 1]], bool)
    sizes, blocks = (13, 17, 3, 4), {"block_q": 4, "block_k": 5}
    rows, cols = np.array([4, 4, 4, 1]), np.array([5, 5, 5, 2])
    t, u = 8 + 12 + 16 + 4, 10 + 15 + 17 + 17
    io = package.io_model
    for name, forms in {
        "flash_attention_1": (io.fa1_traffic, io.fa1_backward_traffic),
        "flash_attention_2": (io.fa2_traffic, io.fa2_backward_traffic),
    }.items():
        got = tuple(form(*sizes, causal=True, **blocks) for form in forms)
        assert got == by_hand(name, *sizes, t, u)
    forms = io.standard_traffic, io.standard_backward_traffic
    assert tuple(form(*sizes) for form in forms) == by_hand("standard_attention", *sizes, 0, 0)
    forms = io.block_sparse_traffic, io.block_sparse_backward_traffic
    got = tuple(form(*sizes, block_mask=tiles, **blocks) for form in forms)
    t, u = int(tiles.sum(1) @ rows), int(tiles.sum(0) @ cols)
    assert got == by_hand("block_sparse_attention", *sizes, t, u)
    for (m, d), want in {
        (16384, 64): (64, 64), (1000, 64): (4, 4), (100, 3): (3, 9), (49152, 128): (96, 96),
    }.items():  # fmt: skip
        assert package.block_sizes(m, d) == want


def check_softmax(package, _):
    rng = np.random.default_rng(2)
    x = 30 * rng.standard_normal((6, 8))
    x[1, :3] = x[2] = -INF
    x[3], x[4] = x[3] + 2000, x[4] - 2000
    gold = Gold(np.ones((6, 1)), np.zeros((8, 1)), np.eye(8), bias=x)
    close(package.safe_softmax(x), gold.o)
    for block in (1, 2, 3, 8, 100):
        close(package.online_softmax(x, block=block), gold.o)


def check_steps(package, _):
    """After each step: exact attention over the scores so far, and the block's own state."""
    rng = np.random.default_rng(3)
    x, v = 20 * rng.standard_normal((4, 8)), rng.standard_normal((8, 2))
    x[1, :3] = -INF
    x[2] -= 3000
    for block in (1, 2, 3, 8):
        steps = package.online_softmax_steps(x, v, block=block)
        assert len(steps) == -(-8 // block)
        for j, step in enumerate(steps):
            for m, l, part in (
                (step.m, step.l, slice(0, (j + 1) * block)),
                (step.m_block, step.l_block, slice(j * block, (j + 1) * block)),
            ):
                s = x[:, part]
                np.testing.assert_array_equal(m, s.max(1))
                want = np.exp(s - np.where(np.isneginf(m), 0, m)[:, None]).sum(1)
                assert np.isfinite(l).all()
                np.testing.assert_allclose(l, want, rtol=1e-12)
            s = x[:, : (j + 1) * block]
            gold = Gold(np.ones((4, 1)), np.zeros((s.shape[1], 1)), v[: s.shape[1]], bias=s)
            close(step.o, gold.o)


def check_merge(package, _):
    rng = np.random.default_rng(4)
    q, k, v, _ = draw(rng, n_q=6, n_k=9, std=3.0)
    mask = rng.random((6, 9)) < 0.6
    mask[1, :4] = mask[2, 4:] = mask[3] = False
    for shift in (0.0, 3000.0, -3000.0):
        bias = np.full(9, shift)
        parts = slice(4), slice(4, 9)
        halves = [Gold(q, k[s], v[s], mask=mask[:, s], bias=bias[s]) for s in parts]
        for half in halves:
            half.o[half.empty_rows] = NAN  # what an empty part holds is ignored
        a, b = halves
        o, lse = package.merge_attention(a.o, a.lse, b.o, b.lse)
        gold = Gold(q, k, v, mask=mask, bias=bias)
        close(o, gold.o)
        close(lse, gold.lse)


def check_packed(package, _):
    rng = np.random.default_rng(5)
    q, _, _, _ = draw(rng, lead_q=(9,), n_q=4)
    _, k, v, _ = draw(rng, lead_kv=(10,), n_k=2)
    ends_q, ends_k = [0, 3, 3, 7, 9], [0, 4, 5, 5, 10]
    keep = flashref.dropout_keep(6, (4, 4, 4, 5), 0.3)
    slopes = rng.random((4, 4))
    options = {"causal": True, "dropout_p": 0.3}
    o, lse = package.flash_attention_varlen(
        q, k, v, ends_q, ends_k, seed=6, alibi_slopes=slopes, return_lse=True, block_q=2,
        block_k=3, **options,
    )  # fmt: skip
    for b in range(4):
        rows, cols = slice(*ends_q[b : b + 2]), slice(*ends_k[b : b + 2])
        q_b, k_b, v_b = (x.swapaxes(0, 1) for x in (q[rows], k[cols], v[cols]))
        keep_b = keep[b, :, : q_b.shape[1], : k_b.shape[1]]
        gold = Gold(q_b, k_b, v_b, keep=keep_b, alibi_slopes=slopes[b], **options)
        close(o[rows].swapaxes(0, 1), gold.o)
        close(lse[:, rows], gold.lse)


def check_dropout(package, _):
    keep = package.dropout_keep(1, (4, 60, 50), 0.3)
    assert abs(keep.mean() - 0.7) <= 4 * np.sqrt(0.3 * 0.7 / keep.size)
    chance = 0.7**2 + 0.3**2
    for axis in range(3):  # neighbouring heads, rows, columns
        next_ = np.arange(1, keep.shape[axis])
        a, b = keep.take(next_ - 1, axis), keep.take(next_, axis)
        assert abs(np.mean(a == b) - chance) <= 5 * np.sqrt(chance * (1 - chance) / a.size)
    other = package.dropout_keep(2, (4, 60, 50), 0.3)
    assert abs(np.mean(keep == other) - chance) <= 5 * np.sqrt(chance * (1 - chance) / keep.size)
    assert (package.dropout_keep(1, (2, 7, 9), 0.3) == keep[:2, :7, :9]).all()


SPARSE, STANDARD = "block_sparse_attention", "standard_attention"
FA1, FA2 = "flash_attention_1", "flash_attention_2"

# What is checked, and the faults that it must catch: module, healthy, broken.
FAULTS = {
    (check_softmax, "softmax"): [
        ("softmax", "return m_new, correction * l", "return m_new, l"),  # no rescale
        ("softmax", "range(0, n, size)", "range(0, n - size + 1, size)"),  # no tail
        ("softmax", "np.where(np.isneginf(m), 0, m)", "m"),  # no guard
        ("softmax", "np.where(l == 0, 1, l)", "l"),  # 0 / 0
        ("softmax", "m_new = np.maximum(m, m_block)", "m_new = m"),  # the maximum stays behind
        ("softmax", "np.exp(m_block - shift) * l_block", "l_block"),  # the block's l as it is
        ("softmax", "correction = np.exp(m - shift)", "correction = np.exp(shift - m)"),  # inverse
        ("softmax", "return np.full(shape, -np.inf, dtype)", "return np.zeros(shape, dtype)"),
        ("softmax", "e = np.exp(s - finite(m))", "e = np.exp(s)"),  # safe no more
    ],
    (check_steps, "steps"): [
        ("softmax", "return m_new, correction * l", "return m_new, l"),
        ("softmax", "o * (correction * l_prev)[..., None]", "o * correction[..., None]"),
        ("softmax", "o * (correction * l_prev)[..., None]", "o * l_prev[..., None]"),
        ("softmax", "+ p_v) / nonzero(l)", "+ p_v) / nonzero(l_block)"),
        (
            "softmax",
            "p = np.exp(s[..., cols] - finite(m)",
            "p = np.exp(s[..., cols] - finite(m_block)",
        ),
        ("softmax", "m_block = s_j.max(axis=-1)", "m_block = s_j.max(axis=-1, initial=0)"),
    ],
    (check_merge, "merge"): [
        ("softmax", "o, lse = part_a + part_b,", "o, lse = (o_a + o_b) / 2,"),
        ("softmax", "w_a, w_b = e_a / nonzero(e), e_b / nonzero(e)", "w_a, w_b = e_a, e_b"),
        ("softmax", "m + log_sum(e)", "m + log_sum(e) / np.log(2)"),
        ("softmax", "m = np.maximum(lse_a, lse_b)", "m = np.zeros_like(lse_a)"),
        ("softmax", "m = np.maximum(lse_a, lse_b)", "m = lse_a"),
        (
            "softmax",
            "np.where(np.isneginf(lse_a)[..., None], 0, w_a[..., None] * o_a)",
            "w_a[..., None] * o_a",
        ),
        ("softmax", "np.exp(lse_b - finite(m))", "np.exp2(lse_b - finite(m))"),
    ],
    (check_forward, STANDARD): [
        ("standard", "m = S_.max(axis=1, initial=-np.inf)", "m = np.zeros(len(S_))"),
        ("standard", "P_ /= nonzero(l)[:, None]", "P_ /= l[:, None]"),
        ("standard", "L[:] = m + log_sum(l)", "L[:] = log_sum(l)"),
        ("standard", "L[:] = m + log_sum(l)", "L[:] = m + l"),
        ("standard", "tile.product(tile.drop(P_), V_)", "tile.product(P_, V_)"),
        ("standard", "tile.product(tile.drop(P_), V_)", "tile.drop(P_) @ V_"),  # 0 * NaN
        ("standard", "l = P_.sum(axis=1)", "l = tile.drop(P_).sum(axis=1)"),
        ("heads", "1 / d**0.5", "1.0"),
        ("heads", "1 / d**0.5", "1 / d"),
    ],
    (check_backward, STANDARD): [
        (
            "standard",
            "softmax_backward(P_, dP_.copy(), D)",
            "softmax_backward(P_, dP_.copy(), 0 * D)",
        ),  # no D
        ("standard", "scores.scale * tile.product(dS_, K_)", "tile.product(dS_, K_)"),
        ("standard", "scores.scale * tile.product_t(dS_, Q_)", "tile.product_t(dS_, Q_)"),
        ("standard", "tile.product_t(tile.drop(P_), dO_)", "tile.product_t(P_, dO_)"),
        ("standard", "tile.drop(dO_ @ V_.T)", "dO_ @ V_.T"),
        (
            "standard",
            "tile.backward(softmax_backward(P_, dP_.copy(), D))",
            "softmax_backward(P_, dP_.copy(), D)",
        ),
        ("standard", "D = tile.clear(P_ * dP_).sum(axis=1)", "D = (P_ * dP_).sum(axis=1)"),
        ("softmax", "    dP *= P\n", ""),
    ],
    (check_traffic, STANDARD): [
        (
            "standard",
            'hbm.store("S", S, queries, tile.scores(Q_, K_))',
            "S[:] = tile.scores(Q_, K_)",
        ),
        ("standard", 'P_, dP_ = hbm.load("P", P, queries)', "P_, dP_ = P"),
        ("standard", 'hbm.store("dP", dP, queries, tile', "dP[:] = (tile"),
    ],
    (check_per_pair, STANDARD): [
        ("standard", "    tile.clear(P)\n", ""),
        ("standard", "D = tile.clear(P_ * dP_).sum(axis=1)", "D = (P_ * dP_).sum(axis=1)"),
        ("standard", "tile.product_t(dS_, Q_)", "(dS_.T @ Q_)"),
    ],
    (check_forward, FA1): [
        ("flash1", "l_new = old * l_i + new * l_ij", "l_new = l_i + new * l_ij"),  # no rescale
        ("flash1", "l_new = old * l_i + new * l_ij", "l_new = new * l_ij"),  # the old l forgotten
        ("flash1", "l_new = old * l_i + new * l_ij", "l_new = old * l_i + l_ij"),
        ("flash1", "(l_i * old)[:, None] * O_i", "l_i[:, None] * O_i"),  # O not rescaled
        ("flash1", "(l_i * old)[:, None] * O_i", "old[:, None] * O_i"),  # O is already divided
        ("flash1", "(l_i * old)[:, None] * O_i", "(l_i / old)[:, None] * O_i"),  # the inverse
        ("flash1", "new[:, None] * P_V", "P_V"),
        ("flash1", "m_new = np.maximum(m_i, m_ij)", "m_new = np.maximum(0, m_ij)"),  # stale
        ("flash1", 'hbm.store("m", m, rows, m_new)', 'hbm.store("m", m, rows, m_ij)'),
        ("flash1", "tile.product(tile.drop(P_ij), V_j)", "tile.product(P_ij, V_j)"),
        ("flash1", "tile.product(tile.drop(P_ij), V_j)", "tile.drop(P_ij) @ V_j"),
        ("flash1", "l_ij = row_sum(P_ij)", "l_ij = row_sum(tile.drop(P_ij))"),  # l of the dropped P
        ("flash1", "/ nonzero(l_new)[:, None]", "/ l_new[:, None]"),
        ("flash1", "L[:] = m + log_sum(l)", "L[:] = l"),
        ("softmax", "range(0, n, size)", "range(0, n - size + 1, size)"),
    ],
    (check_backward, FA1): [
        ("flash1", "D_i = (dO_i * O_i).sum(axis=1)", "D_i = 0 * L_i"),  # no D
        (
            "flash1",
            "D_i = (dO_i * O_i).sum(axis=1)",
            "D_i = (P_ij * dP_ij).sum(axis=1)",
        ),  # the tile's
        ("flash1", "dK_j += scores.scale", "dK_j = scores.scale"),  # the last tile alone
        ("flash1", "dV_j += tile", "dV_j = tile"),
        ("flash1", "dQ_i = dQ_i + scores.scale", "dQ_i = scores.scale"),
        ("flash1", "dQ_i + scores.scale * tile", "dQ_i + tile"),
        ("flash1", "dK_j += scores.scale * tile", "dK_j += tile"),
        ("flash1", "product_t(tile.drop(P_ij), dO_i)", "product_t(P_ij, dO_i)"),
        ("flash1", 'tile.drop(tile.outer("dP", dO_i, V_j))', 'tile.outer("dP", dO_i, V_j)'),
        (
            "flash1",
            "tile.backward(softmax_backward(P_ij, dP_ij, D_i))",
            "softmax_backward(P_ij, dP_ij, D_i)",
        ),
        ("flash1", "tile.product(dS_ij, K_j)", "(dS_ij @ K_j)"),
    ],
    (check_per_pair, FA1): [
        ("flash1", "tile.clear(exp_minus(S_ij, L_i))", "exp_minus(S_ij, L_i)"),
        ("flash1", "tile.product(dS_ij, K_j)", "(dS_ij @ K_j)"),
        ("scores", "        return self.clear(dS_ij)", "        return dS_ij"),
    ],
    (check_traffic, FA1): [
        (
            "flash1",
            'K_j, V_j = hbm.load("K", K, cols), hbm.load("V", V, cols)  # line 6',
            'K_j, V_j = K[cols], hbm.load("V", V, cols)',
        ),
        (
            "flash1",
            'hbm.load("l", l, rows), hbm.load("m", m, rows)',
            'hbm.load("l", l, rows), m[rows]',
        ),
        (
            "flash1",
            "if scores.empty(rows, cols):  # Algorithm 5, line 8",
            "if False:",
        ),
        ("flash1", 'hbm.store("m", m, queries, -np.inf)', "m[:] = -np.inf"),
        ("flash1", 'L_i = hbm.load("L", L, rows)', "L_i = L[rows]"),
        ("flash1", "S=S_ij, m=m_i, l=l_i", "S=S_ij, m=m_i"),
    ],
    (check_forward, FA2): [
        ("flash2", "l_i = correction * l_i +", "l_i = l_i +"),  # no rescale of l
        ("flash2", "            O_i *= correction[:, None]", "            # O_i *= correction"),
        ("flash2", "O_i *= correction[:, None]", "O_i /= correction[:, None]"),  # the misprint
        ("flash2", "m_new = np.maximum(m_i, S_ij.max(axis=1))", "m_new = S_ij.max(axis=1)"),
        ("flash2", "            m_i = m_new\n", ""),  # stale maximum
        ("flash2", "O_i / nonzero(l_i)[:, None]", "O_i"),  # no final division
        ("flash2", "O_i / nonzero(l_i)[:, None]", "O_i / l_i[:, None]"),
        ("flash2", "m_i + log_sum(l_i)", "log_sum(l_i)"),
        ("flash2", "m_i + log_sum(l_i)", "(m_i + log_sum(l_i)) / np.log(2)"),  # base 2
        ("flash2", "tile.product(tile.drop(P_ij), V_j)", "tile.product(P_ij, V_j)"),
        (
            "flash2",
            "correction * l_i + row_sum(P_ij)",
            "correction * l_i + row_sum(tile.drop(P_ij))",
        ),
        ("softmax", "np.where(np.isneginf(m), 0, m)", "m"),  # -inf - -inf in a masked first tile
        ("softmax", "range(0, n, size)", "range(0, n - size + 1, size)"),
    ],
    (check_backward, FA2): [
        ("flash2", "(dO_i * O_i).sum(axis=1)", "0 * L[rows]"),  # no D
        ("flash2", "(dO_i * O_i).sum(axis=1)", "dO_i.sum(axis=1)"),
        ("flash2", "dK_j += scores.scale", "dK_j = scores.scale"),
        ("flash2", "dV_j += tile", "dV_j = tile"),
        ("flash2", "dQ_i = dQ_i + scores.scale", "dQ_i = scores.scale"),
        ("flash2", "dQ_i + scores.scale * tile", "dQ_i + tile"),
        ("flash2", "dK_j += scores.scale * tile", "dK_j += scores.scale**2 * tile"),  # twice
        ("flash2", "product_t(tile.drop(P_ij), dO_i)", "product_t(P_ij, dO_i)"),
        ("flash2", 'tile.drop(tile.outer("dP", dO_i, V_j))', 'tile.outer("dP", dO_i, V_j)'),
        (
            "flash2",
            "tile.backward(softmax_backward(P_ij, dP_ij, D_i))",
            "softmax_backward(P_ij, dP_ij, D_i)",
        ),
        (
            "heads",
            "dx.reshape(groups).sum(axis=-3)",
            "dx.reshape(groups)[..., 0, :, :]",
        ),  # not summed
        ("heads", "dx.reshape(groups).sum(axis=-3)", "dx.reshape(groups).mean(axis=-3)"),
    ],
    (check_per_pair, FA2): [
        ("flash2", "tile.clear(exp_minus(S_ij, L_i))", "exp_minus(S_ij, L_i)"),
        ("flash2", "tile.product(dS_ij, K_j)", "(dS_ij @ K_j)"),
        (
            "softmax",
            "product += np.where(unseen[..., j, None], 0, A[..., j, None] * B[j])",
            "pass",
        ),
    ],
    (check_traffic, FA2): [
        ("flash2", 'Q_i = hbm.load("Q", Q, rows)  # line 4', "Q_i = Q[rows]"),
        ("flash2", 'hbm.store("L", L, rows, m_i', "L[rows] = (m_i"),
        ("flash2", 'hbm.load("D", D, rows)', "D[rows]"),
        ("flash2", 'hbm.store("dQ", dQ, everything, 0)', "dQ[:] = 0"),
        (
            "memory",
            "self.loads_by_array[name] += tile.size",
            "self.loads_by_array[name] += len(tile)",
        ),
        (
            "memory",
            "self.stores_by_array[name] += moved.size",
            "self.stores_by_array[name] += array.size",
        ),
        ("memory", "max(self.peak_sram, elements)", "elements"),  # the last tile, not the largest
    ],
    (check_forward, SPARSE): [
        ("scores", "np.where(block_mask, kinds, np.int8(EMPTY))", "kinds"),  # all tiles there
        (
            "scores",
            "np.where(block_mask, kinds, np.int8(EMPTY))",
            "np.where(block_mask, np.int8(FULL), np.int8(EMPTY))",
        ),
        (
            "scores",
            "kinds if block_mask is None else np.where(block_mask,",
            "kinds if block_mask is None else np.where(~block_mask,",
        ),
        (
            "flash1",
            "if scores.empty(rows, cols):  # Algorithm 5, line 8",
            "if False:",
        ),
        ("flash1", "(l_i * old)[:, None] * O_i", "l_i[:, None] * O_i"),
        ("heads", "block_mask=of_head(self.block_mask)", "block_mask=None"),
        (
            "scores",
            "self.kinds[rows.start // self.block_q,",
            "self.kinds[-1 - rows.start // self.block_q,",
        ),
    ],
    (check_backward, SPARSE): [
        (
            "block_sparse",
            "tiling = Tiling(io_model.fa1_backward_tiles, block_q, block_k, block_mask)",
            "tiling = Tiling(io_model.fa1_backward_tiles, block_q, block_k)",
        ),
        ("flash1", "            if scores.empty(rows, cols):\n                continue\n", ""),
        ("flash1", "D_i = (dO_i * O_i).sum(axis=1)", "D_i = 0 * L_i"),
        ("flash1", "dK_j += scores.scale", "dK_j = scores.scale"),
        ("flash1", "dQ_i = dQ_i + scores.scale", "dQ_i = scores.scale"),
        ("scores", "np.where(block_mask, kinds, np.int8(EMPTY))", "kinds"),
    ],
    (check_forward, "flash_attention_2, scores and heads"): [
        ("scores", "j > i + rule.right", "j >= i + rule.right"),  # causal, off by one
        ("scores", "j < i - rule.left", "j <= i - rule.left"),  # window, off by one
        ("scores", "return left, min(right, 0) if causal else right", "return left, right"),
        ("scores", 'return 0 if causal == "top-left" else n_k - n_q', "return 0"),
        ("scores", 'return 0 if causal == "top-left" else n_k - n_q', "return n_k - n_q"),
        ("scores", "self.clear(S_ij, -np.inf)", "self.clear(S_ij, -100.0)"),  # no stand-in survives
        ("scores", "self.clear(S_ij, -np.inf)", "self.clear(S_ij, 0)"),
        ("scores", "parts += [np.isneginf(self.bias)]", "pass"),
        ("scores", "[~self._load(", "[self._load("),  # True = hidden
        ("scores", "            S_ij *= rule.softcap\n", ""),
        ("scores", 'self.outer("S", rule.scale * Q_i, K_j)', 'self.outer("S", Q_i, K_j)'),
        ("scores", "            S_ij += self.bias\n", "            S_ij *= self.bias\n"),
        ("scores", "np.abs(distance, out=distance)", "distance"),  # ALiBi with a sign
        ("scores", "[:, None] + self.rule.off", "[:, None]"),  # positions from 0
        ("scores", "(high <= right) & (low >= -left)", "(low <= right) & (low >= -left)"),
        ("scores", "(low <= right) & (high >= -left)", "(low < right) & (high >= -left)"),
        ("scores", "np.logical_and, mask", "np.logical_or, mask"),  # a tile is full too soon
        (
            "softmax",
            "        return A @ B\n    bad",
            "        return A @ B\n    return A @ B\n    bad",
        ),
        (
            "scores",
            "self.rows if n_rows > 1 else whole",
            "slice(0, length(self.rows)) if n_rows > 1 else whole",
        ),
        ("scores", "1 / (1 - rule.dropout_p)", "1.0"),
        (
            "dropout",
            "np.arange(rows.start, rows.stop, dtype=np.uint64)",
            "np.arange(rows.stop - rows.start, dtype=np.uint64)",
        ),
        ("scores", "keep_tile(rule.seed, rule.head,", "keep_tile(rule.seed, 0,"),
        (
            "heads",
            "index[-1] * x.shape[-3] // lead[-1]",
            "index[-1] % x.shape[-3]",
        ),  # tile, not repeat
        ("heads", "1 / d**0.5", "1.0"),
    ],
    (check_backward, "flash_attention_1, scores and heads"): [
        ("scores", "self.uncap = 1 - S_ij * S_ij", "self.uncap = 1 + 0 * S_ij"),
        ("scores", "self.uncap = 1 - S_ij * S_ij", "self.uncap = 1 - S_ij"),
        ("scores", "            dS_ij *= self.uncap\n", "            pass\n"),
        ("scores", "        return self.clear(dS_ij)", "        return dS_ij"),
        ("scores", "None if self.unseen is None else self.unseen.T", "None"),
        ("heads", "index[-1] * x.shape[-3] // lead[-1]", "index[-1] % x.shape[-3]"),
        ("heads", "dx.reshape(groups).sum(axis=-3)", "dx.reshape(groups)[..., -1, :, :]"),
        ("dropout", "^ np.uint64(head)", "^ np.uint64(rows.start)"),
    ],
    (check_packed, "packed"): [
        ("heads", "kv_head = h * k.shape[1] // n_heads", "kv_head = h % k.shape[1]"),
        (
            "heads",
            "slice(*ends_k[b : b + 2])\n        kv_head",
            "slice(*ends_q[b : b + 2])\n        kv_head",
        ),
        ("heads", "lse[h, rows]", "lse[0, rows]"),
        ("heads", "np.ravel_multi_index(index, self.lead)", "index[-1]"),
        ("scores", 'return 0 if causal == "top-left" else n_k - n_q', "return 0"),
    ],
    (check_dropout, "dropout"): [
        ("dropout", ">= np.uint64(int(p * 2**64))", "< np.uint64(int(p * 2**64))"),
        ("dropout", "^ np.uint64(head)", ""),
        ("dropout", "i << np.uint64(32) | j", "i ^ j"),
        ("dropout", "i << np.uint64(32) | j", "j"),
        ("dropout", "seed % 2**64", "0"),
        ("dropout", "    return z\n", "    return z >> np.uint64(1)\n"),
    ],
    (check_closed_forms, "closed forms"): [
        ("io_model", "t * (d + d_v + 2)", "t * (d + d_v + 1)"),
        ("io_model", "n_q * (d_v + 2) + t * (d_v + 2)", "t * (d_v + 2)"),
        ("io_model", "t * (2 * d + 2 * d_v + 1)", "t * (2 * d + 2 * d_v + 2)"),
        ("io_model", "n_q * d + u * (d + d_v)", "n_q * d + n_k * (d + d_v)"),
        ("io_model", "t * (2 * d + d_v + 2)", "t * (2 * d + 2 * d_v + 2)"),
        ("io_model", "int(visited.sum(axis=1) @ rows)", "int(visited.sum()) * block_q"),
        ("io_model", "-(-sram_elements // (4 * d))", "sram_elements // (4 * d)"),
        ("io_model", "min(block_k, d), block_k", "block_k, block_k"),
    ],
}


def of(key):
    """Return (check, algorithm) of a key of FAULTS."""
    check, what = key
    return check, what.partition(",")[0]


def test_the_package_is_healthy():
    for check, name in sorted({of(key) for key in FAULTS}, key=lambda x: (x[0].__name__, x[1])):
        check(flashref, name)


@pytest.mark.parametrize(
    ("key", "module", "healthy", "broken"),
    [(key, *fault) for key, faults in FAULTS.items() for fault in faults],
    ids=[
        f"{check.__name__[6:]}-{what}-{i}"
        for (check, what), faults in FAULTS.items()
        for i in range(len(faults))
    ],
)
def test_every_fault_is_seen(key, module, healthy, broken):
    check, name = of(key)
    package = wounded_package(module, healthy, broken)
    assert package is not flashref
    assert sys.modules["flashref"] is flashref
    with np.errstate(all="ignore"), warnings.catch_warnings(), pytest.raises(AssertionError):
        warnings.simplefilter("ignore")
        check(package, name)


def test_a_stale_sabotage_is_an_error():
    """A fault whose place has moved must not pass for one that was caught."""
    with pytest.raises(AssertionError, match="stale sabotage, 0 times"):
        wounded_package("flash2", "this line is not there", "nor this")
    with contextlib.suppress(AssertionError):
        wounded_package("flash2", "import", "import")
    assert sys.modules["flashref"] is flashref


def test_every_algorithm_has_at_least_five_faults_each_way():
    for name in (STANDARD, FA1, FA2, SPARSE):
        for check in (check_forward, check_backward):
            assert len(FAULTS[check, name]) >= 5
    assert len(FAULTS[check_softmax, "softmax"]) >= 5
