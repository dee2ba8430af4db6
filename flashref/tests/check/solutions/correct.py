"""Right answers in many styles; each must pass every check that it fits.

Nothing here uses flashref: the styles are those of homework, of papers, and of other libraries.
PyTorch, JAX and Numba are imported inside the functions, and only where they are installed.
"""

import collections
import functools
import importlib.util
import itertools
import math

import numpy as np

INF = math.inf
SOFTMAX, ONLINE, MERGE, ATTENTION, BACKWARD = [], [], [], [], []
SPARSE, SIZES, TRAFFIC = [], [], []
CHECKS = {
    "softmax": SOFTMAX,
    "online_softmax": ONLINE,
    "merge_attention": MERGE,
    "attention": ATTENTION,
    "attention_backward": BACKWARD,
    "block_sparse_attention": SPARSE,
    "block_sizes": SIZES,
    "traffic": TRAFFIC,
}


def solves(*exercises, needs=None):
    """Put a function on the lists of the exercises that it solves."""

    def put(function):
        for exercise in exercises:
            exercise.append((needs, function))
        return function

    return put


def installed(library):
    """Whether a library can be imported."""
    return importlib.util.find_spec(library) is not None


def quiet(function):
    """Wrap a function as a careless decorator would."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


# --- softmax ------------------------------------------------------------------------------------


@solves(SOFTMAX)
def softmax_in_plain_python(x):
    top = max(x)
    e = [math.exp(s - top) for s in x]
    total = sum(e)
    return [e_j / total for e_j in e]


@solves(SOFTMAX, ONLINE)
def softmax_of_rows(x):
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


@solves(SOFTMAX)
def softmax_along_an_axis(x, axis=-1):
    x = np.asarray(x)
    lse = np.logaddexp.reduce(x, axis=axis, keepdims=True)
    return np.exp(x - lse)


@solves(SOFTMAX)
def softmax_in_float32(logits, *, dim=-1):
    z = logits.astype(np.float32)
    z = z - z.max(axis=dim, keepdims=True)
    return np.exp(z) / np.exp(z).sum(axis=dim, keepdims=True)


@solves(SOFTMAX)
def softmax_of_a_matrix_only(S):
    n, _ = S.shape
    P = np.empty_like(S)
    for i in range(n):
        P[i] = np.exp(S[i] - S[i].max())
        P[i] /= P[i].sum()
    return P


@solves(SOFTMAX)
def softmax_by_two(values):
    w = (values - values.max(axis=-1, keepdims=True)) * math.log2(math.e)
    w = np.exp2(w)
    return w / w.sum(axis=-1, keepdims=True)


@solves(SOFTMAX, needs="torch")
def softmax_of_tensors(x):
    return (x - x.amax(dim=-1, keepdim=True)).exp() / (x - x.amax(dim=-1, keepdim=True)).exp().sum(
        dim=-1, keepdim=True
    )


@solves(SOFTMAX, needs="jax")
def softmax_in_jax(x):
    import jax

    return jax.nn.softmax(x, axis=-1)


SOFTMAX.append((None, functools.partial(softmax_along_an_axis, axis=-1)))
SOFTMAX.append((None, quiet(softmax_of_rows)))


@solves(SOFTMAX)
def recursive_softmax(row):
    def lse(part):
        if len(part) == 1:
            return part[0]
        a, b = lse(part[: len(part) // 2]), lse(part[len(part) // 2 :])
        return max(a, b) + math.log1p(math.exp(-abs(a - b)))

    row = [float(s) for s in row]
    return (
        np.array([math.exp(s - lse(row)) for s in row])
        if len(row) < 200
        else softmax_of_rows(np.array(row))
    )


class Normaliser:
    def __call__(self, x):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    def method(self, x):
        return self(x)


SOFTMAX.append((None, Normaliser()))
SOFTMAX.append((None, Normaliser().method))


# --- online softmax -----------------------------------------------------------------------------


@solves(ONLINE)
def online_one_by_one(x):
    m, l = -INF, 0.0
    for s in x:
        m_new = max(m, s)
        l = l * math.exp(m - m_new) + math.exp(s - m_new)
        m = m_new
    return [math.exp(s - m) / l for s in x]


@solves(ONLINE)
def online_in_blocks(x, block=1, axis=-1):
    s = np.moveaxis(np.asarray(x, float), axis, -1)
    m, l = np.full(s.shape[:-1], -INF), np.zeros(s.shape[:-1])
    for start in range(0, s.shape[-1], block):
        part = s[..., start : start + block]
        new = np.maximum(m, part.max(axis=-1))
        l = np.exp(m - new) * l + np.exp(part - new[..., None]).sum(axis=-1)
        m = new
    return np.moveaxis(np.exp(s - m[..., None]) / l[..., None], -1, axis)


@solves(ONLINE)
def online_by_states(scores, block_size):
    def state(part):
        return part.max(), np.exp(part - part.max()).sum()

    def join(a, b):
        top = max(a[0], b[0])
        return top, a[1] * math.exp(a[0] - top) + b[1] * math.exp(b[0] - top)

    if scores.ndim != 1:
        raise ValueError("one row, please")
    parts = [scores[i : i + block_size] for i in range(0, len(scores), block_size)]
    m, l = functools.reduce(join, map(state, parts))
    return np.exp(scores - m) / l


@solves(ONLINE)
def online_with_lse(x, B):
    rows = x.reshape(-1, x.shape[-1])
    out = np.zeros_like(rows)
    for row, p in zip(rows, out, strict=True):
        lse = -INF
        for start in range(0, len(row), B):
            for s in row[start : start + B]:
                lse = np.logaddexp(lse, s)
        p[:] = np.exp(row - lse)
    return out.reshape(x.shape)


@solves(ONLINE)
def online_in_float32(x, block=4):
    x32 = x.astype(np.float32)
    m = np.full((*x.shape[:-1], 1), -np.inf, np.float32)
    l = np.zeros_like(m)
    for start in range(0, x.shape[-1], block):
        part = x32[..., start : start + block]
        new = np.maximum(m, part.max(axis=-1, keepdims=True))
        l = l * np.exp(m - new) + np.exp(part - new).sum(axis=-1, keepdims=True)
        m = new
    return np.exp(x32 - m) / l


@solves(ONLINE)
def online_from_the_right(x, *, block):
    m, l = -INF, 0
    if x.ndim > 1:
        return np.stack([online_from_the_right(row, block=block) for row in x])
    for stop in range(len(x), 0, -block):
        for s in x[max(0, stop - block) : stop]:
            if s > m:
                l, m = l * math.exp(m - s), s
            l += math.exp(s - m)
    return np.exp(x - m) / l


@solves(ONLINE, needs="torch")
def online_of_tensors(x, block=3):
    import torch

    m = torch.full(x.shape[:-1], -INF, dtype=x.dtype)
    l = torch.zeros_like(m)
    for part in x.split(block, dim=-1):
        new = torch.maximum(m, part.amax(dim=-1))
        l = l * (m - new).exp() + (part - new.unsqueeze(-1)).exp().sum(dim=-1)
        m = new
    return (x - m.unsqueeze(-1)).exp() / l.unsqueeze(-1)


ONLINE.append((None, functools.partial(online_in_blocks, block=2)))


# --- merging ------------------------------------------------------------------------------------


@solves(MERGE)
def merge_with_logaddexp(o_a, lse_a, o_b, lse_b):
    lse = np.logaddexp(lse_a, lse_b)
    shift = np.where(np.isneginf(lse), 0, lse)
    return (
        np.exp(lse_a - shift)[..., None] * o_a + np.exp(lse_b - shift)[..., None] * o_b,
        lse,
    )


@solves(MERGE)
def merge_row_by_row(o1, L1, o2, L2):
    out, lse = np.zeros(o1.shape), np.full(L1.shape, -INF)
    for row in np.ndindex(*L1.shape):
        a, b = L1[row], L2[row]
        m = max(a, b)
        if m == -INF:
            continue
        w_a, w_b = math.exp(a - m), math.exp(b - m)
        out[row] = (w_a * o1[row] + w_b * o2[row]) / (w_a + w_b)
        lse[row] = m + math.log(w_a + w_b)
    return out, lse


@solves(MERGE)
def merge_by_sigmoid(out_x, out_y, lse_x, lse_y):
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.where(lse_x == lse_y, 0, lse_y - lse_x)
        w = 1 / (1 + np.exp(gap))
        lse = np.maximum(lse_x, lse_y) + np.log1p(np.exp(-np.abs(gap)))
    o = w[..., None] * out_x + (1 - w)[..., None] * out_y
    return o, np.where(np.isneginf(np.maximum(lse_x, lse_y)), -np.inf, lse)


@solves(MERGE)
def merge_of_lists(a, b, c, d):
    o, lse = merge_row_by_row(np.array(a), np.array(b), np.array(c), np.array(d))
    return o.tolist(), lse.tolist()


@solves(MERGE)
def merge_in_float32(o_a, lse_a, o_b, lse_b):
    o, lse = merge_with_logaddexp(*(x.astype(np.float32) for x in (o_a, lse_a, o_b, lse_b)))
    return [o, lse]


@solves(MERGE)
def merge_with_four_axes_only(o_left, lse_left, o_right, lse_right):
    b, h, n, _ = o_left.shape
    o, lse = np.zeros_like(o_left), np.zeros((b, h, n))
    for i, j in itertools.product(range(b), range(h)):
        o[i, j], lse[i, j] = merge_row_by_row(
            o_left[i, j], lse_left[i, j], o_right[i, j], lse_right[i, j]
        )
    return o, lse


@solves(MERGE, needs="torch")
def merge_of_tensors(o_a, lse_a, o_b, lse_b):
    import torch

    lse = torch.logaddexp(lse_a, lse_b)
    shift = torch.where(lse.isneginf(), torch.zeros_like(lse), lse)
    w_a, w_b = (lse_a - shift).exp().unsqueeze(-1), (lse_b - shift).exp().unsqueeze(-1)
    return w_a * o_a + w_b * o_b, lse


MERGE.append((None, quiet(merge_with_logaddexp)))


# --- attention ----------------------------------------------------------------------------------


@solves(ATTENTION)
def attention_in_loops(q, k, v):
    n, d = q.shape
    out = []
    for i in range(n):
        s = [sum(q[i, c] * k[j, c] for c in range(d)) / math.sqrt(d) for j in range(len(k))]
        top = max(s)
        e = [math.exp(x - top) for x in s]
        out.append([sum(w * y for w, y in zip(e, column, strict=True)) / sum(e) for column in v.T])
    return out


@solves(ATTENTION)
def attention_of_matrices(q, k, v, causal=False, scale=None):
    d = q.shape[-1]
    S = np.matmul(q, np.swapaxes(k, -1, -2)) * (1 / np.sqrt(d) if scale is None else scale)
    n_q, n_k = S.shape[-2:]
    if causal:
        S = np.where(np.tri(n_q, n_k, n_k - n_q, dtype=bool), S, -np.inf)
    m = S.max(axis=-1, keepdims=True)
    m = np.where(np.isfinite(m), m, 0)
    P = np.exp(S - m)
    l = P.sum(axis=-1, keepdims=True)
    return np.matmul(P, v) / np.where(l == 0, 1, l)


@solves(ATTENTION)
def flash_1_as_in_the_paper(Q, K, V, Br, Bc):
    N, M, dv = len(Q), len(K), V.shape[1]
    tau = Q.shape[1] ** -0.5
    O, l, m = np.zeros((N, dv)), np.zeros(N), np.full(N, -np.inf)
    for j in range(math.ceil(M / Bc)):
        K_j, V_j = K[j * Bc : (j + 1) * Bc], V[j * Bc : (j + 1) * Bc]
        for i in range(math.ceil(N / Br)):
            r = slice(i * Br, (i + 1) * Br)
            S = tau * Q[r] @ K_j.T
            mt = S.max(axis=1)
            P = np.exp(S - mt[:, None])
            lt = P.sum(axis=1)
            m_new = np.maximum(m[r], mt)
            l_new = np.exp(m[r] - m_new) * l[r] + np.exp(mt - m_new) * lt
            O[r] = (
                (l[r] * np.exp(m[r] - m_new))[:, None] * O[r]
                + np.exp(mt - m_new)[:, None] * (P @ V_j)
            ) / l_new[:, None]
            l[r], m[r] = l_new, m_new
    return O, m + np.log(l)


@solves(ATTENTION)
def flash_2_as_in_the_paper(
    q, k, v, block_q=64, block_k=64, causal=False, scale=None, return_lse=False
):
    n_q, d = q.shape
    n_k = k.shape[0]
    scale = d**-0.5 if scale is None else scale
    o, lse = np.zeros((n_q, v.shape[1])), np.full(n_q, -np.inf)
    for i0 in range(0, n_q, block_q):
        rows = np.arange(i0, min(i0 + block_q, n_q))
        m, l, acc = np.full(len(rows), -np.inf), np.zeros(len(rows)), 0.0
        for j0 in range(0, n_k, block_k):
            cols = np.arange(j0, min(j0 + block_k, n_k))
            if causal and cols[0] > rows[-1] + n_k - n_q:
                break
            S = scale * (q[rows] @ k[cols].T)
            if causal:
                S[cols[None] > rows[:, None] + n_k - n_q] = -np.inf
            new = np.maximum(m, S.max(1))
            safe = np.where(new == -np.inf, 0, new)
            P = np.exp(S - safe[:, None])
            a = np.exp(m - safe)
            l = a * l + P.sum(1)
            acc = a[:, None] * acc + P @ v[cols]
            m = new
        some = l > 0
        o[rows[some]] = acc[some] / l[some, None] if some.any() else 0
        lse[rows[some]] = m[some] + np.log(l[some])
    return (o, lse) if return_lse else o


@solves(ATTENTION)
def attention_with_four_axes_only(q, k, v):
    _b, _h, _n, d = q.shape
    S = np.einsum("bhid,bhjd->bhij", q, k) / d**0.5
    P = np.exp(S - S.max(-1, keepdims=True))
    return np.einsum("bhij,bhjc->bhic", P / P.sum(-1, keepdims=True), v)


@solves(ATTENTION)
def attention_with_three_axes_only(q, k, v, is_causal=False):
    _h, _n, d = q.shape
    S = np.einsum("hid,hjd->hij", q, k) / d**0.5
    if is_causal:
        S = np.where(np.tril(np.ones(S.shape[-2:], bool)), S, -np.inf)
    P = np.exp(S - S.max(-1, keepdims=True))
    return np.einsum("hij,hjc->hic", P / P.sum(-1, keepdims=True), v)


@solves(ATTENTION)
def attention_in_float32(query, key, value, *, is_causal=False, softmax_scale=None):
    q, k, v = (x.astype(np.float32) for x in (query, key, value))
    scale = np.float32(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    S = (q * scale) @ k.swapaxes(-1, -2)
    if is_causal:
        S = np.where(np.tril(np.ones(S.shape[-2:], bool)), S, np.float32(-np.inf))
    S -= S.max(axis=-1, keepdims=True)
    P = np.exp(S)
    return (P @ v) / P.sum(axis=-1, keepdims=True)


@solves(ATTENTION)
def attention_by_merging_halves(Q, K, V):
    def run(K, V):
        if len(K) == 1:
            return np.repeat(V, len(Q), axis=0), (Q @ K[0]) / math.sqrt(Q.shape[1])
        half = len(K) // 2
        return merge_with_logaddexp(*run(K[:half], V[:half]), *run(K[half:], V[half:]))

    Q, K, V = np.asarray(Q), np.asarray(K), np.asarray(V)
    if Q.ndim != 2:
        raise ValueError("one head at a time")
    return run(K, V)


@solves(ATTENTION)
class FlashClass:
    """As `torch.autograd.Function`, without PyTorch."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        o = attention_of_matrices(q, k, v, causal=is_causal)
        ctx.saved = (q, k, v, is_causal)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, is_causal = ctx.saved
        return (*gradients_of_matrices(do, q, k, v, causal=is_causal), None)

    @classmethod
    def apply(cls, *args):
        class Context:
            pass

        return cls.forward(Context(), *args)


