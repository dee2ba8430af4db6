"""What must hold whatever the numbers: each a sentence about attention, tried on many examples.

Hypothesis draws sizes, options and blocks; the same ones in every run, by the profile in conftest.
"""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashref
from flashref.tests.cases import ALGORITHMS
from flashref.tests.oracle import assert_close
from flashref.tests.rungs import Result, Rung

pytestmark = pytest.mark.filterwarnings("error")

NAMES = Result._fields
FLASH = ALGORITHMS[1:]


class Problem(NamedTuple):
    """One call: arrays, options, and a generator for whatever else a test needs."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray
    options: dict
    rng: np.random.Generator

    @property
    def square(self):
        return (*self.q.shape[:-1], self.k.shape[-2])


@st.composite
def problems(draw, positions=True, biased=True):
    """Draw a problem; without `positions`, no option depends on where a key stands."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = st.integers(1, 12)
    n_q, n_k, d, d_v = draw(st.tuples(size, size, st.integers(1, 5), st.integers(1, 5)))
    heads = draw(st.sampled_from([None, (2, 2), (4, 2), (3, 1)]))
    lead, kv_lead = ((), ()) if heads is None else ((heads[0],), (heads[1],))
    spread = draw(st.sampled_from([0.1, 1, 3]))
    shapes = (*lead, n_q, d), (*kv_lead, n_k, d), (*kv_lead, n_k, d_v), (*lead, n_q, d_v)
    q, k, v, do = (spread * rng.standard_normal(shape) for shape in shapes)
    options = {
        "scale": draw(st.sampled_from([None, 0.4, -0.7])),
        "softcap": draw(st.sampled_from([None, 2.0])),
    }
    if draw(st.booleans()):
        options["mask"] = rng.random((*lead, n_q, n_k)) < draw(st.sampled_from([0.2, 0.8]))
    if biased and draw(st.booleans()):
        bias = rng.standard_normal((n_q, n_k))
        options["bias"] = np.where(rng.random((n_q, n_k)) < 0.2, -np.inf, bias)
    if positions:
        options["causal"] = draw(st.sampled_from([False, True, "top-left"]))
        options["window"] = draw(st.sampled_from([None, (2, 1), (None, 3), (0, None)]))
        if draw(st.booleans()):
            options["alibi_slopes"] = rng.random(lead)
        if draw(st.booleans()):
            options |= {"dropout_p": draw(st.sampled_from([0.2, 0.6])), "seed": 5}
    return Problem(q, k, v, do, options, rng)


@st.composite
def rungs(draw, names=ALGORITHMS):
    """Draw an algorithm and its block sizes, from 1 to more than any n."""
    name = draw(st.sampled_from(names))
    size = st.integers(1, 14)
    blocks = () if name == "standard_attention" else draw(st.tuples(size, size))
    return Rung(name, blocks, flashref)


def same(got, want, what="result", tolerance=1e-11):
    """Assert equality up to rounding, NaN and infinities in the same places."""
    assert_close(got, want, tolerance * np.maximum(1, np.abs(want)), what=what)


def all_same(got, want):
    for name, x, y in zip(NAMES, got, want, strict=True):
        same(x, y, name)


def equal(got, want):
    """Assert that all results have the same bits."""
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


# Tiles ------------------------------------------------------------------------------------------


@given(problems(), rungs(), rungs())
def test_no_algorithm_and_no_block_size_changes_the_answer(problem, one, other):
    *arrays, options, _ = problem
    all_same(one.run(*arrays, **options), other.run(*arrays, **options))


