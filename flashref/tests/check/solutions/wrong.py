"""Wrong answers that have no name, as learners write them, and what their report must speak of.

Each is written by itself, not with the package's own variations (`flashref/check/faulty.py`).
"""

import math

import numpy as np

import flashref

WRONG = []  #: (check, words of its report, function)


def wrong(name, words):
    """Add a function to the list."""

    def add(function):
        WRONG.append((name, words, function))
        return function

    return add


def attempt(name, words, function, label):
    """Add a function that was made by another, under a name of its own."""
    function.__name__ = label
    WRONG.append((name, words, function))


# --- softmax ------------------------------------------------------------------------------------


def shifted(shift):
    def softmax(x):
        e = np.exp(x - shift(x))
        return e / e.sum(axis=-1, keepdims=True)

    return softmax


ROW = {"axis": -1, "keepdims": True}
attempt("softmax", "subtracts the mean", shifted(lambda x: x.mean(**ROW)), "by_mean")
attempt("softmax", "the smallest score", shifted(lambda x: x.min(**ROW)), "by_minimum")
attempt("softmax", "the first score", shifted(lambda x: x[..., :1]), "by_first")
attempt("softmax", "the largest |s|", shifted(lambda x: np.abs(x).max(**ROW)), "by_size")
attempt("softmax", "the sum of a row", shifted(lambda x: x.sum(**ROW)), "by_sum")
attempt("softmax", "One maximum", shifted(lambda x: x.max()), "by_largest_of_all")
attempt("softmax", "the median", shifted(lambda x: np.median(x, **ROW)), "by_median")


@wrong("softmax", "Place 2 of p is wrong")
def without_the_largest(x):
    p = flashref.safe_softmax(x)
    p[x == x.max(axis=-1, keepdims=True)] = np.inf
    return p


