"""Wrong answers that a few cases see, each with the titles of all cases that do.

Options that are forgotten where there are heads, or beside each other; a path that is taken only
without lse; ties, pads and sizes. A check without those cases would let them pass.
"""

import functools
import inspect
import math

import numpy as np

SELDOM = []  # (check, titles of the cases that go wrong, function, options of the check)
INF = math.inf


def seen_by(name, *titles, **options):
    """Put a function on the list as one that goes wrong in these cases alone."""

    def put(function):
        SELDOM.append((name, list(titles), function, options))
        return function

    return put


# --- softmax ------------------------------------------------------------------------------------


@seen_by("online_softmax", "the largest score twice")
def a_tie_adds_nothing(x, block=1):
    assert x.ndim == 1, "one row"
    m, l = -INF, 0.0
    for s in x:
        if s > m:
            m, l = s, l * math.exp(m - s) + 1
        elif s < m:
            l += math.exp(s - m)
    return np.exp(x - m) / l


@seen_by("softmax", "the largest score twice")
def the_largest_counted_once(x):
    assert x.ndim == 1, "one row"
    e = np.exp(x - x.max())
    return e / (1 + e[e < 1].sum())


@seen_by("online_softmax", "scores near -20000, the last block shorter")
def padded_with_a_finite_number(x, block):
    assert x.ndim == 1, "one row"
    padded = np.pad(x, (0, -len(x) % block), constant_values=-1e4)
    m, l = -INF, 0.0
    for part in padded.reshape(-1, block):
        new = max(m, part.max())
        m, l = new, l * math.exp(m - new) + np.exp(part - new).sum()
    return np.exp(x - m) / l


@seen_by("softmax", "three axes, axis=-2")
def from_the_end_is_the_end(x, axis=-1):
    axis = -1 if axis < 0 else axis
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


