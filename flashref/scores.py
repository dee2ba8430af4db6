"""The scores of one tile: scale -> softcap -> bias, ALiBi -> mask, and the way back.

FlashAttention-1 (arXiv:2205.14135) app. B.3, Algorithm 2 lines 10-14; FlashAttention-2
(arXiv:2307.08691) §3.1.1 for the tiles that causal masking leaves out. Here lives what every mask,
window, bias and cap *means*; the tile loops know none of it.

A pair (i, j) that is not seen contributes exactly nothing, whatever its arrays hold. Its score is
-inf and its P is 0; since 0 * NaN is NaN, products leave unseen pairs out where an operand is not
finite.
"""

import copy
import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashref.dropout import keep_tile
from flashref.inputs import bool_array, count, is_integer, require
from flashref.memory import DIRECT
from flashref.softmax import blocks, length, seen_product

EMPTY, PARTIAL, FULL = 0, 1, 2  #: no pair of the tile is seen; some; all


def check_causal(causal):
    """Return causal as True, False or "top-left", or raise."""
    if isinstance(causal, bool | np.bool_):
        return bool(causal)
    ok = isinstance(causal, str) and causal == "top-left"
    require(ok, f'causal={causal!r} must be True, False or "top-left"')
    return causal


def check_window(window):
    """Return window, None or a pair of sides, or raise."""
    if window is None:
        return None
    pair = isinstance(window, tuple | list) and len(window) == 2
    ok = pair and all(side is None or (is_integer(side) and side >= 0) for side in window)
    rule = "a pair (left, right) of integers of at least 0, or None for no limit on that side"
    require(ok, f"window={window!r} must be {rule}")
    return tuple(None if side is None else int(side) for side in window)