@solves(ATTENTION)
class OnlyApply:
    @staticmethod
    def apply(q, k, v):
        return attention_of_matrices(q, k, v)


@solves(ATTENTION)
def attention_by_keyword_only(*, q, k, v, causal, scale, block):
    return flash_2_as_in_the_paper(q, k, v, block, block, causal, scale, True)


@solves(ATTENTION)
def attention_with_other_names(first, second, third):
    return attention_of_matrices(first, second, third)


@solves(ATTENTION)
def attention_of_any_arguments(*args):
    return attention_of_matrices(*args)


@solves(ATTENTION)
def attention_of_lists(Q, K, V, B_c=2):
    out = []
    for q_i in Q:
        m, l, acc = -INF, 0.0, [0.0] * len(V[0])
        for j in range(0, len(K), B_c):
            for k_j, v_j in zip(K[j : j + B_c], V[j : j + B_c], strict=True):
                s = sum(a * b for a, b in zip(q_i, k_j, strict=True)) / len(q_i) ** 0.5
                new = max(m, s)
                a, p = math.exp(m - new), math.exp(s - new)
                m, l = new, a * l + p
                acc = [a * x + p * y for x, y in zip(acc, v_j, strict=True)]
        out.append([x / l for x in acc])
    return out


@solves(ATTENTION)
def attention_by_columns(q, k, v):
    S = np.tensordot(k, q, axes=(1, 1)) / np.sqrt(q.shape[1])  # keys first
    P = np.exp(S - S.max(axis=0))
    return (P / P.sum(axis=0)).T @ v


