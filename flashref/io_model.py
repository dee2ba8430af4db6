"""What the algorithms must cost: slow-memory traffic, fast memory and FLOPs in closed form.

FlashAttention-1 (arXiv:2205.14135) Theorem 2 and Proposition 4 say how traffic grows; these are the
exact counts behind them, element for element what `Memory` measures (the tests compare). They hold
for one head. T_r = ⌈n_q/B_r⌉ and T_c = ⌈n_k/B_c⌉; t is the sum of the rows of all visited tiles
(T_c n_q when none is skipped) and u the sum of their columns (T_r n_k).
"""

from dataclasses import dataclass

from flashref.inputs import count, finite_number, require
from flashref.scores import EMPTY, need_block_mask, tile_kinds
from flashref.softmax import blocks, length


def standard_traffic(n_q, n_k, d, d_v):
    """Return (loads, stores) of Algorithm 0: S and P go out to slow memory and come back.

    Parameters
    ----------
    n_q, n_k, d, d_v : int
        Queries, keys, and the columns of q and k, and of v.

    Returns
    -------
    loads, stores : int
        Elements.

    Examples
    --------
    >>> standard_traffic(64, 64, 16, 16)
    (11264, 9216)
    """
    n_q, n_k, d, d_v = _sizes(n_q, n_k, d, d_v)
    return (n_q + n_k) * d + 2 * n_q * n_k + n_k * d_v, 2 * n_q * n_k + n_q * d_v


def standard_backward_traffic(n_q, n_k, d, d_v):
    """Return (loads, stores) of Algorithm 3, with P as saved by the forward pass.

    Parameters
    ----------
    n_q, n_k, d, d_v : int
        Queries, keys, and the columns of q and k, and of v.

    Returns
    -------
    loads, stores : int
        Elements.

    Examples
    --------
    >>> standard_backward_traffic(64, 64, 16, 16)
    (25600, 11264)
    """
    n_q, n_k, d, d_v = _sizes(n_q, n_k, d, d_v)
    loads = 5 * n_q * n_k + n_q * (d + 2 * d_v) + n_k * (d + d_v)
    return loads, 2 * n_q * n_k + n_q * d + n_k * (d + d_v)


def fa1_traffic(n_q, n_k, d, d_v, *, block_q, block_k, causal=False, window=None):
    """Return (loads, stores) of FlashAttention-1, Algorithm 1.

    Parameters
    ----------
    n_q, n_k, d, d_v : int
        Queries, keys, and the columns of q and k, and of v.
    block_q, block_k : int
        Rows and columns of a tile.
    causal, window
        As in `standard_attention`; tiles in which no pair is seen are skipped.

    Returns
    -------
    loads, stores : int
        Elements. Only block_k matters without a mask: Q, O, l and m pass by T_c times.

    Examples
    --------
    >>> fa1_traffic(64, 64, 16, 16, block_q=16, block_k=32)
    (6400, 3456)
    """
    *sizes, t, _ = _visited(n_q, n_k, d, d_v, block_q, block_k, causal, window)
    return _fa1(*sizes, t)


def fa1_backward_traffic(n_q, n_k, d, d_v, *, block_q, block_k, causal=False, window=None):
    """Return (loads, stores) of FlashAttention-1's backward, Algorithm 4, one lse for l and m.

    Parameters
    ----------
    n_q, n_k, d, d_v, block_q, block_k, causal, window
        As in `fa1_traffic`.

    Returns
    -------
    loads, stores : int
        Elements.

    Examples
    --------
    >>> fa1_backward_traffic(64, 64, 16, 16, block_q=16, block_k=32)
    (10368, 7168)
    """
    *sizes, t, _ = _visited(n_q, n_k, d, d_v, block_q, block_k, causal, window)
    return _fa1_backward(*sizes, t)


def block_sparse_traffic(
    n_q, n_k, d, d_v, *, block_mask, block_q, block_k, causal=False, window=None
):
    """Return (loads, stores) of block-sparse attention, FlashAttention-1's Algorithm 5.

    Parameters
    ----------
    n_q, n_k, d, d_v, block_q, block_k, causal, window
        As in `fa1_traffic`.
    block_mask : bool array (T_r, T_c)
        True = the tile is there.

    Returns
    -------
    loads, stores : int
        Elements. K and V are loaded and O, l, m initialised for absent tiles too: a floor that no
        sparsity lowers (Proposition 4's Nd).

    Examples
    --------
    >>> import numpy as np
    >>> diagonal = np.eye(4, dtype=bool)
    >>> block_sparse_traffic(64, 64, 16, 16, block_mask=diagonal, block_q=16, block_k=16)
    (4224, 2304)
    """
    need_block_mask(block_mask)
    *sizes, t, _ = _visited(n_q, n_k, d, d_v, block_q, block_k, causal, window, block_mask)
    return _fa1(*sizes, t)