@wrong("softmax", "All weights of the matrix together sum to 1")
def summed_over_all(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / np.sum(e)


@wrong("softmax", "All weights of the matrix together sum to 1")
def flat(x):
    row = np.ravel(x)
    e = np.exp(row - max(row))
    return (e / sum(e)).reshape(x.shape)


@wrong("softmax", "Rows use each other's numbers")
def without_keepdims(x):
    e = np.exp(x - x.max(axis=-1))
    return e / e.sum(axis=-1)


@wrong("softmax", "Rows use each other's numbers")
def without_keepdims_in_the_sum(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1)


@wrong("softmax", "multiplied by ln 2 = 0.6931")
def of_two_by_the_inverse(x):
    e = np.exp2((x - x.max(axis=-1, keepdims=True)) * np.log(2))
    return e / e.sum(axis=-1, keepdims=True)


@wrong("softmax", "That is the last axis of a matrix")
def along_axis_1(x):
    e = np.exp(x - x.max(axis=x.ndim > 1 and 1, keepdims=True))
    return e / e.sum(axis=x.ndim > 1 and 1, keepdims=True)


@wrong("softmax", "Wrong only with more than two axes")
def turned_where_it_has_three_axes(x):
    return flashref.safe_softmax(x[:, ::-1] if x.ndim > 2 else x)


@wrong("softmax", "powers of 2, not of e")
def of_two(x):
    e = 2 ** (x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@wrong("softmax", "what you subtract from them is not")
def half_of_two(x):
    e = np.exp2(x * np.log2(np.e) - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@wrong("softmax", "The sum is measured against the maximum, the scores above it are not")
def by_half_of_the_lse(x):
    l = np.exp(x - x.max()).sum()
    return np.exp(x - np.log(l)) if x.ndim == 1 else 1 / 0


@wrong("softmax", "max_starts_at_zero")
def largest_of_nothing(x):
    m = 0
    for s in x:
        m = max(m, s)
    l = sum(math.exp(s - m) for s in x)
    return [math.exp(s - m) / l for s in x]


@wrong("softmax", "max_starts_at_zero")
def largest_of_nothing_with_a_guard(x):
    assert x.ndim == 1, "one row"
    m = 0
    for s in x:
        m = max(m, s)
    l = np.exp(x - m).sum()
    return np.exp(x - m) / l if l > 0 else np.zeros_like(x)


@wrong("softmax", "no_max_subtraction")
def by_the_bare_lse(x):
    assert x.ndim == 1, "one row"
    L = np.log(np.exp(x).sum())
    return np.exp(x - (0 if L == -np.inf else L))


@wrong("softmax", "infinite gives exactly 0, and so does a guard where the sum is 0: print it")
def nothing_where_it_is_large(x):
    return flashref.safe_softmax(x) * (x.max() < 500)


@wrong("softmax", "no_max_subtraction")
def clipped(x):
    e = np.exp(np.minimum(x, 1e9))
    return e / e.sum(axis=-1, keepdims=True)


@wrong("softmax", "")
def softened(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / (e.sum(axis=-1, keepdims=True) + 1e-3)


@wrong("softmax", "")
def normalised_scores(x):
    return x / x.sum(axis=-1, keepdims=True)


@wrong("softmax", "")
def logarithms(x):
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@wrong("softmax", "")
def clipped_at_700(x):
    e = np.exp(np.clip(x, -700, 700))
    return e / e.sum(axis=-1, keepdims=True)


# --- online softmax -----------------------------------------------------------------------------


def online(step, last=lambda m, l: (m, l)):
    """Return an online softmax made of step(m, l, block) -> (m, l)."""

    def online_softmax(x, block):
        m, l = -np.inf, 0.0
        for start in range(0, len(x), block):
            m, l = step(m, l, x[start : start + block])
        m, l = last(m, l)
        return np.exp(x - m) / l

    return online_softmax


def right_step(m, l, s):
    m_new = max(m, s.max())
    return m_new, l * np.exp(m - m_new) + np.exp(s - m_new).sum()


def lost(m, l, s):
    return max(m, s.max()), np.exp(s - max(m, s.max())).sum()


def late(m, l, s):
    m_new = max(m, s.max())
    return m_new, (l + np.exp(s - m_new).sum()) * np.exp(m - m_new)


def late_but_first(m, l, s):
    return late(m, l, s) if l else right_step(m, l, s)


def own(m, l, s):
    m_new = max(m, s.max())
    return m_new, l * np.exp(m - m_new) + np.exp(s - s.max()).sum()


def upside_down(m, l, s):
    m_new = max(m, s.max())
    return m_new, l * np.exp(m_new - m) + np.exp(s - m_new).sum()


def upside_down_but_first(m, l, s):
    m_new = max(m, s.max())
    alpha = 1.0 if l == 0 else np.exp(m_new - m)
    return m_new, l * alpha + np.exp(s - m_new).sum()


def against_the_old(m, l, s):
    m_new = max(m, s.max())
    return m_new, l * np.exp(m - m_new) + np.exp(s - (m if l else m_new)).sum()


def newest(m, l, s):
    return s.max(), l * np.exp(m - s.max()) + np.exp(s - s.max()).sum()


def against_nothing(m, l, s):
    m_new = max(m, s.max())
    return m_new, l * np.exp(m - m_new) + np.exp(s - m).sum()


def block_by_mean(m, l, s):
    m_new = max(m, s.mean())
    return m_new, l * np.exp(m - m_new) + np.exp(s - m_new).sum()


def never_taken_over(m, l, s):
    m_new = max(m, s.max())
    return m, l * np.exp(m - m_new) + np.exp(s - m_new).sum()


attempt("online_softmax", "m and l have changed places",
        online(lambda m, l, s: right_step(m, l, s)[::-1]), "swapped")  # fmt: skip
attempt("online_softmax", "m and l have changed places",
        online(right_step, lambda m, l: (l, m)), "swapped_at_the_end")  # fmt: skip
attempt("online_softmax", "Only the last block counts", online(lost), "lost")
attempt("online_softmax", "m starts at -inf", online(late), "late_at_once")
attempt("online_softmax", "applied to the new block too", online(late_but_first), "late")
attempt("online_softmax", "the new block against its own", online(own), "own")
attempt("online_softmax", "m starts at -inf", online(upside_down), "upside_down")
attempt(
    "online_softmax", "rescale_inverted", online(upside_down_but_first), "upside_down_but_first"
)
attempt("online_softmax", "against the old maximum", online(against_the_old), "against_the_old")
attempt("online_softmax", "“Break it: the maximum”", online(newest), "newest")
attempt("online_softmax", "what does your exp get at the first score?",
        online(against_nothing), "against_nothing")  # fmt: skip
attempt("online_softmax", "", online(block_by_mean), "block_by_mean")
attempt("online_softmax", "infinite", online(never_taken_over), "never_taken_over")


@wrong("online_softmax", "are written earlier")
def in_one_pass(x, block):
    m, l, p = -np.inf, 0.0, np.zeros_like(x)
    for start in range(0, len(x), block):
        part = slice(start, start + block)
        m, l = right_step(m, l, x[part])
        p[part] = np.exp(x[part] - m) / l
    return p


@wrong("online_softmax", "are written earlier")
def divided_at_the_end(x, block):
    m, l, p = -np.inf, 0.0, []
    for start in range(0, len(x), block):
        s = x[start : start + block]
        m, l = right_step(m, l, s)
        p += [math.exp(y - m) for y in s]
    return np.array(p) / l


@wrong("online_softmax", "no_rescale_l")
def score_by_score(x):
    m, l = x[0], 1.0
    for s in x[1:]:
        m = max(m, s)
        l = l * np.exp(m - m) + np.exp(s - m)
    return np.exp(x - m) / l


@wrong("online_softmax", "tail_keys_dropped")
def by_whole_blocks(x, block):
    m, l = -np.inf, 0.0
    for i in range(len(x) // block):
        m, l = right_step(m, l, x[i * block : (i + 1) * block])
    return np.exp(x - m) / l if l else np.zeros_like(x)


@wrong("online_softmax", "max_starts_at_zero")
def from_zero(x, block=4):
    m, l = 0.0, 0.0
    for start in range(0, len(x), block):
        m, l = right_step(m, l, x[start : start + block])
    return np.exp(x - m) / l


@wrong("online_softmax", "")
def each_block_by_itself(x, block):
    return np.concatenate([
        np.exp(s - s.max()) / np.exp(s - s.max()).sum()
        for s in (x[i : i + block] for i in range(0, len(x), block))
    ])  # fmt: skip


# --- merging ------------------------------------------------------------------------------------


def merge(weights, joint):
    """Return a merge made of weights (w_a, w_b) and an lse, both from (lse_a, lse_b)."""

    def merge_attention(o_a, lse_a, o_b, lse_b):
        w_a, w_b = (np.asarray(w)[..., None] for w in weights(lse_a, lse_b))
        return np.nan_to_num(w_a) * o_a + np.nan_to_num(w_b) * o_b, joint(lse_a, lse_b)

    return merge_attention


def shares(a, b):
    lse = np.logaddexp(a, b)
    return np.exp(a - lse), np.exp(b - lse)


def naive_shares(a, b):
    return np.exp(a) / (np.exp(a) + np.exp(b)), np.exp(b) / (np.exp(a) + np.exp(b))


def lse_shares(a, b):
    return a / (a + b), b / (a + b)


MERGES = {
    "swapped": ("exchanged", merge(lambda a, b: shares(b, a), np.logaddexp)),
    "not_divided": (
        "do not sum to 1",
        merge(lambda a, b: (np.exp(a - np.maximum(a, b)), np.exp(b - np.maximum(a, b))),
              np.logaddexp),
    ),
    "by_lse": ("", merge(lse_shares, np.logaddexp)),
    "lse_added_in_weights": (
        "merge_lse_added",
        lambda o_a, a, o_b, b: (
            np.exp(a - (a + b))[..., None] * o_a + np.exp(b - (a + b))[..., None] * o_b, a + b,
        ),
    ),
    "lse_over_joint_lse": (
        "weighed by lse itself",
        lambda o_a, a, o_b, b: (
            (a / np.logaddexp(a, b))[..., None] * o_a + (b / np.logaddexp(a, b))[..., None] * o_b,
            np.logaddexp(a, b),
        ),
    ),
    "formula_as_it_stands": (
        "without subtracting anything",
        lambda o_a, a, o_b, b: (
            np.exp(a - np.log(np.exp(a) + np.exp(b)))[..., None] * o_a
            + np.exp(b - np.log(np.exp(a) + np.exp(b)))[..., None] * o_b,
            np.log(np.exp(a) + np.exp(b)),
        ),
    ),
    "sum_of_exp": ("a piece of it", merge(shares, lambda a, b: np.exp(a) + np.exp(b))),
    "larger_lse": ("a piece of it", merge(shares, np.maximum)),
    "no_maximum": (
        "a piece of it",
        merge(shares, lambda a, b: np.where(
            np.isneginf(np.maximum(a, b)), -np.inf,
            np.log(np.exp(a - np.maximum(a, b)) + np.exp(b - np.maximum(a, b))),
        )),
    ),
    "average": ("merge_average", merge(lambda a, b: (0.5 + 0 * a, 0.5 + 0 * b), np.logaddexp)),
    "lse_added": ("merge_lse_added", merge(shares, np.add)),
    "mean_lse": ("", merge(shares, lambda a, b: (a + b) / 2)),
    "winner": ("", merge(lambda a, b: (a > b, a <= b), np.logaddexp)),
    "base_2": (
        "merge_base2",
        merge(lambda a, b: (1 / (1 + 2.0 ** (b - a)), 1 / (1 + 2.0 ** (a - b))), np.logaddexp2),
    ),
    "first_part": ("", merge(lambda a, b: (1 + 0 * a, 0 * b), np.logaddexp)),
    "sigmoid_of_sum": (
        "", merge(lambda a, b: (1 / (1 + np.exp(-a)), 1 / (1 + np.exp(-b))), np.logaddexp),
    ),
}  # fmt: skip
for label, (words, function) in MERGES.items():
    attempt("merge_attention", words, function, f"merge_{label}")


@wrong("merge_attention", "exp(lse) is computed without subtracting anything")
def merge_of_exponentials(o_a, lse_a, o_b, lse_b):
    a, b = np.exp(lse_a)[..., None], np.exp(lse_b)[..., None]
    return (a * o_a + b * o_b) / (a + b), np.log(np.exp(lse_a) + np.exp(lse_b))


@wrong("merge_attention", "weighed by lse itself")
def merge_by_bare_lse(o_a, lse_a, o_b, lse_b):
    o = (lse_a[..., None] * o_a + lse_b[..., None] * o_b) / (lse_a + lse_b)[..., None]
    return o, np.logaddexp(lse_a, lse_b)


@wrong("merge_attention", "merge_empty_nan")
def merge_without_a_guard(o_a, lse_a, o_b, lse_b):
    lse = np.logaddexp(lse_a, lse_b)
    return np.exp(lse_a - lse)[..., None] * o_a + np.exp(lse_b - lse)[..., None] * o_b, lse


# --- attention ----------------------------------------------------------------------------------


def causal_mask(S):
    n_q, n_k = S.shape[-2:]
    return np.arange(n_k) <= np.arange(n_q)[:, None] + n_k - n_q


def standard(weights, scale=lambda q, k, v: q.shape[-1] ** -0.5, lse=None):
    """Return an attention made of weights(S) and perhaps an lse(S)."""

    def attention(q, k, v, causal=False):
        S = scale(q, k, v) * q @ k.swapaxes(-1, -2)
        if causal:
            S = np.where(causal_mask(S), S, -np.inf)
        o = np.nan_to_num(weights(S)) @ v
        return o if lse is None else (o, lse(S))

    return attention


def softmax(S, axis=-1):
    m = np.maximum(S.max(axis=axis, keepdims=True), -1e300)
    e = np.exp(S - m)
    return e / e.sum(axis=axis, keepdims=True)


def of_all(S):
    e = np.exp(S - S.max(axis=-1, keepdims=True, initial=-1e300))
    return e / e.sum(axis=(-1, -2), keepdims=True)


def by_the_largest_of_all(S):
    e = np.exp(S - S.max())
    return e / np.where(e.sum(axis=-1, keepdims=True) == 0, 1, e.sum(axis=-1, keepdims=True))


ATTENTIONS = {
    "of_all": ("All weights of the matrix together", standard(of_all)),
    "by_the_largest": ("One maximum", standard(by_the_largest_of_all)),
    "in_base_2": ("powers of 2, not of e", standard(lambda S: softmax(S * np.log(2)))),
    "root_d": ("√d where 1/√d belongs", standard(softmax, lambda q, k, v: q.shape[-1] ** 0.5)),
    "root_n_q": ("the number of queries", standard(softmax, lambda q, k, v: q.shape[-2] ** -0.5)),
    "root_n": ("the number of keys", standard(softmax, lambda q, k, v: k.shape[-2] ** -0.5)),
    "root_d_v": ("the width of v", standard(softmax, lambda q, k, v: v.shape[-1] ** -0.5)),
    "squared": ("", standard(lambda S: softmax(S) ** 2)),
    "sigmoid": ("", standard(lambda S: 1 / (1 + np.exp(-S)))),
    "relu": ("", standard(lambda S: np.maximum(S, 0) / np.maximum(S, 0).sum(-1, keepdims=True))),
    "twice": ("", standard(lambda S: softmax(softmax(S)))),
    "hard": ("", standard(lambda S: (S == S.max(-1, keepdims=True)).astype(float))),
    "negative": ("", standard(lambda S: softmax(-S))),
}
LSES = {
    "m": ("m alone", lambda m, l: m),
    "l": ("l alone", lambda m, l: l),
    "m_plus_l": ("m + l", lambda m, l: m + l),
    "minus": ("a sign is wrong", lambda m, l: m - np.log(l)),
    "log2": ("one part is natural", lambda m, l: m + np.log2(l)),
    "sum": ("without the logarithm", lambda m, l: np.exp(m) * l),
    "times": ("the operation between them", lambda m, l: m * np.log(l)),
}
for label, (words, function) in ATTENTIONS.items():
    attempt("attention", words, function, f"attention_{label}")
for label, (words, formula) in LSES.items():

    def saved(S, formula=formula):
        m = S.max(axis=-1)
        l = np.exp(S - np.where(np.isinf(m), 0, m)[..., None]).sum(axis=-1)
        return np.where(np.isinf(m), m, formula(m, l))

    attempt("attention", words, standard(softmax, lse=saved), f"lse_{label}")


@wrong("attention", "1/√(heads · d)")
def scaled_by_the_whole_width(q, k, v):
    width = q.shape[-1] * (q.shape[-3] if q.ndim > 2 else 1)
    return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(width)) @ v


@wrong("attention", "after the softmax")
def masked_afterwards(q, k, v, causal=False):
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    P = softmax(S)
    return (P * causal_mask(S) if causal else P) @ v


def tiled(step, last=lambda m, l, O: O / l[:, None]):
    """Return a tiled attention made of step(m, l, O, S, V) -> (m, l, O)."""

    def flash(Q, K, V, Br, Bc):
        out = []
        for i in range(0, len(Q), Br):
            Q_i = Q[i : i + Br]
            m, l = np.full(len(Q_i), -np.inf), np.zeros(len(Q_i))
            O = np.zeros((len(Q_i), V.shape[1]))
            for j in range(0, len(K), Bc):
                S = Q_i @ K[j : j + Bc].T / np.sqrt(Q.shape[1])
                m, l, O = step(m, l, O, S, V[j : j + Bc])
            out.append(last(m, l, O))
        return np.concatenate(out)

    return flash


def divided_each_time(m, l, O, S, V):
    m_new = np.maximum(m, S.max(axis=1))
    P, alpha = np.exp(S - m_new[:, None]), np.exp(m - m_new)
    l = alpha * l + P.sum(axis=1)
    return m_new, l, (alpha[:, None] * O + P @ V) / l[:, None]


def rescaled_afterwards(m, l, O, S, V):
    m_new = np.maximum(m, S.max(axis=1))
    P, alpha = np.exp(S - m_new[:, None]), np.where(np.isinf(m), 1, np.exp(m - m_new))
    return m_new, alpha * (l + P.sum(axis=1)), alpha[:, None] * (O + P @ V)


def old_l_as_a_view(m, l, O, S, V):
    m_new, l_old = np.maximum(m, S.max(axis=1)), l[:]
    P, alpha = np.exp(S - m_new[:, None]), np.exp(m - m_new)
    l[:] = alpha * l_old + P.sum(axis=1)
    return m_new, l, ((l_old * alpha)[:, None] * O + P @ V) / l[:, None]


def old_m_as_a_view(m, l, O, S, V):
    m_old = m[:]
    m[:] = np.maximum(m_old, S.max(axis=1))
    P, alpha = np.exp(S - m[:, None]), np.exp(m_old - m)
    return m, alpha * l + P.sum(axis=1), alpha[:, None] * O + P @ V


def both_as_views(m, l, O, S, V):
    m_old, l_old = m[:], l[:]
    m[:] = np.maximum(m_old, S.max(axis=1))
    P, alpha = np.exp(S - m[:, None]), np.exp(m_old - m)
    l[:] = alpha * l_old + P.sum(axis=1)
    return m, l, ((l_old * alpha)[:, None] * O + P @ V) / l[:, None]


def newest_maximum(m, l, O, S, V):
    m_new = S.max(axis=1)
    P, alpha = np.exp(S - m_new[:, None]), np.exp(m - m_new)
    return m_new, alpha * l + P.sum(axis=1), alpha[:, None] * O + P @ V


def started_again(m, l, O, S, V):
    m_new = S.max(axis=1)
    P = np.exp(S - m_new[:, None])
    return m_new, P.sum(axis=1), P @ V


def against_its_own(m, l, O, S, V):
    m_new = np.maximum(m, S.max(axis=1))
    P, alpha = np.exp(S - S.max(axis=1, keepdims=True)), np.exp(m - m_new)
    return m_new, alpha * l + P.sum(axis=1), alpha[:, None] * O + P @ V


def half_inverted(m, l, O, S, V):
    m_new = np.maximum(m, S.max(axis=1))
    P, alpha = np.exp(S - m_new[:, None]), np.exp(m - m_new)
    over = np.where(np.isinf(m), 1, np.exp(m_new - m))
    return m_new, alpha * l + P.sum(axis=1), over[:, None] * O + P @ V


def o_never_kept(m, l, O, S, V):
    m_new = np.maximum(m, S.max(axis=1))
    P, alpha = np.exp(S - m_new[:, None]), np.exp(m - m_new)
    return m_new, alpha * l + P.sum(axis=1), P @ V


def nan_at_once(m, l, O, S, V):
    m_new = np.maximum(m, S.max(axis=1))
    P, alpha = np.exp(S - m_new[:, None]), np.exp(m_new - m)
    return m_new, alpha * l + P.sum(axis=1), alpha[:, None] * O + P @ V


def right_so_far(m, l, O, S, V):
    m_new = np.maximum(m, S.max(axis=1))
    P, alpha = np.exp(S - m_new[:, None]), np.exp(m - m_new)
    return m_new, alpha * l + P.sum(axis=1), alpha[:, None] * O + P @ V


def done(m, l, O):
    return O


attempt("attention", "divided by l after every block", tiled(divided_each_time, done), "divided")
attempt("attention", "multiplied by the new l", tiled(old_l_as_a_view, done), "old_l_as_a_view")
attempt("attention", "multiplied by the new l", tiled(both_as_views, done), "both_as_views")
attempt("attention", "no_rescale_both", tiled(old_m_as_a_view), "old_m_as_a_view")
attempt("attention", "“Break it: the maximum”", tiled(newest_maximum), "newest_maximum")
attempt("attention", "the new block against its own", tiled(against_its_own), "tiled_own")
attempt("attention", "Only the last block counts", tiled(started_again), "started_again")
attempt("attention", "upside down for one", tiled(half_inverted), "half_inverted")
attempt("attention", "Only the last block counts", tiled(o_never_kept), "o_never_kept")
attempt("attention", "m starts at -inf", tiled(nan_at_once), "nan_at_once")
attempt("attention", "applied to the new block", tiled(rescaled_afterwards), "rescaled_late")
attempt("attention", "no_final_division", tiled(right_so_far, done), "never_divided")


def cut_by(slices):
    """Return an attention over the blocks of slices(n, size), merged one after the other."""

    def attention(q, k, v, Br, Bc):
        o, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), -np.inf)
        for cols in slices(len(k), Bc):
            for rows in slices(len(q), Br):
                part = flashref.standard_attention(q[rows], k[cols], v[cols], return_lse=True)
                o[rows], lse[rows] = flashref.merge_attention(o[rows], lse[rows], *part)
        return o

    return attention


attempt(
    "attention", "Neither the last, shorter block of keys nor that of queries",
    cut_by(lambda n, size: [slice(i * size, (i + 1) * size) for i in range(n // size)]),
    "no_tail_at_all",
)  # fmt: skip
attempt(
    "attention", "Each block lacks its last row",
    cut_by(lambda n, size: [slice(i, i + size - 1) for i in range(0, n, size)]), "short_slices",
)  # fmt: skip


@wrong("attention", "are not started anew for each block of queries")
def one_state_for_all(q, k, v, Br, Bc):
    o, kept = np.zeros((len(q), v.shape[1])), None
    for i in range(0, len(q), Br):
        rows = q[i : i + Br]
        if kept is None or len(kept[0]) != len(rows):
            kept = np.full(len(rows), -np.inf), np.zeros(len(rows)), 0 * rows @ k.T @ v
        for j in range(0, len(k), Bc):
            S = rows @ k[j : j + Bc].T / np.sqrt(q.shape[1])
            kept = right_so_far(*kept, S, v[j : j + Bc])
        o[i : i + Br] = kept[2] / kept[1][:, None]
    return o


@wrong("attention", "It looks like this: o is right. Your lse is m · log l")
def lse_times_in_empty_rows_too(q, k, v, causal=False):
    assert q.ndim == 2, "one head"
    S = q @ k.T / np.sqrt(q.shape[1])
    S = np.where(causal_mask(S), S, -np.inf) if causal else S
    m = S.max(axis=1, initial=-np.inf)
    P = np.exp(S - np.maximum(m, -1e300)[:, None])
    l = P.sum(axis=1)
    return P @ v / np.maximum(l, 1e-9)[:, None], m * np.log(l)


@wrong("attention", "")
def first_values_for_all(Q, K, V, Bc=2):
    def step(m, l, O, S, V_j):
        m_new = np.maximum(m, S.max(axis=1))
        P, alpha = np.exp(S - m_new[:, None]), np.exp(m - m_new)
        V_0 = np.resize(V[:Bc], V_j.shape)
        return m_new, alpha * l + P.sum(axis=1), alpha[:, None] * O + P @ V_0

    return tiled(step)(Q, K, V, len(Q), Bc)


@wrong("attention", "scores without the scale")
def from_lse_without_scale(q, k, v, scale):
    _, lse = flashref.standard_attention(q, k, v, scale=scale, return_lse=True)
    return np.exp(q @ k.swapaxes(-1, -2) - lse[..., None]) @ v if q.ndim == 2 else 1 / 0


@wrong("attention", "divided by lse itself")
def over_lse(q, k, v, scale):
    _, lse = flashref.standard_attention(q, k, v, scale=scale, return_lse=True)
    return np.exp(scale * q @ k.T) / lse[:, None] @ v


@wrong("attention", "Only the share of the last key")
def overwritten_by_each_key(q, k, v):
    assert q.ndim == 2, "one head"
    P, o = softmax(q @ k.T / np.sqrt(q.shape[1])), np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        for j in range(len(k)):
            o[i] = P[i, j] * v[j]
    return o


def by_rule(left=lambda i, l: i - l, right=lambda i, r: i + r, off=True, causal_off=True):
    """Return attention that knows its pairs from their key positions, with a fault."""

    def attention(q, k, v, causal=False, window=None):
        n_q, n_k = q.shape[-2], k.shape[-2]
        i, j = np.arange(n_q)[:, None], np.arange(n_k)
        seen = np.ones((n_q, n_k), bool)
        if causal:
            seen &= j <= i + causal_off * (n_k - n_q)
        if window is not None:
            at = i + off * (n_k - n_q)
            seen &= (j >= left(at, window[0])) & (j <= right(at, window[1]))
        return flashref.standard_attention(q, k, v, mask=seen)

    return attention


def turned_window(q, k, v, causal=False, window=None):
    return by_rule()(q, k, v, causal, window and window[::-1])


RULES = {
    "left_out": ("too narrow on the left", by_rule(left=lambda i, l: i - l + 1)),
    "right_out": ("too narrow on the right", by_rule(right=lambda i, r: i + r - 1)),
    "both_out": (
        "narrow on both sides",
        by_rule(left=lambda i, l: i - l + 1, right=lambda i, r: i + r - 1),
    ),
    "no_right": ("does not end on the right", by_rule(right=lambda i, r: i + 10**6)),
    "no_left": ("does not end on the left", by_rule(left=lambda i, l: i - 10**6)),
    "none": (
        "Your window has no effect",
        by_rule(left=lambda i, l: i - 10**6, right=lambda i, r: i + 10**6),
    ),
    "turned": ("left and right exchanged", turned_window),
    "without_off": ("is not shifted", by_rule(off=False)),
    "top_left": ("Neither causal nor the window is shifted", by_rule(off=False, causal_off=False)),
    "causal_top_left": ("causal_top_left", by_rule(causal_off=False)),
    "left_wide": ("window_one_too_wide", by_rule(left=lambda i, l: i - l - 1)),
}
for label, (words, function) in RULES.items():
    attempt("attention", words, function, f"window_{label}")


def causal_by_tiles(skip, full):
    """Return attention whose causal tiles are sorted by skip and full of (i0, i1, j0, j1, off)."""

    def attention(q, k, v, block_q, block_k, causal=False):
        n_q, n_k = (len(x) for x in (q, k) if x.ndim == 2)
        seen, off = np.ones((n_q, n_k), bool), n_k - n_q
        for i in range(0, n_q, block_q):
            for j in range(0, n_k, block_k):
                tile = slice(i, min(i + block_q, n_q)), slice(j, min(j + block_k, n_k))
                ends = i, tile[0].stop - 1, j, tile[1].stop - 1, off
                if causal and skip(*ends):
                    seen[tile] = False
                elif causal and not full(*ends):
                    seen[tile] = np.tri(n_q, n_k, off, dtype=bool)[tile]
        return flashref.standard_attention(q, k, v, mask=seen)

    return attention


CAUSAL_TILES = {
    "top_left": (
        "as if n_q were n_k",
        causal_by_tiles(lambda i, I, j, J, off: j > I, lambda i, I, j, J, off: J <= i),
    ),
    "by_first_query": (
        "of which some query still sees a key",
        causal_by_tiles(lambda i, I, j, J, off: j > i + off, lambda i, I, j, J, off: J <= i + off),
    ),
    "by_corner": (
        "are not masked inside",
        causal_by_tiles(
            lambda i, I, j, J, off: j > I + off,
            lambda i, I, j, J, off: J <= i + off or j > i + off,
        ),
    ),
    "whole": (
        "Partial tiles are left out",
        causal_by_tiles(lambda i, I, j, J, off: J > i + off, lambda i, I, j, J, off: True),
    ),
    "unmasked": (
        "diagonal_block_unmasked",
        causal_by_tiles(lambda i, I, j, J, off: j > I + off, lambda i, I, j, J, off: True),
    ),
}
for label, (words, function) in CAUSAL_TILES.items():
    attempt("attention", words, function, f"tiles_{label}")


@wrong("attention", "as if there were as many keys as queries")
def packed_with_the_ends_of_the_queries(q, k, v, causal=False):
    n = len(q) if q.ndim == 2 else 1 / 0
    k, v = (np.concatenate([x, x - 2]) for x in (k, v))  # the next sequence behind it
    return flashref.standard_attention(q, k[:n], v[:n], causal=causal)


@wrong("attention", "Each row of o is right up to a factor of its own (1, 0.5)")
def a_sum_that_no_row_resets(q, k, v):
    assert q.ndim == 2, "one head"
    o, l = np.empty((len(q), v.shape[1])), 0
    for i in range(len(q)):
        s = k @ q[i] / math.sqrt(q.shape[1])
        p = np.exp(s - s.max())
        l += p.sum()
        o[i] = p @ v / l
    return o


@wrong("attention", "attention without key 0")
def first_key_as_a_header(q, k, v):
    k, v = (x[..., 1:, :] if x.shape[-2] > 1 else x for x in (k, v))
    return flashref.standard_attention(q, k, v)


@wrong("attention", "Only rows 64 to 130 of o are wrong")
def one_block_of_queries(q, k, v, block_q=64):
    o = flashref.standard_attention(q, k, v)
    o[..., 64:, :] += flashref.standard_attention(q[..., 64:, :], k, v)
    return o


@wrong("attention", "Only head 2 of o is wrong")
def last_head_twice(q, k, v):
    o = flashref.standard_attention(q, k, v)
    if o.ndim > 2:
        o[..., -1, :, :] += o[..., 0, :, :]
    return o


@wrong("attention", "NaN fills 5 of 15 rows of o")
def last_head_never_summed(q, k, v):
    o = flashref.standard_attention(q, k, v)
    if o.ndim > 2:
        o[..., -1, :, :] *= np.nan
    return o


@wrong("attention", "Your mask has no effect")
def a_mask_that_nobody_reads(q, k, v, mask=None):
    return flashref.standard_attention(q, k, v)


@wrong("attention", "Your window has no effect")
def a_window_that_nobody_reads(q, k, v, window=None):
    return flashref.standard_attention(q, k, v)


@wrong("attention", "Wrong only with a mask, and there always")
def a_mask_of_keys(q, k, v, mask=None):
    if mask is not None:  # a key is there as soon as one query sees it, but the first
        mask = np.broadcast_to(mask[1:].any(axis=0), mask.shape)
    return flashref.standard_attention(q, k, v, mask=mask)


@wrong("attention", "sram_elements=1,500")
def a_tile_for_narrow_heads(q, k, v):
    size, memory = 8 if q.shape[-1] <= 8 else 40, flashref.Memory(1500)
    return flashref.flash_attention_1(q, k, v, block_q=size, block_k=size, memory=memory)


@wrong("attention", "diagonal_block_unmasked")
def keys_in_blocks_of_4(q, k, v, Br, causal=False):
    assert q.ndim == 2, "one head"
    mask = np.tri(len(q), len(k), len(k) - len(q), dtype=bool) | (not causal)
    for i in range(0, len(q), Br):
        for j in range(0, len(k), 4):
            mask[i : i + Br, j : j + 4] |= mask[i : i + Br, j : j + 4].any()
    return flashref.standard_attention(q, k, v, mask=mask)


@wrong("attention", "tail_keys_dropped")
def blocks_that_it_may_choose(q, k, v, Br=None, Bc=None):
    assert q.ndim == 2, "one head"
    n = len(k) // (Bc or 32) * (Bc or 32)
    return flashref.standard_attention(q, k[:n], v[:n]) if n else np.zeros((len(q), v.shape[1]))


@wrong("attention", "Part of it looks like tail_keys_dropped")
def whole_blocks_and_no_scale(q, k, v, Br=None, Bc=None, scale=None):
    assert q.ndim == 2, "one head"
    n = len(k) // (Bc or 1) * (Bc or 1)
    return flashref.standard_attention(q, k[:n], v[:n]) if n else np.zeros((len(q), v.shape[1]))


# --- the backward pass --------------------------------------------------------------------------


@wrong("attention_backward", "Your dq is log₂ e = 1.4427 times the right one, everywhere")
def scores_in_base_2(do, q, k, v):
    dq, dk, dv = flashref.standard_attention_backward(do, q, k, v)
    return dq / np.log(2), dk, dv  # q was multiplied by log2(e), and nobody took it back


def backward(ds, dq_scale=1, dk_scale=1, dv=lambda P, dO: P.swapaxes(-1, -2) @ dO, unscaled=False):
    """Return a backward pass made of ds(P, dP, D)."""

    def attention_backward(do, q, k, v, causal=False):
        scale = q.shape[-1] ** -0.5
        S = scale * q @ k.swapaxes(-1, -2)
        S = np.where(causal_mask(S), S, -np.inf) if causal else S
        P = np.nan_to_num(softmax(S))
        if unscaled:
            m = S.max(axis=-1, keepdims=True)
            P = np.nan_to_num(np.exp(S / scale - m - np.log(np.exp(S - m).sum(-1, keepdims=True))))
        dP = do @ v.swapaxes(-1, -2)
        dS = ds(P, dP, np.sum(softmax_safe(S) * dP, axis=-1, keepdims=True))
        dq = scale**dq_scale * dS @ k
        return dq, scale**dk_scale * dS.swapaxes(-1, -2) @ q, dv(P, do)

    return attention_backward


def softmax_safe(S):
    return np.nan_to_num(softmax(S))


def right_ds(P, dP, D):
    return P * (dP - D)


BACKWARDS = {
    "neither_scaled": ("Neither dQ nor dK", backward(right_ds, 0, 0)),
    "scaled_twice": ("multiplied in twice", backward(right_ds, 2, 2)),
    "dq_scaled_twice": ("multiplied in twice", backward(right_ds, 2, 1)),
    "without_p": ("your factor P", backward(lambda P, dP, D: dP - D)),
    "d_outside": ("your factor P", backward(lambda P, dP, D: P * dP - D)),
    "plus": ("a sign wrong", backward(lambda P, dP, D: P * (dP + D))),
    "turned": ("a sign wrong", backward(lambda P, dP, D: P * (D - dP))),
    "sigmoid": ("only the diagonal", backward(lambda P, dP, D: P * (1 - P) * dP)),
    "unscaled_scores": ("scores without the scale", backward(right_ds, unscaled=True)),
    "no_d": ("no_d_term", backward(lambda P, dP, D: P * dP)),
    "dv_of_ones": ("", backward(right_ds, dv=lambda P, dO: P.swapaxes(-1, -2) @ (0 * dO + 1))),
    "dv_squared": ("", backward(right_ds, dv=lambda P, dO: (P**2).swapaxes(-1, -2) @ dO)),
    "dq_alone": ("dk_unscaled", backward(right_ds, 1, 0)),
    "d_is_a_mean": (
        "the plain mean",
        backward(lambda P, dP, D: P * (dP - dP.mean(-1, keepdims=True))),
    ),
    "d_halved": ("", backward(lambda P, dP, D: P * (dP - D / 2))),
    "d_of_columns": (
        "summed over the queries",
        backward(lambda P, dP, D: P * (dP - (P * dP).sum(-2, keepdims=True))),
    ),
}
for label, (words, function) in BACKWARDS.items():
    attempt("attention_backward", words, function, f"backward_{label}")


@wrong("attention_backward", "scores without the scale")
def forgotten_in_p(do, q, k, v, o, lse):
    P = np.exp(q @ k.swapaxes(-1, -2) - lse[..., None])
    dS = P * (do @ v.swapaxes(-1, -2) - (do * o).sum(axis=-1, keepdims=True)) / np.sqrt(q.shape[-1])
    return dS @ k, dS.swapaxes(-1, -2) @ q, P.swapaxes(-1, -2) @ do


def in_tiles(d="row", scale_p=True, scale_d=True, keys=lambda n, b: n, queries=lambda n, b: n,
             weight=lambda S, lse: np.exp(S - lse)):  # fmt: skip
    """Return Algorithm 4 with a fault."""

    def attention_backward(do, q, k, v, o, lse, block_q, block_k):
        tau = 1 / math.sqrt(q.shape[1])
        dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        for j in range(0, keys(len(k), block_k), block_k):
            cols = slice(j, j + block_k)
            for i in range(0, queries(len(q), block_q), block_q):
                rows = slice(i, i + block_q)
                P = weight((tau if scale_p else 1) * q[rows] @ k[cols].T, lse[rows, None])
                dP = do[rows] @ v[cols].T
                D = P * dP if d == "tile" else do[rows] * o[rows]
                dS = (tau if scale_d else 1) * P * (dP - D.sum(axis=1)[:, None])
                dq[rows] += dS @ k[cols]
                dk[cols] += dS.T @ q[rows]
                dv[cols] += P.T @ do[rows]
        return dq, dk, dv

    return attention_backward


def by_whole_tiles(n, size):
    return n // size * size


IN_TILES = {
    "d_of_a_tile": ("one tile alone", in_tiles(d="tile")),
    "no_tail_of_keys": ("block of keys is never visited", in_tiles(keys=by_whole_tiles)),
    "no_tail_of_queries": ("block of queries is never visited", in_tiles(queries=by_whole_tiles)),
    "no_tau_in_p": ("scores without the scale", in_tiles(scale_p=False)),
    "no_tau": ("missing everywhere", in_tiles(scale_p=False, scale_d=False)),
    "over_lse": ("divided by lse itself", in_tiles(weight=lambda S, lse: np.exp(S) / lse)),
}
for label, (words, function) in IN_TILES.items():
    attempt("attention_backward", words, function, f"backward_{label}")


def of_groups(share, gather):
    """Return a backward pass that copies key heads with `share`, and takes gradients home."""

    def attention_backward(do, q, k, v):
        if q.ndim == 2:
            heads = (x[None] for x in (do, q, k, v))
            return tuple(x[0] for x in attention_backward(*heads))
        n_kv, group = k.shape[-3], q.shape[-3] // k.shape[-3]
        dq, dk, dv = backward(right_ds)(do, q, share(k, group), share(v, group))
        return dq, gather(dk, n_kv), gather(dv, n_kv)

    return attention_backward


def repeated(x, group):
    return x.repeat(group, axis=-3)


def put_one_after_another(x, group):
    return np.concatenate(group * [x], axis=-3)


def parts(x, *heads):
    return x.reshape(*x.shape[:-3], *heads, *x.shape[-2:])


def summed(x, n_kv):
    return parts(x, n_kv, -1).sum(axis=-3)


GROUPS = {
    "tile": ("0,0,1,1, not 0,1,0,1", of_groups(put_one_after_another, summed)),
    "tile_twice": (
        "0,0,1,1, not 0,1,0,1",
        of_groups(put_one_after_another, lambda x, n: parts(x, -1, n).sum(axis=-4)),
    ),
    "tile_back": (
        "over the wrong query heads",
        of_groups(repeated, lambda x, n: parts(x, -1, n).sum(axis=-4)),
    ),
    "mean": (
        "are the mean over the query heads",
        of_groups(repeated, lambda x, n: parts(x, n, -1).mean(axis=-3)),
    ),
    "first": (
        "of one query head alone",
        of_groups(repeated, lambda x, n: parts(x, n, -1)[..., 0, :, :]),
    ),
    "first_heads": ("of one query head alone", of_groups(repeated, lambda x, n: x[..., :n, :, :])),
    "last": (
        "gqa_gradients_not_summed",
        of_groups(repeated, lambda x, n: parts(x, n, -1)[..., -1, :, :]),
    ),
    "never_gathered": ("a gradient for each query head", of_groups(repeated, lambda x, n: x)),
}
for label, (words, function) in GROUPS.items():
    attempt("attention_backward", words, function, f"groups_{label}")


@wrong("attention_backward", "keep only the last")
def keys_overwritten(do, q, k, v, block_q, block_k):
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for i in range(0, len(q), block_q):
        rows = slice(i, i + block_q)
        part, dk, dv = backward(right_ds)(do[rows], q[rows], k, v)
        dq[rows] = part
    return dq, dk, dv


@wrong("attention_backward", "(dq, dv, dk)")
def in_another_order(do, q, k, v):
    dq, dk, dv = backward(right_ds)(do, q, k, v)
    return dq, dv, dk


# --- block-sparse attention ---------------------------------------------------------------------


def sparse(seen, weights=softmax_safe, late=False):
    """Return block-sparse attention made of seen(block_mask, block_q, block_k, n_q, n_k)."""

    def block_sparse_attention(q, k, v, block_mask, block_q, block_k):
        S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        here = seen(block_mask, block_q, block_k, *S.shape[-2:])
        P = weights(S) * here if late else weights(np.where(here, S, -np.inf))
        return P @ v

    return block_sparse_attention


def spread(mask, block_q, block_k, n_q, n_k):
    i, j = np.arange(n_q)[:, None] // block_q, np.arange(n_k) // block_k
    return mask[np.minimum(i, mask.shape[0] - 1), np.minimum(j, mask.shape[1] - 1)]


SPARSE = {
    "turned": ("the other way round", sparse(lambda m, *sizes: ~spread(m, *sizes))),
    "late": ("after the softmax", sparse(spread, late=True)),
    "dense": ("sparse_mask_ignored", sparse(lambda m, r, c, n, o: np.ones((n, o), bool))),
    "sizes_swapped": ("block_q and block_k are exchanged", sparse(
        lambda m, r, c, n, o: spread(m, c, r, n, o))),
    "diagonal_kept": ("", sparse(lambda m, *s: spread(m, *s) | np.eye(*s[2:], dtype=bool))),
    "causal_besides": ("", sparse(lambda m, *s: spread(m, *s) & np.tri(*s[2:], dtype=bool))),
    "copied": ("again and again", sparse(lambda m, r, c, n, o: np.tile(m, (r, c))[:n, :o])),
    "flipped": ("", sparse(lambda m, *s: spread(m[::-1], *s))),
    "first_row_for_all": ("", sparse(lambda m, *s: spread(m[:1], *s))),
    "last_row_for_all": ("", sparse(lambda m, *s: spread(m[-1:], *s))),
    "shifted": ("", sparse(lambda m, *s: spread(np.roll(m, 1, axis=1), *s))),
    "any_row": ("", sparse(lambda m, *s: spread(m.any(axis=0, keepdims=True), *s))),
    "softmax_of_all": ("All weights of the matrix", sparse(spread, of_all)),
    "unscaled": ("scale_missing", lambda q, k, v, block_mask, block_q, block_k: sparse(spread)(
        q * np.sqrt(q.shape[-1]), k, v, block_mask, block_q, block_k)),
    "zeros": ("sparse_score_zero", lambda q, k, v, block_mask, block_q, block_k: softmax(np.where(
        spread(block_mask, block_q, block_k, q.shape[-2], k.shape[-2]),
        q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), 0)) @ v),
    "no_guard": ("empty_row_nan", lambda q, k, v, block_mask, block_q, block_k: softmax_bare(
        np.where(spread(block_mask, block_q, block_k, q.shape[-2], k.shape[-2]),
                 q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)) @ v),
    "blocks_averaged": ("", lambda q, k, v, block_mask, block_q, block_k: np.mean([
        sparse(spread)(
            q, k, v, block_mask & (np.arange(block_mask.shape[1]) == j), block_q, block_k)
        for j in range(block_mask.shape[1])], axis=0)),
}  # fmt: skip


def softmax_bare(S):
    e = np.exp(S - S.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@wrong("block_sparse_attention", "Rows and columns of the block mask are exchanged")
def sparse_transposed(q, k, v, block_mask, block_q, block_k, empty=-np.inf, turned=True):
    o, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), empty)
    for i in range(0, len(q), block_q):
        at = [
            (j // block_k, i // block_q)[:: 1 if turned else -1] for j in range(0, len(k), block_k)
        ]
        keys = [slice(t * block_k, (t + 1) * block_k) for t, a in enumerate(at) if block_mask[a]]
        if keys:
            k_i, v_i = (np.concatenate([x[cols] for cols in keys]) for x in (k, v))
            rows = slice(i, i + block_q)
            o[rows], lse[rows] = flashref.standard_attention(q[rows], k_i, v_i, return_lse=True)
    return o, lse


@wrong("block_sparse_attention", "lse of a query that sees no key")
def sparse_with_lse_0_for_nothing(q, k, v, block_mask, block_q, block_k):
    return sparse_transposed(q, k, v, block_mask, block_q, block_k, 0.0, turned=False)


for label, (words, function) in SPARSE.items():
    attempt("block_sparse_attention", words, function, f"sparse_{label}")


# --- counts -------------------------------------------------------------------------------------


def ceil(a, b):
    return -(-a // b)


SIZES = {
    "no_cap": ("Neither size is capped", lambda M, d: (ceil(M, 4 * d), ceil(M, 4 * d))),
    "both": ("Both sizes are capped", lambda M, d: (min(ceil(M, 4 * d), d),) * 2),
    "up": ("the larger of", lambda M, d: (max(ceil(M, 4 * d), d), ceil(M, 4 * d))),
    "nearest": ("to the nearest", lambda M, d: (min(round(M / 4 / d), d), round(M / 4 / d))),
    "floor": ("rounded down is 0", lambda M, d: (min(M // (4 * d), d), M // (4 * d))),
    "one_more": ("one more only", lambda M, d: (min(M // (4 * d) + 1, d), M // (4 * d) + 1)),
    "by_d": ("by d, not by 4d", lambda M, d: (min(ceil(M, d), d), ceil(M, d))),
    "by_2d": ("by 2d", lambda M, d: (min(ceil(M, 2 * d), d), ceil(M, 2 * d))),
    "by_3d": ("by 3d", lambda M, d: (min(ceil(M, 3 * d), d), ceil(M, 3 * d))),
    "by_8d": ("by 8d", lambda M, d: (min(ceil(M, 8 * d), d), ceil(M, 8 * d))),
    "bytes": ("not bytes", lambda M, d: (min(ceil(M, 16 * d), d), ceil(M, 16 * d))),
    "swapped": ("block_sizes_swapped", lambda M, d: (ceil(M, 4 * d), min(ceil(M, 4 * d), d))),
    "floor_of_one": ("block_sizes_floor", lambda M, d: (
        min(max(1, M // (4 * d)), d), max(1, M // (4 * d)))),
    "fractions": ("not rounded", lambda M, d: (min(M / (4 * d), d), M / (4 * d))),
    "cap_4d": ("", lambda M, d: (min(ceil(M, 4 * d), 4 * d), ceil(M, 4 * d))),
    "power_of_2": ("", lambda M, d: (
        min(2 ** int(math.log2(ceil(M, 4 * d))), d), 2 ** int(math.log2(ceil(M, 4 * d))))),
    "fixed": ("", lambda M, d: (64, 64)),
}  # fmt: skip
for label, (words, function) in SIZES.items():
    attempt("block_sizes", words, function, f"sizes_{label}")


def counted(formula):
    """Return a closed form made of formula(n_q, n_k, d, d_v, T_r, T_c)."""

    def traffic(n_q, n_k, d, d_v, block_q, block_k):
        return formula(n_q, n_k, d, d_v, ceil(n_q, block_q), ceil(n_k, block_k))

    return traffic


COUNTS = {
    "no_lse": ("without the lse", lambda n, o, d, e, R, C: (n * d + R * o * (d + e), n * e)),
    "m_and_l": ("both m and l", lambda n, o, d, e, R, C: (n * d + R * o * (d + e), n * (e + 2))),
    "bytes": ("bytes", lambda n, o, d, e, R, C: (
        4 * (n * d + R * o * (d + e)), 4 * n * (e + 1))),
    "swapped": ("changed places", lambda n, o, d, e, R, C: (
        n * (e + 1), n * d + R * o * (d + e))),
    "per_key_block": ("once per block of keys", lambda n, o, d, e, R, C: (
        n * d + C * o * (d + e), n * (e + 1))),
    "not_rounded": ("is not rounded", lambda n_q, n_k, d, d_v, block_q, block_k: (
        n_q * d + n_q / block_q * n_k * (d + d_v), n_q * (d_v + 1))),
    "per_query": ("once per query", lambda n, o, d, e, R, C: (
        n * d + n * o * (d + e), n * (e + 1))),
    "no_values": ("V is not", lambda n, o, d, e, R, C: (n * d + R * o * d, n * (e + 1))),
    "output_read": ("never read", lambda n, o, d, e, R, C: (
        n * d + R * o * (d + e) + n * e, n * (e + 1))),
    "no_output": ("lack O", lambda n, o, d, e, R, C: (n * d + R * o * (d + e), n)),
    "once": ("traffic_keys_once", lambda n, o, d, e, R, C: (n * d + o * (d + e), n * (e + 1))),
    "reloaded": ("traffic_query_reloaded", lambda n, o, d, e, R, C: (
        C * n * d + R * o * (d + e), n * (e + 1))),
    "scores": ("", lambda n, o, d, e, R, C: (
        n * d + R * o * (d + e) + n * o, n * (e + 1) + n * o)),
    "no_queries": ("", lambda n, o, d, e, R, C: (R * o * (d + e), n * (e + 1))),
    "in_order": ("", lambda n, o, d, e, R, C: (n * n * d, n * d)),
    "d_twice": ("d stands where d_v belongs", lambda n, o, d, e, R, C: (
        n * d + 2 * R * o * d, n * (d + 1))),
    "d_twice_in_loads": ("d stands where d_v belongs", lambda n, o, d, e, R, C: (
        n * d + 2 * R * o * d, n * (e + 1))),
    "full_tail": ("counts as if it were full", lambda n_q, n_k, d, d_v, block_q, block_k: (
        n_q * d + ceil(n_q, block_q) * ceil(n_k, block_k) * block_k * (d + d_v), n_q * (d_v + 1))),
}  # fmt: skip
for label, (words, formula) in COUNTS.items():
    whole = formula if "block_q" in formula.__code__.co_varnames else counted(formula)
    attempt("traffic", words, whole, f"traffic_{label}")


@wrong("traffic", "traffic_blocks_floored")
def traffic_floored(n_q, n_k, d, d_v, block_q, block_k):
    return n_q * d + n_q // block_q * n_k * (d + d_v), n_q * (d_v + 1)


@wrong("traffic", "V 0 loads")
def traffic_of_keys_alone(q, k, v, block_q, block_k, memory):
    o, lse = np.zeros((len(q), v.shape[1])), np.zeros(len(q))
    for i in range(0, len(q), block_q):
        rows = slice(i, i + block_q)
        Q_i = memory.load("Q", q, rows)
        K = [memory.load("K", k, slice(j, j + block_k)) for j in range(0, len(k), block_k)]
        S = Q_i @ np.concatenate(K).T / np.sqrt(q.shape[1])
        memory.store("O", o, rows, softmax(S) @ v)
        memory.store("L", lse, rows, np.log(np.exp(S).sum(axis=1)))
    return o


# --- right on the plainest inputs: groups of two, a positive scale, narrow values ---------------


def of_shared_heads(key_head):
    """Return an attention whose query head h reads key head key_head(h, H_q, H_kv)."""

    def attention(q, k, v):
        if q.ndim == 2:
            return flashref.standard_attention(q, k, v)
        n_heads, n_kv = q.shape[-3], k.shape[-3]
        heads = [key_head(h, n_heads, n_kv) if n_kv < n_heads else h for h in range(n_heads)]
        return flashref.standard_attention(q, k[..., heads, :, :], v[..., heads, :, :])

    return attention


def gradients_of_shared_heads(key_head, gather=True):
    """Return a backward pass whose query head h reads key head key_head(h, H_q, H_kv)."""

    def attention_backward(do, q, k, v):
        if q.ndim == 2:
            return flashref.standard_attention_backward(do, q, k, v)
        n_heads, n_kv = q.shape[-3], k.shape[-3]
        heads = [key_head(h, n_heads, n_kv) if n_kv < n_heads else h for h in range(n_heads)]
        dq, each_dk, each_dv = flashref.standard_attention_backward(
            do, q, k[..., heads, :, :], v[..., heads, :, :]
        )
        dk, dv = np.zeros(k.shape), np.zeros(v.shape)
        for h, head in enumerate(heads):
            head = head if gather else h // (n_heads // n_kv)
            dk[..., head, :, :] += each_dk[..., h, :, :]
            dv[..., head, :, :] += each_dv[..., h, :, :]
        return dq, dk, dv

    return attention_backward


def by_key_heads(h, n_heads, n_kv):
    return h // n_kv


def by_two(h, n_heads, n_kv):
    return h // 2


SHARED = "The number of a query head is divided by the number of key heads"
STOPS = "Right where other numbers of heads share a key head; here it stops"
attempt("attention", SHARED, of_shared_heads(by_key_heads), "heads_by_key_heads")
attempt("attention", STOPS, of_shared_heads(by_two), "heads_by_two")
attempt("attention_backward", SHARED, gradients_of_shared_heads(by_key_heads), "gradients_by_heads")
attempt("attention_backward", SHARED, gradients_of_shared_heads(by_key_heads, gather=False),
        "gradients_by_heads_of_the_forward_pass_alone")  # fmt: skip
attempt("attention_backward", STOPS, gradients_of_shared_heads(by_two), "gradients_by_two")


@wrong("block_sparse_attention", SHARED)
def sparse_by_key_heads(q, k, v, block_mask, block_q, block_k):
    heads = [h // k.shape[-3] if k.shape[-3] < q.shape[-3] else h for h in range(q.shape[-3])]
    return flashref.block_sparse_attention(
        q, k[..., heads, :, :], v[..., heads, :, :], block_mask, block_q=block_q, block_k=block_k
    )


@wrong("attention", "columns 3, 4, 5 of o are wrong. Wrong only where d_v > d")
def as_wide_as_keys(q, k, v):
    o = np.zeros((*q.shape[:-1], v.shape[-1]))
    o[..., : q.shape[-1]] = flashref.standard_attention(q, k, v)[..., : q.shape[-1]]
    return o


@wrong("attention_backward", "columns 3, 4, 5 of dv are wrong. Wrong only where d_v > d")
def gradients_as_wide_as_keys(do, q, k, v):
    dq, dk, dv = flashref.standard_attention_backward(do, q, k, v)
    dv[..., q.shape[-1] :] = 0
    return dq, dk, dv


DEFAULT = "The default scale stands where 0, or a negative scale, was asked for"


@wrong("attention", DEFAULT)
def zero_is_no_scale(q, k, v, scale=None):
    return flashref.standard_attention(q, k, v, scale=scale or q.shape[-1] ** -0.5)


@wrong("attention", DEFAULT)
def no_scale_below_zero(q, k, v, scale=None):
    tau = scale if scale is not None and scale > 0 else q.shape[-1] ** -0.5
    return flashref.standard_attention(q, k, v, scale=tau)


@wrong("attention_backward", DEFAULT)
def zero_is_no_scale_backward(do, q, k, v, scale=None):
    return flashref.standard_attention_backward(do, q, k, v, scale=scale or q.shape[-1] ** -0.5)


@wrong("block_sparse_attention", DEFAULT)
def zero_is_no_scale_in_tiles(q, k, v, block_mask, block_q, block_k, scale=None):
    return flashref.block_sparse_attention(
        q, k, v, block_mask, block_q=block_q, block_k=block_k, scale=scale or q.shape[-1] ** -0.5
    )


@wrong("attention", "Wrong only with a negative scale")
def scale_without_its_sign(q, k, v, scale=None):
    tau = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    return flashref.standard_attention(q, k, v, scale=tau)


@wrong("attention", "the scale comes after it: with a negative scale that is the smallest")
def maximum_before_the_scale(q, k, v, scale=None):
    tau = q.shape[-1] ** -0.5 if scale is None else scale
    S = q @ k.swapaxes(-1, -2)
    P = np.exp(tau * S - tau * S.max(axis=-1, keepdims=True))
    return P @ v / P.sum(axis=-1, keepdims=True)


@wrong("attention", "the scale comes after it: with a negative scale that is the smallest")
def running_maximum_before_the_scale(q, k, v, scale=None, block_k=4):
    tau = q.shape[-1] ** -0.5 if scale is None else scale
    m, l, O = np.full(q.shape[:-1], -np.inf), np.zeros(q.shape[:-1]), 0.0
    for j in range(0, k.shape[-2], block_k):
        S = q @ k[..., j : j + block_k, :].swapaxes(-1, -2)
        m_new = np.maximum(m, S.max(axis=-1))
        P, alpha = np.exp(tau * (S - m_new[..., None])), np.exp(tau * (m - m_new))
        l = alpha * l + P.sum(axis=-1)
        O = alpha[..., None] * O + P @ v[..., j : j + block_k, :]
        m = m_new
    return O / l[..., None]


FINITE_START = "The maximum starts at a finite number"


def started_at(start):
    """Return a FlashAttention whose running maximum starts at a number."""

    def attention(q, k, v, block_k=2):
        m, l = np.full(len(q), float(start)), np.zeros(len(q))
        O = np.zeros((len(q), v.shape[1]))
        for j in range(0, len(k), block_k):
            S = q @ k[j : j + block_k].T / np.sqrt(q.shape[1])
            m_new = np.maximum(m, S.max(axis=1))
            P, alpha = np.exp(S - m_new[:, None]), np.exp(m - m_new)
            l = alpha * l + P.sum(axis=1)
            O = alpha[:, None] * O + P @ v[j : j + block_k]
            m = m_new
        return O / l[:, None]

    return attention


@wrong("attention", FINITE_START)
def started_at_a_billion(q, k, v, causal=False):
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    S = np.where(causal_mask(S) | (not causal), S, -np.inf)
    m = S.max(axis=-1, initial=-1e9)
    P = np.exp(S - m[..., None])
    l = P.sum(axis=-1)
    o = P @ v / np.where(l == 0, 1, l)[..., None]
    return o, np.where(l == 0, -np.inf, m + np.log(l))


def softmax_started_at(start):
    def softmax(x):
        m = np.maximum(x.max(axis=-1, keepdims=True), start)
        return np.exp(x - m) / np.exp(x - m).sum(axis=-1, keepdims=True)

    return softmax


def online_started_at(start):
    def online_softmax(x, block):
        m, l = start, 0.0
        for j in range(0, len(x), block):
            m, l = right_step(m, l, x[j : j + block])
        return np.exp(x - m) / l

    return online_softmax


for start in (-500, -1000, -1e4, -1e5):
    attempt("attention", FINITE_START, started_at(start), f"attention_from_{start:.0f}")
    attempt("softmax", FINITE_START, softmax_started_at(start), f"softmax_from_{start:.0f}")
    attempt("online_softmax", FINITE_START, online_started_at(start), f"online_from_{start:.0f}")


@wrong("attention", "Tiles are skipped of which some query still sees a key")
def causal_one_tile_early(q, k, v, block_q, block_k, causal=False):
    n_q, n_k = len(q), len(k)
    seen = np.ones((n_q, n_k), bool)
    for i in range(0, n_q if causal else 0, block_q):
        rows = slice(i, min(i + block_q, n_q))
        for j in range(0, n_k, block_k):
            seen[rows, j : j + block_k] = j < rows.stop - 1 + n_k - n_q
    mask = seen & causal_mask(q @ k.T) if causal else seen
    return flashref.standard_attention(q, k, v, mask=mask)


def with_lse(change):
    """Return an attention whose lse is changed."""

    def attention(q, k, v):
        o, lse = flashref.standard_attention(q, k, v, return_lse=True)
        m = (q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])).max(axis=-1)
        return o, change(m, lse)

    return attention


LARGE = "Wrong only where scores are very large or very negative"
attempt("attention", LARGE, with_lse(lambda m, lse: np.where(m > 100, m, lse)), "lse_m_if_large")
attempt("attention", LARGE, with_lse(lambda m, lse: lse + 4.0 * (abs(lse) > 500)), "lse_4_more")


@wrong("merge_attention", LARGE)
def larger_lse_where_exp_overflows(o_a, lse_a, o_b, lse_b):
    o, lse = flashref.merge_attention(o_a, lse_a, o_b, lse_b)
    return o, np.where(np.abs(lse) > 700, np.maximum(lse_a, lse_b), lse)


# --- counts of what is not used -----------------------------------------------------------------


def booked(uses, where="own"):
    """Return a FlashAttention-2 that loads all tiles, and computes from those of `uses` alone."""

    def attention(q, k, v, block_q, block_k, memory):
        def load(name, array, rows):
            tile = memory.load(name if where == "own" else where, array, rows)
            return tile if name in uses else array[rows]

        o, lse = np.zeros((len(q), v.shape[1])), np.zeros(len(q))
        for i in range(0, len(q), block_q):
            rows = slice(i, i + block_q)
            Q_i = load("Q", q, rows)
            cut = [slice(j, j + block_k) for j in range(0, len(k), block_k)]
            K = np.concatenate([load("K", k, cols) for cols in cut])
            V = np.concatenate([load("V", v, cols) for cols in cut])
            O_i, L_i = flashref.standard_attention(Q_i, K, V, return_lse=True)
            memory.store("O", o, rows, O_i)
            memory.store("L", lse, rows, L_i)
        return o

    return attention


attempt("traffic", "Q, K and V are loaded and thrown away", booked(""), "all_thrown_away")
attempt("traffic", "Q, K and V are loaded and thrown away", booked("", "Q"), "all_booked_as_q")
attempt("traffic", "V is loaded and thrown away", booked("QK"), "values_thrown_away")
attempt("traffic", "Q or K is loaded and thrown away", booked("QV"), "keys_thrown_away")


# --- rows of -inf, where an exercise asks for them: check.softmax(fn, masked=True) ----------------

MASKED = []  #: (check, words of its report, function), right but for scores of -inf


def masked(name, words):
    """Add a function to the list."""

    def add(function):
        MASKED.append((name, words, function))
        return function

    return add


@masked("softmax", "A row of nothing but -inf must give 0, not 0/0")
def without_guards(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@masked("softmax", "came out as a mean")
def with_a_lowest_number(x):
    return without_guards(np.maximum(x, -1e9))


@masked("softmax", "NaN fills row 1 of p")
def guarded_where_all_is_masked(x):
    return np.zeros_like(x) if np.isneginf(x).all() else without_guards(x)


@masked("online_softmax", "A row of nothing but -inf must give 0, not 0/0")
def without_a_guard_at_the_end(x, block):
    assert x.ndim == 1, "one row"
    m, l = -np.inf, 0.0
    for start in range(0, len(x), block):
        m_new = max(m, x[start : start + block].max())
        if m_new > -np.inf:
            m, l = right_step(m, l, x[start : start + block])
    return np.exp(x - m) / l


@masked("online_softmax", "masked before the first one that counts")
def without_a_guard_in_the_loop(x):
    assert x.ndim == 1, "one row"
    m, l = -np.inf, 0.0
    for s in x:
        m, l = right_step(m, l, np.array([s]))
    return np.zeros_like(x) if l == 0 else np.exp(x - m) / l


@masked("online_softmax", "came out as a mean")
def from_the_lowest_number(x, block=2):
    return with_a_lowest_number(x)