@given(problems(), st.integers(1, 14), st.integers(1, 14), st.floats(0, 1))
def test_absent_tiles_are_a_mask(problem, block_q, block_k, density):
    *arrays, options, rng = problem
    *lead, n_q, n_k = problem.square
    tiles = rng.random((*lead, -(-n_q // block_q), -(-n_k // block_k))) < density
    pairs = tiles.repeat(block_q, -2).repeat(block_k, -1)[..., :n_q, :n_k]
    sparse = Rung("block_sparse_attention", (block_q, block_k), flashref)
    got = sparse.run(*arrays, **options, block_mask=tiles)
    masked = {**options, "mask": pairs & options.get("mask", True)}
    all_same(got, Rung("standard_attention", (), flashref).run(*arrays, **masked))


# Keys are a set -----------------------------------------------------------------------------------


@given(problems(positions=False), rungs())
def test_the_order_of_the_keys_does_not_matter(problem, rung):
    q, k, v, do, options, rng = problem
    order = rng.permutation(k.shape[-2])
    moved = dict(options)
    for name in {"mask", "bias"} & options.keys():
        moved[name] = options[name][..., order]
    want = rung.run(q, k, v, do, **options)
    got = rung.run(q, k[..., order, :], v[..., order, :], do, **moved)
    for name, x, y in zip(NAMES, got, want, strict=True):
        same(x, y[..., order, :] if name in ("dk", "dv") else y, name)


@given(problems(positions=False), rungs(), st.lists(st.integers(0, 12), max_size=3))
def test_attention_over_parts_of_the_keys_merges(problem, rung, cuts):
    """Also where a part is empty, or a row sees nothing of it."""
    q, k, v, _, options, _ = problem
    want = rung.forward(q, k, v, **options)
    o, lse = None, None
    for keys in _parts(cuts, k.shape[-2]):
        part = rung.forward(q, k[..., keys, :], v[..., keys, :], **_of_keys(options, keys))
        o, lse = part if o is None else flashref.merge_attention(o, lse, *part)
    same(o, want[0], "o")
    same(lse, want[1], "lse")


@given(problems(positions=False), rungs(FLASH), st.lists(st.integers(0, 12), max_size=3))
def test_the_backward_of_parts_of_the_keys_adds_up(problem, rung, cuts):
    """With o and lse over all keys: dk and dv of each part, and shares of dq."""
    q, k, v, do, options, _ = problem
    want = rung.run(q, k, v, do, **options)
    dq = np.zeros_like(q)
    for keys in _parts(cuts, k.shape[-2]):
        k_part, v_part = k[..., keys, :], v[..., keys, :]
        saved = want.o, want.lse
        part = rung.backward(do, q, k_part, v_part, *saved, **_of_keys(options, keys))
        dq += part[0]
        same(part[1], want.dk[..., keys, :], "dk")
        same(part[2], want.dv[..., keys, :], "dv")
    same(dq, want.dq, "dq")


def _parts(cuts, n):
    """Return slices that cut n keys at these places; some may be empty."""
    ends = [*sorted({0, n} | {min(cut, n) for cut in cuts}), n]
    return [slice(*ends[i : i + 2]) for i in range(len(ends) - 1)]


def _of_keys(options, keys):
    names = {"mask", "bias"} & options.keys()
    return {**options, **{name: options[name][..., keys] for name in names}}


# Softmax ------------------------------------------------------------------------------------------


@given(problems(biased=False), rungs(), st.sampled_from([1.0, 100.0]))
def test_a_constant_along_a_row_moves_lse_alone(problem, rung, size):
    *arrays, options, rng = problem
    shift = size * rng.standard_normal((*problem.square[:-1], 1))
    want = rung.run(*arrays, **options)
    got = rung.run(*arrays, **options, bias=shift)
    all_same(got, want._replace(lse=want.lse + shift[..., 0]))


@given(problems(), rungs())
def test_weights_add_up_to_1(problem, rung):
    """V of ones gives exactly one answer where anything is seen, and 0 elsewhere."""
    q, k, v, _, options, _ = problem
    options = {name: x for name, x in options.items() if name not in ("dropout_p", "seed")}
    o, lse = rung.forward(q, k, np.ones_like(v), **options)
    sees = np.isfinite(lse)
    same(o, np.broadcast_to(sees[..., None], o.shape).astype(float), tolerance=1e-14)
    assert (o[~sees] == 0).all()
    if "mask" in options:
        assert not sees[~options["mask"].any(-1)].any()


def scores(rng, rows, n):
    """Return scores in which every other row has some, or only, -inf."""
    x = 10 * rng.standard_normal((rows, n))
    x[::2][rng.random(x[::2].shape) < 0.5] = -np.inf
    x[-1, : rng.integers(n + 1)] = -np.inf
    return x


seeds = st.integers(0, 2**32 - 1)


@given(seeds, st.integers(1, 20), st.integers(1, 22))
def test_each_online_step_is_exact_for_what_it_has_seen(seed, n, block):
    rng = np.random.default_rng(seed)
    x, v = scores(rng, 4, n), rng.standard_normal((n, 3))
    steps = flashref.online_softmax_steps(x, v, block=block)
    assert len(steps) == -(-n // block)
    for t, step in enumerate(steps):
        own, so_far = x[:, t * block : (t + 1) * block], x[:, : (t + 1) * block]
        one, k = np.zeros((4, 1)), np.zeros((so_far.shape[1], 1))
        want_o, want_lse = flashref.standard_attention(
            one, k, v[: so_far.shape[1]], bias=so_far, return_lse=True
        )
        np.testing.assert_array_equal(step.m, so_far.max(1))
        np.testing.assert_array_equal(step.m_block, own.max(1))
        for l, m, seen in ((step.l, step.m, so_far), (step.l_block, step.m_block, own)):
            same(l, np.exp(seen - np.where(m == -np.inf, 0, m)[:, None]).sum(1), "l")
        sees = step.l > 0
        same((step.m[sees] + np.log(step.l[sees])), want_lse[sees], "m + log l")
        assert (want_lse[~sees] == -np.inf).all()
        same(step.o, want_o, "o")


@given(seeds, st.integers(1, 20), st.integers(1, 22))
def test_online_softmax_is_softmax(seed, n, block):
    x = scores(np.random.default_rng(seed), 4, n)
    want = flashref.safe_softmax(x)
    same(flashref.online_softmax(x, block=block), want)
    same(flashref.online_softmax(x.T, block=block, axis=0).T, want)
    full = np.isfinite(x).any(1)
    same(want.sum(1), full.astype(float))
    same(flashref.naive_softmax(x[full]), want[full])


@given(seeds)
def test_merging_has_no_order_and_no_grouping(seed):
    rng = np.random.default_rng(seed)
    o, lse = rng.standard_normal((3, 6, 2)), 100 * rng.standard_normal((3, 6))
    empty = rng.random((3, 6)) < 0.3
    o[empty], lse[empty] = np.nan, -np.inf
    a, b, c = zip(o, lse, strict=True)
    merge = flashref.merge_attention
    ways = [
        merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c)), merge(*c, *merge(*b, *a)),
        merge(*merge(*a, *c), *b),
    ]  # fmt: skip
    for got_o, got_lse in ways[1:]:
        same(got_o, ways[0][0], "o")
        same(got_lse, ways[0][1], "lse")
    assert (ways[0][0][empty.all(0)] == 0).all()
    assert (ways[0][1][empty.all(0)] == -np.inf).all()


# Gradients ----------------------------------------------------------------------------------------


@given(problems(), rungs(), st.floats(-3, 3), st.floats(-3, 3))
def test_the_backward_is_linear_in_do(problem, rung, a, b):
    q, k, v, do, options, rng = problem
    other = rng.standard_normal(do.shape)
    saved = rung.forward(q, k, v, **options)
    one, two, both = (
        rung.backward(x, q, k, v, *saved, **options) for x in (do, other, a * do + b * other)
    )
    for name, x, y, z in zip(NAMES[2:], one, two, both, strict=True):
        same(z, a * x + b * y, name)


@given(problems(), rungs())
def test_no_do_no_gradient(problem, rung):
    q, k, v, do, options, _ = problem
    for gradient in rung.run(q, k, v, 0 * do, **options)[2:]:
        assert (gradient == 0).all()


@given(problems(), rungs())
def test_dq_and_dk_agree_on_the_scale(problem, rung):
    """Q times t and K over t are the same scores: sum(q * dq) = sum(k * dk), head by head."""
    q, k, v, do, options, _ = problem
    got = rung.run(q, k, v, do, **options)
    q_dq, k_dk = (q * got.dq).sum((-1, -2)), (k * got.dk).sum((-1, -2))
    if q_dq.ndim:
        q_dq = q_dq.reshape(len(k), -1).sum(1)
    same(q_dq, k_dk, tolerance=1e-10)


@given(problems(), rungs(), st.sampled_from("qkv"))
def test_a_seen_nan_spoils_the_rows_that_see_it_and_no_others(problem, rung, where):
    arrays, options = dict(zip("qkv", problem[:3], strict=True)), problem.options
    want, want_lse = rung.forward(**arrays, **options)
    at = int(problem.rng.integers(arrays[where].shape[-2]))
    if where == "q":
        touched = (np.arange(want_lse.shape[-1]) == at) & np.isfinite(want_lse)
    else:  # with a value of 1 for this key alone, o tells which rows see it
        tell = np.zeros_like(arrays["v"])
        tell[..., at, :] = 1
        undropped = {**options, "dropout_p": 0}
        touched = rung.forward(arrays["q"], arrays["k"], tell, **undropped)[0][..., 0] != 0
    arrays[where] = arrays[where].copy()
    arrays[where][..., at, :] = np.nan
    o, lse = rung.forward(**arrays, **options)
    assert np.isnan(o[touched]).all()
    assert np.isnan(lse[touched]).all() or where == "v"
    same(o[~touched], want[~touched], "o")
    same(lse[~touched], want_lse[~touched], "lse")


# Dropout ------------------------------------------------------------------------------------------

sizes = st.integers(0, 9)


@given(seeds, st.lists(sizes, min_size=0, max_size=3), sizes, sizes, sizes, sizes)
def test_the_dropout_of_a_part_is_part_of_the_dropout(seed, lead, n_q, n_k, more_q, more_k):
    whole = flashref.dropout_keep(seed, (*lead, n_q + more_q, n_k + more_k), 0.5)
    part = flashref.dropout_keep(seed, (*lead, n_q, n_k), 0.5)
    np.testing.assert_array_equal(part, whole[..., :n_q, :n_k])
    heads = int(np.prod(lead, dtype=int))
    flat = flashref.dropout_keep(seed, (heads, n_q, n_k), 0.5)
    np.testing.assert_array_equal(part.reshape(flat.shape), flat)
    fewer = flashref.dropout_keep(seed, (heads // 2, n_q, n_k), 0.5)
    np.testing.assert_array_equal(fewer, flat[: heads // 2])


# Determinism --------------------------------------------------------------------------------------


@given(problems(), rungs())
def test_the_same_call_gives_the_same_bits(problem, rung):
    *arrays, options, _ = problem
    equal(rung.run(*arrays, **options), rung.run(*arrays, **options))


@given(problems(), rungs())
def test_asking_for_lse_or_counting_changes_no_bit(problem, rung):
    q, k, v, do, options, _ = problem
    want = rung.run(q, k, v, do, **options)
    args, named = rung._arguments(q, k, options)
    alone = getattr(flashref, rung.name)(q, k, v, *args, **named)
    equal([alone], [want.o])
    memory = flashref.Memory()
    equal(rung.run(q, k, v, do, **options, memory=memory), want)
    assert memory.loads > 0


@given(problems(), rungs())
def test_nothing_is_modified_and_nothing_shared(problem, rung):
    *arrays, options, _ = problem
    given_arrays = [*arrays, *(x for x in options.values() if isinstance(x, np.ndarray))]
    before = [x.copy() for x in given_arrays]
    results = rung.run(*arrays, **options)
    equal(given_arrays, before)
    for result in results:
        assert not any(np.may_share_memory(result, x) for x in given_arrays)