def block_sparse_backward_traffic(
    n_q, n_k, d, d_v, *, block_mask, block_q, block_k, causal=False, window=None
):
    """Return (loads, stores) of the block-sparse backward: Algorithm 4 without the absent tiles.

    Parameters
    ----------
    n_q, n_k, d, d_v, block_mask, block_q, block_k, causal, window
        As in `block_sparse_traffic`.

    Returns
    -------
    loads, stores : int
        Elements.

    Examples
    --------
    >>> import numpy as np
    >>> diagonal = np.eye(4, dtype=bool)
    >>> block_sparse_backward_traffic(64, 64, 16, 16, block_mask=diagonal, block_q=16, block_k=16)
    (6208, 6144)
    """
    need_block_mask(block_mask)
    *sizes, t, _ = _visited(n_q, n_k, d, d_v, block_q, block_k, causal, window, block_mask)
    return _fa1_backward(*sizes, t)


def fa2_traffic(n_q, n_k, d, d_v, *, block_q, block_k, causal=False, window=None):
    """Return (loads, stores) of FlashAttention-2, Algorithm 1.

    Parameters
    ----------
    n_q, n_k, d, d_v, block_q, block_k, causal, window
        As in `fa1_traffic`.

    Returns
    -------
    loads, stores : int
        Elements. Only block_q matters without a mask: K and V pass by T_r times.

    Examples
    --------
    >>> fa2_traffic(64, 64, 16, 16, block_q=16, block_k=32)
    (9216, 1088)
    """
    n_q, n_k, d, d_v, _, u = _visited(n_q, n_k, d, d_v, block_q, block_k, causal, window)
    return n_q * d + u * (d + d_v), n_q * (d_v + 1)


def fa2_backward_traffic(n_q, n_k, d, d_v, *, block_q, block_k, causal=False, window=None):
    """Return (loads, stores) of FlashAttention-2's backward, Algorithm 2.

    Parameters
    ----------
    n_q, n_k, d, d_v, block_q, block_k, causal, window
        As in `fa1_traffic`.

    Returns
    -------
    loads, stores : int
        Elements.

    Examples
    --------
    >>> fa2_backward_traffic(64, 64, 16, 16, block_q=16, block_k=32)
    (10496, 5184)
    """
    n_q, n_k, d, d_v, t, _ = _visited(n_q, n_k, d, d_v, block_q, block_k, causal, window)
    loads = 2 * n_q * d_v + n_k * (d + d_v) + t * (2 * d + d_v + 2)
    return loads, n_q * (d + 1) + t * d + n_k * (d + d_v)


def _sizes(n_q, n_k, d, d_v):
    """Return the sizes as Python ints, which NumPy's are not: theirs overflow at 2^31 or 2^63.

    Queries and keys may be none, but q and k have columns.
    """
    least = (("n_q", n_q, 0), ("n_k", n_k, 0), ("d", d, 1), ("d_v", d_v, 0))
    return [count(*size) for size in least]


def _visited(n_q, n_k, d, d_v, block_q, block_k, causal, window, block_mask=None):
    """Return the sizes as Python ints, and (t, u): the rows and columns of all visited tiles."""
    sizes = n_q, n_k, *_ = _sizes(n_q, n_k, d, d_v)
    block_q, block_k = count("block_q", block_q), count("block_k", block_k)
    kinds = tile_kinds(
        n_q, n_k, block_q, block_k, causal=causal, window=window, block_mask=block_mask
    )
    visited = kinds != EMPTY
    rows = [length(part) for part in blocks(n_q, block_q)]
    cols = [length(part) for part in blocks(n_k, block_k)]
    return *sizes, int(visited.sum(axis=1) @ rows), int(visited.sum(axis=0) @ cols)


def _fa1(n_q, n_k, d, d_v, t):
    loads = n_k * (d + d_v) + t * (d + d_v + 2)
    return loads, n_q * (d_v + 2) + t * (d_v + 2)


