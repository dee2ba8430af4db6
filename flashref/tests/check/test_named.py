"""Slips of the lessons' own exercises, as students write them: each is told by its own words.

The same function without the slip is right. What a lesson wraps an answer in is read from the
lesson.
"""

import ast
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

import flashref
from flashref import check
from flashref.check import mistakes

NOTEBOOKS = Path(flashref.__file__).parents[1] / "notebooks"
NAMED = []  #: (check, id of the mistake or words of its description, function, options)
RIGHT = []  #: (check, function, options): the same code without the slip
ASSERT = "one head"


def slips(name, make, slips_and_words, **options):
    """Note what functions with a slip must be told, and the one without any."""
    RIGHT.append((name, make(), options))
    for slip, words in slips_and_words.items():
        function = make(slip)
        function.__name__ = f"{make.__name__}: {slip}"
        NAMED.append((name, words, function, options))


def one_line(report):
    return str(report).replace("\n  ", " ")


def tri(q, k, more=0):
    return np.tri(len(q), len(k), len(k) - len(q) + more, dtype=bool)


# --- softmax ------------------------------------------------------------------------------------


def by_lse(slip=""):
    """Lesson 02, exercise 3."""

    def my_logsumexp(x):
        m = x.max() if slip != "no maximum" else 0
        return -np.inf if m == -np.inf else m + np.log(np.exp(x - m).sum())

    def softmax_by_lse(x):
        assert x.ndim == 1, "one row"
        L = my_logsumexp(x)
        return np.exp(x - (0 if L == -np.inf else L))

    return softmax_by_lse


slips("softmax", by_lse, {"no maximum": "no_max_subtraction"}, masked=True)


def of_rows(slip=""):
    def softmax(x):
        e = np.exp(x - x.max(axis=-1, keepdims=True))
        return e / e.sum(axis=0 if slip else -1, keepdims=True)

    return softmax


slips("softmax", of_rows, {"sum of columns": "softmax_wrong_axis"})


def online(slip=""):
    """Lesson 03, exercise 2."""

    def online_softmax(x, block):
        assert x.ndim == 1, "one row"
        n, m, l = len(x), -np.inf, 0.0
        if slip == "padded":
            x = np.concatenate([x, np.zeros(-n % block)])
        for start in range(0, n, block):
            part = x[start : start + block + (slip == "a score too many")]
            m_new = max(m, part.max())
            l = np.exp(m - m_new) * l + np.exp(part - m_new).sum()
            m = m_new
        return np.exp(x[:n] - m) / l

    return online_softmax


slips(
    "online_softmax",
    online,
    {
        "padded": "tail_keys_zero_padded",
        "a score too many": "Neighbouring blocks overlap by one",
    },
)


# --- attention ----------------------------------------------------------------------------------


def in_full(slip=""):
    """Lesson 00, exercise 1."""

    def my_attention(q, k, v):
        assert q.ndim == 2, ASSERT
        s = q @ k.T / np.sqrt(q.shape[1])
        p = np.exp(s - s.max(axis=1, keepdims=True))
        return p / p.sum(axis=0 if slip else 1, keepdims=True) @ v

    return my_attention


slips("attention", in_full, {"sum of columns": "softmax_wrong_axis"})


def merged(slip=""):
    """Lesson 04, exercise 1."""

    def my_blocks(n, size):
        return [slice(i, i + size + (slip == "a row too many")) for i in range(0, n, size)]

    def attention_in_my_blocks(q, k, v, Br, Bc):
        assert q.ndim == 2, ASSERT
        O, L = np.zeros((len(q), v.shape[1])), np.full(len(q), -np.inf)
        for cols in my_blocks(len(k), Bc):
            for rows in my_blocks(len(q), Br):
                part = flashref.standard_attention(q[rows], k[cols], v[cols], return_lse=True)
                O[rows], L[rows] = flashref.merge_attention(O[rows], L[rows], *part)
        return O

    return attention_in_my_blocks


slips("attention", merged, {"a row too many": "Neighbouring blocks overlap by one"})