@solves(ATTENTION)
def attention_with_window_and_mask(q, k, v, causal=False, window=None, mask=None, scale=None):
    n_q, n_k = q.shape[-2], k.shape[-2]
    i, j = np.mgrid[:n_q, :n_k]
    at = i + n_k - n_q
    see = np.ones((n_q, n_k), bool)
    if causal:
        see &= j <= at
    if window is not None:
        see &= (at - window[0] <= j) & (j <= at + window[1])
    if mask is not None:
        see = see & mask
    tau = scale if scale is not None else 1 / math.sqrt(q.shape[-1])
    S = tau * np.einsum("...id,...jd->...ij", q, k)
    top = np.max(S, axis=-1, where=see, initial=-np.inf, keepdims=True)
    E = np.where(see, np.exp(np.where(see, S - np.where(top == -np.inf, 0, top), 0)), 0)
    total = E.sum(-1, keepdims=True)
    return E @ v / np.maximum(total, 1e-300)


@solves(ATTENTION)
def flash_with_window(q, k, v, window=None, mask=None, block_m=4, block_n=3, return_lse=True):
    n_q, n_k = len(q), len(k)
    o, lse = np.zeros((n_q, v.shape[1])), np.full(n_q, -INF)
    for i in range(n_q):
        m, l, acc = -INF, 0.0, np.zeros(v.shape[1])
        for j0 in range(0, n_k, block_n):
            for j in range(j0, min(j0 + block_n, n_k)):
                at = i + n_k - n_q
                if window is not None and not at - window[0] <= j <= at + window[1]:
                    continue
                if mask is not None and not mask[i, j]:
                    continue
                s = float(q[i] @ k[j]) / math.sqrt(q.shape[1])
                if s > m:
                    c = math.exp(m - s)
                    l, acc, m = l * c, acc * c, s
                l += math.exp(s - m)
                acc = acc + math.exp(s - m) * v[j]
        if l:
            o[i], lse[i] = acc / l, m + math.log(l)
    return o, lse


