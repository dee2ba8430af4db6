"""The known mistakes as functions: one algorithm for each exercise, with a switch for each fault.

Every switch is off by default, and then the answer is right. `mistakes.py` says which switch makes
which mistake and what a learner is told; here is only what goes wrong. Plain NumPy in float64, for
small arrays: it explains an answer that was wrong, and is never taken for the right one.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

INF = np.inf


def without_warnings(method):
    """Let a method overflow and divide by 0 in silence: that is what it is there for."""

    @functools.wraps(method)
    def quiet(*args, **kwargs):
        with np.errstate(all="ignore"):
            return method(*args, **kwargs)

    return quiet


def finite(m):
    """Return m with 0 for -inf."""
    return np.where(np.isneginf(m), 0, m)


def nonzero(l):
    """Return l with 1 for 0."""
    return np.where(l == 0, 1, l)


def blocks(n, size, drop_tail=False, longer=0, step=None):
    """Return the slices that cut n rows into blocks.

    The last, shorter one may be left out. Every block may end `longer` rows later: at 1 it shares
    a row with the next one, at -1 it lacks its last. Another `step` leads from block to block.
    """
    end = n - n % size if drop_tail else n
    starts = range(0, end, step or size)
    cut = [slice(start, min(start + size + longer, n)) for start in starts]
    return [rows for rows in cut if rows.start < rows.stop]


#: finite numbers at which a maximum starts: one for each set of rows that underflow then
STARTS = (-1000, -10000, -100000, -(10**9))
SHIFTS = {  # what learners subtract before exp: (scores, axis) -> an array that keeps the axis
    "max": lambda x, axis: x.max(axis=axis, keepdims=True),
    "median": lambda x, axis: np.median(x, axis=axis, keepdims=True),
    "mean": lambda x, axis: x.mean(axis=axis, keepdims=True),
    "min": lambda x, axis: x.min(axis=axis, keepdims=True),
    "size": lambda x, axis: np.abs(x).max(axis=axis, keepdims=True),
    "first": lambda x, axis: x.take([0], axis=axis),
    "sum": lambda x, axis: x.sum(axis=axis, keepdims=True),
    **{
        f"max or {start}": lambda x, axis, start=start: np.maximum(
            x.max(axis=axis, keepdims=True), start
        )
        for start in (0, *STARTS)
    },
    "none": lambda x, axis: np.zeros_like(x.max(axis=axis, keepdims=True)),
}


# --- softmax ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Softmax:
    """Softmax along an axis."""

    shift: str = "max"  #: what is subtracted: a key of SHIFTS, of each row
    shift_over: str = "row"  #: "row", or "all" for one number for the whole array
    over: str = "row"  #: "row", or the wrong axis: "column" (-2), "first" (0) or "second" (1)
    sum_over: str = "row"  #: "row", "all" for one sum over the whole array, or "column"
    divide: bool = True
    by_log: bool = False  #: exp(x - log(sum(exp(x)))) in place of a division
    lse: str = "right"  #: "no maximum": exp(x - log l) with l = sum(exp(x - m))
    base: float = math.e
    base_of: str = "both"  #: with another base, "shift": only the shift lacks the factor log(base)
    keepdims: tuple = (True, True)  #: of the maximum and of the sum
    fill: float = -INF  #: what stands in for -inf
    guard: bool = True  #: 0, not 0/0, in a row whose sum is 0
    tiled = False

    @property
    def of_masks(self):
        """Whether scores of -inf alone show what is wrong."""
        return replace(self, fill=-INF, guard=True) == Softmax()

    @without_warnings
    def __call__(self, case, given):
        """Return {"p": weights} for x."""
        x, axis = np.maximum(case["x"], self.fill), case.get("axis", -1)
        if self.over != "row" and x.ndim > 1:
            axis = {"first": 0, "second": 1, "column": x.ndim - 2}[self.over]
        sum_axis = {"all": None, "column": max(x.ndim - 2, 0)}.get(self.sum_over, axis)
        m = SHIFTS[self.shift](x, axis if self.shift_over == "row" else None)
        m = finite(m) if self.guard else m
        rate = math.log(self.base)
        try:
            m = m if self.keepdims[0] else m.squeeze(axis)
            e = np.exp(x - rate * m) if self.base_of == "shift" else np.exp(rate * (x - m))
            l = e.sum(axis=sum_axis, keepdims=True)
            l = l if self.keepdims[1] else l.squeeze(axis)
            l = nonzero(l) if self.guard else l
            if self.by_log:
                return {"p": np.exp(x - m - np.log(l))}
            if self.lse == "no maximum":
                return {"p": np.exp(x - np.log(l))}
            return {"p": e / l if self.divide else e}
        except ValueError:  # without keepdims only square matrices fit
            return {"p": np.full_like(x, np.nan)}


@dataclass(frozen=True)
class OnlineSoftmax:
    """Softmax in two passes, the first one block by block."""

    start: float = -INF  #: the maximum before the first block
    #: "running", "none", "own" (of each block alone), or "block" (the same, with the right factor)
    maximum: str = "running"
    #: "yes", "no", "inverted", "zero" (what was gathered is lost), or "late" (on the new part too)
    rescale: str = "yes"
    step_guard: bool = True  #: against -inf - -inf while nothing has been seen
    #: the maximum in a block's own sum: "running", "own", or "old" (before it, but for the first)
    p_against: str = "running"
    #: "kept", "zero" (its weights are 0), "unseen" (not in m and l only), or "padded" (with scores
    #: of 0)
    tail: str = "kept"
    shared: bool = False  #: neighbouring blocks share a score
    divide: bool = True
    guard: str = "l"  #: "l" (divides by 1 where l is 0), "zeros" (gives 0 there) or "no"
    #: when the shares are written: "last"; in the first pass, with m and l "so far"; or there with
    #: m so far, and divided by the last l ("m so far")
    shares: str = "last"
    swapped: str = ""  #: m and l have changed places: after each "step", or at the "end"

    @property
    def tiled(self):
        """Whether the size of a block makes a difference."""
        right = self.maximum in ("running", "none") and self.rescale == "yes"
        right = right and self.tail == "kept" and self.step_guard and not self.shared
        right = right and self.shares == "last" and self.p_against == "running"
        return not right or self.swapped == "step"

    @property
    def of_masks(self):
        """Whether scores of -inf alone show what is wrong."""
        return replace(self, step_guard=True, guard="l") == OnlineSoftmax()

    @property
    def least_block(self):
        """The smallest block worth a guess: with blocks of one this is right, or is no softmax."""
        return 2 if self.maximum == "own" or self.tail != "kept" else 1

    @without_warnings
    def __call__(self, case, given):
        """Return {"p": weights} for x."""
        x, axis = case["x"], case.get("axis", -1)
        s = np.moveaxis(x, axis, -1)
        n = s.shape[-1]
        m, l = np.full(s.shape[:-1], self.start), np.zeros(s.shape[:-1])
        early = np.zeros_like(s)
        cut = blocks(n, given["block"], self.tail in ("zero", "unseen"), int(self.shared))
        for cols in cut:
            s_block = s[..., cols]
            if self.tail == "padded":
                missing = given["block"] - s_block.shape[-1]
                s_block = np.pad(s_block, [(0, 0)] * (s.ndim - 1) + [(0, missing)])
            m_block = s_block.max(axis=-1)
            m_new = {"running": np.maximum(m, m_block), "none": m}.get(self.maximum, m_block)
            how = self.rescale if self.maximum in ("running", "block") else "no"
            alpha = correction(m, m_new, how, self.step_guard)
            late = self.rescale == "late"
            against = self._against(m, m_new, m_block, l)
            l_block = np.exp(s_block - against[..., None]).sum(axis=-1)
            l = alpha * (l + l_block) if late else alpha * l + l_block
            m = m_new
            early[..., cols] = np.exp(s[..., cols] - m[..., None])
            early[..., cols] /= l[..., None] if self.shares == "so far" else 1
            if self.swapped == "step":
                m, l = l, m
        if self.swapped == "end":
            m, l = l, m
        last = m if self.guard == "no" else finite(m)
        p = np.exp(s - last[..., None]) if self.shares == "last" else early
        if self.divide and self.shares != "so far":
            p = p / (l if self.guard == "no" else nonzero(l))[..., None]
        if self.guard == "zeros":
            p = np.where(l[..., None] == 0, 0, p)
        if self.tail == "zero":
            p[..., cut[-1].stop if cut else 0 :] = 0
        return {"p": np.moveaxis(p, -1, axis)}

    def _against(self, m, m_new, m_block, l):
        """Return the maximum against which a block's own sum is measured."""
        against = m_block if self.p_against == "own" else m_new
        if self.p_against == "old":
            against = np.where(l == 0, m_new, m)
        return finite(against) if self.step_guard else against