def check_block_mask(block_mask, n_q, n_k, block_q, block_k):
    """Return block_mask as a boolean array whose last axes count the tiles, or raise."""
    block_mask = bool_array("block_mask", block_mask, " (the tile is there)")
    tiles = (-(-n_q // block_q), -(-n_k // block_k))
    require(
        block_mask.shape[-2:] == tiles,
        f"block_mask has shape {block_mask.shape}; {n_q} queries and {n_k} keys in blocks of "
        f"{block_q} x {block_k} ask for {tiles}",
    )
    return block_mask


def need_block_mask(block_mask):
    """Refuse None, which elsewhere says that all tiles are there."""
    if block_mask is None:
        raise TypeError(
            "block_mask=None must be a boolean array (T_r, T_c), True = the tile is there"
        )


def offset(n_q, n_k, causal):
    """Return off: query i stands at key position i + off (bottom-right unless "top-left")."""
    return 0 if causal == "top-left" else n_k - n_q


def reach(n_q, n_k, causal, window):
    """Return (left, right): query i sees the keys from i + off - left to i + off + right."""
    left, right = (None, None) if window is None else window
    left = n_q + n_k if left is None else left  # farther than any key is away
    right = n_q + n_k if right is None else right
    return left, min(right, 0) if causal else right


def tile_kinds(
    n_q, n_k, block_q, block_k, *, causal=False, window=None, mask=None, block_mask=None
):
    """Return for each tile whether none, some or all of its pairs are seen.

    Parameters
    ----------
    n_q, n_k, block_q, block_k : int
        Queries and keys, and the rows and columns of a tile.
    causal, window
        As in `standard_attention`.
    mask : bool array (n_q or 1, n_k or 1), optional
        True = seen.
    block_mask : bool array (T_r, T_c), optional
        True = the tile is there.

    Returns
    -------
    kinds : int8 array (T_r, T_c)
        EMPTY, PARTIAL or FULL.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, its value, and what would be right.

    Examples
    --------
    >>> print(tile_kinds(8, 8, 2, 4, causal=True))
    [[1 0]
     [1 0]
     [2 1]
     [2 1]]
    """
    n_q, n_k = count("n_q", n_q, least=0), count("n_k", n_k, least=0)
    block_q, block_k = count("block_q", block_q), count("block_k", block_k)
    causal, window = check_causal(causal), check_window(window)
    if mask is not None:
        mask = bool_array("mask", mask)
        fits = mask.ndim == 2 and mask.shape[0] in (1, n_q) and mask.shape[1] in (1, n_k)
        require(fits, f"mask has shape {mask.shape}; give ({n_q} or 1, {n_k} or 1)")
    if block_mask is not None:
        block_mask = check_block_mask(block_mask, n_q, n_k, block_q, block_k)
        shape = block_mask.shape
        require(len(shape) == 2, f"block_mask has shape {shape}; one head's has {shape[-2:]}")
    return _tile_kinds(n_q, n_k, block_q, block_k, causal, window, mask, block_mask)


def _tile_kinds(n_q, n_k, block_q, block_k, causal, window, mask, block_mask):
    """Return what `tile_kinds` does, of arguments that are checked."""
    left, right = reach(n_q, n_k, causal, window)
    first_row, first_col = np.arange(0, n_q, block_q)[:, None], np.arange(0, n_k, block_k)
    last_row = np.minimum(first_row + block_q, n_q) - 1
    last_col = np.minimum(first_col + block_k, n_k) - 1
    # j - i of a tile takes every value from `low` to `high`, its corners
    low = first_col - last_row - offset(n_q, n_k, causal)
    high = last_col - first_row - offset(n_q, n_k, causal)
    some, all_ = (low <= right) & (high >= -left), (high <= right) & (low >= -left)
    if mask is not None and some.size:
        some = some & _per_tile(np.logical_or, mask, first_row[:, 0], first_col)
        all_ = all_ & _per_tile(np.logical_and, mask, first_row[:, 0], first_col)
    kinds = np.where(all_, FULL, np.where(some, PARTIAL, EMPTY)).astype(np.int8)
    return kinds if block_mask is None else np.where(block_mask, kinds, np.int8(EMPTY))


def _per_tile(ufunc, mask, first_row, first_col):
    """Reduce a mask over each tile; an axis of length 1 stands for every row or column."""
    if len(mask) > 1:
        mask = ufunc.reduceat(mask, first_row, axis=0)
    return ufunc.reduceat(mask, first_col, axis=1) if mask.shape[1] > 1 else mask


@dataclass
class Scores:
    """How one head scores its pairs, and how its rows and columns are cut into tiles."""

    n_q: int
    n_k: int
    block_q: int
    block_k: int
    scale: float
    causal: bool | str = False
    window: tuple | None = None
    mask: np.ndarray | None = None  # (n_q or 1, n_k or 1)
    bias: np.ndarray | None = None  # (n_q or 1, n_k or 1), in the dtype of Q
    slope: float | None = None  # ALiBi
    softcap: float | None = None
    dropout_p: float = 0.0
    seed: int = 0
    head: int = 0
    block_mask: np.ndarray | None = None  # (T_r, T_c)
    hbm: Any = DIRECT
    buffers: dict = field(default_factory=dict)  # of this thread: a fresh tile costs page faults
    kinds: np.ndarray = field(init=False)

    def __post_init__(self):
        """Cut rows and columns into blocks and sort the tiles into empty, partial and full."""
        self.row_blocks = blocks(self.n_q, self.block_q)
        self.col_blocks = blocks(self.n_k, self.block_k)
        self.off = offset(self.n_q, self.n_k, self.causal)
        self.left, self.right = reach(self.n_q, self.n_k, self.causal, self.window)
        sizes = (self.n_q, self.n_k, self.block_q, self.block_k)
        self.kinds = _tile_kinds(*sizes, self.causal, self.window, self.mask, self.block_mask)

    def by_rows(self):
        """Return one `Scores` per block of rows: work that may run at the same time."""
        parts = []
        for rows in self.row_blocks:
            part = copy.copy(self)
            part.row_blocks = [rows]
            parts.append(part)
        return parts

    def kind(self, rows, cols):
        """Return EMPTY, PARTIAL or FULL for the tile that starts at these rows and columns."""
        return self.kinds[rows.start // self.block_q, cols.start // self.block_k]

    def empty(self, rows, cols):
        """Return whether no pair of the tile is seen, so that it can be skipped."""
        return self.kind(rows, cols) == EMPTY

    def tile(self, rows, cols):
        """Return the `Tile` of these rows and columns; a full one pays no mask."""
        return Tile(self, rows, cols, masked=self.kind(rows, cols) != FULL)

    def whole(self):
        """Return all of S as one `Tile`."""
        return Tile(self, slice(0, self.n_q), slice(0, self.n_k), masked=True)


class Tile:
    """The scores of one tile, its unseen pairs and its dropout: what `Scores` means there."""

    def __init__(self, scores, rows, cols, masked):
        self.rule, self.rows, self.cols = scores, rows, cols
        self.bias = None if scores.bias is None else self._load("bias", scores.bias)
        self.unseen = self._unseen(masked)
        self.uncap = None  # derivative of the softcap, made with the scores

    def scores(self, Q_i, K_j):
        """Return S_ij: scaled, capped, biased, and -inf where a pair is not seen."""
        rule = self.rule
        S_ij = self.outer("S", rule.scale * Q_i, K_j)
        if rule.softcap:
            S_ij /= rule.softcap
            np.tanh(S_ij, out=S_ij)
            self.uncap = 1 - S_ij * S_ij
            S_ij *= rule.softcap
        if self.bias is not None:
            S_ij += self.bias
        if rule.slope is not None:
            i, j = (at.astype(S_ij.dtype) for at in self._positions())
            distance = i - j
            S_ij -= np.multiply(np.abs(distance, out=distance), rule.slope, out=distance)
        return self.clear(S_ij, -np.inf)

    def outer(self, name, A_i, B_j):
        """Return A_i B_j^T, a tile of scores or of their gradients, in a buffer of this name."""
        shape, buffers = (len(A_i), len(B_j)), self.rule.buffers
        size = shape[0] * shape[1]
        if name not in buffers or buffers[name].size < size:
            buffers[name] = np.empty(size, A_i.dtype)
        return np.matmul(A_i, B_j.T, out=buffers[name][:size].reshape(shape))

    def drop(self, P_ij):
        """Return P_ij * Z_ij, with Z = keep / (1 - p) made again from the positions."""
        rule = self.rule
        if not rule.dropout_p:
            return P_ij
        keep = keep_tile(rule.seed, rule.head, self.rows, self.cols, rule.dropout_p)
        return P_ij * (keep * P_ij.dtype.type(1 / (1 - rule.dropout_p)))

    def backward(self, dS_ij):
        """Return the gradient before softcap and mask: that of scale * Q_i K_j^T, over dS_ij."""
        if self.uncap is not None:
            dS_ij *= self.uncap
        return self.clear(dS_ij)

    def clear(self, A_ij, value=0):
        """Return A_ij with `value` at the unseen pairs, written in place."""
        if self.unseen is not None:
            np.copyto(A_ij, value, where=self.unseen)
        return A_ij

    def product(self, A_ij, B_j):
        """Return A_ij B_j over the seen pairs only; A_ij is 0 at the others."""
        return seen_product(A_ij, B_j, self.unseen)

    def product_t(self, A_ij, B_i):
        """Return A_ij^T B_i over the seen pairs only; A_ij is 0 at the others."""
        return seen_product(A_ij.T, B_i, None if self.unseen is None else self.unseen.T)

    def _unseen(self, masked):
        """Return the pairs of this tile that their query may not see, or None if there are none."""
        rule, parts = self.rule, []
        if masked:
            i, j = self._positions()
            parts += [j > i + rule.right] if rule.right < rule.n_q + rule.n_k else []
            parts += [j < i - rule.left] if rule.left < rule.n_q + rule.n_k else []
            parts += [] if rule.mask is None else [~self._load("mask", rule.mask)]
        if self.bias is not None:
            parts += [np.isneginf(self.bias)]
        if not any(part.any() for part in parts):
            return None
        unseen = functools.reduce(np.logical_or, parts)
        return np.broadcast_to(unseen, (length(self.rows), length(self.cols)))

    def _positions(self):
        """Return where the queries (a column) and the keys (a row) stand among the keys."""
        i = np.arange(self.rows.start, self.rows.stop)[:, None] + self.rule.off
        return i, np.arange(self.cols.start, self.cols.stop)

    def _load(self, name, array):
        """Load this tile of a mask or bias; an axis of length 1 is not cut."""
        whole = slice(None)
        n_rows, n_cols = array.shape
        tile = (self.rows if n_rows > 1 else whole, self.cols if n_cols > 1 else whole)
        return self.rule.hbm.load(name, array, tile)


def alibi_slopes(n_heads):
    """Return the slope of each head in ALiBi (Press, Smith & Lewis, 2022, arXiv:2108.12409).

    Parameters
    ----------
    n_heads : int
        Number of query heads.

    Returns
    -------
    slopes : float64 array (n_heads,)
        2^(-8i/p) for i = 1…p, p being the largest power of two up to n_heads; then every second
        slope of 2p heads, as many as are missing.

    Raises
    ------
    TypeError, ValueError
        If n_heads is not an integer of at least 1.

    Examples
    --------
    >>> print(alibi_slopes(6))
    [0.25       0.0625     0.015625   0.00390625 0.5        0.125     ]
    """
    n_heads = count("n_heads", n_heads)
    p = 1 << (n_heads.bit_length() - 1)
    exponents = [-8 * i / p for i in range(1, p + 1)]
    exponents += [-8 * i / (2 * p) for i in range(1, 2 * (n_heads - p), 2)]
    return 2.0 ** np.array(exponents)