@solves(ATTENTION)
def grouped_heads(q, k, v, causal=False):
    if q.ndim == 2:
        return attention_of_matrices(q, k, v, causal)
    group = q.shape[-3] // k.shape[-3]
    return attention_of_matrices(
        q, np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3), causal
    )


@solves(ATTENTION)
def attention_by_powers_of_two(q, k, v, sm_scale, causal):
    S = q @ k.swapaxes(-1, -2) * (sm_scale * math.log2(math.e))
    n_q, n_k = S.shape[-2:]
    if causal:
        S = S + np.where(np.tri(n_q, n_k, n_k - n_q, dtype=bool), 0, -np.inf)
    m = S.max(-1, keepdims=True, initial=-np.inf)
    dead = np.isneginf(m)
    P = np.exp2(S - np.where(dead, 0, m))
    l = P.sum(-1, keepdims=True)
    lse = np.where(dead, -np.inf, m * math.log(2) + np.log(np.where(dead, 1, l)))
    return np.where(dead, 0, P @ v / np.where(dead, 1, l)), lse[..., 0]


class Layer:
    def __init__(self, block):
        self.block = block

    def __call__(self, q, k, v, *, causal=False):
        return flash_2_as_in_the_paper(q, k, v, self.block, self.block, causal)

    def forward(self, Q, K, V):
        return self(Q, K, V)


ATTENTION.append((None, Layer(7)))
ATTENTION.append((None, Layer(16).forward))
ATTENTION.append((None, functools.partial(flash_2_as_in_the_paper, block_q=5, block_k=9)))
ATTENTION.append((None, quiet(flash_2_as_in_the_paper)))


@solves(ATTENTION, needs="torch")
def attention_of_tensors(q, k, v, is_causal=False):
    import torch

    S = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
    if is_causal:
        S = S.masked_fill(torch.ones(S.shape[-2:]).triu(1).bool(), -INF)
    return torch.softmax(S, dim=-1) @ v


@solves(ATTENTION, needs="torch")
def flash_of_float32_tensors(q, k, v):
    import torch

    o = torch.zeros(*q.shape[:-1], v.shape[-1])
    m, l = torch.full(q.shape[:-1], -INF), torch.zeros(q.shape[:-1])
    for k_j, v_j in zip(k.split(4, dim=-2), v.split(4, dim=-2), strict=True):
        S = q.float() @ k_j.float().mT / q.shape[-1] ** 0.5
        new = torch.maximum(m, S.amax(-1))
        a, P = torch.exp(m - new), torch.exp(S - new[..., None])
        o, l, m = o * a[..., None] + P @ v_j.float(), l * a + P.sum(-1), new
    return o / l[..., None], m + l.log()


def torch_function():
    import torch

    class Flash(torch.autograd.Function):
        @staticmethod
        def forward(ctx, Q, K, V, is_causal=False):
            S = Q @ K.mT * Q.shape[-1] ** -0.5
            if is_causal:
                S = S.masked_fill(torch.ones(S.shape[-2:]).triu(1).bool(), -INF)
            L = S.logsumexp(-1)
            P = (S - L[..., None]).exp()
            O = P @ V
            ctx.save_for_backward(Q, K, V, O, P)
            return O

        @staticmethod
        def backward(ctx, dO):
            Q, K, V, O, P = ctx.saved_tensors
            D = (dO * O).sum(-1, keepdim=True)
            dS = P * (dO @ V.mT - D) * Q.shape[-1] ** -0.5
            return dS @ K, dS.mT @ Q, P.mT @ dO, None

    return Flash


ATTENTION.append(("torch", torch_function))
BACKWARD.append(("torch", torch_function))


@solves(ATTENTION, needs="jax")
def attention_in_jax(q, k, v, causal=False):
    import jax.numpy as jnp

    S = jnp.einsum("...id,...jd->...ij", q, k) / q.shape[-1] ** 0.5
    n_q, n_k = S.shape[-2:]
    see = jnp.tri(n_q, n_k, n_k - n_q, dtype=bool) if causal else jnp.ones((n_q, n_k), bool)
    m = jnp.max(jnp.where(see, S, -jnp.inf), -1, keepdims=True)
    P = jnp.where(see, jnp.exp(S - jnp.where(jnp.isinf(m), 0, m)), 0)
    l = P.sum(-1, keepdims=True)
    return P @ v / jnp.where(l == 0, 1, l)


# --- the backward pass --------------------------------------------------------------------------


