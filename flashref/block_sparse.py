"""Block-sparse attention: FlashAttention-1 (arXiv:2205.14135), Algorithm 5; and block patterns.

Algorithm 5 is Algorithm 1 in which whole tiles may be absent: one `if` in the loop of `flash1`, so
there is no second loop here. Unlike a mask, which hides pairs, an absent tile is never computed and
its Q, O, l and m never move: traffic falls to Θ(Nd + N²d²s/M), s being the fraction of tiles kept
(Proposition 4). The result is exact attention for the mask that the blocks spell out.
"""

import numpy as np

from flashref import flash1, heads, io_model
from flashref.heads import Options, Tiling
from flashref.inputs import count
from flashref.scores import need_block_mask


def block_sparse_attention(
    q, k, v, block_mask, *, block_q, block_k, return_lse=False, scale=None, causal=False,
    window=None, mask=None, bias=None, alibi_slopes=None, softcap=None, dropout_p=0.0, seed=None,
    memory=None,
):  # fmt: skip
    """Return attention in which query block i sees key block j only where block_mask[i, j].

    Moves what `flash_attention_1` moves, counted over the tiles that are there
    (`io_model.block_sparse_traffic`).

    Parameters
    ----------
    q, k, v : arrays
        As in `standard_attention`.
    block_mask : bool array (T_r, T_c), or (..., H_q, T_r, T_c)
        T_r = ⌈n_q / block_q⌉ by T_c = ⌈n_k / block_k⌉; True = the tile is there.
    block_q, block_k : int
        Rows and columns of a tile; they need not divide n_q and n_k.
    return_lse : bool
        Whether to return lse too.
    scale, causal, window, mask, bias, alibi_slopes, softcap, dropout_p, seed, memory
        As in `standard_attention`.

    Returns
    -------
    o : array (..., H_q, n_q, d_v)
        0 for a query without tiles.
    lse : array (..., H_q, n_q)
        With return_lse: as in `standard_attention`; -inf for a query without tiles.

    Raises
    ------
    TypeError, ValueError
        Before any work, naming the argument, its value, and what would be right.

    Notes
    -----
    What must be in range is as in `flash_attention_1`.

    Examples
    --------
    >>> import numpy as np
    >>> q, k = np.arange(3.0)[:, None], np.arange(5.0)[:, None]
    >>> tiles = np.array([[True, False, True], [False, False, False]])
    >>> print(block_sparse_attention(q, k, k, tiles, block_q=2, block_k=2).ravel().round(6))
    [1.666667 3.791571 0.      ]
    """
    options = Options(
        scale, causal, window, mask, bias, alibi_slopes, softcap, dropout_p, seed, memory
    )
    block_q, block_k = count("block_q", block_q), count("block_k", block_k)
    need_block_mask(block_mask)
    tiling = Tiling(io_model.forward_tiles, block_q, block_k, block_mask)
    return heads.forward(flash1.forward_head, q, k, v, options, tiling, return_lse)


def block_sparse_attention_backward(
    do, q, k, v, o, lse, block_mask, *, block_q, block_k, scale=None, causal=False,
    window=None, mask=None, bias=None, alibi_slopes=None, softcap=None, dropout_p=0.0, seed=None,
    memory=None,
):  # fmt: skip
    """Return the gradients of block-sparse attention: Algorithm 4 without the absent tiles.

    Parameters
    ----------
    do : array (..., H_q, n_q, d_v)
        Gradient of the loss with respect to o.
    q, k, v : arrays
        As in `standard_attention`.
    o, lse : arrays (..., H_q, n_q, d_v) and (..., H_q, n_q)
        What the forward pass returned.
    block_mask, block_q, block_k
        As in `block_sparse_attention`.
    scale, causal, window, mask, bias, alibi_slopes, softcap, dropout_p, seed, memory
        As in `standard_attention`.

    Returns
    -------
    dq, dk, dv : arrays of the shapes of q, k and v
        0 for queries, keys and values without tiles.

    Raises
    ------
    TypeError, ValueError
        Before any work, naming the argument, its value, and what would be right.

    Examples
    --------
    >>> import numpy as np
    >>> q, k = np.arange(3.0)[:, None], np.arange(5.0)[:, None]
    >>> tiles = np.array([[True, False, True], [False, False, False]])
    >>> o, lse = block_sparse_attention(q, k, k, tiles, block_q=2, block_k=2, return_lse=True)
    >>> dq, dk, dv = block_sparse_attention_backward(
    ...     np.ones((3, 1)), q, k, k, o, lse, tiles, block_q=2, block_k=2)
    >>> print(dq.ravel().round(6))
    [2.888889 0.650436 0.      ]
    """
    options = Options(
        scale, causal, window, mask, bias, alibi_slopes, softcap, dropout_p, seed, memory
    )
    block_q, block_k = count("block_q", block_q), count("block_k", block_k)
    need_block_mask(block_mask)
    tiling = Tiling(io_model.fa1_backward_tiles, block_q, block_k, block_mask)
    return heads.backward(flash1.backward_head, do, q, k, v, dict(o=o, lse=lse), options, tiling)


