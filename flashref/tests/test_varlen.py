"""Packed sequences: `flash_attention_varlen` against the oracle, one sequence after the other."""

import numpy as np
import pytest

import flashref
from flashref.tests.oracle import Gold

pytestmark = pytest.mark.filterwarnings("error")

D, D_V = 6, 4
LENGTHS = {  # of the queries and of the keys of each sequence
    "one": ([5], [7]),
    "several": ([3, 5, 2, 9], [4, 2, 2, 11]),
    "zeros at both ends": ([0, 3, 4, 0], [5, 2, 0, 0]),
    "zeros on both sides in the middle": ([4, 0, 0, 2], [3, 6, 0, 1]),
    "no key at all": ([2, 3], [0, 0]),
    "no query at all": ([0, 0], [2, 3]),
    "nothing": ([0], [0]),
    "no sequence": ([], []),
    "single tokens": ([1, 1, 1, 1], [1, 2, 3, 30]),
    "longer than a block": ([70, 1, 40], [33, 90, 40]),
}
OPTIONS = {
    "none": {},
    "causal": {"causal": True},
    "top-left": {"causal": "top-left"},
    "window": {"window": (2, 1)},
    "softcap and scale": {"softcap": 2, "scale": 0.7},
    "alibi": {"alibi_slopes": "per head"},
    "alibi per sequence": {"alibi_slopes": "per sequence", "causal": True},
    "dropout": {"dropout_p": 0.4, "seed": 3},
    "all": {
        "causal": True, "window": (20, None), "softcap": 3, "scale": -0.5, "dropout_p": 0.17,
        "alibi_slopes": "per head", "seed": 8,
    },
}  # fmt: skip
HEADS = [(1, 1), (4, 4), (6, 2), (4, 1)]


def packed(lengths, heads, dtype="float64", seed=0):
    """Return q, k, v and the ends of the sequences, cu_seqlens_q and cu_seqlens_k."""
    rng = np.random.default_rng(seed)
    (total_q, total_k), (heads_q, heads_kv) = map(sum, lengths), heads
    shapes = (total_q, heads_q, D), (total_k, heads_kv, D), (total_k, heads_kv, D_V)
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return q, k, v, *(np.cumsum([0, *n]) for n in lengths)


def slopes_of(options, sequences, heads_q):
    """Return the options with slopes for so many heads, and for so many sequences where asked."""
    options = dict(options)
    kind = options.get("alibi_slopes")
    if kind == "per head":
        options["alibi_slopes"] = 2.0 ** -np.arange(1, heads_q + 1)
    elif kind == "per sequence":
        rng = np.random.default_rng(1)
        options["alibi_slopes"] = rng.random((sequences, heads_q))
    return options


def check_each_sequence(q, k, v, ends_q, ends_k, o, lse, options):
    """Assert that each sequence got what the oracle gives it alone: own off, own dropout."""
    options = dict(options)
    seed, slopes = options.pop("seed", None), options.pop("alibi_slopes", None)
    assert o.shape == (*q.shape[:2], D_V)
    assert lse.shape == q.shape[1::-1]
    heads, sequences = q.shape[1], len(ends_q) - 1
    for b in range(sequences):
        rows, keys = slice(*ends_q[b : b + 2]), slice(*ends_k[b : b + 2])
        q_b, k_b, v_b = (x.swapaxes(0, 1) for x in (q[rows], k[keys], v[keys]))
        own = dict(options)
        if slopes is not None:
            own["alibi_slopes"] = slopes[b] if np.ndim(slopes) == 2 else slopes
        if "dropout_p" in options:  # head h of sequence b counts as head b * heads + h
            shape = ((b + 1) * heads, q_b.shape[1], k_b.shape[1])
            own["keep"] = flashref.dropout_keep(seed, shape, options["dropout_p"])[b * heads :]
        gold = Gold(q_b, k_b, v_b, **own)
        gold.expect(q.dtype).check(o=o[rows].swapaxes(0, 1), lse=lse[:, rows])


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("which", LENGTHS)
def test_each_sequence_as_if_alone(which, name, heads):
    lengths = LENGTHS[which]
    q, k, v, ends_q, ends_k = packed(lengths, heads)
    options = slopes_of(OPTIONS[name], len(lengths[0]), heads[0])
    o, lse = flashref.flash_attention_varlen(
        q, k, v, ends_q, ends_k, block_q=4, block_k=5, return_lse=True, **options
    )
    check_each_sequence(q, k, v, ends_q, ends_k, o, lse, options)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("blocks", [(1, 1), (3, 7), (64, 128), (None, None)], ids=str)
