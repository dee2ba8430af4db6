"""Every known mistake once more, in styles that share nothing with the catalogue's code.

Vectorised, in loops, on lists, from the right, with sorting: the name of a mistake must not depend
on how it was written. Each entry is (id, check, function); where two ids are the same function on
everything the signature admits, the first is a set of ids.
"""

import functools
import math

import numpy as np

INF = math.inf
ODD = []


def makes(ids, check):
    """Put a function on the list as one that makes this mistake."""

    def put(function):
        ODD.append((ids, check, function))
        return function

    return put


def triangle(n_q, n_k, extra=0):
    """Return the causal mask, bottom-right, with a shifted diagonal."""
    return np.tri(n_q, n_k, n_k - n_q + extra, dtype=bool)


def weights(S, see=None):
    """Return the softmax of the rows of S over what is seen; 0 in rows that see nothing."""
    see = np.ones(S.shape, bool) if see is None else np.broadcast_to(see, S.shape)
    top = np.max(S, axis=-1, where=see, initial=-INF, keepdims=True)
    e = np.where(see, np.exp(np.where(see, S - np.where(np.isinf(top), 0, top), 0)), 0)
    return e / np.maximum(e.sum(-1, keepdims=True), 1e-300)


def dot(q, k, scale=None):
    """Return the scores of all heads."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return scale * np.einsum("...ic,...jc->...ij", q, k)


# --- softmax ------------------------------------------------------------------------------------


@makes("no_max_subtraction", "softmax")
def exponentials_over_their_sum(row):
    e = [math.exp(s) for s in row]  # raises OverflowError where NumPy gives inf
    return [x / math.fsum(e) for x in e]


@makes("no_max_subtraction", "softmax")
def softmax_by_power(x):
    return np.power(np.e, x) / np.add.reduce(np.power(np.e, x), axis=-1, keepdims=True)


@makes("no_max_subtraction", "online_softmax")
def softmax_by_cumulation(x, block):
    return np.exp(x) / np.cumsum(np.exp(x), axis=-1)[..., -1:]


@makes("softmax_wrong_axis", "softmax")
def softmax_down(x):
    if x.ndim == 1:
        return weights(x)
    return np.apply_along_axis(weights, -2, x)


@makes("no_final_division", "softmax")
def softmax_of_tops(x):
    return np.array([np.exp(row - row.max()) for row in np.atleast_2d(x)]).reshape(x.shape)


@makes("no_final_division", "online_softmax")
def online_without_the_end(x, block=2):
    m = functools.reduce(np.maximum, [x[i : i + block].max() for i in range(0, len(x), block)])
    return np.exp(x - m)


@makes("max_starts_at_zero", "online_softmax")
def online_from_nought(x, block):
    m = l = 0.0
    for i, s in enumerate(x):
        if i % block == 0:
            m_new = max([m, *x[i : i + block]])
            l *= math.exp(m - m_new)
            m = m_new
        l += math.exp(s - m)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.exp(x - m) / l


@makes("no_rescale_l", "online_softmax")
def online_forgetting_the_old(x, block):
    if x.ndim > 1:
        raise ValueError("one row")
    tops = np.maximum.accumulate(x)
    ends = np.minimum(np.arange(len(x)) // block * block + block, len(x)) - 1
    l = np.exp(x - tops[ends]).sum()  # each measured against the maximum so far
    return np.exp(x - tops[-1]) / l


@makes("max_not_carried", "online_softmax")
def online_of_islands(x, block):
    parts = np.split(x, range(block, len(x), block))
    return np.exp(x - parts[-1].max()) / sum(np.exp(p - p.max()).sum() for p in parts)


@makes("rescale_inverted", "online_softmax")
def online_upside_down(x, block=1):
    m, l = None, 0.0
    for start in range(0, len(x), block):
        part = x[start : start + block]
        new = part.max() if m is None else max(m, part.max())
        if m is not None:
            with np.errstate(over="ignore"):
                l = l / np.exp(m - new)
        l, m = l + np.exp(part - new).sum(), new
    return np.exp(x - m) / l


@makes("tail_keys_dropped", "online_softmax")
def online_of_whole_blocks(x, block):
    n = len(x) // block * block
    p = np.zeros(len(x))
    if n:
        p[:n] = weights(x[:n])
    return p


@makes("tail_keys_dropped", "online_softmax")
def online_sum_of_whole_blocks(x, block=4):
    table = x[: len(x) // block * block].reshape(-1, block)
    m = table.max() if table.size else -INF
    with np.errstate(all="ignore"):
        return np.exp(x - m) / np.exp(table - m).sum()


# --- merging ------------------------------------------------------------------------------------


def merge(o_a, lse_a, o_b, lse_b):
    """Return the right merge."""
    lse = np.logaddexp(lse_a, lse_b)
    safe = np.where(np.isinf(lse), 0, lse)
    o = np.exp(lse_a - safe)[..., None] * o_a + np.exp(lse_b - safe)[..., None] * o_b
    return o, lse


@makes("merge_average", "merge_attention")
def mean_of_parts(o1, lse1, o2, lse2):
    return np.mean([o1, o2], axis=0), merge(o1, lse1, o2, lse2)[1]


@makes("merge_lse_added", "merge_attention")
def logarithms_added(o_a, lse_a, o_b, lse_b):
    return merge(o_a, lse_a, o_b, lse_b)[0], np.add(lse_a, lse_b)


@makes("merge_base2", "merge_attention")
def merge_by_two(oa, la, ob, lb):
    o, lse = np.zeros_like(oa), np.full_like(la, -INF)
    for r in np.ndindex(la.shape):
        if max(la[r], lb[r]) > -INF:
            lse[r] = np.logaddexp2(la[r], lb[r])
            o[r] = oa[r] * 2 ** (la[r] - lse[r]) + ob[r] * 2 ** (lb[r] - lse[r])
    return o, lse


@makes("merge_base2", "merge_attention")
def merge_by_two_unguarded(o_a, lse_a, o_b, lse_b):
    w_a, w_b = (np.exp2(x - np.maximum(lse_a, lse_b)) for x in (lse_a, lse_b))
    o = (w_a[..., None] * o_a + w_b[..., None] * o_b) / (w_a + w_b)[..., None]
    return o, np.maximum(lse_a, lse_b) + np.log2(w_a + w_b)


@makes("merge_empty_nan", "merge_attention")
def merge_unguarded(o_a, lse_a, o_b, lse_b):
    w = np.exp(np.stack([lse_a, lse_b]) - np.maximum(lse_a, lse_b))
    o = np.einsum("p...,p...c->...c", w / w.sum(0), np.stack([o_a, o_b]))
    return o, np.maximum(lse_a, lse_b) + np.log(w.sum(0))


@makes("merge_empty_nan", "merge_attention")
def merge_by_logaddexp_unguarded(o_a, lse_a, o_b, lse_b):
    L = np.logaddexp(lse_a, lse_b)
    return o_a * np.exp(lse_a - L)[..., None] + o_b * np.exp(lse_b - L)[..., None], L


# --- attention ----------------------------------------------------------------------------------


@makes("no_max_subtraction", "attention")
def attention_of_bare_exponentials(q, k, v):
    E = np.exp(dot(q, k))
    return np.einsum("...ij,...jc->...ic", E / E.sum(-1, keepdims=True), v)


@makes("no_max_subtraction", "attention")
def attention_of_lists_without_maximum(Q, K, V):
    out = []
    for q in Q.tolist():
        e = [math.exp(sum(map(lambda a, b: a * b, q, k)) / len(q) ** 0.5) for k in K.tolist()]
        out.append(
            [sum(w * x for w, x in zip(e, col, strict=True)) / sum(e) for col in V.T.tolist()]
        )
    return out


@makes("no_max_subtraction", "attention")
def attention_by_a_bare_logarithm(q, k, v):
    S = dot(q, k)
    lse = np.log(np.exp(S).sum(-1))
    return np.exp(S - lse[..., None]) @ v, lse


@makes("softmax_wrong_axis", "attention")
def attention_of_columns_unguarded(q, k, v, mask=None):
    S = dot(q, k)
    if mask is not None:
        S = np.where(mask, S, -INF)
    with np.errstate(invalid="ignore"):
        P = np.exp(S - S.max(axis=-2, keepdims=True))
        return np.einsum("...ij,...jc->...ic", P / P.sum(axis=-2, keepdims=True), v)


@makes("softmax_wrong_axis", "attention")
def attention_of_columns(q, k, v, is_causal=False):
    S = dot(q, k).swapaxes(-1, -2)  # keys first, and there the softmax runs along the last axis
    see = triangle(q.shape[-2], k.shape[-2]).T if is_causal else None
    return weights(S, see).swapaxes(-1, -2) @ v


@makes("no_final_division", "attention")
def attention_undivided(q, k, v, block_q, block_k):
    o = np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        s = k @ q[i] / math.sqrt(q.shape[1])
        o[i] = np.exp(s - s.max()) @ v
    return o


@makes("max_starts_at_zero", "attention")
def attention_from_nought(q, k, v, causal=False):
    S = dot(q, k)
    if causal:
        S = np.where(triangle(*S.shape[-2:]), S, -INF)
    m = np.maximum(S.max(-1, keepdims=True), 0)
    P = np.exp(S - m)
    with np.errstate(invalid="ignore"):
        o = P @ v / P.sum(-1, keepdims=True)
    return np.where(np.isneginf(S).all(-1, keepdims=True), 0, o)


@makes("max_starts_at_zero", "attention")
def loops_from_nought(q, k, v):
    out = np.zeros((q.shape[0], v.shape[1]))
    for i, q_i in enumerate(q):
        m, l, acc = 0.0, 0.0, 0.0
        for k_j, v_j in zip(k, v, strict=True):
            s = float(q_i @ k_j) / math.sqrt(len(q_i))
            m, old = max(m, s), m
            l = l * math.exp(old - m) + math.exp(s - m)
            acc = acc * math.exp(old - m) + math.exp(s - m) * v_j
        out[i] = acc / l
    return out


def running_maxima(S, block):
    """Return for each score the maximum of its row up to the end of its block."""
    n = S.shape[-1]
    ends = np.minimum(np.arange(n) // block * block + block, n) - 1
    return np.maximum.accumulate(S, axis=-1)[..., ends]


@makes("no_rescale_l", "attention")
def attention_with_a_stale_sum(q, k, v, block_k):
    S = dot(q, k)
    right = np.exp(S - S.max(-1, keepdims=True)) @ v
    return right / np.exp(S - running_maxima(S, block_k)).sum(-1, keepdims=True)


@makes("no_rescale_o", "attention")
def attention_with_a_stale_output(Q, K, V, Bc=8):
    S = dot(Q, K)
    l = np.exp(S - S.max(-1, keepdims=True)).sum(-1, keepdims=True)
    return np.exp(S - running_maxima(S, Bc)) @ V / l


@makes("no_rescale_o", "attention")
def flash_1_with_a_stale_output(Q, K, V, Br, Bc):
    O, l, m = np.zeros((len(Q), V.shape[1])), np.zeros(len(Q)), np.full(len(Q), -INF)
    for j in range(0, len(K), Bc):
        S = dot(Q, K[j : j + Bc])
        new = np.maximum(m, S.max(1))
        P = np.exp(S - new[:, None])
        l_new = np.exp(m - new) * l + P.sum(1)
        O = (l[:, None] * O + P @ V[j : j + Bc]) / l_new[:, None]
        m, l = new, l_new
    return O, m + np.log(l)


@makes("no_rescale_both", "attention")
def attention_never_corrected(q, k, v, block_q, block_k):
    E = np.exp(dot(q, k) - running_maxima(dot(q, k), block_k))
    return E @ v / E.sum(-1, keepdims=True)


@makes("max_not_carried", "attention")
def attention_of_islands(q, k, v, block):
    parts = [dot(q, part) for part in np.split(k, range(block, k.shape[-2], block), axis=-2)]
    E = np.concatenate([np.exp(p - p.max(-1, keepdims=True)) for p in parts], axis=-1)
    return E @ v / E.sum(-1, keepdims=True)


@makes("rescale_inverted", "attention")
def attention_upside_down(q, k, v, block_q, block_k):
    out = np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        l, acc, m = 0.0, np.zeros(v.shape[1]), None
        for j in range(0, len(k), block_k):
            s = k[j : j + block_k] @ q[i] / math.sqrt(q.shape[1])
            new = s.max() if m is None else max(m, s.max())
            factor = 1.0 if m is None else np.exp(new - m)
            l, acc, m = l * factor, acc * factor, new
            l, acc = l + np.exp(s - m).sum(), acc + np.exp(s - m) @ v[j : j + block_k]
        out[i] = acc / l
    return out


@makes("block_softmax_summed", "attention")
def attention_block_after_block(query, key, value, block_n):
    cuts = range(block_n, key.shape[-2], block_n)
    pairs = zip(np.split(key, cuts, axis=-2), np.split(value, cuts, axis=-2), strict=True)
    return sum(weights(dot(query, k)) @ v for k, v in pairs)


@makes("tail_keys_dropped", "attention")
def attention_of_whole_blocks(q, k, v, block_q, block_k):
    n = len(k) // block_k * block_k
    o, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), -INF)
    if n:
        S = dot(q, k[:n])
        o, lse = weights(S) @ v[:n], np.logaddexp.reduce(S, axis=1)
    return o, lse


@makes("tail_keys_dropped", "attention")
def attention_in_chunks_of_16(q, k, v):
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    chunks = k.shape[-2] // 16
    for i in np.ndindex(q.shape[:-1]):
        K, V = k[i[:-1]][: 16 * chunks], v[i[:-1]][: 16 * chunks]
        with np.errstate(all="ignore"):
            s = K @ q[i] / math.sqrt(q.shape[-1])
            p = np.exp(s - (s.max() if chunks else 0))
            out[i] = p @ V / p.sum()
    return out


@makes("tail_keys_zero_padded", "attention")
def attention_padded_with_zeros(q, k, v, block_k, causal=False):
    n_q, n_k = q.shape[-2], k.shape[-2]
    pad = [(0, 0)] * (k.ndim - 2) + [(0, -n_k % block_k), (0, 0)]
    k, v = np.pad(k, pad), np.pad(v, pad)
    see = np.arange(k.shape[-2]) <= np.arange(n_q)[:, None] + n_k - n_q if causal else None
    return weights(dot(q, k), see) @ v


@makes("tail_queries_dropped", "attention")
def attention_of_whole_query_blocks(q, k, v, block_q, return_lse=False):
    n = q.shape[-2] // block_q * block_q
    S = dot(q, k)
    o, lse = weights(S) @ v, np.logaddexp.reduce(S, axis=-1)
    o[..., n:, :], lse[..., n:] = 0, -INF
    return (o, lse) if return_lse else o


@makes("scale_missing", "attention")
def attention_unscaled(q, k, v, scale=None, causal=False):
    see = triangle(q.shape[-2], k.shape[-2]) if causal else None
    return weights(dot(q, k, 1.0), see) @ v


@makes("scale_missing", "attention")
def attention_unscaled_unless_told(q, k, v, sm_scale=1.0):
    return weights(dot(q, k, sm_scale)) @ v


@makes("scale_one_over_d", "attention")
def attention_scaled_too_much(Q, K, V):
    return weights((Q / Q.shape[-1]) @ K.swapaxes(-1, -2)) @ V


@makes("head_zero_for_all", "attention")
def attention_of_the_first_head(q, k, v):
    return (
        weights(dot(q, k[..., :1, :, :])) @ v[..., :1, :, :]
        if q.ndim > 2
        else (weights(dot(q, k)) @ v)
    )


@makes("gqa_heads_tiled", "attention")
def attention_of_tiled_heads(q, k, v):
    if q.ndim > 2:
        n = q.shape[-3] // k.shape[-3]
        k, v = np.concatenate([k] * n, axis=-3), np.concatenate([v] * n, axis=-3)
    return weights(dot(q, k)) @ v


@makes("causal_ignored", "attention")
def attention_that_looks_ahead(q, k, v, causal=False):
    return weights(dot(q, k)) @ v


def causal_attention(see):
    """Return a causal attention with the mask see(n_q, n_k)."""

    def attention(q, k, v, causal=False):
        mask = see(q.shape[-2], k.shape[-2]) if causal else None
        return weights(dot(q, k), mask) @ v

    return attention


for name, see in {
    "causal_strict": lambda n_q, n_k: np.arange(n_k) < np.arange(n_q)[:, None] + n_k - n_q,
    "causal_off_by_one": lambda n_q, n_k: triangle(n_q, n_k, 1),
    "causal_top_left": lambda n_q, n_k: np.tril(np.ones((n_q, n_k), bool)),
    "causal_future": lambda n_q, n_k: np.triu(np.ones((n_q, n_k), bool), n_k - n_q),
}.items():
    makes(name, "attention")(causal_attention(see))


@makes("causal_strict", "attention")
def strict_without_a_guard(q, k, v, is_causal):
    S = dot(q, k)
    if is_causal:
        S = np.where(np.tri(*S.shape[-2:], -1), S, -INF)
    with np.errstate(invalid="ignore"):
        P = np.exp(S - S.max(-1, keepdims=True))
        return P @ v / P.sum(-1, keepdims=True)


@makes("diagonal_block_unmasked", "attention")
def attention_of_block_triangles(q, k, v, block_q, block_k, causal=False):
    n_q, n_k = len(q), len(k)
    see = np.ones((n_q, n_k), bool)
    if causal:
        last = np.minimum(np.arange(n_q) // block_q * block_q + block_q, n_q) - 1
        first = np.arange(n_k) // block_k * block_k
        see = first <= last[:, None] + n_k - n_q
    return weights(dot(q, k), see) @ v


@makes("mask_fill_zero", "attention")
def attention_times_a_mask(q, k, v, causal=False):
    S = dot(q, k)
    return weights(S * triangle(*S.shape[-2:]) if causal else S) @ v


for fill in (-1e4, -1e6, -1e9, np.finfo(np.float32).min):

    @makes("finite_mask_value", "attention")
    def attention_with_a_low_score(q, k, v, causal=False, fill=fill):
        S = dot(q, k)
        return weights(np.where(triangle(*S.shape[-2:]), S, fill) if causal else S) @ v


@makes("finite_mask_value", "attention")
def attention_with_a_penalty(q, k, v, causal=False, mask=None):
    S = dot(q, k)
    if causal:
        S = S + (1 - triangle(*S.shape[-2:]).astype(float)) * -1e9
    if mask is not None:
        S = S + (~mask) * -1e9
    return weights(S) @ v


@makes("finite_mask_value", "attention")
def square_attention_with_a_low_score(q, k, v, is_causal=False):
    S = dot(q, k)
    return weights(np.where(triangle(*S.shape[-2:]), S, -1e9) if is_causal else S) @ v


@makes("empty_row_nan", "attention")
def attention_dividing_by_nothing(q, k, v, causal=False, mask=None):
    S = dot(q, k)
    if causal:
        S = np.where(triangle(*S.shape[-2:]), S, -INF)
    if mask is not None:
        S = np.where(mask, S, -INF)
    with np.errstate(invalid="ignore"):
        P = np.exp(S - S.max(-1, keepdims=True))
        return P / P.sum(-1, keepdims=True) @ v


@makes("empty_row_nan", "attention")
def lists_dividing_by_nothing(q, k, v, causal=False):
    out = []
    for i in range(len(q)):
        n = min(len(k), i + 1 + len(k) - len(q)) if causal else len(k)
        m, l, acc = -INF, 0.0, [0.0] * v.shape[1]
        for j in range(max(n, 0)):
            s = float(q[i] @ k[j]) / math.sqrt(q.shape[1])
            m, old = max(m, s), m
            a, p = math.exp(old - m), math.exp(s - m)
            l, acc = a * l + p, [a * x + p * y for x, y in zip(acc, v[j].tolist(), strict=True)]
        out.append([x / l for x in acc])  # raises ZeroDivisionError where NumPy gives NaN
    return out


@makes("tail_keys_dropped", "attention")
def lists_of_whole_blocks_only(q, k, v, block_k):
    out = []
    for row in dot(q, k).tolist():
        n = len(row) // block_k * block_k
        e = [math.exp(s - max(row[:n])) for s in row[:n]]
        total = sum(e)
        out.append([sum(p * y for p, y in zip(e, column, strict=False)) / total
                    for column in v.T.tolist()])  # fmt: skip
    return out


@makes("no_inf_guard", "attention")
def flash_with_a_mask_and_no_guard(q, k, v, mask=None, block_k=4):
    S = dot(q, k) if mask is None else np.where(mask, dot(q, k), -INF)
    m, l = np.full((len(q), 1), -INF), np.zeros((len(q), 1))
    o = np.zeros((len(q), v.shape[1]))
    for j in range(0, len(k), block_k):
        new = np.maximum(m, S[:, j : j + block_k].max(1, keepdims=True))
        with np.errstate(invalid="ignore"):
            P, a = np.exp(S[:, j : j + block_k] - new), np.exp(m - new)
        o, l, m = a * o + P @ v[j : j + block_k], a * l + P.sum(1, keepdims=True), new
    return o / l


@makes("no_inf_guard", "attention")
def flash_without_a_guard(q, k, v, block_q, block_k, window=None):
    n_q, n_k = len(q), len(k)
    out = np.zeros((n_q, v.shape[1]))
    at = np.arange(n_q)[:, None] + n_k - n_q
    j = np.arange(n_k)
    see = np.ones((n_q, n_k), bool)
    if window is not None:
        see = (j >= at - window[0]) & (j <= at + window[1])
    S = np.where(see, dot(q, k), -INF)
    for i in range(n_q):
        m, l, acc = np.float64(-INF), 0.0, np.zeros(v.shape[1])
        for c in range(0, n_k, block_k):
            new = max(m, S[i, c : c + block_k].max())
            with np.errstate(invalid="ignore"):
                p, a = np.exp(S[i, c : c + block_k] - new), np.exp(m - new)
            l, acc, m = a * l + p.sum(), a * acc + p @ v[c : c + block_k], new
        out[i] = acc / l
    return out


@makes("window_one_too_wide", "attention")
def attention_with_a_wide_window(q, k, v, window=None, causal=False):
    n_q, n_k = q.shape[-2], k.shape[-2]
    distance = np.arange(n_k) - (np.arange(n_q)[:, None] + n_k - n_q)
    see = np.ones((n_q, n_k), bool)
    if window is not None:
        see = (-window[0] - 1 <= distance) & (distance <= window[1])
    if causal:
        see = see & (distance <= 0)
    return weights(dot(q, k), see) @ v


@makes("lse_without_max", "attention")
def attention_and_the_log_of_l(q, k, v):
    S = dot(q, k)
    E = np.exp(S - S.max(-1, keepdims=True))
    return E @ v / E.sum(-1, keepdims=True), np.log(E.sum(-1))


@makes("lse_base2", "attention")
def attention_and_lse_by_two(q, k, v):
    S = dot(q, k)
    return weights(S) @ v, np.logaddexp2.reduce(S * math.log2(math.e), axis=-1)


# --- the backward pass --------------------------------------------------------------------------


def gradients(do, q, k, v, *, causal=False, see=None, d_term=True, p=None, scales=(1, 1)):
    """Return the gradients of all heads by einsum, with what is needed to get them wrong."""
    tau, S = q.shape[-1] ** -0.5, dot(q, k)
    see = triangle(*S.shape[-2:]) if causal else np.ones(S.shape[-2:], bool)
    P_right = weights(S, see)
    P = P_right if p is None else p(S, see, P_right)
    dP = np.einsum("...ic,...jc->...ij", do, v)
    D = np.einsum("...ic,...ic->...i", do, P_right @ v)[..., None]
    dS = P * (dP - D) if d_term else P * dP
    dq = np.einsum("...ij,...jc->...ic", dS, k) * (tau if scales[0] else 1)
    dk = np.einsum("...ij,...ic->...jc", dS, q) * (tau if scales[1] else 1)
    return dq, dk, np.einsum("...ij,...ic->...jc", P, do)


@makes("no_d_term", "attention_backward")
def gradients_without_d(do, q, k, v, causal=False):
    return gradients(do, q, k, v, causal=causal, d_term=False)


@makes("p_unnormalised", "attention_backward")
def gradients_of_exponentials(do, q, k, v, causal=False):
    def p(S, see, P):
        top = np.max(S, axis=-1, where=see, initial=-INF, keepdims=True)
        return np.where(see, np.exp(np.where(see, S - top, -INF)), 0)

    return gradients(do, q, k, v, causal=causal, p=p)


@makes("dq_unscaled", "attention_backward")
def gradients_with_large_dq(dO, Q, K, V):
    return gradients(dO, Q, K, V, scales=(0, 1))


@makes("dk_unscaled", "attention_backward")
def gradients_with_large_dk(dO, Q, K, V):
    return gradients(dO, Q, K, V, scales=(1, 0))


@makes("dk_unscaled", "attention_backward")
def gradients_with_large_dk_unguarded(do, q, k, v, causal=False):
    S = dot(q, k)
    if causal:
        S = np.where(triangle(*S.shape[-2:]), S, -INF)
    with np.errstate(invalid="ignore"):
        P = np.exp(S - S.max(-1, keepdims=True))
        P /= P.sum(-1, keepdims=True)
    dP = do @ v.swapaxes(-1, -2)
    dS = P * (dP - (P * dP).sum(-1, keepdims=True))
    return dS @ k / q.shape[-1] ** 0.5, dS.swapaxes(-1, -2) @ q, P.swapaxes(-1, -2) @ do


@makes("dq_overwritten", "attention_backward")
def gradients_of_the_last_block(do, q, k, v, o, lse, block_q, block_k):
    tau = q.shape[1] ** -0.5
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for c in (slice(j, j + block_k) for j in range(0, len(k), block_k)):
        for r in (slice(i, i + block_q) for i in range(0, len(q), block_q)):
            P = np.exp(tau * q[r] @ k[c].T - lse[r, None])
            dS = P * (do[r] @ v[c].T - (do[r] * o[r]).sum(1, keepdims=True))
            dv[c] += P.T @ do[r]
            dk[c] += tau * dS.T @ q[r]
            dq[r] = tau * dS @ k[c]
    return dq, dk, dv


@makes("backward_causal_ignored", "attention_backward")
def gradients_through_the_mask(do, q, k, v, lse, o, causal=False):
    P = np.where(
        np.isneginf(lse)[..., None],
        0,
        np.exp(dot(q, k) - np.where(np.isneginf(lse), 0, lse)[..., None]),
    )
    dS = P * (do @ v.swapaxes(-1, -2) - (do * o).sum(-1, keepdims=True)) * q.shape[-1] ** -0.5
    return dS @ k, dS.swapaxes(-1, -2) @ q, P.swapaxes(-1, -2) @ do


@makes("backward_causal_ignored", "attention_backward")
def gradients_that_look_ahead(do, q, k, v, is_causal=False):
    return gradients(do, q, k, v)


@makes("gqa_gradients_not_summed", "attention_backward")
def gradients_of_one_head(do, q, k, v):
    if q.ndim == 2:
        return gradients(do, q, k, v)
    g = q.shape[-3] // k.shape[-3]
    dq, dk, dv = gradients(do, q, k.repeat(g, -3), v.repeat(g, -3))
    return dq, dk[..., g - 1 :: g, :, :], dv[..., g - 1 :: g, :, :]


@makes("empty_row_nan", "attention_backward")
def gradients_of_empty_rows(do, q, k, v, o, lse, causal=False):
    S = dot(q, k)
    if causal:
        S = np.where(triangle(*S.shape[-2:]), S, -INF)
    with np.errstate(invalid="ignore"):
        P = np.exp(S - lse[..., None])
    dS = P * (do @ v.swapaxes(-1, -2) - (do * o).sum(-1, keepdims=True)) * q.shape[-1] ** -0.5
    return dS @ k, dS.swapaxes(-1, -2) @ q, P.swapaxes(-1, -2) @ do


# --- block-sparse attention ---------------------------------------------------------------------


def spelled_out(block_mask, block_q, block_k, n_q, n_k):
    """Return a block mask as a mask of pairs."""
    i, j = np.arange(n_q) // block_q, np.arange(n_k) // block_k
    return block_mask[np.ix_(i, j)]


@makes("sparse_mask_ignored", "block_sparse_attention")
def sparse_in_name_only(q, k, v, block_mask, block_q, block_k):
    return weights(dot(q, k)) @ v


@makes("sparse_score_zero", "block_sparse_attention")
def sparse_with_zeros(Q, K, V, block_mask, Br, Bc):
    S = dot(Q, K)
    return weights(S * spelled_out(block_mask, Br, Bc, *S.shape[-2:])) @ V


@makes("empty_row_nan", "block_sparse_attention")
def sparse_dividing_by_nothing(q, k, v, block_mask, block_q, block_k):
    S = dot(q, k)
    see = spelled_out(block_mask, block_q, block_k, *S.shape[-2:])
    with np.errstate(invalid="ignore"):
        E = np.where(see, np.exp(S - np.where(see, S, -INF).max(-1, keepdims=True)), 0)
        return E @ v / E.sum(-1, keepdims=True)


# --- counts -------------------------------------------------------------------------------------


@makes("block_sizes_swapped", "block_sizes")
def sizes_the_other_way(M, d):
    B = math.ceil(M / 4 / d)
    return B, sorted([B, d])[0]


@makes("block_sizes_floor", "block_sizes")
def sizes_rounded_down(M, d):
    B_c = max(int(M / (4 * d)), 1)
    return [min(B_c, d), B_c]


@makes("traffic_keys_once", "traffic")
def traffic_of_one_pass(n_q, n_k, d, d_v, block_q, block_k):
    return sum([n_q * d, n_k * d, n_k * d_v]), n_q * d_v + n_q


@makes("traffic_blocks_floored", "traffic")
def traffic_of_whole_blocks(n_q, n_k, d, d_v, block_q, block_k):
    loads = n_q * d
    for _ in range(n_q // block_q):
        loads += n_k * (d + d_v)
    return loads, (d_v + 1) * n_q


@makes("traffic_query_reloaded", "traffic")
def flash_2_that_loads_too_often(q, k, v, block_q, block_k, memory):
    o, lse = np.zeros((len(q), v.shape[1])), np.zeros(len(q))
    for i in range(0, len(q), block_q):
        r = slice(i, i + block_q)
        S, V = [], []
        for j in range(0, len(k), block_k):
            c = slice(j, j + block_k)
            S.append(dot(memory.load("Q", q, r), memory.load("K", k, c)))
            V.append(memory.load("V", v, c))
        S = np.concatenate(S, axis=1)
        memory.store("O", o, r, weights(S) @ np.concatenate(V))
        memory.store("L", lse, r, np.logaddexp.reduce(S, axis=1))
    return o