# Patterns: which of t x t tiles are there. FA1 uses the butterfly of Pixelated Butterfly (Dao, Chen
# et al., 2021); local and strided are Sparse Transformer's (Child et al., 2019); global + window
# and random are Longformer's (Beltagy et al., 2020) and BigBird's (Zaheer et al., 2020).


def local_pattern(t, width=1):
    """Return the t x t block mask in which a block sees its neighbours up to `width` away.

    Parameters
    ----------
    t : int
        Blocks on each side.
    width : int
        Blocks seen to the left and to the right.

    Returns
    -------
    block_mask : bool array (t, t)

    Examples
    --------
    >>> print(local_pattern(4).astype(int))
    [[1 1 0 0]
     [1 1 1 0]
     [0 1 1 1]
     [0 0 1 1]]
    """
    i, j = _positions(t)
    return abs(i - j) <= count("width", width, least=0)


def strided_pattern(t, stride):
    """Return the t x t block mask in which a block sees every `stride`-th block from its own.

    Parameters
    ----------
    t, stride : int
        Blocks on each side, and the distance between seen blocks.

    Returns
    -------
    block_mask : bool array (t, t)

    Examples
    --------
    >>> print(strided_pattern(4, 2).astype(int))
    [[1 0 1 0]
     [0 1 0 1]
     [1 0 1 0]
     [0 1 0 1]]
    """
    i, j = _positions(t)
    return (i - j) % count("stride", stride) == 0


def butterfly_pattern(t):
    """Return the t x t block mask in which i sees itself and every i XOR 2^k: 1 + log2 t per row.

    Parameters
    ----------
    t : int
        Blocks on each side. Where it is no power of two, partners beyond t are left out.

    Returns
    -------
    block_mask : bool array (t, t)

    Examples
    --------
    >>> print(butterfly_pattern(4).astype(int))
    [[1 1 1 0]
     [1 1 0 1]
     [1 0 1 1]
     [0 1 1 1]]
    """
    i, j = _positions(t)
    apart = i ^ j
    return apart & (apart - 1) == 0  # 0, or a single bit set


def global_window_pattern(t, n_global=1, width=1):
    """Return the t x t block mask of a local pattern whose first blocks see, and are seen by, all.

    Parameters
    ----------
    t : int
        Blocks on each side.
    n_global : int
        First blocks that see everything and that everything sees.
    width : int
        As in `local_pattern`.

    Returns
    -------
    block_mask : bool array (t, t)

    Examples
    --------
    >>> print(global_window_pattern(5).astype(int))
    [[1 1 1 1 1]
     [1 1 1 0 0]
     [1 1 1 1 0]
     [1 0 1 1 1]
     [1 0 0 1 1]]
    """
    i, j = _positions(t)
    n_global = count("n_global", n_global, least=0)
    return local_pattern(t, width) | (i < n_global) | (j < n_global)


def random_pattern(t, per_row, seed):
    """Return the t x t block mask of the diagonal and `per_row` other blocks of each row at random.

    Parameters
    ----------
    t, per_row : int
        Blocks on each side; blocks per row beside the diagonal, fewer than t.
    seed : int
        At least 0; of NumPy's default generator.

    Returns
    -------
    block_mask : bool array (t, t)

    Examples
    --------
    >>> print(random_pattern(8, per_row=2, seed=0).sum(axis=1))
    [3 3 3 3 3 3 3 3]
    """
    i, j = _positions(t)
    per_row = count("per_row", per_row, least=0)
    if per_row >= t:
        raise ValueError(f"per_row={per_row} must be below {t=}: a row has {t - 1} other blocks")
    order = np.random.default_rng(count("seed", seed, least=0)).random((t, t))
    order[i == j] = -1  # the diagonal comes first, then the others by lot
    return order.argsort(axis=1).argsort(axis=1) <= per_row


def _positions(t):
    """Return block numbers i (a column) and j (a row)."""
    i = np.arange(count("t", t))
    return i[:, None], i