@solves(BACKWARD)
def gradients_of_matrices(do, q, k, v, causal=False, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    S = scale * q @ k.swapaxes(-1, -2)
    n_q, n_k = S.shape[-2:]
    if causal:
        S = np.where(np.tri(n_q, n_k, n_k - n_q, dtype=bool), S, -np.inf)
    m = S.max(-1, keepdims=True)
    P = np.exp(S - np.where(np.isinf(m), 0, m))
    l = P.sum(-1, keepdims=True)
    P = P / np.where(l == 0, 1, l)
    dP = do @ v.swapaxes(-1, -2)
    dS = P * (dP - (P * dP).sum(-1, keepdims=True))
    return (
        scale * dS @ k,
        scale * dS.swapaxes(-1, -2) @ q,
        P.swapaxes(-1, -2) @ do,
    )


@solves(BACKWARD)
def flash_2_backward(dO, Q, K, V, O, L, Br, Bc, causal=False):
    (n, d), n_k = Q.shape, len(K)
    tau = d**-0.5
    D = (dO * O).sum(axis=1)
    dQ, dK, dV = np.zeros(Q.shape), np.zeros(K.shape), np.zeros(V.shape)
    for j in range(0, n_k, Bc):
        c = np.arange(j, min(j + Bc, n_k))
        for i in range(0, n, Br):
            r = np.arange(i, min(i + Br, n))
            S = tau * Q[r] @ K[c].T
            see = c <= r[:, None] + n_k - n if causal else np.ones(S.shape, bool)
            P = np.where(see, np.exp(np.where(see, S - L[r, None], 0)), 0)
            dV[c] += P.T @ dO[r]
            dS = P * (dO[r] @ V[c].T - D[r, None])
            dQ[r] += tau * dS @ K[c]
            dK[c] += tau * dS.T @ Q[r]
    return dQ, dK, dV


@solves(BACKWARD)
def gradients_in_loops(grad_output, query, key, value):
    (n, d), (m, e) = query.shape, value.shape
    s = 1 / math.sqrt(d)
    dq, dk, dv = np.zeros((n, d)), np.zeros((m, d)), np.zeros((m, e))
    for i in range(n):
        S = [s * float(query[i] @ key[j]) for j in range(m)]
        p = np.array([math.exp(x - max(S)) for x in S])
        p /= p.sum()
        dp = [float(grad_output[i] @ value[j]) for j in range(m)]
        mean = float(p @ dp)
        for j in range(m):
            ds = p[j] * (dp[j] - mean)
            dq[i] += s * ds * key[j]
            dk[j] += s * ds * query[i]
            dv[j] += p[j] * grad_output[i]
    return dq, dk, dv


@solves(BACKWARD)
def gradients_in_float32(dout, q, k, v, *, out, lse, sm_scale=None):
    dout, q, k, v, out, lse = (x.astype(np.float32) for x in (dout, q, k, v, out, lse))
    scale = np.float32(q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
    P = np.exp(scale * q @ k.swapaxes(-1, -2) - lse[..., None])
    dS = P * (dout @ v.swapaxes(-1, -2) - (dout * out).sum(-1, keepdims=True))
    return [scale * dS @ k, scale * dS.swapaxes(-1, -2) @ q, P.swapaxes(-1, -2) @ dout]


@solves(BACKWARD)
def gradients_with_four_axes_only(do, q, k, v, is_causal=False):
    b, h, _n, _d = q.shape
    parts = [
        gradients_of_matrices(do[x], q[x], k[x], v[x], causal=is_causal)
        for x in itertools.product(range(b), range(h))
    ]
    return tuple(np.stack(x).reshape(b, h, *x[0].shape) for x in zip(*parts, strict=True))


@solves(BACKWARD)
def gradients_of_groups(do, q, k, v, causal=False):
    if q.ndim == 2:
        return gradients_of_matrices(do, q, k, v, causal)
    h, g = k.shape[-3], q.shape[-3] // k.shape[-3]
    dq, dk, dv = gradients_of_matrices(
        do, q, np.repeat(k, g, axis=-3), np.repeat(v, g, axis=-3), causal
    )
    dk, dv = (x.reshape(*x.shape[:-3], h, g, *x.shape[-2:]).sum(axis=-3) for x in (dk, dv))
    return dq, dk, dv


@solves(BACKWARD)
def gradients_by_jacobians(a, b, c, d):
    n, width = b.shape
    dq, dk, dv = np.zeros_like(b), np.zeros_like(c), np.zeros_like(d)
    for i in range(n):
        s = c @ b[i] / width**0.5
        y = np.exp(s - s.max())
        y /= y.sum()
        ds = (np.diag(y) - np.outer(y, y)) @ (d @ a[i])
        dq[i] = ds @ c / width**0.5
        dk += np.outer(ds, b[i]) / width**0.5
        dv += np.outer(y, a[i])
    return dq, dk, dv


BACKWARD.append((None, FlashClass))
BACKWARD.append((None, quiet(flash_2_backward)))


@solves(BACKWARD, needs="torch")
def gradients_by_autograd(do, q, k, v):
    import torch

    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    o = torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, -1) @ v
    return torch.autograd.grad(o, (q, k, v), do)


# --- block-sparse attention ---------------------------------------------------------------------


@solves(SPARSE)
def sparse_by_spelling_out(q, k, v, block_mask, block_q, block_k):
    mask = np.kron(block_mask, np.ones((block_q, block_k), bool)).astype(bool)
    return attention_with_window_and_mask(q, k, v, mask=mask[: q.shape[-2], : k.shape[-2]])


@solves(SPARSE)
def sparse_in_tiles(Q, K, V, block_mask, Br, Bc, causal=False):
    n_q, n_k = len(Q), len(K)
    O, L = np.zeros((n_q, V.shape[1])), np.full(n_q, -np.inf)
    for i, there in enumerate(block_mask):
        rows = np.arange(i * Br, min((i + 1) * Br, n_q))
        S = np.full((len(rows), n_k), -np.inf)
        for j in np.flatnonzero(there):
            c = np.arange(j * Bc, min((j + 1) * Bc, n_k))
            S[:, c] = Q[rows] @ K[c].T / np.sqrt(Q.shape[1])
            if causal:
                S[:, c] = np.where(c <= rows[:, None] + n_k - n_q, S[:, c], -np.inf)
        m = S.max(1)
        ok = np.isfinite(m)
        P = np.exp(S[ok] - m[ok, None])
        O[rows[ok]] = P @ V / P.sum(1, keepdims=True)
        L[rows[ok]] = m[ok] + np.log(P.sum(1))
    return O, L


@solves(SPARSE)
def sparse_of_square_blocks(q, k, v, block_mask, *, block_size, scale=None):
    tau = q.shape[-1] ** -0.5 if scale is None else scale
    o = np.zeros((q.shape[0], v.shape[1]))
    for i in range(len(q)):
        keep = [j for j in range(len(k)) if block_mask[i // block_size, j // block_size]]
        if keep:
            s = tau * (k[keep] @ q[i])
            p = np.exp(s - s.max())
            o[i] = p @ v[keep] / p.sum()
    return o


# --- counts -------------------------------------------------------------------------------------


@solves(SIZES)
def sizes_by_ceil(M, d):
    B_c = math.ceil(M / (4 * d))
    return min(B_c, d), B_c


@solves(SIZES)
def sizes_by_floor_division(sram_elements, d):
    return np.minimum((sram_elements + 4 * d - 1) // (4 * d), [d, sram_elements])


@solves(SIZES)
def sizes_as_a_list(sram, head_dim):
    c = -(-sram // head_dim // 4)
    return [c if c < head_dim else head_dim, c]


@solves(TRAFFIC)
def flash_2_on_a_memory(q, k, v, block_q, block_k, memory):
    n_q, n_k = len(q), len(k)
    o, lse = np.zeros((n_q, v.shape[1])), np.zeros(n_q)
    for i in range(0, n_q, block_q):
        rows = slice(i, i + block_q)
        Q_i = memory.load("Q", q, rows)
        m, l, acc = np.full(len(Q_i), -np.inf), np.zeros(len(Q_i)), 0
        for j in range(0, n_k, block_k):
            cols = slice(j, j + block_k)
            S = Q_i @ memory.load("K", k, cols).T / q.shape[1] ** 0.5
            new = np.maximum(m, S.max(1))
            P, a = np.exp(S - new[:, None]), np.exp(m - new)
            l = a * l + P.sum(1)
            acc = a[:, None] * acc + P @ memory.load("V", v, cols)
            m = new
        memory.store("O", o, rows, acc / l[:, None])
        memory.store("L", lse, rows, m + np.log(l))
    return o


@solves(TRAFFIC)
def flash_1_on_a_memory(Q, K, V, Br, Bc, hbm):
    N, everything = len(Q), slice(0, len(Q))
    O, l, m = np.empty((N, V.shape[1])), np.empty(N), np.empty(N)
    hbm.store("O", O, everything, 0)
    hbm.store("l", l, everything, 0)
    hbm.store("m", m, everything, -np.inf)
    for j in range(0, len(K), Bc):
        K_j, V_j = hbm.load("K", K, slice(j, j + Bc)), hbm.load("V", V, slice(j, j + Bc))
        for i in range(0, N, Br):
            r = slice(i, i + Br)
            Q_i, O_i = hbm.load("Q", Q, r), hbm.load("O", O, r)
            l_i, m_i = hbm.load("l", l, r), hbm.load("m", m, r)
            S = Q_i @ K_j.T / Q.shape[1] ** 0.5
            new = np.maximum(m_i, S.max(1))
            P, a = np.exp(S - new[:, None]), np.exp(m_i - new)
            l_new = a * l_i + P.sum(1)
            O_new = ((a * l_i)[:, None] * O_i + P @ V_j) / l_new[:, None]
            hbm.store("O", O, r, O_new)
            hbm.store("l", l, r, l_new)
            hbm.store("m", m, r, new)
    return O, m + np.log(l)


@solves(TRAFFIC)
def closed_form_of_flash_2(n_q, n_k, d, d_v, block_q, block_k):
    T_r = math.ceil(n_q / block_q)
    return n_q * d + T_r * n_k * (d + d_v), n_q * d_v + n_q


@solves(TRAFFIC)
def closed_form_of_flash_1(Nq, Nk, d, dv, Br, Bc):
    T_c = -(-Nk // Bc)
    loads = Nk * (d + dv) + T_c * Nq * (d + dv + 2)
    return [loads, Nq * (dv + 2) * (1 + T_c)]


@solves(TRAFFIC)
def closed_form_with_one_length(N, d, B_r, B_c):
    return N * d * (1 + 2 * math.ceil(N / B_r)), N * (d + 1)


@solves(TRAFFIC)
def closed_form_with_one_width(n_q, n_k, d, block_q, block_k):
    T_r = (n_q + block_q - 1) // block_q
    return np.array([n_q * d + T_r * n_k * 2 * d, n_q * (d + 1)])


# --- more styles ------------------------------------------------------------------------------


@solves(SOFTMAX)
def softmax_in_a_buffer_of_its_own(x):
    out = np.empty_like(x)
    np.subtract(x, np.max(x, axis=-1, keepdims=True), out=out)
    np.exp(out, out=out)
    out /= out.sum(axis=-1, keepdims=True)
    return out


@solves(SOFTMAX, ONLINE)
def softmax_in_extended_precision(x):
    wide = np.asarray(x, np.longdouble)
    e = np.exp(wide - wide.max(-1)[..., None])
    return e / e.sum(-1)[..., None]


@solves(ONLINE)
def online_from_a_generator(x, block=3):
    def states(scores):
        m, l = -INF, 0.0
        for i in range(0, len(scores), block):
            part = scores[i : i + block]
            top = max(m, *part) if len(part) > 1 else max(m, part[0])
            l = l * math.exp(m - top) + math.fsum(math.exp(s - top) for s in part)
            m = top
            yield m, l

    *_, (m, l) = states(list(map(float, x)))
    return tuple(math.exp(s - m) / l for s in map(float, x))


Attended = collections.namedtuple("Attended", "o lse")
Gradients = collections.namedtuple("Gradients", "dq dk dv")


@solves(MERGE)
def merge_into_a_named_tuple(o_a, lse_a, o_b, lse_b):
    total = np.logaddexp(lse_a, lse_b)
    w_a, w_b = (
        np.where(np.isneginf(part), 0, np.exp(part - np.where(np.isinf(total), 0, total)))
        for part in (lse_a, lse_b)
    )
    return Attended(w_a[..., None] * o_a + w_b[..., None] * o_b, total)


@solves(MERGE)
def merge_in_a_list(*parts):
    o, lse = np.stack(parts[::2]), np.stack(parts[1::2])
    top = lse.max(axis=0)
    w = np.exp(lse - np.where(np.isinf(top), 0, top))
    l = w.sum(axis=0)
    safe = np.where(l == 0, 1, l)
    return [np.einsum("p...,p...c->...c", w, o) / safe[..., None],
            np.where(l == 0, -INF, top + np.log(safe))]  # fmt: skip


@solves(ATTENTION)
def attention_by_broadcasting(q, k, v):
    S = (q[..., :, None, :] * k[..., None, :, :]).sum(axis=-1) / math.sqrt(q.shape[-1])
    E = np.exp(S - S.max(axis=-1)[..., None])
    return (E[..., None] * v[..., None, :, :]).sum(axis=-2) / E.sum(axis=-1)[..., None]


@solves(ATTENTION)
def attention_into_a_named_tuple(query, key, value, *, return_lse):
    S = np.einsum("...ic,...jc->...ij", query, key, optimize=True) * query.shape[-1] ** -0.5
    top = np.amax(S, -1, keepdims=True)
    lse = top + np.log(np.exp(S - top).sum(-1, keepdims=True))
    o = np.exp(S - lse) @ value
    return Attended(o, lse[..., 0]) if return_lse else o


@solves(ATTENTION)
def attention_with_any_options(q, k, v, **options):
    return attention_of_matrices(q, k, v, **options)


@solves(ATTENTION)
def attention_by_reduction(Q, K, V, Bc=5):
    def state(cut):
        S = Q @ K[cut].T / np.sqrt(Q.shape[1])
        m = S.max(1)
        P = np.exp(S - m[:, None])
        return m, P.sum(1), P @ V[cut]

    def joined(a, b):
        m = np.maximum(a[0], b[0])
        e, f = np.exp(a[0] - m), np.exp(b[0] - m)
        return m, e * a[1] + f * b[1], e[:, None] * a[2] + f[:, None] * b[2]

    cuts = (slice(j, j + Bc) for j in range(0, len(K), Bc))
    _, l, O = functools.reduce(joined, map(state, cuts))
    return O / l[:, None]


@solves(ATTENTION)
def attention_by_recursion(q, k, v):
    def part(k, v):
        if len(k) > 4:
            half = len(k) // 2
            (o_a, a), (o_b, b) = part(k[:half], v[:half]), part(k[half:], v[half:])
            lse = np.logaddexp(a, b)
            return np.exp(a - lse)[:, None] * o_a + np.exp(b - lse)[:, None] * o_b, lse
        S = q @ k.T / q.shape[1] ** 0.5
        lse = np.logaddexp.reduce(S, axis=1)
        return np.exp(S - lse[:, None]) @ v, lse

    return part(k, v)


@solves(ATTENTION)
def attention_in_fortran_order(q, k, v, is_causal=False):
    return np.asfortranarray(attention_of_matrices(q, k, v, causal=is_causal))


@solves(ATTENTION)
class Stateful:
    """An object that keeps its arrays between calls, and gives copies away."""

    def __init__(self):
        self.scores = np.empty((0, 0))

    def __call__(self, q, k, v):
        if self.scores.shape != (len(q), len(k)):
            self.scores = np.empty((len(q), len(k)))
        S = np.matmul(q, k.T, out=self.scores)
        S /= q.shape[1] ** 0.5
        S -= S.max(axis=1, keepdims=True)
        np.exp(S, out=S)
        return S @ v / S.sum(axis=1, keepdims=True)


ATTENTION[-1] = (None, Stateful())


def compiled(function):
    """Compile a function with Numba, where there is Numba."""
    if not installed("numba"):
        return function
    import numba

    return numba.njit(function)


@solves(ATTENTION, needs="numba")
@compiled
def attention_in_numba(Q, K, V, Br=4, Bc=3):
    n_q, d = Q.shape
    O = np.zeros((n_q, V.shape[1]))
    for i in range(n_q):
        m, l = -np.inf, 0.0
        for j in range(K.shape[0]):
            s = 0.0
            for c in range(d):
                s += Q[i, c] * K[j, c]
            s /= np.sqrt(d)
            m_new = max(m, s)
            alpha, p = np.exp(m - m_new), np.exp(s - m_new)
            l = alpha * l + p
            for c in range(V.shape[1]):
                O[i, c] = alpha * O[i, c] + p * V[j, c]
            m = m_new
        for c in range(V.shape[1]):
            O[i, c] /= l
    return O


@solves(BACKWARD)
def gradients_in_a_named_tuple(do, q, k, v, o, lse):
    scale = 1 / math.sqrt(q.shape[-1])
    P = np.exp(scale * np.einsum("...ic,...jc->...ij", q, k) - lse[..., None])
    dP = np.einsum("...ic,...jc->...ij", do, v)
    dS = P * (dP - np.einsum("...ic,...ic->...i", do, o)[..., None])
    return Gradients(
        dq=scale * np.einsum("...ij,...jc->...ic", dS, k),
        dk=scale * np.einsum("...ij,...ic->...jc", dS, q),
        dv=np.einsum("...ij,...ic->...jc", P, do),
    )


@solves(BACKWARD)
def gradients_added_up_over_queries(grad_output, query, key, value):
    d_key, d_value = np.zeros(key.shape), np.zeros(value.shape)
    d_query = []
    for q_i, g_i in zip(query, grad_output, strict=True):
        s = key @ q_i / query.shape[1] ** 0.5
        p = np.exp(s - s.max())
        p /= p.sum()
        d_p = value @ g_i
        d_s = (np.diag(p) - np.outer(p, p)) @ d_p / query.shape[1] ** 0.5
        d_query.append(d_s @ key)
        d_key += np.outer(d_s, q_i)
        d_value += np.outer(p, g_i)
    return [np.array(d_query), d_key, d_value]


@solves(SPARSE)
def sparse_row_by_row(q, k, v, block_mask, block_q, block_k):
    rows = []
    for i, q_i in enumerate(q):
        keys = [j for j in range(len(k)) if block_mask[i // block_q][j // block_k]]
        if not keys:
            rows.append(np.zeros(v.shape[1]))
            continue
        s = k[keys] @ q_i / math.sqrt(len(q_i))
        p = np.exp(s - max(s))
        rows.append(p @ v[keys] / p.sum())
    return np.vstack(rows)


@solves(SPARSE)
def sparse_by_kron(Q, K, V, block_mask, Br, Bc, return_lse=False):
    see = np.kron(block_mask, np.ones((Br, Bc)))[: Q.shape[-2], : K.shape[-2]].astype(bool)
    S = np.where(see, Q @ K.swapaxes(-1, -2) * Q.shape[-1] ** -0.5, -INF)
    lse = np.logaddexp.reduce(S, axis=-1, keepdims=True)
    P = np.where(see, np.exp(S - np.where(np.isinf(lse), 0, lse)), 0)
    return (P @ V, lse[..., 0]) if return_lse else P @ V


@solves(SIZES)
def sizes_as_numpy_integers(M, d):
    B_c = np.ceil(np.float64(M) / (4 * d))
    return np.array([np.minimum(B_c, d), B_c])


@solves(TRAFFIC)
def counted_in_loops(n_q, n_k, d, d_v, block_q, block_k):
    loads = stores = 0
    for i in range(0, n_q, block_q):
        rows = len(range(n_q)[i : i + block_q])
        loads += rows * d
        for j in range(0, n_k, block_k):
            loads += len(range(n_k)[j : j + block_k]) * (d + d_v)
        stores += rows * d_v + rows
    return loads, stores


# --- heads that share keys, scales of any sign, and ways to load --------------------------------


@solves(SOFTMAX, ONLINE)
def softmax_by_lse_in_float32(x):
    s = np.float32(x)
    top = s.max(axis=-1, keepdims=True)
    lse = top + np.log(np.exp(s - top).sum(axis=-1, keepdims=True))
    return np.exp(s - lse)


@solves(ATTENTION)
def attention_by_lse_in_float32(q, k, v, causal=False, scale=None):
    q, k, v = np.float32(q), np.float32(k), np.float32(v)
    S = q @ k.swapaxes(-1, -2) * np.float32(q.shape[-1] ** -0.5 if scale is None else scale)
    n_q, n_k = S.shape[-2:]
    S = np.where(np.tri(n_q, n_k, n_k - n_q, dtype=bool) | (not causal), S, np.float32(-INF))
    top = S.max(axis=-1, keepdims=True, initial=-INF)
    total = np.exp(S - np.where(np.isinf(top), 0, top)).sum(axis=-1, keepdims=True)
    lse = np.where(total == 0, -INF, top + np.log(np.where(total == 0, 1, total)))
    return np.exp(S - np.where(np.isinf(lse), 0, lse)) @ v, lse[..., 0]


@solves(ATTENTION)
def attention_by_powers_of_two_in_float32(q, k, v, sm_scale=None):
    tau = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    q, k, v = np.float32(q * tau), np.float32(k), np.float32(v)
    S = q @ k.swapaxes(-1, -2) * np.float32(math.log2(math.e))
    top = S.max(axis=-1, keepdims=True)
    P = np.exp2(S - top)
    l = P.sum(axis=-1, keepdims=True)
    return P @ v / l, ((top + np.log2(l)) * np.float32(math.log(2)))[..., 0]


@solves(ATTENTION)
def grouped_heads_one_by_one(q, k, v, causal=False, softmax_scale=None):
    if q.ndim == 2:
        return attention_of_matrices(q, k, v, causal, softmax_scale)
    batch, n_heads, n_kv = len(q), q.shape[1], k.shape[1]
    o = np.empty((*q.shape[:3], v.shape[3]))
    for b, h in itertools.product(range(batch), range(n_heads)):
        shared = h * n_kv // n_heads
        o[b, h] = attention_of_matrices(q[b, h], k[b, shared], v[b, shared], causal, softmax_scale)
    return o


@solves(ATTENTION)
def grouped_heads_by_an_axis_of_their_own(q, k, v, scale=None):
    if q.ndim < 4:
        return attention_of_matrices(q, k, v, scale=scale)
    groups = q.reshape(len(q), k.shape[1], -1, *q.shape[2:])
    o = attention_of_matrices(groups, k[:, :, None], v[:, :, None], scale=scale)
    return o.reshape(*q.shape[:3], -1)


@solves(BACKWARD)
def gradients_of_groups_in_loops(do, q, k, v, out, softmax_lse, softmax_scale=None):
    if q.ndim == 2:
        return gradients_of_matrices(do, q, k, v, scale=softmax_scale)
    group = q.shape[-3] // k.shape[-3]
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for *lead, h in np.ndindex(q.shape[:-2]):
        i, j = (*lead, h), (*lead, h // group)
        share = gradients_of_matrices(do[i], q[i], k[j], v[j], scale=softmax_scale)
        dq[i] = share[0]
        dk[j] += share[1]
        dv[j] += share[2]
    return dq, dk, dv


@solves(ATTENTION)
def flash_with_a_scale_and_its_lse(q, k, v, scale=None, Bc=3):
    tau = 1 / math.sqrt(q.shape[1]) if scale is None else scale
    O, L = np.zeros((len(q), v.shape[1])), np.full(len(q), -INF)
    for j in range(0, len(k), Bc):
        S = tau * (q @ k[j : j + Bc].T)
        L_j = np.log(np.exp(S - S.max(1, keepdims=True)).sum(1)) + S.max(1)
        O, L = merge_with_logaddexp(O, L, np.exp(S - L_j[:, None]) @ v[j : j + Bc], L_j)
    return O, L


@solves(TRAFFIC)
def flash_2_on_transposed_copies(q, k, v, block_q, block_k, memory):
    K_T = np.ascontiguousarray(k.T, dtype=np.float32)
    V, out = v.copy(), []
    o, lse = np.zeros((len(q), v.shape[1])), np.zeros(len(q))
    for i in range(0, len(q), block_q):
        rows = np.arange(i, min(i + block_q, len(q)))
        Q_i = memory.load("queries", q, rows)
        O_i, L_i = np.zeros((len(rows), v.shape[1])), np.full(len(rows), -INF)
        for j in range(0, len(k), block_k):
            S = Q_i @ memory.load("K_T", K_T, (slice(None), slice(j, j + block_k)))
            S = S / math.sqrt(q.shape[1])
            lse_j = np.logaddexp.reduce(S, axis=1)
            V_j = memory.load("values", V, slice(j, j + block_k))
            O_i, L_i = merge_with_logaddexp(O_i, L_i, np.exp(S - lse_j[:, None]) @ V_j, lse_j)
        memory.store("O", o, rows, O_i)
        memory.store("L", lse, rows, L_i.tolist())
        out.append(O_i)
    return np.concatenate(out)


@solves(TRAFFIC)
def flash_1_divided_at_the_end(Q, K, V, Br, Bc, memory):
    Q, N = Q / math.sqrt(Q.shape[1]), len(Q)
    O, l, m = np.zeros((N, V.shape[1])), np.zeros(N), np.full(N, -INF)
    for name, array in {"O": O, "l": l, "m": m}.items():
        memory.store(name, array, slice(None), array.copy())
    for j in range(0, len(K), Bc):
        K_j, V_j = (memory.load(*x, slice(j, j + Bc)) for x in (("K", K), ("V", V)))
        for i in range(0, N, Br):
            r = slice(i, i + Br)
            Q_i, O_i = memory.load("Q", Q, r), memory.load("O", O, r)
            l_i, m_i = memory.load("l", l, r), memory.load("m", m, r)
            S = Q_i @ K_j.T
            m_new = np.maximum(m_i, S.max(1))
            P, a = np.exp(S - m_new[:, None]), np.exp(m_i - m_new)
            memory.store("O", O, r, a[:, None] * O_i + P @ V_j)
            memory.store("l", l, r, a * l_i + P.sum(1))
            memory.store("m", m, r, m_new)
    return O / l[:, None]


def solutions():
    """Return [(check, function, missing)]: the library that it needs and that is not here."""
    found = []
    for check, functions in CHECKS.items():
        for needs, function in functions:
            here = needs is None or installed(needs)
            function = function() if here and function is torch_function else function
            found.append((check, function, None if here else needs))
    return found