def _fa1_backward(n_q, n_k, d, d_v, t):
    loads = n_k * (d + d_v) + t * (2 * d + 2 * d_v + 1)
    return loads, n_q * d + n_k * (d + d_v) + t * d + n_k * (d + d_v)


# What is on chip at once while one tile is worked on, by array; row temporaries are free.


def forward_tiles(rows, cols, d, d_v):
    """Return the elements of each array on chip in the forward pass; P overwrites S.

    Parameters
    ----------
    rows, cols : int
        B_r and B_c of the tile.
    d, d_v : int
        Columns of q and k, and of v.

    Returns
    -------
    sizes : dict
        Array name to elements.

    Examples
    --------
    >>> sum(forward_tiles(16, 32, 16, 16).values())
    2080
    """
    rows, cols, d, d_v = _tile_sizes(rows, cols, d, d_v)
    return dict(
        Q=rows * d, K=cols * d, V=cols * d_v, O=rows * d_v, S=rows * cols, m=rows, l=rows
    )  # fmt: skip


def fa2_backward_tiles(rows, cols, d, d_v):
    """Return the elements of each array on chip in FlashAttention-2's backward; dS overwrites dP.

    Parameters
    ----------
    rows, cols, d, d_v : int
        As in `forward_tiles`.

    Returns
    -------
    sizes : dict
        Array name to elements.

    Examples
    --------
    >>> sum(fa2_backward_tiles(16, 32, 16, 16).values())
    3872
    """
    rows, cols, d, d_v = _tile_sizes(rows, cols, d, d_v)
    return dict(
        Q=rows * d, dO=rows * d_v, dQ=rows * d, L=rows, D=rows,
        K=cols * d, V=cols * d_v, dK=cols * d, dV=cols * d_v, P=rows * cols, dS=rows * cols,
    )  # fmt: skip


def fa1_backward_tiles(rows, cols, d, d_v):
    """Return the elements of each array on chip in FlashAttention-1's backward: O_i comes along.

    Parameters
    ----------
    rows, cols, d, d_v : int
        As in `forward_tiles`.

    Returns
    -------
    sizes : dict
        Array name to elements.

    Examples
    --------
    >>> sum(fa1_backward_tiles(16, 32, 16, 16).values())
    4128
    """
    rows, cols, d, d_v = _tile_sizes(rows, cols, d, d_v)
    return dict(O=rows * d_v, **fa2_backward_tiles(rows, cols, d, d_v))


def _tile_sizes(rows, cols, d, d_v):
    """Return the sizes of a tile as Python ints; where there is nothing to see, it is empty."""
    least = (("rows", rows, 0), ("cols", cols, 0), ("d", d, 1), ("d_v", d_v, 0))
    return [count(*size) for size in least]


def fitting_block(
    sram_elements, d, d_v, working_set=forward_tiles, block_q=None, block_k=None
):  # fmt: skip
    """Return the largest b for which tiles of b x b fit the fast memory, or 0 if none does.

    Parameters
    ----------
    sram_elements, d, d_v : int
        Size M of the fast memory, columns of q and k, and of v.
    working_set : callable
        `forward_tiles` or one of its relatives.
    block_q, block_k : int, optional
        A side that is given stays; b is the other one.

    Returns
    -------
    b : int

    Raises
    ------
    TypeError, ValueError
        If a size is not an integer of at least 1 (d_v: 0), or both sides are given.

    Examples
    --------
    >>> fitting_block(16384, 64, 64)
    52
    """
    sram_elements = count("sram_elements", sram_elements, hint=" (elements, not bytes)")
    d, d_v = count("d", d), count("d_v", d_v, least=0)
    sides = (("block_q", block_q), ("block_k", block_k))
    block_q, block_k = (None if side is None else count(name, side) for name, side in sides)
    require(not (block_q and block_k), f"{block_q=} and {block_k=} leave no side to fit")
    b = 0
    step = 1 << sram_elements.bit_length()
    while step:  # binary search: the need grows with b
        rows, cols = block_q or b + step, block_k or b + step
        if sum(working_set(rows, cols, d, d_v).values()) <= sram_elements:
            b += step
        step //= 2
    return b