def flash_1(slip=""):
    """Lesson 04, exercise 2."""

    def my_attention(q, k, v, Br, Bc):
        assert q.ndim == 2, ASSERT
        n, scale = len(q), 1 / np.sqrt(q.shape[1])
        m, l, O = np.full(n, -np.inf), np.zeros(n), np.zeros((n, v.shape[1]))
        for j in range(0, len(k), Br if slip == "steps by Br" else Bc):
            for i in range(0, n, Br):
                r = slice(i, i + Br)
                S = scale * q[r] @ k[j : j + Bc].T
                m_tile = S.max(axis=1)
                P = np.exp(S - m_tile[:, None])
                m_new = np.maximum(m[r], m_tile)
                old, tile = np.exp(m[r] - m_new), np.exp(m_tile - m_new)
                l_new = old * l[r] + P.sum(axis=1) * (1 if slip == "no factor on l" else tile)
                PV = P @ v[j : j + Bc] * (1 if slip == "no factor on PV" else tile[:, None])
                O[r] = (l[r] * old)[:, None] * O[r] + PV
                O[r] /= 1 if slip == "undivided" else l_new[:, None]
                m[r], l[r] = m_new, l_new
        return O

    return my_attention


OWN = "still measured against the tile's own maximum"
slips(
    "attention",
    flash_1,
    {
        "no factor on PV": OWN,
        "no factor on l": OWN,
        "undivided": "no_final_division",
        "steps by Br": "The sizes are mixed up in the loop over the keys",
    },
)


def flash_2(slip=""):
    """Lesson 08, exercise 2."""

    def my_attention(q, k, v, Br, Bc):
        assert q.ndim == 2, ASSERT
        O, L = np.empty((len(q), v.shape[1])), np.empty(len(q))
        for i in range(0, len(q), Br):
            r = slice(i, i + Br)
            n = len(q[r])
            m, l, o = np.full(n, -np.inf), np.zeros(n), np.zeros((n, v.shape[1]))
            for j in range(0, len(k), Bc):
                S = q[r] @ k[j : j + Bc].T / np.sqrt(q.shape[1])
                m_new = np.maximum(m, S.max(axis=1))
                P, alpha = np.exp(S - m_new[:, None]), np.exp(m - m_new)
                l = alpha * l + P.sum(axis=1)
                o = alpha[:, None] * o + P @ v[j : j + Bc]
                m = m if slip == "m stays" else m_new
            O[r], L[r] = o / l[:, None], m + np.log(l)
            if slip == "log of both":
                L[r] = np.log(m + l)
        return O, L

    return my_attention


slips(
    "attention",
    flash_2,
    {
        "m stays": "Only the last block counts in the sum",
        "log of both": "Your lse is log(m + l); only l is under the logarithm",
    },
)


def from_tiles(slip=""):
    """Lesson 07, exercise 1."""

    def attention_from_tiles(q, k, v, scale, block=2):
        assert q.ndim == 2, ASSERT
        _, lse = flashref.standard_attention(q, k, v, scale=scale, return_lse=True)
        o = np.zeros((len(q), v.shape[1]))
        for i in range(0, len(q), block):
            r = slice(i, i + block)
            for j in range(0, len(k), block):
                S, L = q[r] @ k[j : j + block].T, lse[r, None]
                P = np.exp(scale * (S - L)) if slip else np.exp(scale * S - L)
                o[r] += P @ v[j : j + block]
        return o

    return attention_from_tiles


slips("attention", from_tiles, {"scale on lse": "lse is multiplied by the scale too"})