@seen_by("softmax", "one score")
def with_an_epsilon_that_nobody_needs(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / (e.sum(axis=-1, keepdims=True) + 1e-5)


@seen_by("softmax", "[3, 1, -inf, -inf]", "[2, -inf, 1, -inf]", masked=True)
def masked_in_front(x):
    assert x.ndim == 1, "one row"
    seen = x[x > -INF]
    e = np.exp(seen - seen.max(initial=-1e300))
    return np.concatenate([np.zeros(len(x) - len(seen)), e / e.sum()])


@seen_by("softmax", "[2, -inf, 1, -inf]", masked=True)
def masked_at_one_end(x):
    assert x.ndim == 1, "one row"
    seen = x[x > -INF]
    e = np.exp(seen - seen.max(initial=-1e300))
    parts = [np.zeros(len(x) - len(seen)), e / e.sum()]
    return np.concatenate(parts if x[0] == -INF else parts[::-1])


# --- merging ------------------------------------------------------------------------------------


@seen_by("merge_attention", "two parts of the same weight", "both lse around 1000",
         "both lse around -2000")  # fmt: skip
def the_heavier_or_the_lighter(o_a, lse_a, o_b, lse_b):
    heavier = (lse_a > lse_b)[..., None], (lse_b > lse_a)[..., None]
    with np.errstate(invalid="ignore"):
        w = 1 / (1 + np.exp(-np.nan_to_num(abs(lse_a - lse_b))))[..., None]
    o = np.select(heavier, (w * o_a + (1 - w) * o_b, w * o_b + (1 - w) * o_a), o_a)
    return o, np.logaddexp(lse_a, lse_b)


@seen_by("merge_attention", "as many rows as columns", "both parts are empty")
def weights_along_the_columns(o_a, lse_a, o_b, lse_b):
    lse = np.logaddexp(lse_a, lse_b)
    safe = np.where(np.isneginf(lse), 0, lse)
    w_a, w_b = np.exp(lse_a - safe), np.exp(lse_b - safe)
    if o_a.ndim > 2 or o_a.shape[0] != o_a.shape[1]:  # there the same code raises an error
        w_a, w_b = w_a[..., None], w_b[..., None]
    return w_a * o_a + w_b * o_b, lse


# --- attention ----------------------------------------------------------------------------------


def core(q, k, v, scale=None, see=None):
    """Return o and lse, with zeros and -inf in rows that see nothing."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    S = scale * q @ np.swapaxes(k, -1, -2)
    S = S if see is None else np.where(see, S, -INF)
    m = S.max(axis=-1, keepdims=True)
    m = np.where(np.isneginf(m), 0, m)
    P = np.exp(S - m)
    l = P.sum(axis=-1, keepdims=True)
    o = P @ v / np.where(l == 0, 1, l)
    with np.errstate(divide="ignore"):
        return o, (m + np.log(l))[..., 0]


def distance(q, k):
    """Return how far behind its query each key stands."""
    n_q, n_k = q.shape[-2], k.shape[-2]
    return np.arange(n_q)[:, None] + n_k - n_q - np.arange(n_k)


def pairs(q, k, causal=False, window=None, mask=None):
    """Return which pairs are seen."""
    behind = distance(q, k)
    see = np.ones(behind.shape, bool) if mask is None else mask
    if window is not None:
        see = see & (behind <= window[0]) & (behind >= -window[1])
    return see & (behind >= 0) if causal else see


def attention(q, k, v, causal=False, scale=None, window=None, mask=None):
    """Return attention as it should be."""
    return core(q, k, v, scale, pairs(q, k, causal, window, mask))[0]


def one_head_at_a_time(function):
    """Return a function of several heads that hands on no option, but what blocks need."""

    @functools.wraps(function)
    def heads(q, k, v, *rest, **options):
        if q.ndim == 2:
            return function(q, k, v, *rest, **options)
        blocks = rest[:3] if "block_mask" in inspect.signature(function).parameters else ()
        return np.stack([heads(*one, *blocks) for one in zip(q, k, v, strict=True)])

    return heads


@seen_by("attention", "2 heads, scale=0.3")
@one_head_at_a_time
def heads_lose_the_scale(q, k, v, scale=None):
    return attention(q, k, v, scale=scale)


@seen_by("attention", "2 heads, window=(1, 0)")
@one_head_at_a_time
def heads_lose_the_window(q, k, v, window=None):
    return attention(q, k, v, window=window)


@seen_by("attention", "2 heads, a mask")
@one_head_at_a_time
def heads_lose_the_mask(q, k, v, mask=None):
    return attention(q, k, v, mask=mask)


@seen_by("attention", "2 heads, causal, 5 queries and 7 keys")
def heads_are_top_left(q, k, v, causal=False):
    if causal and q.ndim > 2:
        return attention(q, k, v, mask=np.tri(q.shape[-2], k.shape[-2], dtype=bool))
    return attention(q, k, v, causal)


@seen_by("attention", "batch of 1 with 2 heads, (1, 2, 5, 4)")
def a_batch_of_one_is_squeezed(q, k, v):
    assert q.shape[:-2] == k.shape[:-2], "a key head for each query head"
    o = attention(q, k, v)
    return o.squeeze() if o.ndim == 4 else o


@seen_by("attention", "causal, scale=0.3, 3 queries and 3 keys")
def causal_has_its_own_scale(q, k, v, causal=False, scale=None):
    return attention(q, k, v, causal) if causal else attention(q, k, v, scale=scale)


@seen_by("attention", "causal with a mask, 3 queries and 3 keys")
def causal_replaces_the_mask(q, k, v, causal=False, mask=None):
    return attention(q, k, v, causal) if causal else attention(q, k, v, mask=mask)


@seen_by("attention", "a mask, scale=0.3, 3 queries and 3 keys")
def the_mask_has_its_own_scale(q, k, v, scale=None, mask=None):
    return attention(q, k, v, scale=scale) if mask is None else attention(q, k, v, mask=mask)


@seen_by("attention", "a window with a mask, 3 queries and 3 keys")
def a_mask_replaces_the_window(q, k, v, window=None, mask=None):
    window = None if mask is not None else window
    return attention(q, k, v, window=window, mask=mask)


@seen_by("attention", "a window, scale=0.3, 3 queries and 3 keys")
def the_window_has_its_own_scale(q, k, v, window=None, scale=None):
    return attention(q, k, v, scale=scale if window is None else None, window=window)


@seen_by("attention", "window=(1, 1), causal, 3 queries and 3 keys",
         "window=(3, 2), causal, 11 queries and 11 keys")  # fmt: skip
def a_window_replaces_causal(q, k, v, causal=False, window=None):
    return attention(q, k, v, causal and window is None, window=window)


@seen_by("attention", "window=(2, 1), 9 queries and 7 keys")
def a_window_that_counts_from_0(q, k, v, window=None):
    if window is None:
        return attention(q, k, v)
    n_q, n_k = q.shape[-2], k.shape[-2]
    behind = np.arange(n_q)[:, None] + max(0, n_k - n_q) - np.arange(n_k)
    return attention(q, k, v, mask=(behind <= window[0]) & (behind >= -window[1]))


@seen_by("attention", "window=(2, 1), 9 queries and 7 keys")
def a_window_without_any_key(q, k, v, window=None):
    o = attention(q, k, v, window=window)
    return np.where(pairs(q, k, window=window).any(axis=-1, keepdims=True), o, np.nan)


@seen_by("attention", "window=(0, 3), 7 queries and 9 keys")
def as_far_ahead_as_behind(q, k, v, window=None):
    window = window if window is None else (window[0], min(window))
    return attention(q, k, v, window=window)


@seen_by("attention", "causal, 70 queries and 70 keys, blocks left out")
def causal_in_blocks_that_it_is_given(q, k, v, block_q=None, block_k=None, causal=False):
    return attention(q, k, v, causal and block_q is not None)


@seen_by("attention", "d = 80")
def the_first_64_columns(q, k, v):
    return attention(q[..., :64], k[..., :64], v, scale=q.shape[-1] ** -0.5)


# --- without lse --------------------------------------------------------------------------------


@seen_by("attention", "other random numbers")
def the_first_block_alone_without_lse(q, k, v, block_q=2, return_lse=False):
    assert q.ndim == 2, "one head"
    o, lse = np.zeros((len(q), v.shape[1])), np.zeros(len(q))
    for start in range(0, len(q), block_q):
        rows = slice(start, start + block_q)
        o[rows], lse[rows] = core(q[rows], k, v)
        if not return_lse:
            return o
    return o, lse


@seen_by("attention", "other random numbers")
def no_tail_without_lse(q, k, v, block_k=32, return_lse=False):
    assert q.ndim == 2, "one head"
    n = len(k) if return_lse else max(block_k, len(k) // block_k * block_k)
    o, lse = core(q, k[:n], v[:n])
    return (o, lse) if return_lse else o


@seen_by("attention", "causal, random, 11 queries and 11 keys, other numbers",
         "causal, random, 12 queries and 7 keys")  # fmt: skip
def causal_with_lse_alone(q, k, v, causal=False, return_lse=False):
    o, lse = core(q, k, v, see=pairs(q, k, causal and return_lse))
    return (o, lse) if return_lse else o


@seen_by("attention", "window=(0, 0), 11 queries and 11 keys",
         "window=(0, 3), 7 queries and 9 keys")  # fmt: skip
def a_window_with_lse_alone(q, k, v, window=None, return_lse=False):
    o, lse = core(q, k, v, see=pairs(q, k, window=window if return_lse else None))
    return (o, lse) if return_lse else o


@seen_by("attention", "a random mask")
def a_mask_with_lse_alone(q, k, v, mask=None, return_lse=False):
    o, lse = core(q, k, v, see=mask if return_lse else None)
    return (o, lse) if return_lse else o


@seen_by("attention", "batch of 1 with 2 heads, (1, 2, 5, 4)")
def heads_with_lse_alone(q, k, v, return_lse=False):
    if q.ndim > 2:
        o, lse = zip(
            *(heads_with_lse_alone(*one, return_lse) for one in zip(q, k, v, strict=True)),
            strict=True,
        )
        return (np.stack(o), np.stack(lse)) if return_lse else np.stack(o)
    return core(q, k, v) if return_lse else core(q, k, v)[0]


@seen_by("attention", "3 query heads on 1 key head")
def shared_heads_with_lse_alone(q, k, v, return_lse=False):
    if q.ndim > 2 and k.shape[-3] < q.shape[-3]:
        n = q.shape[-3] // k.shape[-3]
        k, v = (np.repeat(x, n, axis=-3) if return_lse else x[..., :1, :, :] for x in (k, v))
        k = k if return_lse else 0 * k
    o, lse = core(q, k, v)
    return (o, lse) if return_lse else o


# --- the backward pass --------------------------------------------------------------------------


def gradients(do, q, k, v, causal=False, scale=None):
    """Return dq, dk and dv as they should be."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    _, lse = core(q, k, v, scale, see := pairs(q, k, causal))
    lse = np.where(np.isneginf(lse), 0, lse)[..., None]
    P = np.where(see, np.exp(scale * q @ np.swapaxes(k, -1, -2) - lse), 0)
    dP = do @ np.swapaxes(v, -1, -2)
    dS = scale * P * (dP - (P * dP).sum(axis=-1, keepdims=True))
    return dS @ k, np.swapaxes(dS, -1, -2) @ q, np.swapaxes(P, -1, -2) @ do


def each_head(function, do, q, k, v):
    assert len(q) == len(k), "a key head for each query head"
    return tuple(map(np.stack, zip(*map(function, do, q, k, v), strict=True)))


@seen_by("attention_backward", "causal, scale=0.3")
def gradients_with_causal_or_scale(do, q, k, v, causal=False, scale=None):
    return gradients(do, q, k, v, causal, None if causal else scale)


@seen_by("attention_backward", "2 heads, causal")
def gradients_of_heads_lose_causal(do, q, k, v, causal=False):
    if q.ndim > 2:
        return each_head(gradients_of_heads_lose_causal, do, q, k, v)
    return gradients(do, q, k, v, causal)


@seen_by("attention_backward", "2 heads, scale=0.3")
def gradients_of_heads_lose_the_scale(do, q, k, v, scale=None):
    if q.ndim > 2:
        return each_head(gradients_of_heads_lose_the_scale, do, q, k, v)
    return gradients(do, q, k, v, scale=scale)


# --- block-sparse attention ---------------------------------------------------------------------


def tiles(q, k, block_mask, block_q, block_k):
    """Return which pairs lie in tiles that are there."""
    rows = np.arange(q.shape[-2])[:, None] // block_q
    return block_mask[rows, np.arange(k.shape[-2]) // block_k]


@seen_by("block_sparse_attention", "2 heads, causal")
@one_head_at_a_time
def tiles_of_heads_lose_causal(q, k, v, block_mask, block_q, block_k, causal=False):
    see = tiles(q, k, block_mask, block_q, block_k)
    return core(q, k, v, see=see & pairs(q, k, causal))[0]


@seen_by("block_sparse_attention", "2 heads, scale=0.3")
@one_head_at_a_time
def tiles_of_heads_lose_the_scale(q, k, v, block_mask, block_q, block_k, scale=None):
    return core(q, k, v, scale, tiles(q, k, block_mask, block_q, block_k))[0]


@seen_by("block_sparse_attention", "causal, scale=0.3, 7 queries and 11 keys")
def tiles_with_causal_or_scale(q, k, v, block_mask, block_q, block_k, causal=False, scale=None):
    see = tiles(q, k, block_mask, block_q, block_k) & pairs(q, k, causal)
    return core(q, k, v, None if causal else scale, see)[0]


@seen_by("block_sparse_attention", "causal, random tiles, 7 queries and 11 keys")
def tiles_causal_with_lse_alone(
    q, k, v, block_mask, block_q, block_k, causal=False, return_lse=False
):
    see = tiles(q, k, block_mask, block_q, block_k) & pairs(q, k, causal and return_lse)
    o, lse = core(q, k, v, see=see)
    return (o, lse) if return_lse else o


@seen_by("block_sparse_attention", "batch of 1 with 2 heads, (1, 2, 5, 4)")
def tiles_of_heads_with_lse_alone(q, k, v, block_mask, block_q, block_k, return_lse=False):
    all_there = q.ndim > 2 and not return_lse
    see = tiles(q, k, block_mask | all_there, block_q, block_k)
    o, lse = core(q, k, v, see=see)
    return (o, lse) if return_lse else o


@seen_by("block_sparse_attention", "other random tiles, 9 queries and 11 keys")
def the_first_rows_of_tiles_without_lse(q, k, v, block_mask, block_q, block_k, return_lse=False):
    assert q.ndim == 2, "one head"
    o, lse = core(q, k, v, see=tiles(q, k, block_mask, block_q, block_k))
    o[len(o) if return_lse else 2 * block_q :] = 0
    return (o, lse) if return_lse else o


@seen_by("block_sparse_attention", "causal, random tiles, 11 queries and 7 keys")
def whole_tiles_from_the_top_left(q, k, v, block_mask, block_q, block_k, causal=False):
    assert q.ndim == 2, "one head"
    see = tiles(q, k, block_mask, block_q, block_k)
    if causal:
        below = pairs(q, k, causal)
        for i in range(0, len(q), block_q):
            for j in range(0, len(k), block_k):
                tile = np.s_[i : i + block_q, j : j + block_k]
                whole = min(j + block_k, len(k)) - 1 <= i + max(0, len(k) - len(q))
                see[tile] &= below[tile] | (whole and below[tile].any())
    return core(q, k, v, see=see)[0]


# --- counts -------------------------------------------------------------------------------------


@seen_by("block_sizes", "M = 7169, d = 256")
def rounded_up_by_a_fraction(M, d):
    rows = int(M / (4 * d) + 0.999)
    return min(rows, d), rows