def correction(m, m_new, how, guard=True):
    """Return the factor on what was gathered before the maximum rose from m to m_new."""
    if how in ("no", "zero"):
        return np.full_like(m_new, how == "no")
    alpha = np.exp(m - (finite(m_new) if guard else m_new))
    if how == "inverted":
        alpha = np.where(np.isneginf(m), 1, np.exp(m_new - m))
    if how == "late":
        alpha = np.where(np.isneginf(m), 1, alpha)
    return alpha


# --- merging ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Merge:
    """Two parts (o, lse) of attention into one."""

    average: bool = False  #: o is the mean of the two
    lse_added: bool = False  #: lse is the sum of the two
    base: float = math.e  #: of the weights and of the logarithm
    guard: bool = True
    guard_lse: bool = True
    maximum: bool = True  #: subtract the larger lse before exp
    #: of o: "right", "swapped", "not divided", "lse" (lse_a itself), "share of lse" (lse_a / lse),
    #: "from lse" (exp(lse_a - lse), with the lse returned), or "of columns" (n rows, n columns)
    weights: str = "right"
    lse: str = "right"  #: "right", "sum" (no logarithm), "no maximum" or "larger"
    empty_lse: float = -INF  #: of two empty parts
    tiled = False

    def without_guards(self):
        """Return what becomes of it where nothing guards against two empty parts."""
        if not self.guard:
            return ()
        return [replace(self, guard=False, guard_lse=guarded) for guarded in (False, True)]

    @without_warnings
    def __call__(self, case, given):
        """Return {"o": ..., "lse": ...}."""
        o_a, o_b, lse_a, lse_b = (case[name] for name in ("o_a", "o_b", "lse_a", "lse_b"))
        m = np.maximum(lse_a, lse_b) if self.maximum else np.zeros_like(lse_a)
        shift = finite(m) if self.guard else m
        w_a, w_b = self.base ** (lse_a - shift), self.base ** (lse_b - shift)
        total = w_a + w_b
        log = np.log(total) / math.log(self.base)
        lse = {"right": m + log, "sum": np.exp(m) * total, "no maximum": log, "larger": m}[self.lse]
        if self.guard_lse and self.lse != "sum":
            lse = np.where(np.isneginf(m), self.empty_lse, lse)
        lse = lse_a + lse_b if self.lse_added else lse
        if self.weights == "swapped":
            w_a, w_b = w_b, w_a
        if self.weights == "lse":
            w_a, w_b, total = lse_a, lse_b, lse_a + lse_b
        if self.weights == "share of lse":
            w_a, w_b, total = lse_a, lse_b, lse
        if self.weights == "from lse":
            joint = finite(lse) if self.guard else lse
            w_a, w_b, total = np.exp(lse_a - joint), np.exp(lse_b - joint), np.ones_like(lse)
        if self.weights == "not divided":
            total = np.ones_like(total)
        total = nonzero(total) if self.guard else total
        if self.weights != "of columns":
            w_a, w_b, total = (w[..., None] for w in (w_a, w_b, total))
        o = (w_a * o_a + w_b * o_b) / total
        if self.average:
            o = (o_a + o_b) / 2
        return {"o": o, "lse": lse}


# --- attention ----------------------------------------------------------------------------------


WINDOWS = {  # rules for a window: (left, right, off) -> what is used in their place
    "one more left": lambda left, right, off: (left + 1, right, off),
    "left end out": lambda left, right, off: (left - 1, right, off),
    "right end out": lambda left, right, off: (left, right - 1, off),
    "both ends out": lambda left, right, off: (left - 1, right - 1, off),
    "left end alone": lambda left, right, off: (left, INF, off),
    "right end alone": lambda left, right, off: (INF, right, off),
    "no window": lambda left, right, off: (INF, INF, off),
    "window turned": lambda left, right, off: (right, left, off),
    "window top-left": lambda left, right, off: (left, right, 0),
    "all top-left": lambda left, right, off: (left, right, 0),
}


def positions(n_q, n_k, rule, causal, window):
    """Return the (n_q, n_k) pairs that the rule lets a query see."""
    i, j = np.arange(n_q)[:, None], np.arange(n_k)
    off = n_k - n_q
    seen = np.ones((n_q, n_k), bool)
    if causal and not (rule == "window alone" and window is not None):
        seen = {
            "ignored": seen,
            "strict": j < i + off,
            "one more": j <= i + off + 1,
            "top-left": j <= i,
            "all top-left": j <= i,
            "future": j >= i + off,
        }.get(rule, j <= i + off)
    if window is not None:
        left, right, off = WINDOWS[rule](*window, off) if rule in WINDOWS else (*window, off)
        seen = seen & (j >= i + off - left) & (j <= i + off + right)
    return seen