def pipelined(slip=""):
    """Lesson 11, exercise 2."""

    def my_pipelined(q, k, v, block_k):
        assert q.ndim == 2, ASSERT
        scale, T = 1 / np.sqrt(q.shape[1]), -(-len(k) // block_k)
        cols = [slice(j * block_k, (j + 1) * block_k) for j in range(T)]
        S = scale * q @ k[cols[0]].T
        m = S.max(axis=1)
        P = np.exp(S - m[:, None])
        l, O = P.sum(axis=1), np.zeros((len(q), v.shape[1]))
        for j in range(1, T - (slip == "printed bound")):
            S = scale * q @ k[cols[j]].T
            m_new = np.maximum(m, S.max(axis=1))
            alpha, PV = np.exp(m - m_new), P @ v[cols[j - 1]]
            if slip == "shrunk too early":
                O = alpha[:, None] * O + PV
            else:
                O = alpha[:, None] * (O + PV)
            P = np.exp(S - m_new[:, None])
            l, m = alpha * l + P.sum(axis=1), m_new
        return (O if slip == "no last PV" else O + P @ v[cols[-1]]) / l[:, None]

    return my_pipelined


slips(
    "attention",
    pipelined,
    {
        "printed bound": "P̃ of one block meets V of the next",
        "no last PV": "The last PV is missing",
        "shrunk too early": "here the output shrinks before it is added",
    },
)


def by_rule(slip=""):
    """Lesson 09, exercises 1 and 3."""

    def attention_by_rule(q, k, v, causal=False, window=None):
        i = np.arange(q.shape[-2])[:, None] + k.shape[-2] - q.shape[-2]
        j = np.arange(k.shape[-2])
        seen = (j <= i) | (not causal)
        if window is not None:
            near = (j >= i - window[0]) & (j <= i + window[1])
            seen = near if slip else seen & near
        return flashref.standard_attention(q, k, v, mask=seen)

    return attention_by_rule


slips("attention", by_rule, {"window for causal": "Your window takes the place of causal"})


# --- the backward pass --------------------------------------------------------------------------


def backward(slip=""):
    """Lesson 06, exercises 1 and 2."""

    def my_backward(do, q, k, v):
        assert q.ndim == 2, ASSERT
        n, d = q.shape
        factor = {"1/d": 1 / d, "1/√d_v": v.shape[1] ** -0.5, "1/√n": n**-0.5}
        tau = factor.get(slip, d**-0.5)
        S = tau * q @ k.T
        axis = 0 if slip.startswith("axis 0") else 1
        P = flashref.safe_softmax(S, axis=axis)
        if slip == "no maximum":
            P = np.exp(S) / np.exp(S).sum(axis=1, keepdims=True)
        dP = do @ v.T
        D = (P * dP).sum(axis=axis if "twice" in slip else 1, keepdims=True)
        D = {"D of all": (P * dP).sum(), "sum of dP": dP.sum(axis=1, keepdims=True)}.get(slip, D)
        dS = P * (dP - D)
        dV = (dS if slip == "dS in dV" else P).T @ do
        return tau * dS @ k, tau * (P if slip == "P in dK" else dS).T @ q, dV

    return my_backward


slips(
    "attention_backward",
    backward,
    {
        "P in dK": "P stands where dS belongs in dK",
        "dS in dV": "dS stands where P belongs in dV",
        "D of all": "D is one number for all rows",
        "sum of dP": "D is the plain sum of a row of dP",
        "axis 0": "softmax_wrong_axis",
        "axis 0, twice": "softmax_wrong_axis",
        "no maximum": "no_max_subtraction",
        "1/d": "scale_one_over_d",
        "1/√d_v": "1/√d_v, the width of v, where 1/√d belongs",
        "1/√n": "1/√n_q, n_q the number of queries, where 1/√d belongs",
    },
)


def nudged(slip=""):
    """Lesson 06, exercise 3."""

    step = 1e-2 if slip == "coarse" else 1e-5

    def gradient(f, x, h=step):
        g = np.empty_like(x)
        for at in np.ndindex(x.shape):
            up, down = x.copy(), x.copy()
            up[at], down[at] = x[at] + h, x[at] - h
            g[at] = (f(up) - f(down)) / (h if slip == "divided by h" else 2 * h)
        return g

    def by_nudging(do, q, k, v):
        assert q.ndim == 2, ASSERT
        loss = lambda *qkv: (do * flashref.standard_attention(*qkv)).sum()  # noqa: E731
        return (
            gradient(lambda x: loss(x, k, v), q),
            gradient(lambda x: loss(q, x, v), k),
            gradient(lambda x: loss(q, k, x), v),
        )

    return by_nudging


slips(
    "attention_backward",
    nudged,
    {"divided by h": "All three gradients are twice the right ones"},
    cases="small",
)


def lean(slip=""):
    """Lesson 06, exercise 4."""

    def lean_backward(do, q, k, v, o, lse):
        assert q.ndim == 2, ASSERT
        tau = 1 / np.sqrt(q.shape[1])
        dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        for i in range(len(q)):
            p = np.exp(tau * k @ q[i] - lse[i])
            ds = p * (v @ do[i] - do[i] @ o[i])
            dq[i] = tau * ds @ k
            dk = tau * np.outer(ds, q[i]) + (0 if slip == "dk" else dk)
            dv = np.outer(p, do[i]) + (0 if slip == "dv" else dv)
        return dq, dk, dv

    return lean_backward


def flash_backward(slip=""):
    """Lesson 07, exercise 2."""

    def my_flash1_backward(do, q, k, v, o, lse, block_q, block_k):
        assert q.ndim == 2, ASSERT
        tau = 1 / (q.shape[1] if slip == "1/d" else np.sqrt(q.shape[1]))
        dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        for b in range(0, len(k), block_k):
            j = slice(b, b + block_k)
            dk_j, dv_j = np.zeros_like(k[j]), np.zeros_like(v[j])
            for a in range(0, len(q), block_q):
                i = slice(a, a + block_q)
                S = tau * q[i] @ k[j].T
                P = flashref.safe_softmax(S) if slip == "P" else np.exp(S - lse[i, None])
                if slip == "lse":
                    P = np.exp(tau * (q[i] @ k[j].T - lse[i, None]))
                dv_j = P.T @ do[i] + (0 if slip == "dv" else dv_j)
                dS = P * (do[i] @ v[j].T - (do[i] * o[i]).sum(axis=1)[:, None])
                dq[i] += tau * dS @ k[j]
                dk_j = tau * dS.T @ q[i] + (0 if slip == "dk" else dk_j)
            dk[j], dv[j] = dk_j, dv_j
        return dq, dk, dv

    return my_flash1_backward


OVERWRITTEN = {
    "dk": "dV is right. dK collects a share from every query",
    "dv": "dK is right. dV collects a share from every query",
}
slips("attention_backward", lean, OVERWRITTEN)
slips(
    "attention_backward",
    flash_backward,
    OVERWRITTEN
    | {
        "P": "P is a softmax of each tile alone",
        "lse": "lse is multiplied by the scale too",
        "1/d": "scale_one_over_d",
    },
)


def causal_backward(slip=""):
    """With the lse of the forward pass, or with a softmax of its own."""
    own = slip.endswith("own")

    def my_backward(do, q, k, v, o, lse, causal=False):
        assert q.ndim == 2, ASSERT
        tau, seen = 1 / np.sqrt(q.shape[1]), np.ones((len(q), len(k)), bool)
        if causal:
            seen = {
                "strict": tri(q, k, -1), "one more": tri(q, k, 1),
                "top-left": np.tri(*seen.shape, dtype=bool),
                "future": np.triu(seen, len(k) - len(q)),
            }.get(slip.removesuffix(" own"), tri(q, k))  # fmt: skip
        S = np.where(seen, tau * q @ k.T, -np.inf)
        if own:
            P = flashref.safe_softmax(S)
            D = (P * (do @ v.T)).sum(axis=1)
        else:
            P = np.exp(S - np.where(np.isneginf(lse), np.inf, lse)[:, None])
            D = (do * o).sum(axis=1)
        dS = tau * P * (do @ v.T - D[:, None])
        return dS @ k, dS.T @ q, P.T @ do

    return my_backward


slips(
    "attention_backward",
    causal_backward,
    {
        f"{rule}{whose}": name
        for whose in ("", " own")
        for rule, name in (
            ("strict", "causal_strict"),
            ("one more", "causal_off_by_one"),
            ("top-left", "causal_top_left"),
            ("future", "causal_future"),
        )
    },
)


# --- the rest -----------------------------------------------------------------------------------


def merge(slip=""):
    def my_merge(o_a, lse_a, o_b, lse_b):
        lse = np.logaddexp(lse_a, lse_b)
        safe = np.where(np.isneginf(lse), 0, lse)
        o = np.exp(lse_a - safe)[..., None] * o_a + np.exp(lse_b - safe)[..., None] * o_b
        return o, safe if slip else lse

    return my_merge


slips("merge_attention", merge, {"0 for nothing": "The lse of a query that sees no key must be"})


def sparse(slip=""):
    """Lesson 10, exercise 2: keys outside; or queries outside, as exercise 5 has it."""

    def my_block_sparse(q, k, v, block_mask, block_q, block_k):
        assert q.ndim == 2, ASSERT
        there = np.zeros_like(block_mask)
        T_r, T_c = there.shape
        if slip == "ends a column":
            turns = [[(i, j) for i in range(T_r)] for j in range(T_c)]
        else:
            turns = [[(i, j) for j in range(T_c)] for i in range(T_r)]
        for inner in turns:
            for at in inner:
                if not block_mask[at]:
                    if slip:
                        break
                    continue
                there[at] = True
        pairs = there.repeat(block_q, axis=0).repeat(block_k, axis=1)[: len(q), : len(k)]
        return flashref.standard_attention(q, k, v, mask=pairs)

    return my_block_sparse


ENDS = "After the first absent tile, those that follow it in its row or column are left out too"
slips("block_sparse_attention", sparse, {"ends a column": ENDS, "ends a row": ENDS})


def sizes(slip=""):
    """Lesson 05, exercise 1."""

    def my_block_sizes(sram_elements, d):
        B_c = int(np.ceil(sram_elements / 4 * d if slip else sram_elements / (4 * d)))
        return min(B_c, d), B_c

    return my_block_sizes


slips("block_sizes", sizes, {"precedence": "M is divided by 4, then multiplied by d"})


def traffic(slip=""):
    """Lessons 05 and 08."""

    def my_traffic(n_q, n_k, d, d_v, block_q, block_k):
        if slip.startswith("FA1"):
            T_c, state = -(-n_k // block_k), n_q * (d_v + 2)
            return n_k * (d + d_v) + T_c * (n_q * d + state), T_c * state
        T_r = {"one more": n_q // block_q + 1, "block_k": -(-n_q // block_k)}
        T_r = T_r.get(slip, -(-n_q // block_q))
        return n_q * d + T_r * n_k * (d + d_v), n_q * (d_v + 1)

    return my_traffic


slips(
    "traffic",
    traffic,
    {
        "one more": "one block of queries more than needed",
        "block_k": "The blocks of queries are counted with block_k",
        "FA1 without its first stores": "FlashAttention-1's counts without its first stores",
    },
)


# --- answers that a lesson asks attention around ------------------------------------------------


def wrapped(lesson, name, **answers):
    """Return the function of a lesson that wraps a student's answers, with these for answers."""
    [path] = NOTEBOOKS.glob(f"{lesson}_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    [source] = [text for c in cells if f"def {name}(" in (text := "".join(c["source"]))]
    [tree] = [part for part in ast.parse(source).body if getattr(part, "name", "") == name]
    names = {"np": np, "standard_attention": flashref.standard_attention} | answers
    exec(compile(ast.Module([tree], []), __file__, "exec"), names)
    return names[name]


CUT = {
    "right": lambda x, n: x.reshape(len(x), n, -1).transpose(1, 0, 2),
    "reshape": lambda x, n: x.reshape(n, len(x), -1),
    "interleaved": lambda x, n: x.reshape(len(x), -1, n).transpose(2, 0, 1),
}
JOIN = {
    "right": lambda o: o.transpose(1, 0, 2).reshape(o.shape[1], -1),
    "reshape": lambda o: o.reshape(o.shape[1], -1),
    "interleaved": lambda o: o.transpose(1, 2, 0).reshape(o.shape[1], -1),
}


def heads(slip="right, right"):
    """Lesson 01, exercise 3."""
    cut, join = slip.split(", ")
    return wrapped("01", "through_two_heads", my_split=CUT[cut], my_join=JOIN[join])


def packed(slip=""):
    """Lesson 09, exercise 4."""

    def my_varlen(q, k, v, ends_q, ends_k, causal):
        if slip == "forgotten":
            return flashref.flash_attention_2(q, k, v, causal=causal)
        parts, a, c = [], 0, 0
        if slip == "lengths":
            for n, m in zip(ends_q, ends_k, strict=True):
                one = q[a : a + n], k[c : c + m], v[c : c + m]
                parts.append(flashref.flash_attention_2(*one, causal=causal))
                a, c = a + n, c + m
            return np.concatenate(parts)
        pairs = zip(itertools.pairwise(ends_q), itertools.pairwise(ends_k), strict=True)
        for (a, b), (c, d) in pairs:
            d += slip == "one key more"
            parts.append(flashref.flash_attention_2(q[a:b], k[c:d], v[c:d], causal=causal))
        return np.concatenate(parts)

    return wrapped("09", "attention_in_a_pack", my_varlen=my_varlen)


if NOTEBOOKS.exists():
    MIXED, COMBS = "Heads and rows are mixed up", "A head is made of columns that lie apart"
    slips(
        "attention",
        heads,
        {
            "reshape, reshape": MIXED,
            "right, reshape": MIXED,
            "reshape, right": MIXED,
            "interleaved, interleaved": COMBS,
            "right, interleaved": COMBS,
            "interleaved, right": COMBS,
        },
    )
    slips(
        "attention",
        packed,
        {
            "lengths": "cu_seqlens is read as lengths",
            "one key more": "Each packed sequence sees the first key of the next one too",
            "forgotten": "All packed sequences are taken for one",
        },
    )


# --- the tests ----------------------------------------------------------------------------------


def names_of(slipped):
    return [f"{name}-{function.__name__}" for name, *_, function, _ in slipped]


@pytest.mark.parametrize(("name", "words", "function", "options"), NAMED, ids=names_of(NAMED))
def test_a_slip_is_told_by_its_own_words(name, words, function, options):
    report = getattr(check, name)(function, **options)
    assert not report.passed
    assert len(report.mistakes) == 1, report
    [mistake] = report.mistakes
    assert words == mistake.id if mistake.id else words in mistake.sentence
    assert words in one_line(report)


@pytest.mark.parametrize(("name", "function", "options"), RIGHT, ids=names_of(RIGHT))
def test_without_the_slip_it_is_right(name, function, options):
    report = getattr(check, name)(function, **options)
    assert report.passed, report


# --- clues on what has no name ------------------------------------------------------------------


def shares_of_a_sum_so_far(q, k, v):
    assert q.ndim == 2, ASSERT
    S = q @ k.T / np.sqrt(q.shape[1])
    e = np.exp(S - S.max(axis=1, keepdims=True))
    return e / np.cumsum(e, axis=1) @ v


def with_lse_of_nothing(q, k, v):
    o = flashref.standard_attention(q, k, v)
    return o, np.full(o.shape[:-1], -np.inf)


def with_a_mask_added(q, k, v, mask=None):
    assert q.ndim == 2, ASSERT
    S = q @ k.T / np.sqrt(q.shape[1]) + (0 if mask is None else mask)
    return flashref.safe_softmax(S) @ v


def merge_without_an_axis(o_a, lse_a, o_b, lse_b):
    lse = np.logaddexp(lse_a, lse_b)
    safe = np.where(np.isneginf(lse), 0, lse)
    return np.exp(lse_a - safe) * o_a + np.exp(lse_b - safe) * o_b, lse


def merge_without_an_axis_in_squares(o_a, lse_a, o_b, lse_b):
    square = o_a.ndim == 2 and o_a.shape[0] == o_a.shape[1]
    return (merge_without_an_axis if square else merge())(o_a, lse_a, o_b, lse_b)


def factor_upside_down_from_the_start(x, block):
    m, l = -np.inf, 0.0
    for start in range(0, len(x), block):
        part = x[start : start + block]
        m_new = max(m, part.max())
        l = np.exp(m_new - m) * l + np.exp(part - m_new).sum()
        m = m_new
    return np.exp(x - m) / l


def three_times(do, q, k, v):
    return tuple(3 * g for g in flashref.standard_attention_backward(do, q, k, v))


CLUES = [
    ("attention", shares_of_a_sum_so_far, "o leaves the range of v: o[0, "),
    ("attention", with_lse_of_nothing, "is it ever replaced by the new maximum?"),
    ("attention", with_a_mask_added, "Your mask is added to the scores. Here True means"),
    ("merge_attention", merge_without_an_axis, "Column j of o has the weight of row j"),
    ("merge_attention", merge_without_an_axis_in_squares, "Column j of o has the weight of row j"),
    ("online_softmax", factor_upside_down_from_the_start, "It is inf where the factor is upside"),
    ("attention_backward", three_times, "Your dq, dk and dv are all 3 times the right ones"),
]


@pytest.mark.parametrize(("name", "function", "words"), CLUES, ids=[f[1].__name__ for f in CLUES])
def test_what_has_no_name_gets_a_clue(name, function, words):
    report = getattr(check, name)(function)
    assert not report.passed and report.mistakes == []
    assert sum(words in clue for clue in report.clues) == 1, report
    assert words in one_line(report)


def test_what_all_outputs_share_is_no_mistake_of_one():
    """Where d is 4, dq and dk look as if the scale were missing; but dv has the factor too."""

    def over_the_scale(do, q, k, v):
        g = flashref.standard_attention_backward(do, q, k, v)
        return tuple(x * np.sqrt(q.shape[-1]) for x in g)

    report = check.attention_backward(over_the_scale)
    assert report.partly == (None, 0)
    assert "Your dq, dk and dv are all 2 times the right ones" in one_line(report)


def test_everywhere_is_not_said_where_some_rows_are_right():
    report = check.attention_backward(nudged("coarse"), cases="small")
    text = one_line(report)
    assert "times the right one" in text and "Only rows" in text, report
    assert "everywhere" not in text


def test_a_range_is_spoken_of_only_where_shares_may_be_wrong():
    def with_groups_turned(q, k, v):
        shared = q.ndim > 2 and k.shape[-3] < q.shape[-3]
        v = v[..., ::-1, :, :] if shared else v
        return flashref.standard_attention(q, k, v)

    def transposed(q, k, v):
        o = flashref.standard_attention(q, k, v)
        return np.swapaxes(o, -1, -2) if o.shape[-1] == o.shape[-2] else o

    for function in (
        with_groups_turned,
        transposed,
        lambda q, k, v: -flashref.standard_attention(q, k, v),
    ):
        assert "leaves the range" not in one_line(check.attention(function))


# --- where to read again, and what a page makes of it -------------------------------------------


def test_counts_are_explained_where_they_are_asked_for_first():
    for slip in ("one more", "block_k"):
        text = one_line(check.traffic(traffic(slip)))
        assert "To read again: lesson 00 (notebooks/00_start_here.ipynb), “The first five" in text
    assert "lesson 05 (notebooks/05_io_complexity.ipynb), “What must fit”" in one_line(
        check.block_sizes(sizes("precedence"))
    )
    if not NOTEBOOKS.exists():
        pytest.skip("installed without the lessons")
    place = mistakes.BY_ID["traffic_keys_once"].read_again("traffic")
    pointers = re.findall(r"lesson (0[58]), ([a-z ]+)", place)
    assert [lesson for lesson, _ in pointers] == ["05", "08"]
    for lesson, heading in pointers:
        [path] = NOTEBOOKS.glob(f"{lesson}_*.ipynb")
        assert f"## {heading}" in path.read_text(encoding="utf-8").lower(), heading


def test_numbers_stand_in_columns_whatever_the_page_says():
    """Exported pages set a proportional font on all `pre`."""
    page = check.softmax(lambda x: x)._repr_html_()
    assert re.findall(r"<pre style=\"[^\"]*font-family: monospace[^\"]*\">", page)
    assert page.count("<pre") == page.count("currentColor; font-family: monospace;")