def block_sizes(sram_elements, d):
    """Return the paper's block sizes, B_c = ⌈M/4d⌉ and B_r = min(B_c, d) (Algorithm 1, line 1).

    The rule makes the proof of Theorem 2 go through; it leaves no room for S, m and l, so tiles of
    this size may not fit (`fitting_block` finds those that do).

    Parameters
    ----------
    sram_elements : int
        Size M of the fast memory, in elements.
    d : int
        Columns of q, k and v.

    Returns
    -------
    B_r, B_c : int

    Raises
    ------
    TypeError, ValueError
        If an argument is not an integer of at least 1.

    Examples
    --------
    >>> block_sizes(25600, 64)
    (64, 100)
    """
    sram_elements = count("sram_elements", sram_elements, hint=" (elements, not bytes)")
    d = count("d", d)
    block_k = -(-sram_elements // (4 * d))
    return min(block_k, d), block_k


def forward_flops(n_q, n_k, d, d_v):
    """Return the FLOPs of the two matrix products of the forward pass, one head, no mask.

    Parameters
    ----------
    n_q, n_k, d, d_v : int
        Queries, keys, and the columns of q and k, and of v.

    Returns
    -------
    flops : int
        2 per multiply-add: 4 N² d for equal sizes.

    Examples
    --------
    >>> forward_flops(1024, 1024, 64, 64)
    268435456
    """
    n_q, n_k, d, d_v = _sizes(n_q, n_k, d, d_v)
    return 2 * n_q * n_k * (d + d_v)


def backward_flops(n_q, n_k, d, d_v, *, recompute=True):
    """Return the FLOPs of the matrix products of the backward pass, one head, no mask.

    Parameters
    ----------
    n_q, n_k, d, d_v : int
        Queries, keys, and the columns of q and k, and of v.
    recompute : bool
        Whether S is computed again (FlashAttention, five products) or P was stored (four).

    Returns
    -------
    flops : int
        10 N² d, or 8 N² d, for equal sizes.

    Examples
    --------
    >>> backward_flops(1024, 1024, 64, 64) / forward_flops(1024, 1024, 64, 64)
    2.5
    """
    n_q, n_k, d, d_v = _sizes(n_q, n_k, d, d_v)
    return 2 * n_q * n_k * ((3 if recompute else 2) * d + 2 * d_v)


@dataclass(frozen=True)
class Machine:
    """A processor with a slow and a fast memory.

    Parameters
    ----------
    name : str
    peak_flops : float
        FLOP/s of matrix products, in the precision that `dtype` names.
    bandwidth : float
        Bytes per second from slow memory.
    sram_bytes : int
        Fast memory of one core (a GPU's SM) that a program can use.
    cores : int
        How many such cores work at once.
    dtype : str

    Examples
    --------
    >>> round(A100.ridge)
    208
    """

    name: str
    peak_flops: float
    bandwidth: float
    sram_bytes: int
    cores: int
    dtype: str = "fp16"

    @property
    def ridge(self):
        """FLOPs per byte from which arithmetic, not memory, is the limit."""
        return self.peak_flops / self.bandwidth


def roofline(machine, intensity):
    """Return the FLOP/s that a machine can reach at an arithmetic intensity.

    Williams, Waterman & Patterson (2009), "Roofline".

    Parameters
    ----------
    machine : Machine
    intensity : float
        FLOPs per byte moved from or to slow memory.

    Returns
    -------
    flops_per_second : float

    Raises
    ------
    ValueError
        If the intensity is negative.

    Examples
    --------
    >>> roofline(A100, 10) == 10 * A100.bandwidth
    True
    """
    intensity = finite_number("intensity", intensity)
    require(intensity >= 0, f"intensity={intensity} must not be negative")
    return min(machine.peak_flops, intensity * machine.bandwidth)


# Dense matrix rates and bandwidths from NVIDIA's data sheets, the A100's bandwidth rounded as in
# FA1 §2.1; fast memory is the most shared memory that one thread block may use (CUDA C++
# Programming Guide, compute capabilities 7.5, 8.0 and 9.0).
T4 = Machine("T4", 65e12, 320e9, 64 * 1024, 40)
A100 = Machine("A100 40 GB", 312e12, 1.5e12, 163 * 1024, 108)
H100 = Machine("H100 SXM", 989e12, 3.35e12, 227 * 1024, 132)
H200 = Machine("H200", 989e12, 4.8e12, 227 * 1024, 132)
MACHINES = (T4, A100, H100, H200)