TILES = {  # of a tile: first and last query at their key positions, first and last key, off; and
    # the last query of a full tile -> whether it is visited, and whether it is masked inside
    "top-left": lambda i0, i1, j0, j1, off, end: (j0 <= i1 - off, j1 > i0 - off),
    "by its first query": lambda i0, i1, j0, j1, off, end: (j0 <= i0, j1 > i0),
    "one key early": lambda i0, i1, j0, j1, off, end: (j0 < i1, True),
    "one key early, full": lambda i0, i1, j0, j1, off, end: (j0 < end, True),
    "by its corner": lambda i0, i1, j0, j1, off, end: (j0 <= i1, j0 <= i0 < j1),
    "whole alone": lambda i0, i1, j0, j1, off, end: (j1 <= i0, False),
}


def causal_tiles(rule, n_q, n_k, B_r, B_c):
    """Return the pairs that a query sees where tiles are sorted out by a rule of `TILES`."""
    seen, off = positions(n_q, n_k, "right", True, None), n_k - n_q
    for rows in blocks(n_q, B_r):
        for cols in blocks(n_k, B_c):
            ends = rows.start + off, rows.stop - 1 + off, cols.start, cols.stop - 1
            visited, masked = TILES[rule](*ends, off, rows.start + off + B_r - 1)
            if not (visited and masked):
                seen[rows, cols] = visited
    return seen