def test_blocks_and_dtypes(blocks, dtype):
    q, k, v, ends_q, ends_k = packed(LENGTHS["longer than a block"], (6, 2), dtype, seed=1)
    options = slopes_of(OPTIONS["all"], 3, 6)
    o, lse = flashref.flash_attention_varlen(
        q, k, v, ends_q, ends_k, block_q=blocks[0], block_k=blocks[1], return_lse=True, **options
    )
    check_each_sequence(q, k, v, ends_q, ends_k, o, lse, options)


def test_random_lengths():
    """A hundred packs of up to seven sequences, a third of the lengths 0."""
    rng = np.random.default_rng(2)
    for seed in range(100):
        lengths = rng.integers(1, 12, (2, rng.integers(1, 8)))
        lengths = np.where(rng.random(lengths.shape) < 1 / 3, 0, lengths).tolist()
        heads = HEADS[seed % len(HEADS)]
        q, k, v, ends_q, ends_k = packed(lengths, heads, seed=seed)
        options = slopes_of(list(OPTIONS.values())[seed % len(OPTIONS)], len(lengths[0]), heads[0])
        o, lse = flashref.flash_attention_varlen(
            q, k, v, ends_q, ends_k, block_q=3, block_k=4, return_lse=True, **options
        )
        check_each_sequence(q, k, v, ends_q, ends_k, o, lse, options)


def test_no_sequence_sees_another():
    """NaN in one sequence stays there, also where it shares a block with its neighbours."""
    q, k, v, ends_q, ends_k = packed(LENGTHS["several"], (4, 2), seed=3)
    want, want_lse = flashref.flash_attention_varlen(q, k, v, ends_q, ends_k, return_lse=True)
    for x, ends in ((q, ends_q), (k, ends_k), (v, ends_k)):
        x[ends[1] : ends[2]] = np.nan
    o, lse = flashref.flash_attention_varlen(q, k, v, ends_q, ends_k, return_lse=True)
    others = np.ones(len(q), bool)
    others[ends_q[1] : ends_q[2]] = False
    assert np.isnan(o[~others]).all()
    np.testing.assert_array_equal(o[others], want[others])
    np.testing.assert_array_equal(lse[:, others], want_lse[:, others])


@pytest.mark.parametrize("name", ["none", "all"])
def test_lse_changes_no_bit_and_nothing_is_modified(name):
    arrays = packed(LENGTHS["several"], (4, 2), seed=4)
    before = [x.copy() for x in arrays]
    options = slopes_of(OPTIONS[name], 4, 4)
    o, lse = flashref.flash_attention_varlen(*arrays, return_lse=True, **options)
    np.testing.assert_array_equal(flashref.flash_attention_varlen(*arrays, **options), o)
    for x, y in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(x, y)
        assert not np.may_share_memory(o, x)
        assert not np.may_share_memory(lse, x)


def test_equal_lengths_are_a_batch():
    """The same bits as a call with a batch axis, dropout included."""
    q, k, v, ends_q, ends_k = packed(([5] * 3, [8] * 3), (4, 2), seed=5)
    options = slopes_of(OPTIONS["all"], 3, 4)
    o, lse = flashref.flash_attention_varlen(q, k, v, ends_q, ends_k, return_lse=True, **options)
    batch = [x.reshape(3, -1, *x.shape[1:]).swapaxes(1, 2) for x in (q, k, v)]
    want, want_lse = flashref.flash_attention_2(*batch, return_lse=True, **options)
    np.testing.assert_array_equal(o.reshape(3, 5, 4, D_V).swapaxes(1, 2), want)
    np.testing.assert_array_equal(lse.reshape(4, 3, 5).swapaxes(0, 1), want_lse)