def written_out(mask, rows, cols, n_q, n_k):
    """Return the pairs of a block mask; where it is too small, its last row or column again."""
    i = np.minimum(np.arange(n_q) // rows, mask.shape[0] - 1)
    j = np.minimum(np.arange(n_k) // cols, mask.shape[1] - 1)
    return mask[i[:, None], j]


BLOCK_MASKS = {  # (mask, rows, cols, n_q, n_k) -> the pairs that are there
    "right": written_out,
    "zero": written_out,
    "row ends": lambda mask, *sizes: written_out(np.logical_and.accumulate(mask, axis=1), *sizes),
    "column ends": lambda mask, *sizes: written_out(np.logical_and.accumulate(mask), *sizes),
    "ignored": lambda mask, rows, cols, n_q, n_k: np.ones((n_q, n_k), bool),
    "turned": lambda mask, *sizes: ~written_out(mask, *sizes),
    "transposed": lambda mask, *sizes: written_out(mask.T, *sizes),
    "sizes exchanged": lambda mask, rows, cols, *n: written_out(mask, cols, rows, *n),
    "copied": lambda mask, rows, cols, n_q, n_k: np.tile(mask, (rows, cols))[:n_q, :n_k],
}


def kv_head(how, h, n_heads, n_kv):
    """Return the key head that query head h reads."""
    if how == "first":
        return 0
    if how == "by key heads" and n_kv < n_heads:
        return min(h // n_kv, n_kv - 1)
    return h % n_kv if how == "tiled" else h // (n_heads // n_kv)


def each_head(how, run, q, k, v):
    """Run a function of 2-D arrays on every head; return its results, stacked like q's heads."""
    if q.ndim == 2:
        return run(q, k, v)
    lead, results = q.shape[:-2], []
    for index in np.ndindex(lead):
        kv = (*index[:-1], kv_head(how, index[-1], q.shape[-3], k.shape[-3]))
        results.append(run(q[index], k[kv], v[kv]))
    stacked = [np.stack(parts) for parts in zip(*results, strict=True)]
    return tuple(x.reshape(*lead, *x.shape[1:]) for x in stacked)


SCALES = {  # default scales: (d, n_q, n_k, d_v, d · heads) -> scale
    "missing by default": lambda d, n_q, n_k, d_v, d_model: 1.0,
    "1/d": lambda d, n_q, n_k, d_v, d_model: 1.0 / d,
    "√d": lambda d, n_q, n_k, d_v, d_model: d**0.5,
    "1/√n_q": lambda d, n_q, n_k, d_v, d_model: n_q**-0.5,
    "1/√n": lambda d, n_q, n_k, d_v, d_model: n_k**-0.5,
    "1/√d_v": lambda d, n_q, n_k, d_v, d_model: d_v**-0.5,
    "1/√d_model": lambda d, n_q, n_k, d_v, d_model: d_model**-0.5,
}
LSES = {  # what is saved as lse: (m, l) -> lse
    "right": lambda m, l: m + np.log(l),
    "no maximum": lambda m, l: np.log(l),
    "base 2": lambda m, l: (m + np.log(l)) * math.log2(math.e),
    "base 2 of l": lambda m, l: m + np.log2(l),
    "maximum": lambda m, l: m,
    "sum": lambda m, l: l,
    "no logarithm": lambda m, l: m + l,
    "minus": lambda m, l: m - np.log(l),
    "product": lambda m, l: m * np.log(l),
    "exponential": lambda m, l: np.exp(m) * l,
    "log of both": lambda m, l: np.log(m + l),
    "start": lambda m, l: np.log(l) - INF,
}


@dataclass(frozen=True)
class Attention:
    """Tiled attention, key blocks from left to right."""

    #: "right", "missing", a key of SCALES, or what is taken for none: "0 is none", "negative too"
    scale: str = "right"
    unscaled_max: bool = False  #: the running maximum is that of q · k, times the scale
    base: float = math.e  #: of the exponential and of the logarithm
    sees: str = "right"  #: a rule of `positions`
    fill: float = -INF  #: the score of a pair that is not seen
    fill_added: bool = False  #: added to the score instead of taking its place
    tiles: str = "right"  #: which tiles of a causal mask are visited, or a key of TILES
    sparse: str = "right"  #: a key of BLOCK_MASKS; "zero": pairs that are not there score 0
    heads: str = "grouped"  #: "grouped", "first", "tiled", or "by key heads" (h // H_kv if shared)
    tail_keys: str = "kept"  #: "kept", "dropped" or "zeros" (padded with keys that score 0)
    tail_queries: str = "kept"  #: "kept" or "dropped"
    short: str = ""  #: which blocks lack their last row: those of "keys", or "both"
    shared: bool = False  #: neighbouring blocks of keys share a row
    mixed: bool = False  #: blocks of keys start every block_q rows
    kept_state: bool = False  #: m, l and O are not started anew for each block of queries
    skip: bool = False  #: tiles without a visible pair are not visited
    whole_diagonal: bool = False  #: a tile with any visible pair counts as wholly visible
    start: float = -INF  #: the maximum before the first block
    maximum: str = "running"  #: as in `OnlineSoftmax`
    #: the maximum in P: "running" or "own"; "own in l" or "own in o" for one of the two alone
    p_against: str = "running"
    rescale_l: str = "yes"  #: as in `OnlineSoftmax`
    rescale_o: str = "yes"
    step_guard: bool = True  #: against -inf - -inf while a row has seen nothing
    summed: bool = False  #: softmax in each block by itself, results added
    divide: bool = True
    divide_often: bool = False  #: after each block, and not at the end
    new_l: bool = False  #: the same, and O is multiplied by the new l before it, not by the old
    old_l: bool = False  #: O is multiplied by the old l before each block, and never divided
    #: P V of a block comes after the next block's S: "late" is added after the rescale; "no last",
    #: without the one after the loop; "short", the loop lacks a turn: the last V meets the P before
    pipeline: str = ""
    by_log: bool = False  #: P = exp(S - log l) in place of a division: 0 where l is infinite
    #: 0 instead of 0/0: where nothing was "seen", wherever l is 0 ("l"), "no"; the same with an lse
    #: of NaN ("nan"), or of NaN for the rows of tiles that were "visited"
    guard: str = "seen"
    lse: str = "right"  #: a key of LSES
    empty_lse: float = -INF  #: the lse of rows that see nothing

    @property
    def tiled(self):
        """Whether the size of a block makes a difference."""
        return self._rows_matter or self._cols_matter

    @property
    def least_block(self):
        """The smallest block worth a guess: with blocks of one this is right, or no attention."""
        cut = self.tail_keys != "kept" or self.tail_queries != "kept" or self.whole_diagonal
        cut = cut or self.tiles != "right" or bool(self.short)
        own = self.maximum == "own" or self.p_against != "running"
        return 2 if cut or self.skip or self.summed or own else 1

    @property
    def _rows_matter(self):
        cut = self.tail_queries != "kept" or self.short == "both" or self.mixed
        return self.whole_diagonal or self.skip or self._sorted or cut or self.kept_state

    @property
    def _cols_matter(self):
        rescaled = self.rescale_l == self.rescale_o == "yes"
        rescaled = rescaled and self.maximum in ("running", "none")
        rescaled = rescaled and not (self.new_l or self.old_l)
        whole = self.tail_keys == "kept" and not self.summed and self.step_guard
        whole = whole and self.p_against == "running" and not self.divide_often
        whole = whole and not (self.short or self.shared or self.mixed or self.pipeline)
        return self.whole_diagonal or self.skip or self._sorted or not (rescaled and whole)

    @property
    def _sorted(self):
        return self.tiles != "right"

    def without_guards(self):
        """Return what becomes of it where nothing guards against rows that see nothing."""
        if self.guard != "seen":
            return ()
        return [replace(self, guard=guard) for guard in ("no", "nan")]

    def may_show(self, case):
        """Whether this can give a wrong answer on a case, as far as is seen without computing."""
        masked = any(case.get(name) is not None for name in ("window", "mask", "block_mask"))
        masked = masked or bool(case.get("causal"))
        needs_mask = Attention(
            sees=self.sees, fill=self.fill, fill_added=self.fill_added, skip=self.skip,
            whole_diagonal=self.whole_diagonal, step_guard=self.step_guard, guard=self.guard,
            tiles=self.tiles, empty_lse=self.empty_lse,
        )  # fmt: skip
        if self == needs_mask:
            return masked
        if self == Attention(heads=self.heads, guard=self.guard):
            return case["q"].ndim > 2
        return self != Attention(sparse=self.sparse, guard=self.guard) or "block_mask" in case

    @without_warnings
    def __call__(self, case, given):
        """Return {"o": ..., "lse": ...}."""
        q, k, v = case["q"], case["k"], case["v"]
        n_q, n_k = q.shape[-2], k.shape[-2]
        B_r = given["block_q"] if self._rows_matter else max(n_q, 1)
        B_c = given["block_k"] if self._cols_matter else max(n_k, 1)
        seen, zero, pad = self._visible(case, B_r, B_c)
        if self.whole_diagonal:
            for rows in blocks(len(seen), B_r):
                for cols in blocks(seen.shape[1], B_c):
                    seen[rows, cols] = seen[rows, cols].any()

        def run(Q, K, V):
            S = math.log(self.base) * self._scale(case) * Q @ K.T
            S = np.where(seen, S, S + self.fill if self.fill_added else self.fill)
            return self._head(np.where(zero, 0, S), seen | zero, V, B_r, B_c, pad)

        o, lse = each_head(self.heads, run, q, k, v)
        if (
            self.unscaled_max and self._scale(case) <= 0
        ):  # the first factor: exp(inf), or of 0 · inf
            o, lse = np.full_like(o, np.nan), np.full_like(lse, np.nan)
        return {"o": o, "lse": lse}

    def _scale(self, case):
        d = case["q"].shape[-1]
        if self.scale == "missing":
            return 1.0
        scale = case.get("scale")
        none = {"0 is none": scale == 0, "negative too": scale is not None and scale <= 0}
        if scale is not None and not none.get(self.scale):
            return scale
        if self.scale in SCALES:
            d_model = d * math.prod(case["q"].shape[:-2][-1:])
            return SCALES[self.scale](d, case["q"].shape[-2], *case["v"].shape[-2:], d_model)
        return d**-0.5

    def _visible(self, case, B_r=None, B_c=None):
        """Return which pairs are seen, which score 0 instead, and the score of a padding key."""
        n_q, n_k = case["q"].shape[-2], case["k"].shape[-2]
        causal, window, mask = (case.get(name) for name in ("causal", "window", "mask"))
        seen = positions(n_q, n_k, self.sees, causal and not self._sorted, window)
        if causal and self._sorted:
            seen = seen & causal_tiles(self.tiles, n_q, n_k, B_r, B_c)
        if mask is not None:
            seen = seen & mask
        zero = np.zeros_like(seen)
        if "block_mask" in case:
            there = BLOCK_MASKS[self.sparse](case["block_mask"], *case.blocks, n_q, n_k)
            zero = seen & ~there & (self.sparse == "zero")
            seen = seen & there
        masked = causal or window is not None or mask is not None
        return seen, zero, -INF if masked else 0.0

    def _head(self, S, seen, V, B_r, B_c, pad):
        dtype = S.dtype
        O, L = np.zeros((len(S), V.shape[1]), dtype), np.full(len(S), -INF, dtype)
        kept = None
        longer = self.shared - bool(self.short)
        step = B_r if self.mixed else None
        cut = blocks(len(V), B_c, self.tail_keys == "dropped", longer, step)
        cut = list(zip(cut, cut, strict=True))  # of S, and of V
        if self.pipeline == "short" and len(cut) > 1:
            cut[-2:] = [(cut[-2][0], cut[-1][1])]
        for rows in blocks(len(S), B_r, self.tail_queries == "dropped", -(self.short == "both")):
            n, visited = len(S[rows]), False
            m, l, O_i = np.full(n, self.start, dtype), np.zeros(n, dtype), O[rows]
            waiting = np.zeros_like(O_i)
            touched = np.zeros(n, bool)
            if kept is not None and len(kept[0]) == n:
                m, l, O_i = kept
            for cols, cols_V in cut:
                visible = seen[rows, cols]
                if self.skip and not visible.any():
                    continue
                S_ij, V_j, visited = S[rows, cols], V[cols_V], True
                if len(V_j) < S_ij.shape[1]:  # there the learner's code stops
                    V_j = np.full((S_ij.shape[1], V.shape[1]), np.nan)
                touched |= visible.any(axis=1) | (self.fill != -INF)
                if self.tail_keys == "zeros":
                    missing = (0, B_c - len(V_j))
                    S_ij = np.pad(S_ij, ((0, 0), missing), constant_values=pad)
                    V_j = np.pad(V_j, (missing, (0, 0)))
                m_new = self._maximum(m, S_ij)
                P_l, P_o = (self._weights(S_ij, m_new, of) for of in "lo")
                if self.summed:
                    own = np.exp(S_ij - finite(S_ij.max(axis=1))[:, None])
                    O_i = O_i + own @ V_j / nonzero(own.sum(axis=1))[:, None]
                l_old, l = l, self._gather(m, m_new, self.rescale_l, l, P_l.sum(axis=1))
                if not self.summed:
                    share = P_o @ V_j / nonzero(l)[:, None] if self.new_l else P_o @ V_j
                    O_i = O_i * l_old[:, None] if self.old_l else O_i
                    if self.pipeline == "late":
                        share, waiting = waiting, share
                    if self.pipeline == "no last":
                        O_i, share, waiting = O_i + waiting, 0, share
                    O_i = self._gather(m, m_new, self.rescale_o, O_i, share)
                if self.divide_often:
                    O_i = O_i / nonzero(l)[:, None]
                m = m_new
            kept = (m, l, O_i) if self.kept_state else None
            O_i = O_i + waiting if self.pipeline == "late" else O_i
            O[rows], L[rows] = self._finish(m, l, O_i, ~touched, visited)
        return O, L

    def _maximum(self, m, S_ij):
        if self.maximum == "none":
            return np.zeros_like(m)
        m_block = S_ij.max(axis=1)
        if self.maximum in ("own", "block"):
            return np.where(np.isneginf(m_block), m, m_block)
        return np.maximum(m, m_block)

    def _weights(self, S_ij, m_new, of):
        """Return P of a tile, for the sum "l" or for the output "o"."""
        own = self.p_against in ("own", f"own in {of}")
        m = S_ij.max(axis=1) if own else m_new
        return np.exp(S_ij - (finite(m) if self.step_guard else m)[:, None])

    def _correction(self, m, m_new, how):
        how = how if self.maximum in ("running", "block") or how == "zero" else "no"
        return correction(m, m_new, how, self.step_guard)

    def _gather(self, m, m_new, how, old, new):
        """Return what was gathered, and the share of a block, measured against the new maximum."""
        alpha = self._correction(m, m_new, how).reshape(-1, *(1,) * (old.ndim - 1))
        return alpha * (old + new) if how == "late" else alpha * old + new

    def _finish(self, m, l, O_i, empty, visited):
        if self.divide and not (self.summed or self.divide_often or self.new_l):
            O_i = O_i / (nonzero(l) if self.guard == "l" else l)[:, None]
            if self.by_log:
                O_i = np.where(np.isposinf(l)[:, None], 0, O_i)
        L_i = LSES[self.lse](m, l) / math.log(self.base)
        if self.guard == "seen":
            O_i, L_i = np.where(empty[:, None], 0, O_i), np.where(empty, self.empty_lse, L_i)
        if self.guard == "nan" or (self.guard == "visited" and visited):
            L_i = np.where(empty, np.nan, L_i)
        return O_i, L_i


@dataclass(frozen=True)
class MatrixAttention:
    """Attention with all of S at once, and a softmax that is not one of rows."""

    #: what is subtracted: a key of SHIFTS, or "unscaled": the maximum of q · k, times the scale
    shift: str = "max"
    shift_over: tuple | int | None = -1  #: the axes over which; None for all
    sum_over: tuple | int | None = -1
    masked: str = "right"  #: "late": P is set to 0 where masked, after the softmax
    #: P from the right lse, but of scores "without scale"; or exp(S) "divided" by that lse; or with
    #: an lse that is "scaled" like the scores
    from_lse: str = ""
    share: str = "all"  #: o is the share of the "last" key alone, or of the "last seen" one
    tiled = False

    def may_show(self, case):
        """Whether this can give a wrong answer on a case, as far as is seen without computing."""
        masks = ("causal", "window", "mask", "block_mask")
        masked = any(case.get(name) is not None and case.get(name) is not False for name in masks)
        return masked or self.masked == "right"

    @without_warnings
    def __call__(self, case, given):
        """Return {"o": ..., "lse": ...}."""
        right = Attention()
        seen, _, _ = right._visible(case)
        q, k, v = case["q"], case["k"], case["v"]
        group = 1 if q.ndim == 2 else q.shape[-3] // k.shape[-3]
        k, v = (x if group == 1 else np.repeat(x, group, axis=-3) for x in (k, v))
        scale = right._scale(case)
        S = scale * q @ k.swapaxes(-1, -2)
        S = S if self.masked == "late" else np.where(seen, S, -INF)
        if self.from_lse:
            lse = right(case, given)["lse"]
            P = np.exp(q @ k.swapaxes(-1, -2) - lse[..., None])
            P = np.exp(S) / lse[..., None] if self.from_lse == "divided" else P
            P = np.exp(S - scale * lse[..., None]) if self.from_lse == "scaled" else P
            return {"o": np.where(seen, P, 0) @ v, "lse": lse}
        shift = "min" if scale < 0 else "max"
        shift = shift if self.shift == "unscaled" else self.shift
        m = finite(SHIFTS[shift](S, self.shift_over))
        P = np.exp(S - m)
        l = P.sum(axis=self.sum_over, keepdims=True)
        counted = seen
        if self.share != "all":
            j = np.arange(seen.shape[1])
            last = np.where(seen, j, -1).max(axis=1, keepdims=True)
            counted = seen & (j == (last if self.share == "last seen" else len(j) - 1))
        o = np.where(counted, P, 0) / nonzero(l) @ v
        lse = np.broadcast_to(m + np.log(l), (*S.shape[:-1], 1))[..., 0]
        return {"o": o, "lse": np.where(seen.any(axis=-1) | (self.masked == "late"), lse, -INF)}


@dataclass(frozen=True)
class ColumnAttention:
    """Attention whose softmax runs over the queries, for every key by itself."""

    axis: int = -2  #: 0 goes over the batch, or the heads, where there are any
    max_axis: int | None = None  #: of the maximum, where it is another one
    guard: bool = True  #: 0 instead of 0/0 for a key that no query sees
    tiled = False

    def without_guards(self):
        """Return what becomes of it where nothing guards against keys that no query sees."""
        return [replace(self, guard=False)] if self.guard else ()

    @without_warnings
    def __call__(self, case, given):
        """Return {"o": ..., "lse": ...}; lse is right."""
        right = Attention()
        seen, _, _ = right._visible(case)
        q, k, v = case["q"], case["k"], case["v"]
        group = 1 if q.ndim == 2 else q.shape[-3] // k.shape[-3]
        k, v = (x if group == 1 else np.repeat(x, group, axis=-3) for x in (k, v))
        S = np.where(seen, right._scale(case) * q @ k.swapaxes(-1, -2), -INF)
        max_axis = self.axis if self.max_axis is None else self.max_axis
        P = np.exp(S - finite(S.max(axis=max_axis, keepdims=True)))
        l = P.sum(axis=self.axis, keepdims=True)
        P = P / (nonzero(l) if self.guard else l)
        return {"o": P @ v, "lse": right(case, given)["lse"]}


# --- what a lesson asks attention around ---------------------------------------------------------


CUTS = {  # (n, heads · d), heads -> (heads, n, d)
    "right": lambda x, heads: x.reshape(len(x), heads, -1).swapaxes(0, 1),
    "rows": lambda x, heads: x.reshape(heads, len(x), -1),
    "combs": lambda x, heads: np.moveaxis(x.reshape(len(x), -1, heads), -1, 0),
}
JOINTS = {  # (heads, n, d) -> (n, heads · d)
    "right": lambda o: o.swapaxes(0, 1).reshape(o.shape[1], -1),
    "rows": lambda o: o.reshape(o.shape[1], -1),
    "combs": lambda o: np.moveaxis(o, 0, -1).reshape(o.shape[1], -1),
}


@dataclass(frozen=True)
class TwoHeads:
    """Attention of two heads, x and 1 - x side by side, cut and joined; the first is the answer."""

    cut: str = "right"  #: a key of CUTS
    joint: str = "right"  #: a key of JOINTS
    tiled = False

    @without_warnings
    def __call__(self, case, given):
        """Return {"o": ..., "lse": ...}; lse is right."""
        right = Attention()(case, given)
        if case["q"].ndim > 2:
            return right
        packed = [np.concatenate([case[r], 1 - case[r]], axis=1) for r in ("q", "k", "v")]
        q, k, v = (CUTS[self.cut](x, 2) for x in packed)
        o = Attention()({"q": q, "k": k, "v": v}, given)["o"]
        return {**right, "o": JOINTS[self.joint](o)[:, : case["v"].shape[1]]}


@dataclass(frozen=True)
class Packed:
    """Attention of the second of four packed sequences: one row, x, none, and x - 2."""

    #: of the sequences: "right", read as "lengths", "ignored", or "one key more" at each end
    ends: str = "right"
    tiled = False

    @without_warnings
    def __call__(self, case, given):
        """Return {"o": ..., "lse": ...}; lse is right."""
        right, n = Attention()(case, given), case["q"].shape[0]
        if case["q"].ndim > 2:
            return right
        packed = {r: np.concatenate([case[r][:1] + 1, case[r], case[r] - 2]) for r in "qkv"}
        ends_q, ends_k = ([0, 1, 1 + m, 1 + m, 1 + 2 * m] for m in (n, len(case["k"])))
        if self.ends == "lengths":
            ends_q, ends_k = np.cumsum([0, *ends_q]), np.cumsum([0, *ends_k])
        if self.ends == "ignored":
            ends_q, ends_k = ([0, len(packed[r])] for r in "qk")
        o = np.zeros_like(packed["v"], shape=(len(packed["q"]), packed["v"].shape[1]))
        for rows, cols in zip(*map(itertools.pairwise, (ends_q, ends_k)), strict=True):
            rows, cols = slice(*rows), slice(cols[0], cols[1] + (self.ends == "one key more"))
            part = {"q": packed["q"][rows], "k": packed["k"][cols], "v": packed["v"][cols]}
            if len(part["q"]) and len(part["k"]):
                o[rows] = Attention()({**part, "causal": case.get("causal")}, given)["o"]
        return {**right, "o": o[1 : 1 + n]}


# --- the backward pass --------------------------------------------------------------------------


DS = {  # (P, dP, D) -> dS
    "right": lambda P, dP, D: P * (dP - D),
    "without P": lambda P, dP, D: dP - D,
    "D outside": lambda P, dP, D: P * dP - D,
    "plus": lambda P, dP, D: P * (dP + D),
    "turned": lambda P, dP, D: P * (D - dP),
    "sigmoid": lambda P, dP, D: P * (1 - P) * dP,
}


def by_key_heads(x, n_kv):
    """Return sums of (..., H_q, n, d) over the query heads h of which h // H_kv is the same."""
    total = np.zeros((*x.shape[:-3], n_kv, *x.shape[-2:]))
    for h in range(x.shape[-3]):
        total[..., kv_head("by key heads", h, x.shape[-3], n_kv), :, :] += x[..., h, :, :]
    return total


def in_groups(x, n_kv):
    """Return (..., H_q, n, d) as (..., H_kv, group, n, d): neighbours share a key head."""
    return x.reshape(*x.shape[:-3], n_kv, -1, *x.shape[-2:])


GATHERS = {  # gradients of all query heads (..., H_q, n, d), H_kv -> those of the key heads
    "sum": lambda x, n_kv: in_groups(x, n_kv).sum(axis=-3),
    "mean": lambda x, n_kv: in_groups(x, n_kv).mean(axis=-3),
    "last": lambda x, n_kv: in_groups(x, n_kv)[..., -1, :, :],
    "first": lambda x, n_kv: in_groups(x, n_kv)[..., 0, :, :],
    "first heads": lambda x, n_kv: x[..., :n_kv, :, :],
    "by key heads": by_key_heads,
    "tiled": lambda x, n_kv: x.reshape(*x.shape[:-3], -1, n_kv, *x.shape[-2:]).sum(axis=-4),
}
ROW_SUMS = {  # (P, dP, dO, O) -> D, a column or a matrix
    "right": lambda P, dP, dO, O: (dO * O).sum(axis=1, keepdims=True),
    "P": lambda P, dP, dO, O: (P * dP).sum(axis=1, keepdims=True),
    "mean": lambda P, dP, dO, O: dP.mean(axis=1, keepdims=True),
    "sum": lambda P, dP, dO, O: dP.sum(axis=1, keepdims=True),
    "all": lambda P, dP, dO, O: (P * dP).sum(keepdims=True),
    "columns": lambda P, dP, dO, O: (P * dP).sum(axis=0, keepdims=True),
}


@dataclass(frozen=True)
class Backward:
    """The gradients of attention, with P computed again."""

    d_term: bool = True
    #: D = rowsum(dO * O): "right"; rowsum(P * dP) with its own "P", or that of each "tile" alone;
    #: the plain "mean" or "sum" of a row of dP; the sum over the "columns" of P * dP, or over "all"
    d_from: str = "right"
    #: P = exp(S - lse): "right"; exp(S - row maximum), "not divided"; exp(S) / lse, "divided by
    #: lse"; exp(S) / Σ exp(S), "no maximum"; or a softmax of each row of a "tile", or of "columns"
    weights: str = "right"
    #: m, lse and O are the right ones, of the forward pass, whatever `scale` and `sees` make of S
    saved: bool = False
    scale_dq: float = 1  #: how many times dq and dk are multiplied by the scale
    scale_dk: float = 1
    scale: str = "right"  #: as in `Attention`
    #: in P = exp(S - lse): "missing" in S, or "in both" of S and lse; or lse is "scaled" like S
    scale_p: str = "right"
    ds: str = "right"  #: a key of DS
    dk_of: str = "dS"  #: "P" in its place
    dv_of: str = "P"  #: "dS" in its place
    times: float = 1  #: what all three gradients are multiplied by
    rows_last: str = ""  #: "dk", "dv" or "dk dv" keep the share of the last block of queries only
    dq_last: str = ""  #: dq keeps the share of the "last" block, or of the last one "visited", only
    tail_keys: str = "kept"  #: "kept" or "dropped"
    tail_queries: str = "kept"
    sees: str = "right"  #: a rule of `positions`
    heads: str = "grouped"  #: which key head a query head reads; as in `Attention`
    gather: str = "sum"  #: a key of GATHERS
    guard: bool = True  #: P = 0 in rows that see nothing
    skip: bool = False  #: tiles without a visible pair are not visited

    def without_guards(self):
        """Return what becomes of it where nothing guards against rows that see nothing."""
        if not self.guard:
            return ()
        return [replace(self, guard=False, skip=skip) for skip in (False, True)]

    @property
    def tiled(self):
        """Whether the size of a block makes a difference."""
        last = bool(self.dq_last or self.rows_last)
        return last or self.skip or self.weights == "tile" or self.least_block > 1

    @property
    def least_block(self):
        """The smallest block worth a guess: with blocks of one this is right, or another fault."""
        cut = self.tail_keys != "kept" or self.tail_queries != "kept"
        return 2 if cut or "tile" in (self.d_from, self.weights) else 1

    def may_show(self, case):
        """Whether this can give a wrong answer on a case, as far as is seen without computing."""
        if self == Backward(heads=self.heads, gather=self.gather):
            return case["q"].ndim > 2 and case["q"].shape[-3] != case["k"].shape[-3]
        if self == Backward(sees=self.sees, saved=self.saved, guard=self.guard):
            return bool(case.get("causal"))
        return True

    @without_warnings
    def __call__(self, case, given):
        """Return {"dq": ..., "dk": ..., "dv": ...}."""
        do, q, k, v = (case[name] for name in ("do", "q", "k", "v"))
        if q.ndim == 2:
            return dict(zip(("dq", "dk", "dv"), self._head(case, given, do, q, k, v), strict=True))
        n_kv, dq = k.shape[-3], np.zeros_like(q)
        dk, dv = (np.zeros((*q.shape[:-2], *x.shape[-2:])) for x in (k, v))
        for index in np.ndindex(q.shape[:-2]):
            kv = (*index[:-1], kv_head(self.heads, index[-1], q.shape[-3], n_kv))
            dq[index], dk[index], dv[index] = self._head(
                case, given, do[index], q[index], k[kv], v[kv]
            )
        gather = GATHERS[self.gather]
        return {"dq": dq, "dk": gather(dk, n_kv), "dv": gather(dv, n_kv)}

    def _head(self, case, given, dO, Q, K, V):
        scale, causal = Attention(scale=self.scale)._scale(case), case.get("causal", False)
        seen = positions(len(Q), len(K), self.sees, causal, None)
        S = scale * Q @ K.T
        forward = S, seen
        if self.saved:
            of_all = positions(len(Q), len(K), "right", causal, None)
            forward = Attention()._scale(case) * Q @ K.T, of_all
        P_right, m, lse = self._softmax(*forward)
        if self.scale_p in ("missing", "in both"):
            S = Q @ K.T
        if self.scale_p == "in both":
            _, m, lse = self._softmax(S, seen)
        S = np.where(seen, S, -INF)
        P = self._weights(S, m, lse * (scale if self.scale_p == "scaled" else 1), given)
        if self.guard:
            P[np.isneginf(m)] = 0
        visited = self._visited(seen, given)
        P = np.where(visited & self._kept(seen, given), P, 0)
        dP = dO @ V.T
        D = self._row_sums(P, dP, dO, P_right @ V, given)
        dS = DS[self.ds](P, dP, D) if self.d_term else P * dP
        dQ = np.where(self._lasting(visited, given), dS, 0) if self.dq_last else dS
        dQ = dQ @ K * scale**self.scale_dq
        of_K, of_V = P if self.dk_of == "P" else dS, dS if self.dv_of == "dS" else P
        last = np.arange(len(Q))[:, None] >= (len(Q) - 1) // given["block_q"] * given["block_q"]
        of_K = np.where(last, of_K, 0) if "dk" in self.rows_last else of_K
        of_V = np.where(last, of_V, 0) if "dv" in self.rows_last else of_V
        dK = of_K.T @ Q * scale**self.scale_dk
        return self.times * dQ, self.times * dK, self.times * of_V.T @ dO

    def _softmax(self, S, seen):
        """Return P, the row maxima and the lse of what is seen of S."""
        S = np.where(seen, S, -INF)
        m = S.max(axis=1, initial=-INF)
        e = np.exp(S - finite(m)[:, None])
        l = e.sum(axis=1)
        return e / nonzero(l)[:, None], m, m + np.log(l)

    def _weights(self, S, m, lse, given):
        """Return P of masked scores."""
        if self.weights == "divided by lse":
            return np.exp(S) / lse[:, None]
        if self.weights == "no maximum":
            return np.exp(S) / np.exp(S).sum(axis=1, keepdims=True)
        if self.weights == "columns":
            return self._softmax(S.T, True)[0].T
        if self.weights == "tile":
            cut = blocks(S.shape[1], given["block_k"])
            return np.concatenate([self._softmax(S[:, cols], True)[0] for cols in cut], axis=1)
        return np.exp(S - (lse if self.weights == "right" else m)[:, None])

    def _row_sums(self, P, dP, dO, O, given):
        """Return D: a column, or as a matrix where it differs from tile to tile."""
        if self.d_from != "tile":
            return ROW_SUMS[self.d_from](P, dP, dO, O)
        D = np.zeros_like(P)
        for cols in blocks(P.shape[1], given["block_k"]):
            D[:, cols] = (P * dP)[:, cols].sum(axis=1, keepdims=True)
        return D

    def _kept(self, seen, given):
        """Return the pairs that are not in a tail that is dropped."""
        kept = np.ones_like(seen)
        if self.tail_queries == "dropped":
            kept[len(seen) - len(seen) % given["block_q"] :] = False
        if self.tail_keys == "dropped":
            kept[:, seen.shape[1] - seen.shape[1] % given["block_k"] :] = False
        return kept

    def _visited(self, seen, given):
        """Return the pairs in tiles that are visited."""
        if not (self.skip or self.dq_last == "visited"):
            return np.ones_like(seen)
        visited = np.zeros_like(seen)
        for rows in blocks(len(seen), given["block_q"]):
            for cols in blocks(seen.shape[1], given["block_k"]):
                visited[rows, cols] = seen[rows, cols].any()
        return visited

    def _lasting(self, visited, given):
        """Return the pairs whose share of dq is not overwritten by a later block."""
        block = np.arange(visited.shape[1]) // given["block_k"]
        last = np.where(visited, block, -1).max(axis=1, initial=-1)
        return block == last[:, None]


# --- counts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockSizes:
    """The paper's block sizes, B_c = ⌈M/4d⌉ and B_r = min(B_c, d)."""

    swapped: bool = False
    floor: bool = False  #: rounded down, at least 1
    whole: Callable | None = None  #: M/4d -> whole number, in place of rounding it up
    parts: float = 4  #: M/parts d
    times_d: bool = False  #: M/parts · d, from left to right
    capped: str = "rows"  #: by d: "rows", "none", "both", or "up" (the larger of the two)
    tiled = False

    def __call__(self, case, given):
        """Return {"sizes": (B_r, B_c)}."""
        M, d = case["sram_elements"], case["d"]
        share = M / self.parts * d if self.times_d else M / (self.parts * d)
        B_c = max(1, math.floor(share)) if self.floor else (self.whole or math.ceil)(share)
        B_r = B_c if self.capped == "none" else min(B_c, d)
        B_r = max(B_c, d) if self.capped == "up" else B_r
        B_c = min(B_c, d) if self.capped == "both" else B_c
        return {"sizes": (B_c, B_r) if self.swapped else (B_r, B_c)}


QUERY_BLOCKS = {  # (n_q, B_r, B_c) -> T_r
    "right": lambda n_q, B_r, B_c: -(-n_q // B_r),
    "floor": lambda n_q, B_r, B_c: n_q // B_r,
    "divided": lambda n_q, B_r, B_c: n_q / B_r,
    "one more": lambda n_q, B_r, B_c: n_q // B_r + 1,
    "by columns": lambda n_q, B_r, B_c: -(-n_q // B_c),
}


@dataclass(frozen=True)
class Traffic:
    """The traffic of FlashAttention-2, in elements."""

    keys_once: bool = False  #: K and V are read once, not once for every query block
    query_blocks: str = "right"  #: how many there are: a key of QUERY_BLOCKS
    query_reloaded: bool = False  #: Q_i is read again for every key block
    keys: str = "rows"  #: K and V are read once per block of "rows", or of "columns", or "row"
    values: bool = True  #: V is read
    lse: float = 1  #: numbers stored per row besides O
    output: bool = True  #: O is stored
    output_read: bool = False  #: O is read once
    width: str = ""  #: d stands where d_v belongs: in "loads", in "stores", or in "both"
    full: str = ""  #: the last, shorter block counts as full: of "keys", of "queries", or of "both"
    times: int = 1  #: bytes per number
    swapped: bool = False
    tiled = False

    def __call__(self, case, given):
        """Return {"traffic": (loads, stores)}."""
        n_q, n_k, d, d_v = (case[name] for name in ("n_q", "n_k", "d", "d_v"))
        B_r, B_c = given["block_q"], given["block_k"]
        T_r = QUERY_BLOCKS[self.query_blocks](n_q, B_r, B_c)
        T_c = -(-n_k // B_c)
        n_q = T_r * B_r if self.full in ("queries", "both") else n_q
        n_k = T_c * B_c if self.full in ("keys", "both") else n_k
        loaded, stored = (
            d if self.width in (where, "both") else d_v for where in ("loads", "stores")
        )
        passes = {"rows": T_r, "columns": T_c, "row": n_q}[self.keys]
        loads = n_q * d * (T_c if self.query_reloaded else 1)
        loads += n_k * (d + loaded * self.values) * (1 if self.keys_once else passes)
        loads += n_q * loaded * self.output_read
        stores = n_q * (stored * self.output + self.lse)
        counts = (self.times * loads, self.times * stores)
        return {"traffic": counts[::-1] if self.swapped else counts}


@dataclass(frozen=True)
class FirstTraffic:
    """The traffic of FlashAttention-1, in elements, without the first stores of O, l and m."""

    tiled = False

    def __call__(self, case, given):
        """Return {"traffic": (loads, stores)}."""
        n_q, n_k, d, d_v = (case[name] for name in ("n_q", "n_k", "d", "d_v"))
        T_c, state = -(-n_k // given["block_k"]), n_q * (d_v + 2)
        return {"traffic": (n_k * (d + d_v) + T_c * (n_q * d + state), T_c * state)}
